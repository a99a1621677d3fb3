"""From a task's items to the run's prompt file: render, tokenise, check lengths once, before anything generates."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

from psrl.config.agents import plays_turns
from psrl.config.errors import ConfigError
from psrl.config.schema import Config
from psrl.models.tokenizer import ChatTokenizer
from psrl.tasks.base import PreparedPrompt, Task
from psrl.tasks.prepared import PreparedReader, PreparedStats, PreparedWriter

log = logging.getLogger(__name__)


def context_length(config: Config) -> int:
    """Tokens that prompt and response may have together."""
    return (
        config.gen_actor_rollout_ref.rollout.max_model_len
        or config.data.max_prompt_length + config.data.max_response_length
    )


def prepare(config: Config, task: Task, tokenizer: ChatTokenizer, path: Path) -> PreparedStats:
    """Write the prompts of `task` to `path` (immutable: one that is there already, from before a restart, is kept).

    A prompt longer than data.max_prompt_length, or one that leaves no room in the context, is skipped and counted; with
    data.truncation=error it is refused. Raises ConfigError for that, for an item that cannot be rendered or stored, and
    if no prompt is left.
    """
    if path.exists():
        return PreparedReader(path).stats
    stats = PreparedStats()
    with_messages = plays_turns(config.gen_actor_rollout_ref.rollout.agent)
    with PreparedWriter(path) as writer:
        tokens = 0
        for item in task.items():
            ids = tokenizer.encode_chat(item.messages)
            stats.items += 1
            if not _fits(len(ids), stats.items - 1, config, stats):
                continue
            prompt = PreparedPrompt(
                index=len(writer),
                prompt_ids=_int32(ids),
                data_source=item.data_source,
                ground_truth=item.ground_truth,
                extra_info=item.extra_info,
                messages=(item.agent_messages or item.messages) if with_messages else [],
            )
            try:
                writer.add(prompt)
            except (TypeError, ValueError, OverflowError) as error:
                raise ConfigError(
                    f"Item {stats.items - 1} of the data holds a ground_truth or extra_info that cannot be stored "
                    f"({error}): use JSON-like values."
                ) from error
            tokens += len(ids)
            stats.longest = max(stats.longest, len(ids))
        stats.kept = len(writer)
        stats.mean_length = tokens / max(1, stats.kept)
        if stats.kept == 0:
            raise ConfigError(
                f"The data holds no usable prompt: {stats.items} items, {stats.skipped_too_long} longer than "
                f"data.max_prompt_length={config.data.max_prompt_length}, {stats.skipped_no_room} leave no room in the "
                f"context of {context_length(config)}."
            )
        writer.finish(stats)
    log.info(
        "data: %d prompts, mean %.0f and longest %d tokens, %d too long",
        stats.kept,
        stats.mean_length,
        stats.longest,
        stats.skipped,
    )
    return stats


def _fits(length: int, item: int, config: Config, stats: PreparedStats) -> bool:
    """Whether the prompt is used; counts or refuses it if not. A prompt of context - 1 tokens leaves room for one."""
    context = context_length(config)
    if length == 0:
        raise ConfigError(f"Item {item} of the data has an empty prompt: remove it.")
    if length < context and length <= config.data.max_prompt_length:
        return True
    no_room = length >= context
    if config.data.truncation == "error":
        limit = (
            f"the context of {context} tokens has no room for it"
            if no_room
            else f"data.max_prompt_length={config.data.max_prompt_length}"
        )
        raise ConfigError(
            f"The prompt of item {item} has {length} tokens but {limit}: raise the limit, or leave such prompts "
            "out with data.truncation=skip."
        )
    if no_room:
        stats.skipped_no_room += 1
    else:
        stats.skipped_too_long += 1
    return False


def _int32(ids: list[int]) -> bytes:
    return np.asarray(ids, dtype="<i4").tobytes()
