"""Sealed sample segments: references, durability, faults, deletion."""

from __future__ import annotations

import os
import threading
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrl.rundir import segments as segments_module
from psrl.rundir.retry import UnreadableError
from psrl.rundir.segments import SegmentWriter, delete_segments, list_segments, read_sample, removable_segments

pytestmark = pytest.mark.unit


@given(payloads=st.lists(st.tuples(st.binary(min_size=1, max_size=200), st.booleans()), max_size=20))
def test_every_reference_reads_back_its_own_payload(tmp_path_factory, payloads: list[tuple[bytes, bool]]) -> None:
    samples = tmp_path_factory.mktemp("samples")
    writer = SegmentWriter(samples, "agent-0")
    references = []
    for payload, rotate in payloads:
        references.append((writer.append(payload), payload))
        if rotate:
            writer.rotate()
    writer.close()
    for (segment, offset, length, crc), payload in references:
        assert read_sample(samples, segment, offset, length, crc, deadline_s=0) == payload
        assert crc == zlib.crc32(payload)
    assert sum((samples / name).stat().st_size for name in list_segments(samples)) == sum(len(p) for p, _ in payloads)
    assert all((samples / name).stat().st_size for name in list_segments(samples))


def test_two_writers_of_one_name_never_share_a_segment(tmp_path: Path) -> None:
    first, second = SegmentWriter(tmp_path, "agent-0"), SegmentWriter(tmp_path, "agent-0")
    assert first.append(b"a")[0] != second.append(b"b")[0]
    assert all((tmp_path / name).stat().st_mode & 0o777 == 0o600 for name in list_segments(tmp_path))


def test_one_sync_covers_many_appends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    real = os.fdatasync
    monkeypatch.setattr(segments_module.os, "fdatasync", lambda fd: (synced.append(fd), real(fd)))
    writer = SegmentWriter(tmp_path, "agent-0")
    for _ in range(10):
        writer.append(b"x")
    writer.sync()
    writer.sync()  # nothing new: nothing to do
    assert len(synced) == 1


@pytest.mark.parametrize("call", ["write", "fdatasync"])
def test_after_a_fault_of_the_disk_the_segment_is_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    writer = SegmentWriter(tmp_path, "agent-0")
    kept = writer.append(b"kept")
    writer.sync()

    def fail(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(segments_module.os, call, fail)
        with pytest.raises(OSError, match="No space"):
            writer.append(b"lost")
            writer.sync()
    assert writer.segment is None
    again = writer.append(b"again")
    writer.sync()
    assert again[0] != kept[0] and again[1] == 0
    assert read_sample(tmp_path, *kept, deadline_s=0) == b"kept"
    assert read_sample(tmp_path, *again, deadline_s=0) == b"again"


def test_a_short_write_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(segments_module.os, "write", lambda fd, data: real(fd, data[:3]))
    writer = SegmentWriter(tmp_path, "agent-0")
    reference = writer.append(b"0123456789")
    assert read_sample(tmp_path, *reference, deadline_s=0) == b"0123456789"


def test_a_segment_that_is_seen_late_is_read_again(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, "agent-0")
    segment, offset, length, crc = writer.append(b"hello")
    whole = (tmp_path / segment).read_bytes()
    (tmp_path / segment).write_bytes(whole[:2])  # what another node may see for a while
    complete = threading.Timer(0.1, lambda: (tmp_path / segment).write_bytes(whole))
    complete.start()
    assert read_sample(tmp_path, segment, offset, length, crc, deadline_s=60) == b"hello"
    complete.join()


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda path: path.unlink(), "does not exist"),
        (lambda path: path.write_bytes(b"hel"), "3 of 5 bytes"),
        (lambda path: path.write_bytes(b"hellO"), "checksum is wrong"),
    ],
)
def test_a_damaged_sample_is_never_returned(tmp_path: Path, change, fault: str) -> None:
    writer = SegmentWriter(tmp_path, "agent-0")
    reference = writer.append(b"hello")
    change(tmp_path / reference[0])
    with pytest.raises(UnreadableError, match=fault):
        read_sample(tmp_path, *reference, deadline_s=0)


@pytest.mark.parametrize("name", ["", "../ledger/1", "/etc/passwd", "agent-0", "agent-0-0123456789ab-1"])
def test_a_name_that_no_writer_makes_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="not the name of a sample segment"):
        read_sample(tmp_path, name, 0, 1, 0)
    with pytest.raises(ValueError, match="not the name of a sample segment"):
        delete_segments(tmp_path, [name])


def test_only_segments_that_nobody_needs_or_writes_are_deleted(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, "agent-0")
    names = []
    for _ in range(4):
        names.append(writer.append(b"x")[0])
        if len(names) < 4:
            writer.rotate()
    (tmp_path / "notes.txt").write_text("not ours to delete")
    doomed = removable_segments(list_segments(tmp_path), needed={names[1]}, writing={writer.segment or ""})
    assert doomed == [names[0], names[2]]
    assert delete_segments(tmp_path, [*doomed, names[0]]) == 2
    assert list_segments(tmp_path) == [names[1], names[3]]
    assert (tmp_path / "notes.txt").exists()


def test_an_empty_payload_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="empty payload"):
        SegmentWriter(tmp_path, "agent-0").append(b"")
