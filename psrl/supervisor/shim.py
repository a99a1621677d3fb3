"""Between fork and exec of a child: everything that must hold before its first own instruction.

Run as a file by `process.spawn` (`python -IS shim.py SETTINGS PROGRAM ARGS...`), hence no imports of our own.
A separate program instead of a `preexec_fn`: code between fork and exec of a process with threads may deadlock.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1

EXIT_NOT_STARTED = 127


def set_parent_death_signal(number: int, parent: int) -> bool:
    """Ask for signal `number` when `parent` dies; False if it is dead already (the signal would then never come)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    return os.getppid() == parent


def main(arguments: list[str]) -> None:
    settings, argv = json.loads(arguments[0]), arguments[1:]
    # A warning signal to a Slurm step reaches every process in it; only the supervisor is to act on it. It was blocked
    # before the fork, so that there was no moment in which it could have killed this process.
    for number in settings["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, settings["ignored"])
    if not set_parent_death_signal(settings["death_signal"], settings["parent"]):
        sys.exit(EXIT_NOT_STARTED)
    if settings["cores"] is not None:
        os.sched_setaffinity(0, settings["cores"])
    if settings["oom_score_adj"] is not None:
        Path("/proc/self/oom_score_adj").write_text(str(settings["oom_score_adj"]))
    for name, (soft, hard) in settings["rlimits"].items():
        resource.setrlimit(getattr(resource, name), (soft, hard))
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (OSError, ValueError) as error:
        print(f"cannot start {sys.argv[2:]}: {error}", file=sys.stderr, flush=True)
        sys.exit(EXIT_NOT_STARTED)
