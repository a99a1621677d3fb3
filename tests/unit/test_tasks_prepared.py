"""The run's prompt file: lengths are checked once, damage is noticed, a restart keeps what is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psrl.config.errors import ConfigError
from psrl.config.schema import Config
from psrl.rundir.retry import UnreadableError
from psrl.tasks.base import Answer, PreparedPrompt, TaskItem, user_message
from psrl.tasks.prepare import prepare
from psrl.tasks.prepared import PreparedReader, PreparedStats, write_prepared

pytestmark = pytest.mark.unit


class Unary:
    """A tokenizer of one token a character, so that lengths are what they look like."""

    eos_token_id, pad_token_id, vocab_size = 2, 0, 256

    def encode_chat(self, messages: Any) -> list[int]:
        return self.encode(messages[0]["content"])

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: Any) -> str:
        return "".join(map(chr, ids))

    def decode_batch(self, sequences: Any, skip_special_tokens: bool = True) -> list[str]:
        return [self.decode(ids) for ids in sequences]


class Lengths:
    """A task whose prompts have given lengths."""

    def __init__(self, *lengths: int, ground_truth: Any = "x"):
        self.lengths, self.ground_truth = lengths, ground_truth

    def items(self) -> list[TaskItem]:
        return [
            TaskItem(
                messages=user_message("a" * n),
                data_source="t",
                ground_truth=self.ground_truth,
                extra_info={"length": n},
            )
            for n in self.lengths
        ]

    def score(self, answer: Answer) -> float:
        return 0.0


def config_with(max_prompt_length: int = 64, context: int | None = 32, truncation: str = "skip") -> Config:
    config = Config()
    config.data.max_prompt_length, config.data.truncation = max_prompt_length, truncation
    config.gen_actor_rollout_ref.rollout.max_model_len = context
    return config


def test_a_prompt_that_fills_the_context_is_skipped_and_one_token_less_is_kept(tmp_path: Path) -> None:
    stats = prepare(config_with(context=32), Lengths(31, 32, 33), Unary(), tmp_path / "prompts.bin")
    reader = PreparedReader(tmp_path / "prompts.bin")
    assert [len(p.prompt_ids) // 4 for p in reader] == [31]
    assert (stats.items, stats.kept, stats.skipped, stats.skipped_no_room, stats.longest) == (3, 1, 2, 2, 31)
    assert reader.stats == stats


SKIPPED: list[tuple[dict[str, Any], list[int], list[int]]] = [
    ({"max_prompt_length": 4, "context": 32}, [3, 4, 5, 32, 40], [3, 4]),
    ({"max_prompt_length": 4, "context": None}, [4, 5], [4]),
    ({"max_prompt_length": 100, "context": 2}, [1, 2], [1]),
]


@pytest.mark.parametrize(("limits", "lengths", "kept"), SKIPPED)
def test_long_prompts_are_left_out_and_indices_stay_dense(
    tmp_path: Path, limits: dict[str, Any], lengths: list[int], kept: list[int]
) -> None:
    prepare(config_with(**limits), Lengths(*lengths), Unary(), tmp_path / "prompts.bin")
    prompts = list(PreparedReader(tmp_path / "prompts.bin"))
    assert [p.extra_info["length"] for p in prompts] == kept
    assert [p.index for p in prompts] == list(range(len(kept)))


REFUSED: list[tuple[dict[str, Any], Lengths, str]] = [
    (
        {"truncation": "error"},
        Lengths(3, 33),
        "prompt of item 1 has 33 tokens but the context of 32 tokens has no room",
    ),
    ({"truncation": "error", "max_prompt_length": 4}, Lengths(5), "item 0 has 5 tokens but data.max_prompt_length=4"),
    ({}, Lengths(40, 50), "no usable prompt: 2 items, 0 longer than data.max_prompt_length=64, 2 leave no room"),
    ({}, Lengths(), "no usable prompt: 0 items"),
    ({}, Lengths(0), "Item 0 of the data has an empty prompt"),
    (
        {},
        Lengths(3, ground_truth=object()),
        "Item 0 of the data holds a ground_truth or extra_info that cannot be stored",
    ),
]


@pytest.mark.parametrize(("limits", "task", "message"), REFUSED)
def test_unusable_data_is_refused_and_leaves_no_file(
    tmp_path: Path, limits: dict[str, Any], task: Lengths, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(config_with(**limits), task, Unary(), tmp_path / "prompts.bin")
    assert list(tmp_path.iterdir()) == []


def test_a_restart_keeps_the_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.bin"
    first = prepare(config_with(), Lengths(1, 2), Unary(), path)
    before = path.read_bytes()
    assert prepare(config_with(), Lengths(7), Unary(), path) == first
    assert path.read_bytes() == before


def some_prompts(count: int) -> list[PreparedPrompt]:
    return [
        PreparedPrompt(
            index=i,
            prompt_ids=np.arange(i + 1, dtype="<i4").tobytes(),
            data_source="s",
            ground_truth={"answer": [i, None, 1.5]},
            extra_info={"ünï": "✓"},
        )
        for i in range(count)
    ]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    prompts, path = some_prompts(50), tmp_path / "p.bin"
    write_prepared(path, prompts, PreparedStats(kept=50))
    reader = PreparedReader(path)
    assert list(reader) == prompts and len(reader) == 50 and reader[49] == prompts[49]
    for index in (-1, 50):
        with pytest.raises(IndexError, match=f"prompt {index} of 50"):
            reader[index]


def test_every_damaged_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "p.bin"
    write_prepared(path, some_prompts(3), PreparedStats(kept=3))
    whole = path.read_bytes()
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises((UnreadableError, ValueError)):
            list(PreparedReader(path, deadline_s=0.0))
    for length in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(UnreadableError):
            PreparedReader(path, deadline_s=0.0)
    with pytest.raises(UnreadableError, match="does not exist"):
        PreparedReader(tmp_path / "none", deadline_s=0.0)


def test_reading_prompts_and_tokenizers_imports_no_torch() -> None:
    """Coordinator, agent loops and scoring processes start in tenths of a second only without it."""
    modules = (
        "psrl.tasks.prepared, psrl.tasks.prepare, psrl.tasks.registry, psrl.models.tokenizer, psrl.models.resolve, "
        "psrl.rollout.scoring"
    )
    heavy = ("torch", "transformers", "reasoning_gym", "pyarrow")
    code = f"import sys, {modules}; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.strip() == "[]"
