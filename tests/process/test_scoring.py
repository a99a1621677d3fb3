"""Scoring processes under reward functions that hang, raise, die, print, eat memory or return nonsense."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from psrl.config.errors import ConfigError
from psrl.config.schema import Config
from psrl.rollout.scoring import RewardTypeError, ScoreResult, ScoringPool, check_scoring
from psrl.tasks.base import Answer

pytestmark = pytest.mark.process
T = TypeVar("T")

REWARDS = '''
import os, pathlib, subprocess, sys, time
import numpy

def value(data_source, solution_str, ground_truth, extra_info):
    """The solution says what to do."""
    return {
        "one": 1, "half": 0.5, "yes": True, "numpy": numpy.float32(0.25),
        "none": None, "nan": float("nan"), "inf": float("inf"), "text": "1",
        "list": [1.0], "dict": {"score": 0.75, "length": 3, "note": "x"}, "dict_none": {"score": None},
    }[solution_str]

def act(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "raise":
        raise ValueError("no\\nreward")
    if solution_str == "hang_once":
        mark = pathlib.Path(extra_info["mark"])
        if not mark.exists():
            mark.touch()
            subprocess.Popen(["sleep", "987.125"])
            time.sleep(3600)
    if solution_str == "hang":
        time.sleep(3600)
    if solution_str == "exit":
        sys.exit(3)
    if solution_str == "die":
        os._exit(7)
    if solution_str == "killed":
        os.kill(os.getpid(), 9)
    if solution_str == "eat":
        return len(bytearray(3 << 30))
    if solution_str == "print":
        print("hello from user code " * 100)
        os.write(1, b"\\x00\\x00\\x00\\x00raw bytes on descriptor 1")
        subprocess.run(["echo", "a child's words"], check=True)
        return float(sys.stdin.read() == "")
    if solution_str == "limits":
        return int(pathlib.Path("/proc/self/oom_score_adj").read_text())
    return float(solution_str == ground_truth)

def keywords(*, data_source, solution_str, ground_truth, extra_info):
    given = [data_source, solution_str, ground_truth, extra_info]
    return float(given == ["src", "answer", {"a": [1]}, {"split": "train"}])

NOT_CALLABLE = 3
'''


@pytest.fixture(autouse=True)
def reward_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    (tmp_path / "broken_rewards.py").write_text("raise RuntimeError('at import')")
    (tmp_path / "leaving_rewards.py").write_text("import sys; sys.exit(1)")
    here = str(Path(__file__).resolve().parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), here]))


def configuration(function: str | None = "my_rewards:act", timeout_s: float = 60.0, num_workers: int = 1) -> Config:
    config = Config()
    config.data.task = "digit_sum"
    config.reward.function, config.reward.timeout_s, config.reward.num_workers = function, timeout_s, num_workers
    config.reward.max_memory_gb = 2.0
    return config


def answers(*texts: str, truth: Any = "7", **extra_info: Any) -> list[Answer]:
    return [Answer(solution_str=text, data_source="src", ground_truth=truth, extra_info=extra_info) for text in texts]


def with_pool(config: Config, use: Callable[[ScoringPool], Awaitable[T]]) -> T:
    async def run() -> T:
        async with ScoringPool.from_config(config) as pool:
            return await use(pool)

    return asyncio.run(run())


def score(config: Config, *groups: list[Answer]) -> tuple[list[list[ScoreResult]], dict[str, int]]:
    async def use(pool: ScoringPool) -> tuple[list[list[ScoreResult]], dict[str, int]]:
        return [await pool.score(group) for group in groups], dict(pool.counters)

    return with_pool(config, use)


VALUES: list[tuple[str, float | None, str]] = [
    ("one", 1.0, "ok"),
    ("half", 0.5, "ok"),
    ("yes", 1.0, "ok"),
    ("numpy", 0.25, "ok"),
    ("none", None, "invalid"),
    ("nan", None, "invalid"),
    ("inf", None, "invalid"),
    ("dict", 0.75, "ok"),
    ("dict_none", None, "invalid"),
]


def test_what_a_returned_value_means() -> None:
    """None, NaN and infinity are counted and have no reward; they never become 0."""
    [results], counters = score(configuration("my_rewards:value"), answers(*(text for text, _, _ in VALUES)))
    assert [(r.reward, r.kind) for r in results] == [(reward, kind) for _, reward, kind in VALUES]
    assert results[7].metrics == {"length": 3.0}
    assert counters == {"ok": 5, "invalid": 4}
    assert all("reward.function=my_rewards:value returned" in (r.error or "") for r in results if r.kind == "invalid")


@pytest.mark.parametrize(("text", "shown"), [("text", "'1' of type str"), ("list", r"\[1.0\] of type list")])
def test_a_reward_that_is_no_number_stops_and_names_the_function(text: str, shown: str) -> None:
    with pytest.raises(RewardTypeError, match=f"reward.function=my_rewards:value returned {shown}"):
        score(configuration("my_rewards:value"), answers("one", text, "one"))


def test_the_function_is_called_with_verls_keywords() -> None:
    group = [Answer(solution_str="answer", data_source="src", ground_truth={"a": [1]}, extra_info={"split": "train"})]
    [results], _ = score(configuration("my_rewards:keywords"), group)
    assert results[0].reward == 1.0


def test_a_sample_that_always_raises_does_not_touch_its_group() -> None:
    """Prompt p2 raises always: an error each time it is tried, with its text, and the others have their rewards."""
    group = answers("7", "raise", "3", "exit")
    rounds, counters = score(configuration(), group, group)
    for results in rounds:
        assert [(r.reward, r.kind) for r in results] == [(1.0, "ok"), (None, "error"), (0.0, "ok"), (None, "error")]
        assert results[1].error == "reward.function=my_rewards:act raised ValueError: no reward"
    assert counters == {"ok": 4, "error": 4}


def test_a_sample_that_hangs_once_times_out_and_succeeds_later(tmp_path: Path) -> None:
    """Prompt p3 hangs once: a timeout, its process (and what that started) is ended, the rest is scored."""
    group = [*answers("7"), *answers("hang_once", mark=str(tmp_path / "mark")), *answers("7")]
    (first, second), counters = score(configuration(timeout_s=5.0), group, group)
    assert [r.kind for r in first] == ["ok", "timeout", "ok"]
    assert first[1].reward is None and first[1].error == "no score within reward.timeout_s=5"
    assert [(r.reward, r.kind) for r in second] == [(1.0, "ok"), (0.0, "ok"), (1.0, "ok")]
    assert counters == {"ok": 5, "timeout": 1, "replaced": 1}
    assert "987.125" not in all_command_lines()


@pytest.mark.parametrize(("deed", "cause"), [("die", "exit code 7"), ("killed", "signal SIGKILL")])
def test_a_process_that_dies_costs_one_sample(deed: str, cause: str) -> None:
    [results], counters = score(configuration(), answers("7", deed, "7"))
    assert [(r.reward, r.kind) for r in results] == [(1.0, "ok"), (None, "error"), (1.0, "ok")]
    assert results[1].error == f"the scoring process ended by {cause}"
    assert counters == {"ok": 2, "error": 1, "replaced": 1}


def test_memory_is_limited_to_the_process_that_wants_it() -> None:
    [results], counters = score(configuration(), answers("eat", "7"))
    assert [r.kind for r in results] == ["error", "ok"] and "MemoryError" in (results[0].error or "")
    assert "replaced" not in counters


def test_what_user_code_prints_does_not_reach_the_channel() -> None:
    [results], _ = score(configuration(), answers("print", "7", "print"))
    assert [r.reward for r in results] == [1.0, 1.0, 1.0]


def test_the_kernel_prefers_to_end_a_scoring_process() -> None:
    [results], _ = score(configuration(), answers("limits"))
    assert results[0].reward == 800.0


def test_many_groups_share_a_few_processes() -> None:
    async def use(pool: ScoringPool) -> list[list[ScoreResult]]:
        return await asyncio.gather(*(pool.score(answers(*["7", "3", "raise"] * 5)) for _ in range(40)))

    groups = with_pool(configuration(num_workers=2), use)
    assert all([r.reward for r in group] == [1.0, 0.0, None] * 5 for group in groups)


def test_a_cancelled_score_leaves_the_pool_in_step() -> None:
    async def use(pool: ScoringPool) -> list[ScoreResult]:
        waiting = asyncio.create_task(pool.score(answers(*["3"] * 500)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return await pool.score(answers("7", "3"))

    assert [r.reward for r in with_pool(configuration(), use)] == [1.0, 0.0]


def test_close_ends_a_score_in_progress() -> None:
    async def run() -> None:
        pool = ScoringPool.from_config(configuration())
        await pool.start()
        waiting = asyncio.create_task(pool.score(answers("hang")))
        await asyncio.sleep(0.1)
        await pool.close()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(run())
    assert f"score_worker\0{os.getpid()}\0" not in all_command_lines()


REFUSED: list[tuple[str, str]] = [
    ("my_rewards:missing", "reward.function=my_rewards:missing: my_rewards has no such name"),
    ("my_rewards", "reward.function=my_rewards must read module:name"),
    ("my_rewards:NOT_CALLABLE", "holds a int, which cannot be called"),
    ("no_such_module:f", "importing no_such_module failed with ModuleNotFoundError"),
    ("broken_rewards:f", "importing broken_rewards failed with RuntimeError: at import"),
    ("leaving_rewards:f", "reward.function=leaving_rewards:f cannot be set up: SystemExit"),
]


@pytest.mark.parametrize(("function", "message"), REFUSED)
def test_a_function_that_cannot_be_built_is_refused_at_start(function: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_scoring(configuration(function))
    assert "my_rewards" not in sys.modules


def test_the_tasks_own_verifier_scores_without_a_function() -> None:
    config = configuration(None)
    config.data.task, config.data.reasoning_gym.dataset = None, "chain_sum"
    config.data.reasoning_gym.params = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    from psrl.tasks.registry import build_task, task_spec

    item = next(iter(build_task(task_spec(config)).items()))
    group = [
        Answer(
            solution_str=text, data_source=item.data_source, ground_truth=item.ground_truth, extra_info=item.extra_info
        )
        for text in (str(item.solution), "nonsense")
    ]
    [results], _ = score(config, group)
    assert [r.reward for r in results] == [1.0, 0.0]


def test_scoring_processes_die_with_their_parent(tmp_path: Path) -> None:
    code = (
        "import asyncio, os, time\n"
        "from psrl.config.schema import Config\n"
        "from psrl.rollout.scoring import ScoringPool\n"
        "async def main():\n"
        "    config = Config(); config.data.task = 'digit_sum'\n"
        "    pool = ScoringPool.from_config(config)\n"
        "    await pool.start()\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "ready\n"
        assert f"score_worker\0{parent.pid}\0" in all_command_lines()
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30.0
    while f"score_worker\0{parent.pid}\0" in all_command_lines() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert f"score_worker\0{parent.pid}\0" not in all_command_lines()


def all_command_lines() -> str:
    """Arguments of every living process, separated by NUL."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_text(errors="replace"))
        except OSError:  # it ended meanwhile
            continue
    return "\n".join(lines)
