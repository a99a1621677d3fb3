"""When an instance reports: changes at most once an interval, tokens alone more rarely, and nothing stays unsaid."""

from __future__ import annotations

import math

import pytest

from psrl.protocol.generation import EngineStats
from psrl.rollout.status_reports import StatusReports

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("change", "after_s", "due"),
    [
        ({}, 9.0, False),
        ({"running": 3}, 0.05, False),
        ({"running": 3}, 0.1, True),
        ({"waiting": 1}, 0.1, True),
        ({"preemptions": 1}, 0.1, True),
        ({"kv_usage": 0.509}, 0.1, False),  # less than a hundredth of the cache
        ({"kv_usage": 0.52}, 0.1, True),
        ({"kv_usage": 0.48}, 0.1, True),
        ({"generated_tokens": 90}, 0.4, False),
        ({"generated_tokens": 90}, 0.5, True),
    ],
)
def test_what_is_worth_a_report_and_when(change: dict[str, float], after_s: float, due: bool) -> None:
    reports = StatusReports(0.1)
    before = {"running": 2, "kv_usage": 0.5, "generated_tokens": 10}
    reports.sent(EngineStats(**before), 64.0)
    assert reports.due(EngineStats(**(before | change)), 64.0 + after_s) is due
    assert not StatusReports(0.0).due(EngineStats(**(before | change)), 64.0 + after_s), "switched off"


def test_the_last_change_before_an_idle_time_is_told_in_time() -> None:
    """The engine has just become idle: its loop may sleep only until that can be said."""
    reports = StatusReports(0.25)
    reports.sent(EngineStats(running=1), 64.0)
    assert reports.due_in_s(EngineStats(running=0), 64.125) == 0.125
    assert reports.due_in_s(EngineStats(running=1), 64.125) == math.inf
    assert reports.due_in_s(EngineStats(running=0), 64.5) == math.inf, (
        "it could not be sent: no reason to turn in circles"
    )


def test_other_news_are_told_with_the_figures_though_nothing_moved() -> None:
    reports = StatusReports(0.25)
    reports.sent(EngineStats(running=1), 64.0)
    assert [reports.due(EngineStats(running=1), at_s, other_news=True) for at_s in (64.2, 64.25)] == [False, True]
    assert reports.due_in_s(EngineStats(running=1), 64.125, other_news=True) == 0.125
    assert not StatusReports(0.0).due(EngineStats(), 64.25, other_news=True), "switched off"


def test_a_new_coordinator_is_told_everything() -> None:
    reports = StatusReports(0.25)
    reports.sent(EngineStats(running=1), 64.0)
    reports.forget()
    assert reports.due(EngineStats(running=1), 64.5)
