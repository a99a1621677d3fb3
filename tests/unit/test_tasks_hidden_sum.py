"""The task that needs turns: its items, its verifier, and what the tiny model learns from."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from agent_sessions import ScriptedSession

from psrl.agents.environments.hidden_sum import HiddenSumEnvironment
from psrl.agents.multi_turn import ToolAgent, TurnLimits
from psrl.config.schema import Config, TinyModelConfig
from psrl.models.tiny import build_tiny, solved_example
from psrl.models.tokenizer import load_tokenizer
from psrl.tasks.base import Answer, PreparedPrompt, TaskItem
from psrl.tasks.hidden_sum import HiddenSum
from psrl.tasks.prepare import prepare
from psrl.tasks.prepared import PreparedReader
from psrl.tasks.registry import TaskSpec, build_task

pytestmark = pytest.mark.unit


def test_the_prompt_does_not_tell_the_numbers_and_the_seed_decides_them() -> None:
    items = list(HiddenSum(seed=1, size=50).items())
    assert items == list(HiddenSum(seed=1, size=50).items()) != list(HiddenSum(seed=2, size=50).items())
    for item in items:
        [message] = item.messages
        values = item.extra_info["values"]
        assert message["content"] == f"sum {' '.join(values)}" and str(sum(values.values())) == item.ground_truth


@pytest.mark.parametrize(
    ("text", "score"),
    [("= 9", 1.0), ("=9", 1.0), (" = 9 \n", 1.0), ("= 8", 0.0), ("9", 0.0), ("a", 0.0), ("", 0.0), ("= 9 or 8", 0.0)],
)
def test_only_the_right_answer_scores(text: str, score: float) -> None:
    answer = Answer(solution_str=text, data_source="hidden_sum", ground_truth="9")
    assert HiddenSum().score(answer) == score


@pytest.mark.parametrize("params", [{"terms": 0}, {"terms": 9}, {"size": 0}, {"largest": 0}])
def test_impossible_parameters_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is refused"):
        build_task(TaskSpec(kind="built_in", name="hidden_sum", params=params))


def test_its_dialogue_is_what_the_environment_and_a_perfect_model_say() -> None:
    task = HiddenSum(seed=3, size=20)
    for item in task.items():
        said = [m["content"] for m in item.dialogue if m["role"] == "assistant"]
        session = ScriptedSession(said)
        prompt = PreparedPrompt(
            index=0, prompt_ids=b"", data_source="", messages=item.messages, extra_info=item.extra_info
        )
        ending = asyncio.run(ToolAgent(HiddenSumEnvironment, TurnLimits()).run(session, prompt))
        assert not ending.failed and not session.turns
        assert session.asked[-1].messages == [*item.messages, *item.dialogue[:-1]]
        answer = Answer(solution_str=said[-1], data_source="", ground_truth=item.ground_truth)
        assert task.score(answer) == 1.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    config = TinyModelConfig(hidden_size=32, num_layers=1, num_heads=2, intermediate_size=64, warm_start_steps=2)
    report = build_tiny(config, HiddenSum(seed=1, size=64), HiddenSum(seed=2, size=64), directory, 128)
    assert report is not None and report.steps == 2
    return directory


def test_of_a_dialogue_the_model_learns_what_it_writes_itself(model: Path) -> None:
    tokenizer = load_tokenizer(model)
    item = next(iter(HiddenSum(seed=4).items()))
    example = solved_example(item, tokenizer)
    assert example is not None and example.written is not None
    assert example.prompt_ids == tokenizer.encode_chat(item.messages)
    whole = [*example.prompt_ids, *example.answer_ids]
    assert [*whole, *tokenizer.encode("<|assistant|>")] == tokenizer.encode_chat([*item.messages, *item.dialogue])
    written = [i for i, mine in zip(example.answer_ids, example.written, strict=True) if mine]
    said = [m["content"] for m in item.dialogue if m["role"] == "assistant"]
    assert tokenizer.decode(written) == "".join(said) and written.count(tokenizer.eos_token_id) == len(said)


def test_a_single_answer_is_learned_whole(model: Path) -> None:
    tokenizer = load_tokenizer(model)
    item = TaskItem(messages=[{"role": "user", "content": "4 ="}], data_source="", solution="4")
    example = solved_example(item, tokenizer)
    assert example is not None and example.written is None
    assert tokenizer.decode(example.answer_ids) == "4" and example.answer_ids[-1] == tokenizer.eos_token_id
    assert solved_example(TaskItem(messages=item.messages, data_source=""), tokenizer) is None


@pytest.mark.parametrize(("loop", "kept"), [("single_turn_agent", False), ("tool_agent", True)])
def test_prompts_carry_their_messages_for_agents_only(model: Path, tmp_path: Path, loop: str, kept: bool) -> None:
    config = Config()
    config.gen_actor_rollout_ref.rollout.agent.default_agent_loop = loop
    task = HiddenSum(size=3)
    prepare(config, task, load_tokenizer(model), tmp_path / "prompts.bin")
    found = [prompt.messages for prompt in PreparedReader(tmp_path / "prompts.bin")]
    assert found == [item.messages if kept else [] for item in task.items()]
