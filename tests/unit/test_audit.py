from __future__ import annotations

from pathlib import Path

import pytest

from psrl.audit import audit, main
from psrl.coordinator.ledger import Ledger
from psrl.coordinator.records import (
    AnyRecord,
    Checkpoint,
    End,
    Epoch,
    Occupy,
    Publish,
    Release,
    Reserve,
    ShortBuffer,
    Start,
    Take,
)
from psrl.protocol.samples import SampleRef

pytestmark = pytest.mark.unit
REF = SampleRef("s", 0, 1, 0, [1])


def reserve(group: int, version: int = 0, prompt: int | None = None) -> Reserve:
    return Reserve(group, 0, group if prompt is None else prompt, version, "i", 0)


def occupy(group: int, buffer: int) -> Occupy:
    return Occupy(group, buffer, REF, 0.5, 9)


# Two groups a step, staleness 1: one filtered, one tried again, a resume from version 1 that trains buffer 1 again.
RUN: list[AnyRecord] = [
    Epoch(0, "a", []),
    Start(0, 0, "first"),
    *(reserve(group) for group in range(4)),
    occupy(1, 0),
    Release(2, "filtered", "dropped"),
    Release(3, "error", "requeued", "ValueError"),
    reserve(4, prompt=3),
    occupy(0, 0),
    Take(0, [1, 0]),
    Publish(1),
    Checkpoint(1),
    occupy(4, 1),
    reserve(5, version=1),
    occupy(5, 1),
    Take(1, [4, 5]),
    Publish(2),
    reserve(6, version=2),
    occupy(6, 2),
    reserve(7, version=2),
    Epoch(1, "b", [("00000000-a", 99)]),
    Release(7, "restart", "requeued"),
    Start(1, 1, "second"),
    Take(1, [4]),
    Take(1, [5]),
    Publish(2),
    reserve(8, version=2, prompt=7),
]


def test_every_group_is_accounted_for() -> None:
    report = audit(RUN, buffer_entries=2, staleness=1)
    assert report.findings == []
    assert report.reserved == 9
    assert report.fates == {"trained": 4, "waiting": 1, "open": 1, "requeued": 2, "dropped": 1}
    assert report.released == {("dropped", "filtered"): 1, ("requeued", "error"): 1, ("requeued", "restart"): 1}
    assert (report.max_lag, report.lags) == (1, {0: 3, 1: 1})
    assert (report.steps, report.starts, report.coordinator_starts, report.status) == (2, 2, 2, "")


def without(*records: AnyRecord) -> list[AnyRecord]:
    return [r for r in RUN if r not in records]


def after(record: AnyRecord, *more: AnyRecord) -> list[AnyRecord]:
    """The run up to `record`, then `more`."""
    return [*RUN[: RUN.index(record) + 1], *more]


SHIPPED = RUN[RUN.index(Take(0, [1, 0]))]


@pytest.mark.parametrize(
    ("records", "finding"),
    [
        (after(Publish(1), reserve(4)), "group 4 is reserved twice"),
        (after(Publish(1), reserve(9, version=2)), "group 9 starts at version 2, the newest is 1"),
        (after(Publish(1), occupy(1, 1)), "group 1 enters buffer 1 but is trained"),
        (after(Publish(1), occupy(4, 1), occupy(4, 2)), "group 4 enters buffer 2 but is waiting"),
        (after(Publish(1), occupy(77, 1)), "group 77 enters buffer 1 but is unknown"),
        (after(SHIPPED, occupy(4, 0)), "group 4 enters buffer 0, which trains already"),
        (after(Publish(1), Release(1, "error", "dropped")), "group 1 is released (error) but is trained"),
        (after(Publish(1), Release(4, "", "dropped")), "group 4 is released as 'dropped' with reason ''"),
        (after(SHIPPED, Take(1, [4])), "buffer 1 is taken while the newest version is 0"),
        (after(occupy(0, 0), Take(0, [0, 1])), "out of the order of occupation"),
        (after(occupy(1, 0), Take(0, [1]), Publish(1)), "buffer 0 is trained with 1 groups instead of 2"),
        (without(Publish(1)), "version 2 is published after 0"),
        (after(Publish(1), Checkpoint(2)), "checkpoint 2 is complete before version 2 was published"),
        (without(Release(7, "restart", "requeued")), "groups [7] are in flight across the trainer start"),
        (after(Publish(1), occupy(4, 1), Start(2, 1, "x")), "incarnation 2 starts after 0"),
        (after(occupy(5, 1), reserve(9, prompt=5), occupy(9, 2)), "prompt 5 of data epoch 0 counts twice: groups 5, 9"),
        (after(Publish(1), End("completed", "")), "completed with 1 groups in flight"),
        (
            after(
                Publish(1),
                Release(4, "redundant", "requeued"),
                reserve(9, prompt=3),
                Release(9, "straggler", "requeued"),
            ),
            "prompt 3 of data epoch 0 gave way to others twice",
        ),
        (after(occupy(5, 1), ShortBuffer(1, 1)), "the last buffer 1 is said to hold 1 groups, it holds 2"),
    ],
)
def test_each_kind_of_violation_is_found(records: list[AnyRecord], finding: str) -> None:
    report = audit(records, buffer_entries=2, staleness=1)
    assert any(finding in found for found in report.findings), report.findings


def test_a_lag_beyond_the_bound_is_found() -> None:
    report = audit(after(Publish(2)), buffer_entries=2, staleness=0)
    assert report.findings == [
        "group 4 of version 0 is trained in buffer 1: a lag of 1, psrl.staleness=0 allows 0",
    ]


def test_a_short_last_buffer_is_no_finding() -> None:
    end = after(occupy(4, 1), Release(4, "unreadable", "dropped"), reserve(5, 1), occupy(5, 2), ShortBuffer(1, 1))
    report = audit([*end, Take(1, [5]), Publish(2), End("completed", "")], buffer_entries=2, staleness=1)
    assert report.findings == []
    assert report.fates == {"trained": 3, "dropped": 2, "requeued": 1}
    assert report.status == "completed"


def run_dir(path: Path, records: list[AnyRecord], config: str) -> str:
    ledger = Ledger.open(path / "ledger")
    ledger.append([r for r in records if not isinstance(r, Epoch)])
    ledger.flush()
    ledger.close()
    (path / "config.yaml").write_text(config)
    return str(path)


def test_the_command_reads_a_run_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run_dir(tmp_path, RUN, "psrl: {staleness: 1, staleness_buffer_entries: 2}\n")
    assert main([path]) == 0
    out = capsys.readouterr().out
    assert "groups: 9 reserved = 4 trained, 1 waiting, 1 open, 2 requeued, 1 dropped" in out
    assert "lag: most 1, 3 at 0, 1 at 1" in out
    (tmp_path / "config.yaml").write_text("psrl: {staleness: 0, staleness_buffer_entries: 3}\n")
    assert main([path]) == 1
    out = capsys.readouterr().out
    assert "FINDING: buffer 0 is trained with 2 groups instead of 3" in out


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ("psrl: {staleness: 1}\n", "psrl.staleness_buffer_entries=None must be an integer"),
        ("psrl: {staleness: x, staleness_buffer_entries: 2}\n", "psrl.staleness='x' must be an integer"),
    ],
)
def test_a_bad_configuration_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: str, text: str
) -> None:
    assert main([run_dir(tmp_path, RUN, config)]) == 2
    assert text in capsys.readouterr().err


def test_a_directory_without_a_ledger_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "give the directory of a run" in capsys.readouterr().err
