"""Black boxes: functions and programs that end, fail, hang, are killed or print garbage."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shlex
import sys
import textwrap
import threading
import types
from pathlib import Path
from typing import Any

import pytest
from agent_sessions import ScriptedSession, prompt_of

from psrl.agents import black_box
from psrl.agents.base import Ending, Endpoint
from psrl.agents.black_box import BlackBoxAgent, make_black_box
from psrl.agents.sandbox import MARK
from psrl.config.agents import BlackBoxConfig
from psrl.config.errors import ConfigError

pytestmark = pytest.mark.unit

ENDPOINT = Endpoint("http://127.0.0.1:4711", "key")
SESSION = ScriptedSession([])


def run(agent: BlackBoxAgent) -> Ending:
    return asyncio.run(agent.run(SESSION, prompt_of(ground_truth="9", extra_info={"values": {"a": 9}})))


# ---- functions ---------------------------------------------------------------------------------------------------


class ClientError(Exception):
    """As the openai client raises it."""

    code = "context_length_exceeded"


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("own_box")
    monkeypatch.setitem(sys.modules, "own_box", module)
    return module


def function_agent(own: types.ModuleType, function: Any, **settings: Any) -> BlackBoxAgent:
    own.play = function  # type: ignore[attr-defined]
    return make_black_box(BlackBoxConfig(function="own_box:play", **settings), ENDPOINT)


def test_a_function_is_told_where_and_what(own: types.ModuleType) -> None:
    told: list[Any] = []

    async def play(base_url: str, api_key: str, prompt: dict[str, Any]) -> None:
        told.extend((base_url, api_key, prompt))

    assert run(function_agent(own, play)) == Ending()
    url, key, prompt = told
    assert (url, key) == ("http://127.0.0.1:4711/sessions/s1/v1", "key")
    assert prompt == {
        "index": 3,
        "messages": [{"role": "user", "content": "How much?"}],
        "data_source": "test",
        "ground_truth": "9",
        "extra_info": {"values": {"a": 9}},
    }
    assert json.loads(json.dumps(prompt)) == prompt


@pytest.mark.parametrize(
    ("returned", "ending"),
    [
        (None, Ending()),
        (1, Ending(1.0)),
        (-0.5, Ending(-0.5)),
        (True, Ending(1.0)),
        ({"score": 0.5, "edits": 2, "note": "x", "ratio": math.nan}, Ending(0.5, {"edits": 2.0})),
        ({"score": None, "edits": 2}, Ending(None, {"edits": 2.0})),
    ],
)
def test_what_it_returns_is_the_reward(own: types.ModuleType, returned: Any, ending: Ending) -> None:
    assert run(function_agent(own, lambda *_: returned)) == ending


@pytest.mark.parametrize("returned", [math.nan, math.inf, "1", [1], {"reward": 1}, {"score": "1"}])
def test_what_is_no_reward_fails(own: types.ModuleType, returned: Any) -> None:
    ending = run(function_agent(own, lambda *_: returned))
    assert ending.reward is None and ending.failed


def test_a_function_that_raises_fails(own: types.ModuleType) -> None:
    def play(*_: Any) -> float:
        raise KeyError("values")

    assert run(function_agent(own, play)) == Ending(failed="black box: it raised KeyError: 'values'")


def test_no_room_for_a_further_turn_is_an_end_like_any_other(own: types.ModuleType) -> None:
    def play(*_: Any) -> float:
        raise ClientError("the conversation is too long")

    assert run(function_agent(own, play)) == Ending()


def test_a_function_that_hangs_fails_at_the_deadline(own: types.ModuleType) -> None:
    release = threading.Event()
    said = "black box: not done within black_box.timeout_s=0.1"
    try:
        assert run(function_agent(own, lambda *_: release.wait(60), timeout_s=0.1)) == Ending(failed=said)
    finally:
        release.set()

    async def hang(*_: Any) -> None:
        await asyncio.sleep(60)

    assert run(function_agent(own, hang, timeout_s=0.1)) == Ending(failed=said)


def test_a_deadline_of_its_own_is_told_apart(own: types.ModuleType) -> None:
    def play(*_: Any) -> float:
        raise TimeoutError("the service")

    assert run(function_agent(own, play)) == Ending(failed="black box: it raised TimeoutError: the service")


def test_no_more_than_allowed_run_at_once(own: types.ModuleType) -> None:
    now, most = 0, 0

    async def play(*_: Any) -> float:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.01)
        now -= 1
        return 1.0

    async def many() -> list[Ending]:
        agent = function_agent(own, play, max_concurrent=3)
        return await asyncio.gather(*(agent.run(SESSION, prompt_of()) for _ in range(10)))

    assert {e.reward for e in asyncio.run(many())} == {1.0} and most == 3


def test_a_function_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"agent\.black_box\.function=no_such_module:f: importing"):
        make_black_box(BlackBoxConfig(function="no_such_module:f"), ENDPOINT)


# ---- programs ----------------------------------------------------------------------------------------------------


def program(tmp_path: Path, code: str, **settings: Any) -> BlackBoxAgent:
    path = tmp_path / "my agent.py"
    path.write_text("import json, os, signal, sys, time\n" + textwrap.dedent(code))
    return make_black_box(BlackBoxConfig(command=shlex.join([sys.executable, str(path)]), **settings), ENDPOINT)


RESULT = "open(os.environ['PSRL_RESULT_FILE'], 'w').write"


def test_a_program_is_told_where_and_what_by_its_environment(tmp_path: Path) -> None:
    code = f"""
        prompt = json.load(open(os.environ["PSRL_PROMPT_FILE"]))
        right = (
            os.environ["OPENAI_BASE_URL"] == "http://127.0.0.1:4711/sessions/s1/v1"
            and os.environ["OPENAI_API_KEY"] == "key"
            and prompt["messages"][0]["content"] == "How much?"
            and prompt["ground_truth"] == "9"
        )
        {RESULT}(json.dumps({{"score": float(right), "turns": 2}}))
    """
    assert run(program(tmp_path, code)) == Ending(1.0, {"turns": 2.0})


def test_a_program_has_the_users_environment_and_finds_the_modules_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SETTING", "7")
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    (tmp_path / "beside.py").write_text("score = 0.5")
    code = f"import beside; {RESULT}(str(beside.score * (os.environ['MY_SETTING'] == '7')))"
    assert run(program(tmp_path, code)) == Ending(0.5)


def test_a_program_without_a_result_leaves_it_to_the_verifier(tmp_path: Path) -> None:
    assert run(program(tmp_path, "print('done')")) == Ending()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("sys.exit('no such repository')", "exit code 1: no such repository"),
        ("print('a\\nb'); sys.exit(3)", "exit code 3: a | b"),
        ("print('\\n'.join(map(str, range(99)))); 1 / 0", "ZeroDivisionError: division by zero"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "signal SIGKILL"),
        ("sys.stdout.buffer.write(bytes(range(256)) * 4096); sys.exit(1)", "exit code 1: "),
        (f"{RESULT}('0.5'); os.kill(os.getpid(), signal.SIGKILL)", "signal SIGKILL"),
        (f"{RESULT}('one')", "its result is no JSON: b'one'"),
        (f"{RESULT}('')", "its result is no JSON: b''"),
        (f"{RESULT}('NaN')", "the reward is nan"),
        (f"{RESULT}('\"1\"')", "the reward '1' is of type str, not a number"),
        (f"{RESULT}('9' * 2**21)", "its result is larger than 1048576 bytes"),
        ("os.mkdir(os.environ['PSRL_RESULT_FILE'])", "its result cannot be read: IsADirectoryError"),
        ("x = bytearray(2**30)", "MemoryError"),
    ],
)
def test_a_program_that_fails_is_never_rewarded(tmp_path: Path, code: str, said: str) -> None:
    ending = run(program(tmp_path, code, max_memory_gb=0.5))
    assert ending.reward is None and said in ending.failed and "\n" not in ending.failed


def test_garbage_on_the_way_does_not_matter(tmp_path: Path) -> None:
    code = f"sys.stdout.buffer.write(os.urandom(2**20)); {RESULT}('0.25')"
    assert run(program(tmp_path, code)) == Ending(0.25)


def test_a_program_that_is_not_there_fails() -> None:
    ending = run(make_black_box(BlackBoxConfig(command="no-such-program --now"), ENDPOINT))
    assert ending.failed.startswith("black box: exit code 127: cannot start ['no-such-program', '--now']")


def test_a_program_that_hangs_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    code = """
        import subprocess
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for own in (False, True):
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=own)
        print("waiting for the model", flush=True)
        time.sleep(600)
    """
    before = marked()
    ending = run(program(tmp_path, code, timeout_s=16.0))
    assert ending == Ending(failed="black box: killed after 16 s: waiting for the model")
    assert marked() <= before


def test_a_cancelled_program_is_gone_and_its_directory_too(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    code = f"open({str(begun)!r}, 'w').write(os.environ['PSRL_PROMPT_FILE']); time.sleep(600)"

    async def cancel_it() -> None:
        running = asyncio.create_task(program(tmp_path, code).run(SESSION, prompt_of()))
        while not begun.exists() or not begun.read_text():
            await asyncio.sleep(0.02)
        assert marked() > before
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    before = marked()
    asyncio.run(cancel_it())
    assert marked() <= before and not Path(begun.read_text()).parent.exists()


def marked() -> set[int]:
    """Processes that this test's black boxes started; other workers' tests start some, too."""
    found, test = set(), f"PYTEST_CURRENT_TEST={os.environ['PYTEST_CURRENT_TEST']}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                variables = (entry / "environ").read_bytes().split(b"\0")
                if test in variables and any(variable.startswith(f"{MARK}=".encode()) for variable in variables):
                    found.add(int(entry.name))
            except OSError:
                continue
    return found


def test_the_result_is_read_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(black_box, "MAX_RESULT_BYTES", 4)
    (tmp_path / "r").write_text("12345")
    with pytest.raises(black_box.BlackBoxFailedError, match="larger than 4 bytes"):
        black_box.read_result(tmp_path / "r")
    os.truncate(tmp_path / "r", 4)
    assert black_box.read_result(tmp_path / "r") == 1234
