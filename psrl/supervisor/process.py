"""Children of a supervisor: started so that none outlives it, ended by deadline, reaped to the last orphan.

Each child leads a session of its own. So do the orphans below it, and by that they are told from children which this
process started in another way (a subprocess.run, a library's helper): those are left alone.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from psrl.supervisor import shim

_PR_SET_CHILD_SUBREAPER = 36
_AFTER_KILL_S = 10.0


def become_subreaper() -> None:
    """Adopt the orphans of all descendants, so that `terminate` and `reap_orphans` can find them."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def die_with_parent(parent: int, death_signal: int = signal.SIGKILL) -> None:
    """For the first line of a child that was not started by `spawn` (multiprocessing): leave when `parent` is gone."""
    if not shim.set_parent_death_signal(death_signal, parent):
        sys.exit(shim.EXIT_NOT_STARTED)


def spawn(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    log_path: Path,
    cwd: Path | None = None,
    cores: Collection[int] | None = None,
    oom_score_adj: int | None = None,
    rlimits: Mapping[str, tuple[int, int]] | None = None,
    death_signal: int = signal.SIGKILL,
    ignored: Collection[int] = (signal.SIGUSR2,),
) -> subprocess.Popen[bytes]:
    """Start `argv` as leader of its own session, with stdout and stderr appended to `log_path` and stdin empty.

    Before the program begins: `death_signal` is set to come when this process dies, the `ignored` signals are ignored,
    the process is pinned to `cores`, and has its `oom_score_adj` and `rlimits` (name such as "RLIMIT_AS" -> (soft,
    hard)). `env` is the whole environment. If any of that fails the child ends with code 127 and its log says why.

    Main thread only (RuntimeError otherwise): the death signal comes when the *thread* that spawned ends.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("spawn must be called from the main thread: a child dies with the thread that started it")
    settings = {
        "parent": os.getpid(),
        "death_signal": int(death_signal),
        "cores": None if cores is None else sorted(cores),
        "oom_score_adj": oom_score_adj,
        "rlimits": dict(rlimits or {}),
        "ignored": sorted(map(int, ignored)),
    }
    command = [sys.executable, "-IS", shim.__file__, json.dumps(settings), *argv]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ignored)
    try:
        with log_path.open("ab", buffering=0) as log:
            return subprocess.Popen(
                command,
                env=dict(env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def cap_log(path: Path, cap_bytes: int) -> bool:
    """If the log has grown beyond `cap_bytes`, move its last half of that to `<name>.1` and empty it in place.

    Its writers append, so they go on at the start; lines written during the copy may be lost. True if it was cut.
    """
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return False
    if size <= cap_bytes:
        return False
    with path.open("rb") as log:
        log.seek(size - cap_bytes // 2)
        path.with_name(path.name + ".1").write_bytes(log.read(cap_bytes // 2))
    os.truncate(path, 0)
    return True


def describe_exit(returncode: int) -> str:
    """`describe_exit(-9) == "signal SIGKILL"`, `describe_exit(3) == "exit code 3"`."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"signal {signal.Signals(-returncode).name}"
    except ValueError:
        return f"signal {-returncode}"


def wait_exits(children: Collection[subprocess.Popen[bytes]], deadline: float) -> bool:
    """Wait until all have ended (they are not reaped) or monotonic time reaches `deadline`; True if all have."""
    for child in children:
        left = deadline - time.monotonic()
        if not has_ended(child, max(0.0, left)):
            return False
    return True


def has_ended(child: subprocess.Popen[bytes], timeout_s: float = 0.0) -> bool:
    """True once the process has ended, within `timeout_s`. It stays a zombie: its pid and group are still its own."""
    if child.returncode is not None:
        return True
    descriptor = os.pidfd_open(child.pid)
    try:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        return bool(poller.poll(1000 * timeout_s))
    finally:
        os.close(descriptor)


def kill_group(child: subprocess.Popen[bytes]) -> None:
    """SIGKILL the child's whole process group. Only before it is reaped: later the number may be another's."""
    if child.returncode is None:
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has not reached setsid yet, or everything in it has ended
            child.kill()


def reap_orphans(known: Collection[subprocess.Popen[bytes]]) -> list[int]:
    """Reap adopted processes that have ended, leaving `known` children to their owner; returns their pids."""
    try:
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:  # the usual case, at one system call
            return []
    except ChildProcessError:
        return []
    own = {child.pid for child in known}
    return [pid for pid in _children_in_other_sessions() if pid not in own and os.waitpid(pid, os.WNOHANG)[0] == pid]


def terminate(children: Collection[subprocess.Popen[bytes]], grace_s: float) -> list[int]:
    """End `children` and everything below them: SIGTERM to each, up to `grace_s` for all, then SIGKILL to their groups
    and to every adopted orphan. All are reaped; returns the pids that the kernel could not end (normally none).

    `children` must be all that are still running: one that is left out is taken for an orphan."""
    for child in children:
        if child.returncode is None and not has_ended(child):
            os.kill(child.pid, signal.SIGTERM)  # Popen.send_signal might reap it, and its group would be out of reach
    wait_exits(children, time.monotonic() + grace_s)
    deadline = time.monotonic() + _AFTER_KILL_S
    for child in children:
        kill_group(child)
    wait_exits(children, deadline)
    pause = 0.005
    while True:
        for child in children:
            child.poll()
        reap_orphans(children)
        left = _children_in_other_sessions()
        if not left or time.monotonic() >= deadline:
            return left
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(pause)
        pause = min(2 * pause, 0.2)


def _children_in_other_sessions() -> list[int]:
    """Pids, zombies included, whose parent is this process and whose session is not."""
    own, session = os.getpid(), os.getsid(0)
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # The name in parentheses may hold anything; state, parent, group and session follow it.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # ended meanwhile
                continue
            if int(fields[1]) == own and int(fields[3]) != session:
                found.append(int(entry.name))
    return found
