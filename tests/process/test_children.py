"""Supervised children: real processes, real signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import psrl
from psrl.supervisor.children import ChildEvent, Children, ChildSpec, judge_end, restart_delay_s
from psrl.supervisor.process import cap_log, describe_exit, has_ended, reap_orphans, spawn

DEADLINE_S = 60.0
process_test = pytest.mark.process
unit_test = pytest.mark.unit


def python(code: str, *arguments: object) -> tuple[str, ...]:
    return (sys.executable, "-c", textwrap.dedent(code), *map(str, arguments))


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(Path(psrl.__file__).parent.parent)}


@pytest.fixture
def children(tmp_path: Path) -> Iterator[Children]:
    table = Children(tmp_path, environment())
    yield table
    assert table.stop_all(grace_s=5.0) == []


def until(condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < end, "the deadline has passed"
        time.sleep(0.02)
    return value


def output_of(code: str, *arguments: object) -> str:
    argv = python(code, *arguments)
    result = subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S, env=environment())
    assert result.returncode == 0, result.stderr
    return result.stdout


def next_event(children: Children) -> ChildEvent:
    (event,) = until(lambda: children.poll(1.0))
    return event


def lines(path: Path, count: int) -> list[str]:
    """What a log says, once it has `count` whole lines: unbuffered, a print of two words is several writes."""
    return until(lambda: path.exists() and (found := path.read_text()).count("\n") >= count and found.splitlines())


def alive(pid: int) -> bool:
    """Running, and not merely a zombie that somebody has yet to reap."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@unit_test
@pytest.mark.parametrize(
    ("returncode", "text"),
    [(0, "exit code 0"), (3, "exit code 3"), (137, "exit code 137"), (-9, "signal SIGKILL"), (-15, "signal SIGTERM"),
     (-64, "signal SIGRTMAX"), (-50, "signal 50")],
)  # fmt: skip
def test_an_end_in_words(returncode: int, text: str) -> None:
    assert describe_exit(returncode) == text


@unit_test
@pytest.mark.parametrize(
    ("generation", "returncode", "asked", "finished", "restarting"),
    [
        (0, -9, False, False, True),
        (1, 1, False, False, True),
        (2, -9, False, False, False),  # max_restarts 2: generations 0, 1, 2
        (0, 0, False, True, False),
        (0, -15, True, True, False),
    ],
)
def test_what_an_end_means(generation: int, returncode: int, asked: bool, finished: bool, restarting: bool) -> None:
    spec = ChildSpec(role="instance", name="instance-0", argv=("x",), max_restarts=2, critical=True)
    event = judge_end(spec, generation, 1, returncode, asked)
    assert (event.finished, event.restarting, event.critical, event.generation) == (
        finished,
        restarting,
        True,
        generation,
    )


@unit_test
def test_the_pause_before_a_restart_grows_to_a_limit() -> None:
    assert [restart_delay_s(number) for number in (0, 1, 2, 6, 10**9)] == [0.5, 1.0, 2.0, 30.0, 30.0]


@unit_test
def test_a_log_is_cut_to_its_newest_lines_and_its_writer_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    assert not cap_log(path, 100)
    with path.open("ab", buffering=0) as writer:
        writer.write(b"x" * 100)
        assert not cap_log(path, 100)
        writer.write(b"y")
        assert cap_log(path, 100)
        writer.write(b"next")
    assert path.read_bytes() == b"next"
    assert (tmp_path / "a.log.1").read_bytes() == b"x" * 49 + b"y"


@process_test
def test_a_killed_child_is_started_again_until_its_restarts_are_used_up(children: Children, tmp_path: Path) -> None:
    code = "import os, time; print(os.environ['PSRL_GENERATION'], os.environ['EXTRA']); time.sleep(600)"
    spec = ChildSpec(role="instance", name="i0", argv=python(code), max_restarts=2, critical=True, env={"EXTRA": "e"})
    pid = children.start(spec)
    for generation in range(3):
        assert lines(tmp_path / "i0.log", generation + 1)[generation] == f"{generation} e"
        os.kill(pid, signal.SIGKILL)
        event = next_event(children)
        assert (event.cause, event.generation, event.critical) == ("signal SIGKILL", generation, True)
        assert event.restarting is (generation < 2)
        if event.restarting:
            assert children.alive() == ["i0"]
            pid = until(lambda: children.poll(0.1) or children.running().get("i0"))
    assert children.alive() == [] and children.poll(0.0) == []


@process_test
def test_one_of_several_children_ends_and_the_others_go_on(children: Children) -> None:
    for name in ("a", "b"):
        children.start(ChildSpec(role="agent", name=name, argv=("sleep", "600")))
    children.start(ChildSpec(role="agent", name="c", argv=("sh", "-c", "exit 3")))
    event = next_event(children)
    assert (event.name, event.cause, event.finished, event.restarting) == ("c", "exit code 3", False, False)
    assert children.alive() == ["a", "b"]
    with pytest.raises(ValueError, match="'a' is running already"):
        children.start(ChildSpec(role="agent", name="a", argv=("true",)))


@process_test
def test_a_child_that_is_told_to_stop_is_no_failure(children: Children) -> None:
    children.start(ChildSpec(role="agent", name="a", argv=("sleep", "600"), max_restarts=5))
    children.stop("a", grace_s=DEADLINE_S)
    event = next_event(children)
    assert (event.cause, event.finished, event.restarting) == ("signal SIGTERM", True, False)


@process_test
def test_what_a_dead_child_had_started_dies_with_it(children: Children, tmp_path: Path) -> None:
    code = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid); time.sleep(600)"
    pid = children.start(ChildSpec(role="instance", name="i0", argv=python(code)))
    helper = int(lines(tmp_path / "i0.log", 1)[0])
    os.kill(pid, signal.SIGKILL)
    next_event(children)
    until(lambda: not alive(helper))


@process_test
def test_a_program_that_does_not_exist_ends_with_127_and_a_reason(children: Children, tmp_path: Path) -> None:
    children.start(ChildSpec(role="agent", name="a", argv=("/no/such/program", "x")))
    assert next_event(children).cause == "exit code 127"
    assert lines(tmp_path / "a.log", 1)[0].startswith("cannot start ['/no/such/program', 'x']: ")


PROBE = """
    import json, os, resource, signal
    ignored = int(next(line for line in open("/proc/self/status") if line.startswith("SigIgn")).split()[1], 16)
    blocked = int(next(line for line in open("/proc/self/status") if line.startswith("SigBlk")).split()[1], 16)
    print(json.dumps({
        "usr2_ignored": bool(ignored >> (signal.SIGUSR2 - 1) & 1), "blocked": blocked,
        "leader": os.getsid(0) == os.getpid(),
        "group": os.getpgid(0) == os.getpid(), "cores": sorted(os.sched_getaffinity(0)),
        "oom": int(open("/proc/self/oom_score_adj").read()), "files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "stdin": os.read(0, 1).decode(), "cwd": os.getcwd(),
    }))
"""


@process_test
def test_everything_holds_before_the_programs_first_instruction(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    child = spawn(
        python(PROBE),
        env=environment(),
        log_path=tmp_path / "log",
        cwd=tmp_path,
        cores=[core],
        oom_score_adj=800,
        rlimits={"RLIMIT_NOFILE": (64, 128)},
    )
    assert child.wait(DEADLINE_S) == 0, (tmp_path / "log").read_text()
    assert json.loads((tmp_path / "log").read_text()) == {
        "usr2_ignored": True, "blocked": 0, "leader": True, "group": True, "cores": [core], "oom": 800,
        "files": [64, 128], "stdin": "", "cwd": str(tmp_path),
    }  # fmt: skip
    assert signal.SIGUSR2 not in signal.pthread_sigmask(signal.SIG_BLOCK, set())


@process_test
def test_a_warning_signal_never_kills_a_child_however_early_it_comes(tmp_path: Path) -> None:
    for number in range(5):
        child = spawn(("sh", "-c", "sleep 0.2; exit 7"), env=environment(), log_path=tmp_path / str(number))
        while not has_ended(child, 0.001):
            os.kill(child.pid, signal.SIGUSR2)
        assert child.wait(DEADLINE_S) == 7


@process_test
def test_only_the_main_thread_may_spawn(tmp_path: Path) -> None:
    errors: list[Exception] = []

    def attempt() -> None:
        try:
            spawn(("true",), env=environment(), log_path=tmp_path / "log")
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join(DEADLINE_S)
    assert "main thread" in str(errors[0])


SUPERVISOR = """
    import os, sys, time
    from pathlib import Path
    from psrl.supervisor.process import spawn
    logs, depth = Path(sys.argv[1]), int(sys.argv[2])
    print(os.getpid(), flush=True)
    if depth:
        argv = (sys.executable, __file__, sys.argv[1], str(depth - 1))
        spawn(argv, env=os.environ, log_path=logs / f"{depth - 1}.log")
    time.sleep(600)
"""


@process_test
def test_kill_9_of_the_parent_ends_children_and_grandchildren(tmp_path: Path) -> None:
    script = tmp_path / "supervisor.py"
    script.write_text(textwrap.dedent(SUPERVISOR))
    parent = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path), "2"], stdout=subprocess.DEVNULL, env=environment()
    )
    pids = [int(lines(tmp_path / f"{depth}.log", 1)[0]) for depth in (1, 0)]
    assert all(map(alive, pids))
    parent.kill()
    parent.wait()
    until(lambda: not any(map(alive, pids)))


STUBBORN = """
    import os, signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    escaped = subprocess.Popen(["sh", "-c", "trap '' TERM; echo $$; sleep 600"], start_new_session=True)
    print(os.getpid(), flush=True)
    time.sleep(600)
"""

TERMINATOR = """
    import os, subprocess, sys, time
    from pathlib import Path
    from psrl.supervisor.process import become_subreaper, describe_exit, reap_orphans, spawn, terminate
    become_subreaper()
    logs, stubborn = Path(sys.argv[1]), sys.argv[2]
    helper = subprocess.Popen(["sleep", "600"])  # started in another way: none of terminate's business
    polite = spawn(("sleep", "600"), env=os.environ, log_path=logs / "polite.log")
    stubborn = spawn((sys.executable, "-c", stubborn), env=os.environ, log_path=logs / "stubborn.log")
    while (logs / "stubborn.log").read_text().count("\\n") < 2:
        time.sleep(0.02)
    stuck = terminate([polite, stubborn], grace_s=0.5)
    print(stuck, describe_exit(polite.returncode), "/", describe_exit(stubborn.returncode), helper.poll())
    helper.kill()
    print(helper.wait())
"""


@process_test
def test_terminate_ends_everything_below_and_nothing_else(tmp_path: Path) -> None:
    output = output_of(TERMINATOR, tmp_path, textwrap.dedent(STUBBORN))
    assert output.splitlines() == ["[] signal SIGTERM / signal SIGKILL None", "-9"]
    pids = [int(line) for line in (tmp_path / "stubborn.log").read_text().splitlines()]
    assert len(pids) == 2 and not any(map(alive, pids))


@process_test
def test_reaping_takes_orphans_and_leaves_the_children_of_others(tmp_path: Path) -> None:
    code = """
        import os, subprocess, sys, time
        from pathlib import Path
        from psrl.supervisor.process import become_subreaper, has_ended, reap_orphans, spawn
        become_subreaper()
        other = subprocess.Popen(["sh", "-c", "exit 5"])
        known = spawn(("sh", "-c", "(sleep 0.2) & exit 6"), env=os.environ, log_path=Path(sys.argv[1]))
        while not (has_ended(known) and has_ended(other)):
            time.sleep(0.01)
        reaped = []
        while not reaped:
            reaped = reap_orphans([known])
            time.sleep(0.01)
        print(len(reaped), known.wait(), other.wait())
    """
    assert output_of(code, tmp_path / "log").split() == ["1", "6", "5"]
    assert reap_orphans([]) == []
