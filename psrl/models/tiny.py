"""A Qwen3- or Qwen3-MoE-shaped model small enough to train on a laptop, saved as an ordinary Hugging Face directory."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from psrl.config.errors import ConfigError
from psrl.config.model_checks import EXPERTS_PER_TOKEN
from psrl.config.schema import TinyModelConfig
from psrl.models.tiny_tokenizer import END_ID, PAD_ID, make_tokenizer, save_tokenizer
from psrl.models.tokenizer import ChatTokenizer, load_tokenizer
from psrl.models.warm_start import Example, WarmStartReport, warm_start
from psrl.tasks.base import Task, TaskItem

log = logging.getLogger(__name__)
VOCAB_TEXTS = 512
"""Items whose texts decide the tokenizer's merges."""
WARM_START_ITEMS = 2048


def build_tiny(
    config: TinyModelConfig,
    task: Task,
    practice: Task,
    directory: Path,
    context: int,
    *,
    before_training: Callable[[Path], None] = lambda directory: None,
) -> WarmStartReport | None:
    """Make the tiny model for `task` in `directory` (which exists and is empty).

    The tokenizer's merges come from the texts of `task`, the supervised warm start from the solved items of `practice`
    (the same task under another seed). The same arguments give the same files. Returns None where no warm start was
    made: `warm_start_steps` is 0, or the task knows no solutions. The shape is one that `check_tiny_shape` lets pass.
    `before_training` sees the directory with all but the weights, and may raise.
    """
    save_tokenizer(make_tokenizer(_texts(islice(task.items(), VOCAB_TEXTS))), directory, context)
    tokenizer = load_tokenizer(directory)
    model = random_tiny(config, tokenizer.vocab_size, context)
    model.config.save_pretrained(directory)
    before_training(directory)
    solved = [solved_example(item, tokenizer) for item in islice(practice.items(), WARM_START_ITEMS)]
    examples = [example for example in solved if example is not None]
    examples = [e for e in examples if len(e.prompt_ids) + len(e.answer_ids) <= context]
    report = None
    if config.warm_start_steps > 0 and examples:
        report = warm_start(model, examples, config)
    elif config.warm_start_steps > 0:
        log.warning("tiny model: the task has no known solutions, so there is no warm start and the weights are random")
    model.save_pretrained(directory)
    if report is not None:
        (directory / "warm_start.json").write_text(json.dumps(report.as_dict(), indent=2), encoding="utf-8")
    return report


def _texts(items: Iterable[TaskItem]) -> Iterable[str]:
    for item in items:
        yield from (str(message["content"]) for message in item.messages)
        yield from (str(message["content"]) for message in item.dialogue)
        if item.solution is not None:
            yield item.solution


def solved_example(item: TaskItem, tokenizer: ChatTokenizer) -> Example | None:
    """The item and its solution in tokens, or its dialogue: what the assistant says in it is learned, the rest is given."""
    prompt = tokenizer.encode_chat(item.messages)
    if item.solution is not None:
        return Example(prompt, [*tokenizer.encode(item.solution), END_ID])
    if not item.dialogue:
        return None
    ids, written = list(prompt), []
    for number, message in enumerate(item.dialogue):
        if message["role"] != "assistant":
            continue
        before = tokenizer.encode_chat([*item.messages, *item.dialogue[:number]])
        if before[: len(ids)] != ids:
            raise ConfigError(
                f"The chat template rewrites earlier turns: the dialogue {item.dialogue} cannot be learned."
            )
        said = [*tokenizer.encode(str(message["content"])), END_ID]
        written += [False] * (len(before) - len(ids)) + [True] * len(said)
        ids = [*before, *said]
    return Example(prompt, ids[len(prompt) :], written)


def random_tiny(config: TinyModelConfig, vocab_size: int, context: int) -> PreTrainedModel:
    """The network before any training, in float32."""
    shape: dict[str, Any] = {
        "vocab_size": -(-vocab_size // 64) * 64,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.hidden_size // config.num_heads,
        "max_position_embeddings": max(config.max_position_embeddings, context),
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": END_ID,
        "pad_token_id": PAD_ID,
        "initializer_range": 0.7 * config.hidden_size**-0.5,
    }
    experts: dict[str, Any] = {
        "num_experts": config.num_experts,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "moe_intermediate_size": config.intermediate_size,
        "norm_topk_prob": True,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        if config.num_experts:
            model: PreTrainedModel = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts)).float()
        else:
            model = Qwen3ForCausalLM(Qwen3Config(**shape)).float()
    model.generation_config = GenerationConfig(eos_token_id=END_ID, pad_token_id=PAD_ID, do_sample=True)
    return model
