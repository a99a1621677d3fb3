"""Between the start of a sandboxed program and its first own instruction: namespaces, limits, a guard that counts.

Run as a file by psrl.agents.sandbox (`python -IS jail.py SETTINGS PROGRAM ARGS...`), hence no imports of our own. With
`isolated` three processes come of it: this one, which has the program's exit code; the guard, first process of a PID namespace
(when it ends the kernel ends everything below it, whatever groups and sessions were made there); and the program.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

EXIT_NOT_STARTED = 127
EXIT_TOO_MANY = 126
"""The guard found more processes than allowed."""
NOBODY = 65534
"""Inside the namespace the program is nobody, so that it has no rights over the namespace (mounts) itself."""
LOOK_S = 0.03

PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 2**17, 2**27, 2**28, 2**29, 2**30
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1

libc = ctypes.CDLL(None, use_errno=True)


class MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")]


def check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def die_with_parent() -> None:
    check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")


def new_namespaces() -> None:
    """User, PID, mount, network and IPC namespaces of its own; the user inside is nobody, which is the same user outside."""
    uid, gid = os.getuid(), os.getgid()
    check(libc.unshare(CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{NOBODY} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{NOBODY} {gid} 1")


def protect_files(writable: str, hidden: list[str]) -> None:
    """Everything is read-only but `writable`; `hidden` directories look empty; /proc shows this namespace alone."""

    def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
        texts = [t.encode() if t is not None else None for t in (source, target, kind, options)]
        check(libc.mount(*texts[:3], ctypes.c_ulong(flags), texts[3]), f"mount {target}")

    def set_attributes(target: str, flags: int, attributes: MountAttributes) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(attributes))
        arguments = (ctypes.c_int(AT_FDCWD), target.encode(), ctypes.c_uint(flags), ctypes.byref(attributes), size)
        check(libc.syscall(ctypes.c_long(SYS_MOUNT_SETATTR), *arguments), f"mount_setattr {target}")

    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    for directory in hidden:
        mount("none", directory, "tmpfs", MS_NOSUID | MS_NODEV, "size=4k")
    mount(writable, writable, None, MS_BIND)
    set_attributes("/", AT_RECURSIVE, MountAttributes(attr_set=MOUNT_ATTR_RDONLY))
    set_attributes(writable, 0, MountAttributes(attr_clr=MOUNT_ATTR_RDONLY))
    os.chdir(writable)  # the old working directory is the one below the mount


def limit(rlimits: dict[str, int]) -> None:
    """Lower limits, never beyond what a stricter environment allows."""
    for name, value in rlimits.items():
        number = getattr(resource, name)
        _, hard = resource.getrlimit(number)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))


def run(settings: dict[str, Any], program: list[str]) -> None:
    """Become the program. Does not return."""
    limit(settings["rlimits"])
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    os.execvp(program[0], program)


def guard(child: int, max_processes: int) -> int:
    """The first process of the namespace: reaps orphans, counts; returns the exit code of `child`, negative for a signal."""
    while True:
        signal.sigtimedwait({signal.SIGCHLD}, LOOK_S)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return EXIT_NOT_STARTED
            if pid == child:
                return os.waitstatus_to_exitcode(status)
            if pid == 0:
                break
        if sum(name.isdigit() for name in os.listdir("/proc")) - 1 > max_processes:  # noqa: PTH208 (a string is enough)
            return EXIT_TOO_MANY


def end_as(code: int) -> None:
    """End this process with the exit code of another, by the same signal if that was its end."""
    if code < 0:
        limit({"RLIMIT_CORE": 0})
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    os._exit(code)


def main(arguments: list[str]) -> None:
    settings, program = json.loads(arguments[0]), arguments[1:]
    die_with_parent()
    if os.getppid() != settings["parent"]:
        sys.exit(EXIT_NOT_STARTED)
    Path("/proc/self/oom_score_adj").write_text(str(settings["oom_score_adj"]))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    if not settings["isolated"]:
        run(settings, program)
    new_namespaces()
    if first := os.fork():
        _, status = os.waitpid(first, 0)
        end_as(os.waitstatus_to_exitcode(status))
    die_with_parent()
    protect_files(settings["writable"], settings["hidden"])
    if child := os.fork():
        code = guard(child, settings["max_processes"])
        os._exit(code if code >= 0 else 128 - code)
    run(settings, program)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (OSError, ValueError) as error:
        print(f"cannot start {sys.argv[2:]}: {error}", file=sys.stderr, flush=True)
        os._exit(EXIT_NOT_STARTED)
