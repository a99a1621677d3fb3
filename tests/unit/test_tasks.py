"""Task selection, the synthetic tasks, files in verl's columns, verifiers."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from psrl.config.errors import ConfigError
from psrl.config.schema import Config
from psrl.tasks.base import Answer, Task, TaskItem
from psrl.tasks.files import FileTask
from psrl.tasks.reasoning_gym import ReasoningGymTask
from psrl.tasks.registry import BUILT_IN, TaskSpec, build_task, task_spec
from psrl.tasks.synthetic import DigitSum, LongtailCount, countdown
from psrl.tasks.verifiers import final_answer, math_match, numeric_match

pytestmark = pytest.mark.unit
ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def answer_of(item: TaskItem, text: str) -> Answer:
    return Answer(
        solution_str=text, data_source=item.data_source, ground_truth=item.ground_truth, extra_info=item.extra_info
    )


def config_with(**data: Any) -> Config:
    config = Config()
    for key, value in data.items():
        setattr(config.data, key, value)
    return config


TASKS: list[tuple[str, TaskSpec]] = [
    ("digit_sum", TaskSpec(kind="built_in", name="digit_sum", seed=3, params={"size": 20})),
    ("longtail_count", TaskSpec(kind="built_in", name="longtail_count", seed=3, params={"size": 20})),
    ("chain_sum", TaskSpec(kind="reasoning_gym", name="chain_sum", seed=3, size=20, params=ONE_DIGIT)),
    ("own", TaskSpec(kind="object", name="psrl.tasks.synthetic:DigitSum", seed=3, params={"size": 20})),
]


@pytest.mark.parametrize(("name", "spec"), TASKS, ids=[name for name, _ in TASKS])
def test_every_task_repeats_its_items_and_rewards_its_own_solutions(name: str, spec: TaskSpec) -> None:
    task, again = build_task(spec), build_task(spec)
    items = list(task.items())
    assert len(items) == 20
    assert items == list(task.items()) == list(again.items())
    assert [i.messages for i in build_task(spec.with_seed(4)).items()] != [i.messages for i in items]
    for item in items:
        assert item.solution is not None
        assert again.score(answer_of(item, item.solution)) == 1.0
        assert again.score(answer_of(item, "I do not know")) == 0.0
    json.dumps([item.ground_truth for item in items])


SELECTIONS: list[tuple[dict[str, Any], str]] = [
    (
        {"task": "digit_sum", "train_files": "x.jsonl"},
        "exactly one of .*data.train_files=x.jsonl and data.task=digit_sum",
    ),
    ({}, "exactly one of .*none of them is set"),
    ({"task": "digit_sun"}, "data.task=digit_sun is unknown: allowed are digit_sum, longtail_count"),
    (
        {"task": "no.such.module:x"},
        "data.task=no.such.module:x: importing no.such.module failed with ModuleNotFoundError",
    ),
    ({"task": "psrl.tasks.synthetic:Nothing"}, "psrl.tasks.synthetic has no such name"),
    ({"task": "psrl.tasks.synthetic:"}, "must read module:name"),
    ({"task": "psrl.tasks.verifiers:VERIFIERS"}, "holds a dict, which cannot be called"),
    ({"task": "builtins:dict"}, "gave a dict: a task has the methods"),
    ({"task": "digit_sum", "task_params": {"digit": 2}}, "data.task_params={'digit': 2}.*unexpected keyword"),
    ({"task": "digit_sum", "task_params": {"digits": 0}}, "digits >= 1"),
    ({"task": "digit_sum", "task_params": {"seed": 2}}, "data.task_params.seed=2 is set by data.seed"),
    ({"task": "longtail_count", "task_params": {"median_length": 400}}, "median_length <= max_length"),
]


@pytest.mark.parametrize(("data", "message"), SELECTIONS)
def test_a_wrong_selection_is_refused_in_one_sentence(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refusal:
        build_task(task_spec(config_with(**data)))
    assert "\n" not in str(refusal.value)


GYM: list[tuple[str, dict[str, Any], str]] = [
    ("chainsum", {}, "data.reasoning_gym.dataset=chainsum is not a reasoning-gym dataset: did you mean chain_sum"),
    ("zzzz", {}, "for example chain_sum"),
    (
        "chain_sum",
        {"max_term": 2},
        "data.reasoning_gym.params.max_term is not a parameter of chain_sum: did you mean max_terms",
    ),
    ("chain_sum", {"seed": 1}, "params.seed is set by data.seed"),
    ("chain_sum", {"size": 1}, "params.size is set by data.reasoning_gym.size"),
    ("chain_sum", {"min_terms": 0}, "reasoning-gym refuses chain_sum.*min_terms must be positive"),
]


@pytest.mark.parametrize(("dataset", "params", "message"), GYM)
def test_reasoning_gym_refuses_in_one_sentence(dataset: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ReasoningGymTask(dataset, 10, 0, params)


def test_reasoning_gym_reads_answer_tags_and_gives_its_partial_credit() -> None:
    task = ReasoningGymTask("chain_sum", 10, 0, {**ONE_DIGIT, "allow_negation": False})
    item = next(iter(task.items()))
    truth = item.ground_truth
    assert task.score(answer_of(item, f"Let me think: 99. <answer> {truth} </answer>")) == 1.0
    assert 0.0 < task.score(answer_of(item, f"It is {truth}")) < 1.0


def test_longtail_lengths_are_long_tailed_and_within_bounds() -> None:
    lengths = [len(str(item.solution)) for item in LongtailCount(seed=0, size=2000).items()]
    assert min(lengths) >= 8 and max(lengths) <= 258
    assert 35 <= statistics.median(lengths) <= 48
    assert statistics.quantiles(lengths, n=20)[-1] > 3 * statistics.median(lengths)


COUNTDOWNS = [("3,2,1", 1.0), (" 3,2,1\n", 1.0), ("3,2", 0.6), ("3,1", 0.4), ("3,2,1,0", 0.8), ("", 0.0), ("7", 0.0)]


@pytest.mark.parametrize(("text", "reward"), COUNTDOWNS)
def test_longtail_rewards_the_right_beginning(text: str, reward: float) -> None:
    assert countdown(3) == "3,2,1"
    answer = Answer(solution_str=text, data_source="longtail_count", ground_truth=3)
    assert LongtailCount().score(answer) == pytest.approx(reward)


def test_built_in_names_give_tasks() -> None:
    assert all(isinstance(factory(), Task) for factory in BUILT_IN.values())
    assert isinstance(DigitSum(), Task)


NUMERIC: list[tuple[str, Any, float]] = [
    ("The answer is 12.", "12", 1.0),
    ("3 apples and 4 pears make 7", 7, 1.0),
    (r"\boxed{1,000.0} or maybe 5", "1000", 1.0),
    (r"first \boxed{3}, finally \boxed{4}", "4", 1.0),
    ("so 5 + 5 = 10\n#### 10", "10", 1.0),
    ("-3", "3", 0.0),
    ("the answer is 12", "13", 0.0),
    ("", "0", 0.0),
    ("no number here", "7", 0.0),
    ("yes", "yes", 1.0),
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", 1.0),
    (r"\boxed{unclosed 7", "7", 1.0),
    ("NaN", "NaN", 1.0),
    ("12 .", "12.0", 1.0),
]


@pytest.mark.parametrize(("text", "truth", "reward"), NUMERIC)
def test_numeric_match(text: str, truth: Any, reward: float) -> None:
    assert numeric_match(text, truth) == reward
    assert math_match(text, truth) == reward


def test_final_answer_prefers_the_box() -> None:
    assert final_answer(r"so \boxed{7} it is 8") == "7"
    assert final_answer("") is None


ROW = {"prompt": [{"role": "user", "content": "1 + 1?"}], "data_source": "gsm8k", "reward_model": {"ground_truth": "2"}}


def write_rows(path: Path, rows: list[Any]) -> Path:
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_files_in_verls_columns(tmp_path: Path, suffix: str) -> None:
    rows = [{**ROW, "extra_info": {"index": i, "split": "train"}} for i in range(3)]
    task = FileTask(write_rows(tmp_path / f"train{suffix}", rows))
    items = list(task.items())
    assert [item.extra_info["index"] for item in items] == [0, 1, 2]
    assert items[0].messages == ROW["prompt"] and items[0].ground_truth == "2" and items[0].solution == "2"
    assert [task.score(answer_of(items[0], text)) for text in ("it is 2", "3")] == [1.0, 0.0]


BAD_FILES: list[tuple[str, Any, str]] = [
    ("missing.jsonl", None, "does not exist"),
    ("train.csv", "a,b", "ends with '.csv': allowed are .parquet and .jsonl"),
    ("broken.jsonl", "{]\n", "line 1 is not JSON"),
    ("list.jsonl", "[1]\n", "line 1 must hold an object"),
    ("noprompt.jsonl", json.dumps({"data_source": "gsm8k"}), "row 0: column 'prompt' .* the row has only data_source"),
    ("number.jsonl", json.dumps({**ROW, "prompt": 7}), "it holds 7"),
    (
        "source.jsonl",
        json.dumps({**ROW, "data_source": "mine"}),
        "data_source 'mine' has no built-in verifier: set reward.function",
    ),
    ("broken.parquet", "no parquet", "is not a readable parquet file"),
]


@pytest.mark.parametrize(("name", "content", "message"), BAD_FILES, ids=[name for name, _, _ in BAD_FILES])
def test_a_bad_file_is_refused_in_one_sentence(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        list(FileTask(tmp_path / name).items())


def test_a_reward_function_lifts_the_need_for_a_known_source(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "t.jsonl", [{**ROW, "data_source": "mine", "prompt": "plain text"}])
    config = config_with(train_files=str(path))
    config.reward.function = "my.rewards:score"
    items = list(build_task(task_spec(config)).items())
    assert items[0].messages == [{"role": "user", "content": "plain text"}]
