from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from psrl.coordinator import ledger as ledger_module
from psrl.coordinator.ledger import Ledger, LedgerError, LedgerFenced, replay, segments
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

EVERY_KIND: list[AnyRecord] = [
    Start(0, 0, "nonce"),
    Reserve(0, 1, 2, 3, "instance-0", 1),
    Occupy(0, 4, SampleRef("agent-0/3", 5, 6, 0xFFFFFFFF, [7, 0, 8]), -0.25, 15),
    Release(1, "error", "requeued", "ValueError: ü"),
    Take(4, [0, 9, 10]),
    Publish(5),
    Checkpoint(5),
    ShortBuffer(6, 1),
    End("failed", "cause"),
]


def own(records: object) -> list[AnyRecord]:
    """Without the epoch records."""
    return [r for r in records if not isinstance(r, Epoch)]  # type: ignore[attr-defined]


def written(directory: Path, *frames: list[AnyRecord], nonce: str | None = None) -> Ledger:
    ledger = Ledger.open(directory, nonce)
    for frame in frames:
        ledger.append(frame)
    ledger.flush()
    return ledger


def path_of(ledger: Ledger) -> Path:
    return ledger.directory / str(ledger.name)


def test_every_kind_of_record_comes_back(tmp_path: Path) -> None:
    ledger = written(tmp_path / "ledger", EVERY_KIND, EVERY_KIND)
    ledger.close()
    records = list(replay(tmp_path / "ledger"))
    assert records == [Epoch(0, ledger.name.nonce, []), *EVERY_KIND, *EVERY_KIND]
    assert path_of(ledger).stat().st_size == ledger.size
    assert path_of(ledger).name == f"00000000-{ledger.name.nonce}"
    assert path_of(ledger).stat().st_mode & 0o077 == 0


def test_no_ledger_is_an_empty_history(tmp_path: Path) -> None:
    assert list(replay(tmp_path / "none")) == []
    ledger = Ledger.open(tmp_path / "new")
    assert list(ledger.history()) == [] and ledger.epoch == 0


def test_starts_follow_each_other(tmp_path: Path) -> None:
    for version in range(1, 4):
        ledger = written(tmp_path, [Publish(version)])
        assert own(ledger.history()) == [Publish(v) for v in range(1, version)]
        ledger.close()
    assert own(replay(tmp_path)) == [Publish(1), Publish(2), Publish(3)]
    assert [name.epoch for name in segments(tmp_path)] == [0, 1, 2]


def test_nothing_is_written_before_the_flush(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path)
    size = ledger.size
    ledger.append([Publish(1)])
    assert own(replay(tmp_path)) == [] and path_of(ledger).stat().st_size == size
    ledger.flush(sync=False)
    assert own(replay(tmp_path)) == [Publish(1)]
    ledger.flush()
    assert own(replay(tmp_path)) == [Publish(1)]


def test_a_torn_tail_ends_the_segment_at_any_byte(tmp_path: Path) -> None:
    ledger = written(tmp_path, [Publish(1)])
    whole = ledger.size
    ledger.append([Release(3, "redundant", "requeued"), Publish(2)])
    ledger.flush()
    ledger.close()
    content = path_of(ledger).read_bytes()
    for cut in range(whole, len(content)):
        path_of(ledger).write_bytes(content[:cut])
        assert own(replay(tmp_path)) == [Publish(1)], "records appended together count together"
    for flipped in range(whole, len(content)):
        path_of(ledger).write_bytes(content[:flipped] + bytes([content[flipped] ^ 0x40]) + content[flipped + 1 :])
        assert own(replay(tmp_path)) == [Publish(1)]
    path_of(ledger).write_bytes(content)
    assert own(replay(tmp_path))[-1] == Publish(2)


def test_a_new_start_goes_on_after_a_torn_tail(tmp_path: Path) -> None:
    first = written(tmp_path, [Publish(1)], [Publish(2)])
    first.close()
    os.truncate(path_of(first), first.size - 3)
    second = written(tmp_path, [Publish(9)])
    assert own(second.history()) == [Publish(1)]
    assert own(replay(tmp_path)) == [Publish(1), Publish(9)]


def test_what_a_fenced_coordinator_writes_never_counts(tmp_path: Path) -> None:
    orphan = written(tmp_path, [Publish(1)])
    orphan.append([Publish(66)])  # decided, not yet written
    newest = written(tmp_path, [Publish(2)])
    orphan.flush()
    orphan.append([Publish(67)])
    orphan.flush()
    assert own(replay(tmp_path)) == [Publish(1), Publish(2)]
    with pytest.raises(LedgerFenced, match="another coordinator runs this directory"):
        orphan.check_newest()
    newest.check_newest()
    third = written(tmp_path, [Publish(3)])
    newest.append([Publish(68)])
    newest.flush()
    assert own(third.history()) == [Publish(1), Publish(2)]
    assert own(replay(tmp_path)) == [Publish(1), Publish(2), Publish(3)]


def test_a_start_that_died_before_its_epoch_record_never_was(tmp_path: Path) -> None:
    first = written(tmp_path, [Publish(1)])
    (tmp_path / "00000001-dead").write_bytes(path_of(first).read_bytes()[:11])
    (tmp_path / "00000002-empty").touch()
    (tmp_path / "notes.txt").write_text("not a segment")
    assert own(replay(tmp_path)) == [Publish(1)]
    third = written(tmp_path, [Publish(2)])
    assert third.epoch == 3
    assert own(replay(tmp_path)) == [Publish(1), Publish(2)]


def test_damage_to_what_counted_is_an_error(tmp_path: Path) -> None:
    first = written(tmp_path, [Publish(1)], [Publish(2)])
    written(tmp_path, [Publish(3)])
    os.truncate(path_of(first), first.size - 1)
    with pytest.raises(LedgerError, match=rf"{first.size} were counted: the file is damaged"):
        list(replay(tmp_path))


@pytest.mark.parametrize(("other", "wins"), [("aaaa", True), ("zzzz", False)])
def test_two_starts_of_the_same_epoch_at_the_same_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str, wins: bool
) -> None:
    """The other one creates its segment between this one's look at the directory and its own creation."""
    look = segments
    raced: list[Ledger] = []

    def look_then_race(directory: Path) -> list:
        found = look(directory)
        if not raced:
            monkeypatch.setattr(ledger_module, "segments", look)
            raced.append(written(directory, [Publish(1)], nonce=other))
        return found

    monkeypatch.setattr(ledger_module, "segments", look_then_race)
    if not wins:
        with pytest.raises(LedgerFenced, match="another coordinator started as well"):
            Ledger.open(tmp_path, "mmmm")
        raced[0].check_newest()
        assert own(replay(tmp_path)) == [Publish(1)]
        return
    ledger = written(tmp_path, [Publish(2)], nonce="mmmm")
    assert ledger.epoch == 1, "it comes after the other for good"
    assert own(ledger.history()) == [Publish(1)]
    with pytest.raises(LedgerFenced):
        raced[0].check_newest()
    assert own(replay(tmp_path)) == [Publish(1), Publish(2)]


def test_a_failed_write_ends_the_ledger(tmp_path: Path) -> None:
    ledger = written(tmp_path, [Publish(1)])
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, ledger._fd)
    os.close(full)
    ledger.append([Publish(2)])
    for text in ("cannot be written: .*No space left", "failed before: .*No space left"):
        with pytest.raises(LedgerError, match=text):
            ledger.flush()


COORDINATOR = """
import sys
from pathlib import Path
from psrl.coordinator.ledger import Ledger, LedgerFenced
from psrl.coordinator.records import Publish, Reserve
try:
    ledger = Ledger.open(Path(sys.argv[1]))
except LedgerFenced:
    sys.exit(3)
for i in range(40):
    ledger.append([Reserve(i, 0, 0, 0, ledger.name.nonce, 0)])
    ledger.flush()
print(ledger.name)
"""


@pytest.mark.process
def test_many_coordinators_started_at_once(tmp_path: Path) -> None:
    """Each history that counts is a prefix of what its coordinator wrote; the newest counts whole."""
    environment = {**os.environ, "PYTHONPATH": str(Path(ledger_module.__file__).parents[2])}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", COORDINATOR, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
        )
        for _ in range(4)
    ]
    names = sorted(child.communicate(timeout=120)[0].strip() for child in children)
    assert {child.returncode for child in children} <= {0, 3}
    started = [name for name in names if name]
    assert started and len({name.split("-")[0] for name in started}) == len(started)
    counted: dict[str, list[int]] = {}
    for record in own(replay(tmp_path)):
        assert isinstance(record, Reserve)
        counted.setdefault(record.instance, []).append(record.group)
    assert all(groups == list(range(len(groups))) for groups in counted.values())
    assert len(counted[started[-1].split("-")[1]]) == 40
