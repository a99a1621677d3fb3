"""A trainer of one or more ranks on a fixed little problem; `main` is one rank (RANK, WORLD_SIZE).

`main('{"checkpoints": DIR, "init": FILE, "steps": 4, "save_at": [2]}')`: rank 0 prints the metrics of each
step as a line of JSON. "actor": settings of the actor, for example its strategy. "shards" and "log_probs": directories where
each rank leaves its last weights and the log-probs of the first step. "background": checkpoints are written while training goes
on; "killed": every rank kills itself where the last one would be marked complete, or is being written. "then": another task
for the same processes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from psrl.algorithms import policy
from psrl.algorithms.advantages import AdvantageOptions, grpo
from psrl.algorithms.aggregation import Aggregation
from psrl.algorithms.policy import PolicyLoss
from psrl.algorithms.rollout_correction import Correction
from psrl.config.fsdp import FSDPConfig
from psrl.config.megatron import MegatronConfig
from psrl.config.schema import ActorConfig, OptimConfig
from psrl.protocol.samples import Group, Sample
from psrl.trainer import checkpoints
from psrl.trainer.backends.base import MicroBatch
from psrl.trainer.backends.core import BackendCore
from psrl.trainer.backends.make import make_backend
from psrl.trainer.batch import (
    build_micro_batches,
    count_loss_tokens,
    groups_needed,
    index_samples,
    rewards_of,
    sample_rewards,
)
from psrl.trainer.micro_batches import plan_micro_batches, trainable_lengths
from psrl.trainer.rows import separate_rows, shared_rows
from psrl.trainer.saving import Saved, Saver

VOCABULARY = 131  # odd: two ranks hold 66 and 65 rows


def end_process_group() -> None:
    """Of this process, with the groups that Megatron remembers."""
    if state := sys.modules.get("megatron.core.parallel_state"):
        state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def make_model(tied: bool = True, seed: int = 0, kv_heads: int = 2, experts: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": kv_heads, "head_dim": 16, "max_position_embeddings": 128, "tie_word_embeddings": tied,
    }  # fmt: skip
    if experts:
        sparse = Qwen3MoeConfig(**shape, num_experts=experts, num_experts_per_tok=2, moe_intermediate_size=32)
        return AutoModelForCausalLM.from_config(sparse)
    return AutoModelForCausalLM.from_config(Qwen3Config(**shape))


def make_actor(**changes) -> ActorConfig:
    defaults = {
        "use_torch_compile": False,
        "grad_clip": 1.0,
        "optim": OptimConfig(lr=1e-3, lr_warmup_steps=3, weight_decay=0.1),
    }
    return ActorConfig(**{**defaults, **changes})


def make_groups(step: int, num_groups: int = 3, size: int = 3) -> list[Group]:
    """Ragged prompts and responses, some tokens masked, two samples without a reward."""
    random = np.random.default_rng(step)

    def sample(position: int, reward: float | None) -> Sample:
        length = int(random.integers(1, 9))
        mask = random.integers(0, 4, length) > 0
        mask[0] = True
        return Sample(
            response_ids=random.integers(0, VOCABULARY, length).astype("<i4").tobytes(),
            logprobs=(-5.0 + random.normal(size=length)).astype("<f4").tobytes(),
            reward=reward,
            finish="stop",
            spans=[],
            mask=mask.astype(np.uint8).tobytes(),
        )

    return [
        Group(
            group=g, data_epoch=0, prompt=g, version=0,
            prompt_ids=random.integers(0, VOCABULARY, int(random.integers(2, 7))).astype("<i4").tobytes(),
            samples=[sample(s, None if (g, s) in {(0, 1), (2, 2)} else float(random.normal())) for s in range(size)],
        )
        for g in range(num_groups)
    ]  # fmt: skip


def make_batches(
    groups: list[Group], rank: int, world_size: int, cap: int, shared: bool = False, device: torch.device | str = "cpu"
) -> list[MicroBatch]:
    tokens = [
        [0 if s.reward is None else (len(g.prompt_ids) + len(s.response_ids)) // 4 for s in g.samples] for g in groups
    ]
    index = index_samples(tokens)
    lengths = trainable_lengths(tokens)
    rows = separate_rows(lengths)
    if shared:
        rows = shared_rows(
            lengths, index.group, [len(g.prompt_ids) // 4 for g in groups], hidden_size=64, max_tokens=cap
        )
    plan = plan_micro_batches([row.length for row in rows], world_size, cap, micro_batch_cost=10**6)
    mine = [[rows[i] for i in batch] for batch in plan.ranks[rank]]
    needed = groups_needed(mine, index)
    rewards = {g: rewards_of(groups[g], tokens[g], least_valid=2) for g in needed}
    batches = build_micro_batches(mine, index, {g: groups[g] for g in needed}, rewards, device)
    estimated = grpo(sample_rewards(index, rewards), batches, AdvantageOptions(), list).advantages
    return [replace(b, advantages=grid.float().to(device)) for b, grid in zip(batches, estimated, strict=True)]


def token_tis(tokens: int, **changes) -> PolicyLoss:
    """PPO with truncated importance weights, token-mean over `tokens`."""
    correction = Correction(level="token", high=2.0)
    return PolicyLoss(aggregation=Aggregation(tokens=tokens), correction=correction, **changes)


def train_step(backend: BackendCore, step: int, cap: int = 1024, **changes) -> dict[str, float]:
    batches = make_batches(make_groups(step), backend.dp_rank, backend.dp_size, cap, device=backend.device)
    (tokens,) = backend.all_sum([count_loss_tokens(batches)])
    sums = backend.update(batches, token_tis(int(tokens), **changes))
    return policy.finalise(sums) | {name: value for name, value in sums.items() if "/sums/" not in name}


def save(backend: BackendCore, root: Path, step: int, killed: bool = False) -> None:
    path = checkpoints.step_directory(root, step)
    if backend.rank == 0:
        checkpoints.begin(root, step, backend.checkpoint_bytes())
    if backend.world_size > 1:
        dist.barrier()
    backend.save(path)
    if killed:
        os.kill(os.getpid(), signal.SIGKILL)
    if backend.world_size > 1:
        dist.barrier()
    if backend.rank == 0:
        checkpoints.finish(path, {"version": step})


def log_probs_by_row(backend: BackendCore, *, shared: bool = True) -> dict[tuple[int, ...], torch.Tensor]:
    return scores_by_row(backend, backend.log_probs, shared=shared)


def scores_by_row(
    backend: BackendCore, score: Callable[[MicroBatch], torch.Tensor], *, shared: bool = True
) -> dict[tuple[int, ...], torch.Tensor]:
    """What `score` says of this rank's rows, with (if it can and should) and without shared prompts, by the row's tokens."""
    groups = make_groups(3, num_groups=4, size=5)
    ways = [False, True] if shared and backend.can_share_prompts else [False]
    batches = [b for s in ways for b in make_batches(groups, backend.dp_rank, backend.dp_size, 64, s, backend.device)]
    return {
        tuple(ids[real].tolist()): values[mask].cpu()
        for batch in batches
        for ids, real, mask, values in zip(
            batch.input_ids, batch.attention_mask, batch.loss_mask, score(batch), strict=True
        )
        if mask.any()
    }


def settings(task: dict) -> dict:
    """Settings of the actor, nested ones as their dataclasses."""
    given = dict(task.get("actor", {}))
    kinds = {"megatron": MegatronConfig, "fsdp_config": FSDPConfig}
    given |= {name: kind(**given[name]) for name, kind in kinds.items() if name in given}
    return given | ({"optim": OptimConfig(lr=task["lr"])} if "lr" in task else {})


def steps_with_save(backend: BackendCore, root: Path, task: dict) -> None:
    for step in range(backend.steps, task["steps"]):
        report(backend, train_step(backend, step, task.get("cap", 1024), **task.get("loss", {})))
        if backend.steps in task["save_at"]:
            save(backend, root, backend.steps, killed=task.get("killed", False))


def steps_with_saver(backend: BackendCore, root: Path, task: dict) -> None:
    """As the trainer does it."""
    barrier = dist.barrier if backend.world_size > 1 else lambda: None
    saver = Saver(backend, root, backend.steps, barrier, background=True)
    for step in range(backend.steps, task["steps"]):
        report(backend, train_step(backend, step, task.get("cap", 1024), **task.get("loss", {})))
        mark_complete(backend, root, saver.finished())
        if backend.steps in task["save_at"]:
            mark_complete(backend, root, saver.wait())
            saver.begin(backend.steps)
            if task.get("killed") and backend.steps == task["save_at"][-1]:
                os.kill(os.getpid(), signal.SIGKILL)
    mark_complete(backend, root, saver.wait())


def mark_complete(backend: BackendCore, root: Path, saved: Saved | None) -> None:
    if saved is not None and backend.rank == 0:
        checkpoints.finish(checkpoints.step_directory(root, saved.version), {"version": saved.version})


def report(backend: BackendCore, metrics: dict[str, float]) -> None:
    if backend.rank == 0:
        print(json.dumps(metrics), flush=True)


def run(task: dict, device: str) -> None:
    """One task from the first step to the last one."""
    actor = make_actor(**settings(task))
    # A resumed run starts from other weights ("seed"), so that it is right only if the checkpoint replaces them.
    backend = make_backend(
        make_model(seed=task.get("seed", 0), kv_heads=task.get("kv_heads", 2), experts=task.get("experts", 0)),
        actor,
        temperature=0.8,
        device=device,
    )
    root = Path(task["checkpoints"])
    found, _ = checkpoints.newest_complete(root)
    if found is not None:
        backend.load(found)
    if "log_probs" in task:
        torch.save(log_probs_by_row(backend), Path(task["log_probs"]) / f"{backend.rank}.pt")
    if task.get("background"):
        steps_with_saver(backend, root, task)
    else:
        steps_with_save(backend, root, task)
    if "shards" in task:
        shards = [replace(shard, local=shard.local.cpu()) for shard in backend.weight_shards()]
        torch.save(shards, Path(task["shards"]) / f"{backend.rank}.pt")


def main(text: str) -> None:
    task = json.loads(text)
    torch.set_num_threads(1)
    world_size = int(os.environ["WORLD_SIZE"])
    device = task.get("device", "cpu")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["RANK"]))
    if world_size > 1:
        dist.init_process_group(
            "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
            init_method=f"file://{task['init']}",
            rank=int(os.environ["RANK"]),
            world_size=world_size,
            timeout=timedelta(seconds=120),
        )
    while task:
        run(task, device)
        task = task.get("then", {})
    if world_size > 1:
        dist.destroy_process_group()
