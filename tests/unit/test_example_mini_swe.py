"""The SWE-style example without a model: each kind of bug is one, its mending counts, nothing else does."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from agent_sessions import ScriptedSession, Turn, tool_call

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "mini_swe"
sys.path.append(str(EXAMPLE))

from mini_swe.environment import SweEnvironment  # noqa: E402
from mini_swe.kinds import KINDS  # noqa: E402
from mini_swe.outcomes import outcomes  # noqa: E402
from mini_swe.repository import make_repository  # noqa: E402
from mini_swe.task import MiniSwe  # noqa: E402

from psrl.agents.base import Ending  # noqa: E402
from psrl.agents.multi_turn import ToolAgent, TurnLimits  # noqa: E402
from psrl.config.errors import ConfigError  # noqa: E402
from psrl.tasks.base import PreparedPrompt  # noqa: E402
from psrl.tasks.registry import TaskSpec, build_task  # noqa: E402

pytestmark = pytest.mark.unit

every_kind = pytest.mark.parametrize("kind", KINDS)


def shell(command: str) -> dict[str, Any]:
    return tool_call("shell", json.dumps({"command": command}))


def play(kind: str, commands: list[str], **settings: Any) -> tuple[Ending, list[str]]:
    """How a trajectory of these commands ends, and what they were answered."""
    turns: list[Turn] = [*map(shell, commands), "It is mended."]
    session = ScriptedSession(turns)
    prompt = PreparedPrompt(
        index=0,
        prompt_ids=b"",
        data_source="",
        messages=[{"role": "user", "content": "Mend it."}],
        extra_info={"kind": kind, "seed": 5},
    )
    settings = {"timeout_s": 60.0} | settings
    ending = asyncio.run(
        ToolAgent(lambda: SweEnvironment(**settings), TurnLimits(step_timeout_s=200)).run(session, prompt)
    )
    assert not session.turns
    return ending, [m["content"] for m in session.asked[-1].messages if m["role"] == "tool"]


def mending(kind: str) -> str:
    """The command that mends the bug, written as an agent would: a program that replaces the passage."""
    repository = make_repository(kind, 5)
    return f"cat > {repository.module} <<'END'\n{repository.mended}END"


@every_kind
def test_the_bug_fails_and_the_mending_passes(kind: str) -> None:
    untouched, [said] = play(kind, ["python -m unittest 2>&1 | tail -1"])
    assert (untouched.reward, untouched.failed, said) == (0.0, "", "OK\n[exit code 0]")
    mended, [_, said] = play(kind, [mending(kind), "python -m unittest 2>&1 | tail -1"])
    assert (mended.reward, mended.failed, said) == (1.0, "", "OK\n[exit code 0]")


@every_kind
def test_a_repository_is_the_same_for_the_same_seed_and_the_issue_tells_names(kind: str) -> None:
    assert make_repository(kind, 1) == make_repository(kind, 1)
    made = [make_repository(kind, seed) for seed in range(30)]
    assert len({r.issue for r in made}) > 1
    for repository in made:
        texts = [repository.issue, repository.mended, *repository.files.values(), *repository.hidden]
        assert not any("NAME" in text or "LIMIT" in text for text in texts)
        assert repository.files[repository.module] != repository.mended
        assert repository.mended not in repository.files.values()


def test_what_is_right_is_right() -> None:
    """Values worked out by hand: what `outcomes` finds in the mended modules is not just what they do."""
    wanted = {
        "off_by_one": ["[3, 5, 7]", "[5]", "[]", "[4]"],
        "shared_default": ["[1]", "[2]", "[1, 3]", "([4], [5])"],
        "whole_division": ["1.5", "0.0", "2.0", "-0.5"],
        "boundary": ["0", "4", "0", "4"],
        "letter_case": ["'two-words'", "'plain'", "'a-b'", "''"],
        "sort_order": ["['bo', 'ann']", "['bo', 'cy', 'di']", "[]"],
        "early_return": ["False", "True", "False", "False", "True"],
        "wrong_start": ["6", "1", "0", "-4"],
        "leap_year": ["True", "False", "True", "False", "True"],
        "swapped_arguments": ["25.0", "150.0", "0.0", "0.0"],
        "missing_check": ["raises ValueError"] * 2 + ["65535", "1"] + ["raises ValueError"] * 2,
        "missing_type": ["[1, 2, 3]", "[1, 2]", "[]", "['ab']"],
        "padding": ["'2:05'", "'0:59'", "'0:00'", "'10:00'"],
    }
    for kind, values in wanted.items():
        repository = make_repository(kind, 0)
        assert outcomes(repository.mended, repository.hidden) == values, kind
    assert KINDS.keys() - wanted.keys() == {"shared_defaults"}  # drawn numbers are in its values
    repository = make_repository("shared_defaults", 0)
    assert outcomes(repository.mended, repository.hidden)[1] == outcomes(repository.mended, repository.hidden[1:2])[0]


@pytest.mark.parametrize(
    "command",
    [
        "rm *.py",
        "echo 'raise SystemExit(0)' > MODULE",
        "echo 'print(\"[]\"); import os; os._exit(0)' > MODULE",
        "rm MODULE && mkfifo MODULE",
        "rm MODULE && ln -s /dev/zero MODULE",
        "head -c 1000000 /dev/zero > MODULE",
        "echo 'while True: pass' > MODULE",
        "python -c 'import sys; sys.setrecursionlimit(10)' && rm -rf . ; mkdir MODULE; chmod 000 MODULE",
    ],
)
def test_tricks_earn_nothing_and_hold_nobody_up(command: str) -> None:
    module = make_repository("padding", 5).module
    ending, _ = play("padding", [command.replace("MODULE", module)], timeout_s=2.0)
    assert (ending.reward, ending.failed) == (0.0, "")


def test_a_command_that_hangs_is_told_and_its_output_cut() -> None:
    _, [hung, long] = play("padding", ["echo begun; sleep 600", "yes | head -c 9000"], timeout_s=10, max_output=100)
    assert hung == "begun\n[killed after 10 s]" and len(long) < 130


def test_items_are_drawn_by_seed_and_say_the_issue() -> None:
    task = build_task(TaskSpec(kind="object", name="mini_swe.task:MiniSwe", seed=3, params={"size": 200}))
    items = list(task.items())
    assert items == list(MiniSwe(seed=3, size=200).items())
    assert {item.extra_info["kind"] for item in items} == KINDS.keys()
    for item in items[:20]:
        repository = make_repository(**item.extra_info)
        assert repository.issue in item.messages[1]["content"] and repository.module in item.messages[1]["content"]
    only = MiniSwe(seed=3, size=9, kinds=["padding"])
    assert {item.extra_info["kind"] for item in only.items()} == {"padding"}


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(ConfigError, match="kinds typo are unknown: allowed are off_by_one"):
        build_task(TaskSpec(kind="object", name="mini_swe.task:MiniSwe", params={"kinds": ["typo"]}))


def test_outcomes_as_a_program_prints_them_last() -> None:
    program = EXAMPLE / "mini_swe" / "outcomes.py"
    calls = json.dumps(["half(3)", "half('a')"])
    code = "print('noise')\ndef half(x): return x / 2"
    done = subprocess.run(
        [sys.executable, program, calls, "/dev/stdin"], input=code, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout.splitlines()[-1]) == ["1.5", "raises TypeError"]
