"""The counters of sync and migration on the report page."""

from __future__ import annotations

import pytest

from psrl.telemetry.coordination import describe, per_step
from psrl.telemetry.coordination_plots import events, moved_samples

pytestmark = pytest.mark.unit


def rows(**counters: list[int | None]) -> list[dict[str, object]]:
    """Row i holds element i of each counter."""
    length = max(map(len, counters.values()))
    return [
        {"training/global_step": i + 1}
        | {f"rollout/{n}": values[i] for n, values in counters.items() if values[i] is not None}
        for i in range(length)
    ]


@pytest.mark.parametrize(
    ("totals", "grown"),
    [
        ([2, 4, 4, 7], [2, 2, 0, 3]),
        ([5, 1, 3], [5, 1, 2]),  # the second coordinator began at 0
        ([None, 3], [3]),
    ],
)
def test_a_counter_is_told_by_step_across_a_coordinator_restart(totals: list[int | None], grown: list[int]) -> None:
    assert per_step(rows(pulls=totals), "pulls")[1] == grown


def test_what_happened_in_words() -> None:
    told = describe(
        rows(pulls=[2, 4], interrupted_samples=[0, 12], migrations=[0, 1], migrated_samples=[0, 9], failed_pulls=[0, 0])
    )
    assert told == (
        "In the whole run, pulls of new weights: 4; samples that a pull interrupted: 12; migrations: 1; "
        "samples that were moved to a less busy instance: 9."
    )
    assert describe([]) == "No instance has pulled weights yet."


def test_only_what_was_counted_is_drawn() -> None:
    figure = events(rows(pulls=[2, 4], migrations=[0, 0]))
    assert [line.get_label() for line in figure.axes[0].lines] == ["pulls of new weights"]
    assert list(figure.axes[0].lines[0].get_ydata()) == [2, 2]
    assert moved_samples(rows(pulls=[2, 4])) is None
    assert len(moved_samples(rows(interrupted_samples=[1, 2], migrated_samples=[0, 3])).axes[0].lines) == 2
