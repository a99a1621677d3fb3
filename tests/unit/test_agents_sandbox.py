"""What a program that a model wrote may do: each limit met by a program that goes for it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from psrl.agents import sandbox
from psrl.agents.sandbox import MARK, Finished, HeadAndTail, Limits, processes_with, run_program
from psrl.agents.tools.python import PythonTool
from psrl.config.agents import SandboxConfig

pytestmark = pytest.mark.unit

needs_namespaces = pytest.mark.skipif(
    sandbox.why_no_namespaces() is not None, reason=f"no namespaces here: {sandbox.why_no_namespaces()}"
)
both_kinds = pytest.mark.parametrize("isolated", [pytest.param(True, marks=needs_namespaces), False])
QUICK = Limits(timeout_s=60.0)


def run(
    code: str, directory: Path, limits: Limits = QUICK, *, isolated: bool = True, env: dict[str, str] | None = None
) -> Finished:
    argv = [sys.executable, "-I", "-B", "-c", textwrap.dedent(code)]
    return asyncio.run(run_program(argv, cwd=directory, limits=limits, env=env, isolated=isolated))


@both_kinds
def test_output_and_exit_code_come_back(tmp_path: Path, isolated: bool) -> None:
    done = run("import sys; print('out'); print('err', file=sys.stderr)", tmp_path, isolated=isolated)
    assert sorted(done.output.split()) == ["err", "out"] and done.ended == ""
    assert run("raise SystemExit(3)", tmp_path, isolated=isolated) == Finished("exit code 3", "")
    killed = run("import os; os.kill(os.getpid(), 9)", tmp_path, isolated=isolated)
    assert killed == Finished("signal SIGKILL", "")


@both_kinds
def test_an_endless_loop_is_killed_at_the_deadline(tmp_path: Path, isolated: bool) -> None:
    done = run("print('begun', flush=True)\nwhile True: pass", tmp_path, Limits(timeout_s=10), isolated=isolated)
    assert done == Finished("killed after 10 s", "begun\n")


@both_kinds
def test_a_gigabyte_is_refused(tmp_path: Path, isolated: bool) -> None:
    limits = Limits(timeout_s=60.0, memory_bytes=256 * 2**20)
    done = run("b = bytearray(2**30)\nprint('has it')", tmp_path, limits, isolated=isolated)
    assert done.ended == "exit code 1" and "MemoryError" in done.output


@both_kinds
def test_endless_output_is_cut_and_ended_by_the_deadline(tmp_path: Path, isolated: bool) -> None:
    limits = Limits(timeout_s=10, output_bytes=1000)
    done = run("while True: print('x' * 1000)", tmp_path, limits, isolated=isolated)
    assert done.ended == "killed after 10 s" and len(done.output) < 1100 and " bytes ..." in done.output


@both_kinds
def test_a_large_file_is_refused(tmp_path: Path, isolated: bool) -> None:
    code = "open('large', 'wb').write(bytes(2**21))"
    done = run(code, tmp_path, Limits(timeout_s=60.0, file_bytes=2**20), isolated=isolated)
    assert done.ended and (tmp_path / "large").stat().st_size <= 2**20


LEAVES_CHILDREN = """
    import os, subprocess, sys, time
    for session in (False, True):
        subprocess.Popen([sys.executable, "-I", "-c", "import time; time.sleep(600)"], start_new_session=session)
    if os.fork() == 0:  # a daemon: its parent has ended
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
    print("started", flush=True)
"""


@both_kinds
@pytest.mark.parametrize("stays", [False, True])
def test_nothing_is_left_of_what_it_started(tmp_path: Path, isolated: bool, stays: bool) -> None:
    before = _left_in(tmp_path)
    limits = Limits(timeout_s=16 if stays else 60)
    done = run(LEAVES_CHILDREN + ("    time.sleep(600)\n" if stays else ""), tmp_path, limits, isolated=isolated)
    assert done.output == "started\n"
    assert done.ended == ("killed after 16 s" if stays else "")
    assert _left_in(tmp_path) <= before


def _left_in(directory: Path) -> set[int]:
    """Processes of this test's sandboxes; others may run beside it."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes()
                if f"{MARK}=".encode() in environment and bytes(directory) in environment:
                    found.add(int(entry.name))
            except OSError:
                continue
    return found


BOMB = """
    import os, time
    began = time.monotonic()
    while time.monotonic() - began < 10:
        try:
            if os.fork() == 0:
                time.sleep(600)
        except OSError:
            time.sleep(0.1)
"""


@needs_namespaces
def test_a_fork_bomb_is_held(tmp_path: Path) -> None:
    before = _left_in(tmp_path)
    done = run(BOMB, tmp_path, Limits(timeout_s=30.0, processes=16))
    assert done.ended == "killed with more than 16 processes"
    assert _left_in(tmp_path) <= before


@pytest.mark.skipif(os.getuid() == 0, reason="RLIMIT_NPROC does not bind root")
def test_a_fork_bomb_is_held_without_namespaces(tmp_path: Path) -> None:
    before = _left_in(tmp_path)
    done = run(BOMB, tmp_path, Limits(timeout_s=3.0, processes=16), isolated=False)
    assert done.ended == "killed after 3 s"
    assert _left_in(tmp_path) <= before


@needs_namespaces
def test_files_outside_are_not_written_and_hidden_ones_not_read(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    (outside / "secret").write_text("key")
    code = f"""
        import os
        from pathlib import Path
        Path("mine").write_text("written")
        for place in ({str(outside)!r}, "/tmp", "/dev/shm", os.path.expanduser("~root"), "/"):
            try:
                Path(place, "theirs").write_text("written")
                print("wrote to", place)
            except OSError as error:
                pass
        try:
            print(Path({str(outside / "secret")!r}).read_text())
        except OSError:
            print("unreadable")
        print(os.getuid(), sorted(os.listdir("/proc/self/fd")))
    """
    assert run(code, inside).output.splitlines()[0] == "key"
    hidden = run(code, inside, Limits(timeout_s=60.0, hidden=(str(outside),)))
    # Descriptors: its own three, and the one that lists them.
    assert hidden == Finished("", "unreadable\n65534 ['0', '1', '2', '3']\n")
    assert [p.name for p in outside.iterdir()] == ["secret"] and (inside / "mine").read_text() == "written"


@needs_namespaces
def test_there_is_no_network_and_no_other_process(tmp_path: Path) -> None:
    code = """
        import os, socket
        try:
            socket.create_connection(("127.0.0.1", 22), timeout=5)
        except OSError as error:
            print(error.strerror)
        print(sum(name.isdigit() for name in os.listdir("/proc")))
    """
    assert run(code, tmp_path).output == "Network is unreachable\n2\n"


@both_kinds
def test_nothing_of_our_environment_and_no_open_file_is_inherited(
    tmp_path: Path, isolated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    with (tmp_path / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        code = "import os; print(sorted(os.environ)); print(len(os.listdir('/proc/self/fd')))"
        done = run(code, tmp_path, env={"EXTRA": "1"}, isolated=isolated)
    names, descriptors = done.output.splitlines()
    assert "WANDB_API_KEY" not in names and "EXTRA" in names and descriptors == "4"


@both_kinds
def test_a_cancelled_program_is_gone(tmp_path: Path, isolated: bool) -> None:
    async def cancel_it() -> None:
        code = "import pathlib, time; pathlib.Path('begun').touch(); time.sleep(600)"
        argv = [sys.executable, "-c", code]
        running = asyncio.create_task(run_program(argv, cwd=tmp_path, limits=Limits(timeout_s=60), isolated=isolated))
        while not (tmp_path / "begun").exists():
            await asyncio.sleep(0.02)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    before = _left_in(tmp_path)
    asyncio.run(cancel_it())
    assert _left_in(tmp_path) <= before


@both_kinds
def test_a_program_dies_with_the_process_that_started_it(tmp_path: Path, isolated: bool) -> None:
    starter = f"""
        import asyncio, sys
        from pathlib import Path
        from psrl.agents.sandbox import Limits, run_program
        code = "import os, time; print(1); open('begun', 'w').close(); time.sleep(600)"
        argv = [sys.executable, "-c", code]
        asyncio.run(run_program(argv, cwd=Path({str(tmp_path)!r}), limits=Limits(timeout_s=600), isolated={isolated}))
    """
    before = _left_in(tmp_path)
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(starter)])
    deadline = time.monotonic() + 60
    while not (tmp_path / "begun").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 60
    while _left_in(tmp_path) - before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert _left_in(tmp_path) <= before


@both_kinds
def test_a_program_that_is_not_there_says_so(tmp_path: Path, isolated: bool) -> None:
    done = asyncio.run(run_program(["no-such-program"], cwd=tmp_path, limits=QUICK, isolated=isolated))
    assert done.ended == "exit code 127" and "cannot start ['no-such-program']" in done.output


def test_a_kernel_without_namespaces_is_told_once_and_limits_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sandbox.why_no_namespaces.cache_clear()
    refusing = tmp_path / "jail.py"
    refusing.write_text("import sys; print('unshare: Operation not permitted', file=sys.stderr); sys.exit(127)")
    with monkeypatch.context() as patched:
        patched.setattr(sandbox.jail, "__file__", str(refusing))
        assert sandbox.why_no_namespaces() == "unshare: Operation not permitted"
        assert sandbox.why_no_namespaces() == "unshare: Operation not permitted"
    try:
        assert len([r for r in caplog.records if "the kernel gives no namespaces" in r.message]) == 1
        assert run("import os; print(os.getuid())", tmp_path).output == f"{os.getuid()}\n"
        assert run("while True: pass", tmp_path, Limits(timeout_s=1.0)).ended == "killed after 1 s"
    finally:
        sandbox.why_no_namespaces.cache_clear()


@pytest.mark.parametrize(
    ("parts", "kept"),
    [
        (["abc"], "abc"),
        (["abcdefgh"], "abcdefgh"),
        (["abcdefghij"], "abcd\n... 2 bytes ...\nghij"),
        (["a", "bcdefghij", "kl"], "abcd\n... 4 bytes ...\nijkl"),
    ],
)
def test_of_much_output_the_middle_is_thrown_away(parts: list[str], kept: str) -> None:
    output = HeadAndTail(8)
    for part in parts:
        output.add(part.encode())
    assert output.text() == kept


def test_marks_are_found(tmp_path: Path) -> None:
    mark = f"m{os.getpid()}"
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={MARK: mark})
    try:
        deadline = time.monotonic() + 30
        while processes_with(mark) != [child.pid] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert processes_with(mark) == [child.pid] and processes_with(mark[:-1]) == []
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("print(sum(range(5)))", "10"),
        ("x = 1", ""),
        ("print('a'); raise SystemExit(2)", "a\n[exit code 2]"),
        ("while True: pass", "[killed after 4 s]"),
        ("print(open('program.py').read()[:5])", "print"),
    ],
)
def test_the_python_tool_answers_with_what_was_printed(code: str, answer: str) -> None:
    timeout_s = 4.0 if code.startswith("while") else 60.0
    tool = PythonTool(Limits.from_config(SandboxConfig(timeout_s=timeout_s)))
    assert asyncio.run(tool.run(code)) == answer


def test_the_python_tool_shows_errors_to_the_model() -> None:
    answer = asyncio.run(PythonTool(QUICK).run("1 / 0"))
    assert "ZeroDivisionError" in answer and answer.endswith("[exit code 1]")
