"""The run directory: permissions, immutable publication, endpoints, keys, code snapshot."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from psrl.rundir import publish as publish_module
from psrl.rundir.endpoints import Endpoint, latest_endpoint, publish_endpoint, publish_next_endpoint
from psrl.rundir.keys import KEY_FILE, create_keys, load_keys
from psrl.rundir.layout import SUBDIRECTORIES, RunDir
from psrl.rundir.publish import frame, publish, read_published, unframe, write_atomic
from psrl.rundir.retry import TornError, UnreadableError, retry
from psrl.rundir.snapshot import conf_dir, snapshot_code

pytestmark = pytest.mark.unit


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "runs" / "one")
    run.create()
    return run


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def endpoint(port: int) -> Endpoint:
    return Endpoint(address=f"tcp://127.0.0.1:{port}", node="n1", pid=7)


class FakeTime:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_every_directory_is_private_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    run = RunDir(tmp_path / "run")
    before = os.umask(umask)
    try:
        run.create()
        run.create()
    finally:
        os.umask(before)
    assert {mode(run.path)} | {mode(run.path / name) for name in SUBDIRECTORIES} == {0o700}


def test_an_open_directory_of_ours_is_closed_and_keeps_its_setgid_bit(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    run.path.chmod(0o2775)
    run.create()
    assert run.path.stat().st_mode & 0o7777 == 0o2700


def test_a_file_in_the_place_of_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(PermissionError, match="is not a directory: choose another"):
        RunDir(tmp_path / "run").create()


@pytest.mark.parametrize("payload", [b"", b"x", os.urandom(100_000)])
def test_a_published_file_reads_back_and_is_never_replaced(tmp_path: Path, payload: bytes) -> None:
    path = tmp_path / "name"
    publish(path, payload)
    with pytest.raises(FileExistsError):
        publish(path, b"other")
    assert read_published(path, deadline_s=0) == payload
    assert mode(path) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["name"]  # no temporary file is left


def test_without_hard_links_a_name_is_still_taken_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(source: object, target: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(publish_module.os, "link", no_links)
    publish(tmp_path / "name", b"one")
    with pytest.raises(FileExistsError):
        publish(tmp_path / "name", b"two")
    assert read_published(tmp_path / "name", deadline_s=0) == b"one"


@pytest.mark.parametrize(
    ("torn", "fault"),
    [
        (lambda whole: b"", "0 bytes are too few"),
        (lambda whole: whole[:10], "10 bytes are too few"),
        (lambda whole: whole[:-1], "4 of 5 bytes are there"),
        (lambda whole: whole + b"x", "6 of 5 bytes are there"),
        (lambda whole: whole[:-1] + b"X", "checksum is wrong"),
        (lambda whole: b"????" + whole[4:], "not a published file"),
    ],
)
def test_a_torn_copy_is_told_from_a_whole_one(torn, fault: str) -> None:
    assert unframe(frame(b"hello")) == b"hello"
    with pytest.raises(TornError, match=fault):
        unframe(torn(frame(b"hello")))


def test_a_torn_publication_is_read_again_until_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "name"
    whole = frame(b"hello")
    stages = iter([None, whole[:3], whole[:-1], whole[:-1] + b"?", whole])
    fake = FakeTime()

    def read() -> bytes:
        stage = next(stages)
        if stage is not None:
            path.write_bytes(stage)
        return unframe(path.read_bytes())

    assert retry(read, "it", 90, clock=fake.clock, sleep=fake.sleep) == b"hello"
    assert fake.pauses == [0.005, 0.01, 0.02, 0.04]


def test_the_wait_ends_at_its_deadline_with_the_last_fault() -> None:
    fake = FakeTime()

    def read() -> bytes:
        raise TornError("3 of 5 bytes are there")

    with pytest.raises(UnreadableError, match=r"cannot read it within 90 s: 3 of 5 bytes are there"):
        retry(read, "it", 90, clock=fake.clock, sleep=fake.sleep)
    assert fake.now == pytest.approx(90)
    assert max(fake.pauses) == 1.0


def test_a_dead_writer_ends_the_wait_but_not_before_a_last_read(tmp_path: Path) -> None:
    path = tmp_path / "name"
    with pytest.raises(UnreadableError, match=r"does not exist, and its writer is gone \(signal SIGKILL\)"):
        read_published(path, gone=lambda: "signal SIGKILL")

    def finished_just_before() -> str:
        publish(path, b"last words")
        return "exit code 0"

    assert read_published(path, gone=finished_just_before) == b"last words"


def test_write_atomic_replaces_in_one_step(tmp_path: Path) -> None:
    write_atomic(tmp_path / "summary.json", b"1")
    write_atomic(tmp_path / "summary.json", b"2")
    assert [(entry.name, entry.read_bytes()) for entry in tmp_path.iterdir()] == [("summary.json", b"2")]


def test_the_newest_endpoint_wins_in_numeric_order(run_dir: RunDir) -> None:
    assert latest_endpoint(run_dir, "coordinator") is None
    for generation in (0, 2, 999_999, 1_000_000):
        publish_endpoint(run_dir, "coordinator", generation, endpoint(generation))
    publish_endpoint(run_dir, "coordinator2", 2_000_000, endpoint(1))
    assert latest_endpoint(run_dir, "coordinator") == (1_000_000, endpoint(1_000_000))
    with pytest.raises(FileExistsError):
        publish_endpoint(run_dir, "coordinator", 2, endpoint(5))
    assert publish_next_endpoint(run_dir, "coordinator", endpoint(6)) == 1_000_001
    assert (run_dir.rendezvous / "coordinator.000002").exists()


def test_a_torn_newest_endpoint_is_passed_over_for_now(run_dir: RunDir) -> None:
    publish_endpoint(run_dir, "a", 0, endpoint(1))
    torn = run_dir.rendezvous / "a.000001"
    torn.write_bytes(frame(b"{}")[:-1])
    assert latest_endpoint(run_dir, "a") == (0, endpoint(1))
    torn.unlink()
    publish_endpoint(run_dir, "a", 1, endpoint(2))
    assert latest_endpoint(run_dir, "a") == (1, endpoint(2))


@pytest.mark.parametrize("name", ["", "../a", "a.b", "-a", "a b"])
def test_a_role_name_that_is_no_file_name_is_refused(run_dir: RunDir, name: str) -> None:
    with pytest.raises(ValueError, match="role name"):
        publish_endpoint(run_dir, name, 0, endpoint(1))


def test_many_who_publish_the_next_endpoint_at_once_get_one_generation_each(run_dir: RunDir) -> None:
    generations: list[int] = []
    threads = [
        threading.Thread(
            target=lambda port=port: generations.append(publish_next_endpoint(run_dir, "a", endpoint(port)))
        )
        for port in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(generations) == list(range(8))


def test_keys_are_made_once_and_are_private(run_dir: RunDir) -> None:
    keys = create_keys(run_dir)
    assert create_keys(run_dir) == load_keys(run_dir) == keys
    assert mode(run_dir.rendezvous / KEY_FILE) == 0o600
    assert len({keys.server_public, keys.server_secret, keys.client_public, keys.client_secret}) == 4
    assert keys.server_secret not in repr(keys) and keys.client_secret not in repr(keys)


@pytest.mark.parametrize(("exposed", "remedy"), [("rendezvous", "chmod 700"), (f"rendezvous/{KEY_FILE}", "chmod 600")])
def test_keys_that_others_can_reach_are_refused(run_dir: RunDir, exposed: str, remedy: str) -> None:
    create_keys(run_dir)
    path = run_dir.path / exposed
    path.chmod(path.stat().st_mode | 0o040)
    with pytest.raises(PermissionError, match=rf"is accessible by others \(mode .*{remedy}"):
        load_keys(run_dir)


def test_keys_that_never_appear_end_the_wait(run_dir: RunDir) -> None:
    with pytest.raises(UnreadableError, match="does not exist"):
        load_keys(run_dir, deadline_s=0)


def fake_checkout(root: Path, conf_inside: bool) -> Path:
    package = root / "psrl"
    (package / "net" / "__pycache__").mkdir(parents=True)
    (package / "__init__.py").write_text("version = 1")
    (package / "net" / "__pycache__" / "x.pyc").write_text("")
    conf = (package if conf_inside else root) / "conf"
    conf.mkdir()
    (conf / "config.yaml").write_text("a: 1")
    (root / "pyproject.toml").write_text("")
    return package


@pytest.mark.parametrize("conf_inside", [True, False])
def test_the_code_is_kept_once_with_its_configuration(run_dir: RunDir, tmp_path: Path, conf_inside: bool) -> None:
    package = fake_checkout(tmp_path / "checkout", conf_inside)
    assert snapshot_code(run_dir, package) == run_dir.code
    (package / "__init__.py").write_text("version = 2")
    snapshot_code(run_dir, package)
    files = sorted(str(path.relative_to(run_dir.code)) for path in run_dir.code.rglob("*") if path.is_file())
    assert files == ["psrl/__init__.py", "psrl/conf/config.yaml"]
    assert (run_dir.code / "psrl" / "__init__.py").read_text() == "version = 1"
    assert conf_dir(run_dir.code / "psrl") == run_dir.code / "psrl" / "conf"


def test_a_conf_directory_of_somebody_else_is_not_taken(tmp_path: Path) -> None:
    package = fake_checkout(tmp_path, conf_inside=False)
    (tmp_path / "pyproject.toml").unlink()
    with pytest.raises(FileNotFoundError, match="installation is incomplete"):
        conf_dir(package)
