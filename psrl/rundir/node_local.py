"""Node-local scratch: caches and temporary files go to a private directory of this node, never to a home on NFS."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

SHM = Path("/dev/shm")

_CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TORCH_EXTENSIONS_DIR": "torch-extensions",
    "VLLM_CACHE_ROOT": "vllm",
    "HF_MODULES_CACHE": "hf-modules",  # code of models; HF_HOME stays, it holds the user's models and token
    "CUDA_CACHE_PATH": "cuda",
    "NUMBA_CACHE_DIR": "numba",
    "MPLCONFIGDIR": "matplotlib",
}


def node_local_root(environ: Mapping[str, str] | None = None) -> Path:
    """`<base>/psrl-<uid>`, made 0700. Base: PSRL_NODE_LOCAL, SLURM_TMPDIR, TMPDIR or /tmp, the first that is set.

    The base may be writable by everyone, so what is there already is trusted only if it is a real directory of this
    user. Raises PermissionError otherwise.
    """
    environ = os.environ if environ is None else environ
    base = next(
        (environ[key] for key in ("PSRL_NODE_LOCAL", "SLURM_TMPDIR", "TMPDIR") if environ.get(key)), "/tmp"
    )  # fmt: skip
    root = Path(base) / f"psrl-{os.geteuid()}"
    try:
        root.mkdir(mode=0o700, parents=False)
    except FileExistsError:
        pass
    except FileNotFoundError:
        raise FileNotFoundError(
            f"node-local directory {base} does not exist: set PSRL_NODE_LOCAL to one that does"
        ) from None
    _refuse_foreign(root)
    return root


def node_local_env(root: Path, run_path: Path) -> dict[str, str]:
    """Environment that keeps a role's caches and temporary files under `root` (from `node_local_root`).

    Compile caches are shared by all runs of this user on the node; TMPDIR is the run's own, with a short name because
    a socket's path may hold 107 bytes only. Makes the directories.
    """
    env = {key: str(root / "cache" / name) for key, name in _CACHES.items()}
    env["TMPDIR"] = str(root / _run_id(run_path))
    for directory in env.values():
        Path(directory).mkdir(mode=0o700, parents=True, exist_ok=True)
    return env


def shm_name(job: str, epoch: int) -> str:
    """Name of a shared-memory segment that the sweep recognises: `psrl-<uid>-<job>-<epoch>`."""
    return f"psrl-{os.geteuid()}-{job}-{epoch}"


def node_store_path(run_path: Path, shm: Path = SHM) -> Path:
    """The segment in which the instances of this node share the weights that one of them has fetched (`weights.node_store`).
    A supervisor unlinks it when its run ends; one that was killed leaves it to the next one's sweep."""
    return shm / shm_name(_run_id(run_path), 0)


def sweep_shm(shm: Path = SHM, proc: Path = Path("/proc"), min_age_s: float = 60.0) -> list[str]:
    """Unlink this user's psrl segments that no living process has open or mapped; returns their names.

    Names carry the user and the owner is checked too, so nobody else's are touched; another run of this user on the
    node keeps what it uses, and one younger than `min_age_s` may be about to be mapped.
    """
    prefix = f"psrl-{os.geteuid()}-"
    stale = {}
    for entry in shm.glob(f"{prefix}*"):
        try:
            status = entry.lstat()
        except FileNotFoundError:
            continue
        if status.st_uid == os.geteuid() and time.time() - status.st_mtime >= min_age_s:
            stale[str(entry)] = entry
    if not stale:
        return []
    for path in _paths_in_use(proc, prefix):
        stale.pop(path, None)
    for entry in stale.values():
        entry.unlink(missing_ok=True)
    return sorted(entry.name for entry in stale.values())


def _run_id(run_path: Path) -> str:
    return hashlib.sha256(os.fsencode(run_path)).hexdigest()[:8]


def _paths_in_use(proc: Path, part: str) -> set[str]:
    """Paths containing `part` that a process has open or mapped, as far as this user may look."""
    used: set[str] = set()
    for process in proc.glob("[0-9]*"):
        try:
            lines = (process / "maps").read_text().splitlines()
            links = list((process / "fd").iterdir())
        except OSError:  # another user's process, or one that ended meanwhile
            continue
        used.update(fields[5] for line in lines if part in line and len(fields := line.split(maxsplit=5)) == 6)
        for link in links:
            try:
                used.add(str(link.readlink()))
            except OSError:  # closed meanwhile
                continue
    return used


def _refuse_foreign(root: Path) -> None:
    status = root.lstat()
    if root.is_symlink() or not root.is_dir():
        raise PermissionError(f"{root} is not a plain directory: remove it, or set PSRL_NODE_LOCAL to another place")
    if status.st_uid != os.geteuid():
        raise PermissionError(
            f"{root} belongs to user {status.st_uid}, not to user {os.geteuid()}: set PSRL_NODE_LOCAL to another place"
        )
    if status.st_mode & 0o077:
        root.chmod(0o700)
