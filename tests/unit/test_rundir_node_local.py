"""Node-local directories and the sweep of /dev/shm."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from psrl.rundir.node_local import node_local_env, node_local_root, shm_name, sweep_shm

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("set_keys", "used"),
    [
        (["PSRL_NODE_LOCAL", "SLURM_TMPDIR", "TMPDIR"], "PSRL_NODE_LOCAL"),
        (["SLURM_TMPDIR", "TMPDIR"], "SLURM_TMPDIR"),
        (["TMPDIR"], "TMPDIR"),
    ],
)
def test_the_first_base_that_is_set_is_used(tmp_path: Path, set_keys: list[str], used: str) -> None:
    environ = {key: str(tmp_path / key) for key in set_keys}
    for base in environ.values():
        Path(base).mkdir()
    root = node_local_root(environ)
    assert root == tmp_path / used / f"psrl-{os.geteuid()}"
    assert root.stat().st_mode & 0o777 == 0o700


def test_an_open_directory_of_ours_is_closed(tmp_path: Path) -> None:
    root = tmp_path / f"psrl-{os.geteuid()}"
    root.mkdir()
    root.chmod(0o777)
    assert node_local_root({"TMPDIR": str(tmp_path)}).stat().st_mode & 0o777 == 0o700


def test_a_link_planted_in_a_shared_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"psrl-{os.geteuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="not a plain directory"):
        node_local_root({"TMPDIR": str(tmp_path)})


def test_a_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = os.geteuid() + 1
    (tmp_path / f"psrl-{other}").mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(PermissionError, match=rf"belongs to user {other - 1}, not to user {other}.*PSRL_NODE_LOCAL"):
        node_local_root({"TMPDIR": str(tmp_path)})


def test_a_missing_base_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}/none does not exist: set PSRL_NODE_LOCAL"):
        node_local_root({"SLURM_TMPDIR": f"{tmp_path}/none"})


def test_two_runs_share_compile_caches_but_not_temporary_files(tmp_path: Path) -> None:
    one, two = (node_local_env(tmp_path, Path(f"/runs/{name}")) for name in ("one", "two"))
    assert {key for key in one if one[key] != two[key]} == {"TMPDIR"}
    assert {"TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT", "HF_MODULES_CACHE"} < one.keys()
    assert all(Path(directory).is_dir() and directory.startswith(str(tmp_path)) for directory in one.values())


def test_the_sweep_takes_only_old_unused_segments_of_this_user(tmp_path: Path) -> None:
    names = {"stale": shm_name("17", 1), "mapped": shm_name("18", 1), "young": shm_name("19", 1)}
    for name in (*names.values(), "psrl-99999-17-1", "other"):
        (tmp_path / name).write_bytes(b"x")
        if name != names["young"]:
            os.utime(tmp_path / name, (0, 0))
    with (tmp_path / names["mapped"]).open("rb"):
        assert sweep_shm(shm=tmp_path) == [names["stale"]]
    left = {entry.name for entry in tmp_path.iterdir()}
    assert left == {names["mapped"], names["young"], "psrl-99999-17-1", "other"}
    assert sweep_shm(shm=tmp_path) == [names["mapped"]]
