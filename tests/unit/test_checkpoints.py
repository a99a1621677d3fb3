"""Which checkpoint directory is complete, resumed from, replaced or deleted."""

import errno
import json
import logging
from collections import namedtuple

import pytest

from psrl.trainer import checkpoints
from psrl.trainer.checkpoints import MARKER, begin, finish, newest_complete, prune, read_metadata, why_incomplete

pytestmark = pytest.mark.unit


def write(root, step, content=b"weights", metadata=None):
    path = begin(root, step, needed_bytes=1)
    (path / "__0_0.distcp").write_bytes(content)
    (path / "trainer.json").write_text('{"cursor": 1}')
    finish(path, metadata or {})
    return path


def test_roundtrip_with_metadata(tmp_path):
    metadata = {"version": 3, "incarnation": 1, "seconds": 0.5, "config_digest": "ab"}
    path = write(tmp_path / "checkpoints", 3, metadata=metadata)
    assert newest_complete(tmp_path / "checkpoints") == (path, [])
    assert read_metadata(path) == metadata
    assert sorted(p.name for p in path.iterdir()) == ["__0_0.distcp", MARKER, "trainer.json"]


def test_resume_takes_the_newest_complete_one_and_names_what_it_skips(tmp_path, caplog):
    good = write(tmp_path, 10)
    (write(tmp_path, 20) / "trainer.json").unlink()
    with (write(tmp_path, 30) / "__0_0.distcp").open("r+b") as file:
        file.truncate(3)
    (tmp_path / "step_x").mkdir()
    (tmp_path / "step_40.tmp").mkdir()
    (tmp_path / "notes").mkdir()
    with caplog.at_level(logging.WARNING):
        found, skipped = newest_complete(tmp_path)
    assert found == good
    assert dict(skipped) == {
        "step_20": "trainer.json is missing",
        "step_30": "__0_0.distcp has 3 bytes instead of 7",
        "step_40.tmp": "not the name of a checkpoint",
        "step_x": "not the name of a checkpoint",
    }
    assert len(caplog.records) == 4
    assert all(name in caplog.text for name, _ in skipped)


def test_steps_are_compared_as_numbers(tmp_path):
    write(tmp_path, 9)
    newest = write(tmp_path, 10)
    assert newest_complete(tmp_path) == (newest, [])


@pytest.mark.parametrize("marker", ["", "{", "[]", '{"files": 3}', '{"files": {"a": {}}}', '{"metadata": {}}'])
def test_a_damaged_marker_is_never_a_traceback(tmp_path, marker):
    path = write(tmp_path, 1)
    (path / MARKER).write_text(marker)
    assert newest_complete(tmp_path) == (None, [("step_1", f"{MARKER} is not readable")])


def test_nothing_to_resume_from(tmp_path):
    assert newest_complete(tmp_path / "absent") == (None, [])
    (tmp_path / "step_5").mkdir()
    (tmp_path / "step_6").touch()
    found, skipped = newest_complete(tmp_path)
    assert found is None
    assert [name for name, _ in skipped] == ["step_6", "step_5"]


def test_same_size_but_other_content_is_noticed_in_small_files(tmp_path):
    path = write(tmp_path, 1)
    (path / "__0_0.distcp").write_bytes(b"weightZ")
    assert why_incomplete(path) == "__0_0.distcp has a wrong checksum"


def test_large_files_are_checked_by_size_only(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "CHECKSUM_LIMIT", 4)
    path = write(tmp_path, 1)
    assert json.loads((path / MARKER).read_text())["files"]["__0_0.distcp"] == {"size": 7, "crc32": None}
    assert why_incomplete(path) is None


def test_a_half_written_step_is_replaced_by_the_next_save_of_that_step(tmp_path):
    half = begin(tmp_path, 4, needed_bytes=1)
    (half / "left_over").write_bytes(b"x")
    assert newest_complete(tmp_path)[0] is None
    path = write(tmp_path, 4)
    assert why_incomplete(path) is None
    assert not (path / "left_over").exists()


def test_a_complete_step_is_not_overwritten(tmp_path):
    write(tmp_path, 4)
    with pytest.raises(FileExistsError, match="step_4 is a complete checkpoint already"):
        begin(tmp_path, 4, needed_bytes=1)


def test_too_little_space_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda _: usage(10**10, 0, 2 * 10**9))
    with pytest.raises(OSError, match=r"needs 3\.00 GB but only 2\.00 GB are free .* trainer\.keep_last") as caught:
        begin(tmp_path, 1, needed_bytes=3 * 10**9)
    assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_without_files_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no files"):
        finish(begin(tmp_path, 1, needed_bytes=1), {})


def test_prune_counts_complete_ones_only(tmp_path):
    for step in (1, 2, 3, 9):
        write(tmp_path, step)
    (tmp_path / "step_4").mkdir()  # half-written between kept ones and newest: may be in progress elsewhere
    (tmp_path / "step_10").mkdir()
    (tmp_path / "step_0").mkdir()
    (tmp_path / "step_x").mkdir()
    removed = prune(tmp_path, keep_last=2)
    assert [p.name for p in removed] == ["step_2", "step_1", "step_0"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_10", "step_3", "step_4", "step_9", "step_x"]
    assert newest_complete(tmp_path)[0] == tmp_path / "step_9"


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_none_is_refused(tmp_path, keep):
    with pytest.raises(ValueError, match=rf"trainer\.keep_last is {keep}"):
        prune(tmp_path, keep)


def test_prune_of_nothing(tmp_path):
    assert prune(tmp_path / "absent", 1) == []
