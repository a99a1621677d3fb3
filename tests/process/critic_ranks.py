"""The critic on a fixed little problem; `main` is one rank (RANK, WORLD_SIZE) of critics spread in several ways.

`main('{"init": FILE, "from": DIR, "to": DIR, "variants": {NAME: ACTOR}}')`, one variant after the other in the same
processes: the values of the first weights are left in TO/NAME.RANK.pt, a critic is trained for SAVED_AT steps and saved to
TO/NAME, and another one goes on from the checkpoint FROM until STEPS. Rank 0 prints a line of JSON a variant with all of its rows.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from fsdp2_ranks import make_actor, make_batches, make_groups, make_model, scores_by_row, settings

from psrl.algorithms.value import ValueLoss, finalise
from psrl.config.critic import CriticConfig
from psrl.config.schema import OptimConfig
from psrl.trainer.backends.base import MicroBatch
from psrl.trainer.backends.core import local_part
from psrl.trainer.backends.critic import FSDP2Critic
from psrl.trainer.batch import count_loss_tokens

STEPS, SAVED_AT = 4, 2


def make_critic(
    actor: dict | None = None, *, seed: int = 0, tied: bool = True, weight_decay: float = 0.1, device: str = "cpu"
) -> FSDP2Critic:
    torch.set_num_threads(1)
    critic = CriticConfig(optim=OptimConfig(lr=3e-3, weight_decay=weight_decay))
    return FSDP2Critic(make_model(tied, seed), make_actor(**settings({"actor": actor or {}})), critic, device=device)


def with_head(critic: FSDP2Critic, seed: int = 5) -> FSDP2Critic:
    """Random values in place of zeros."""
    generator = torch.Generator().manual_seed(seed)
    head = local_part(critic._parameters["lm_head.weight"])
    row = 0.2 * torch.randn(1, critic.hidden_size, generator=generator)
    head.copy_(row[: len(head)])  # a rank may have no part of it
    critic._weights_changed()
    return critic


def train_step(critic: FSDP2Critic, step: int, cap: int = 1024) -> dict[str, float]:
    """One optimizer step towards returns that follow from the tokens."""
    batches = make_batches(make_groups(step), critic.dp_rank, critic.dp_size, cap, device=critic.device)
    batches = [replace(batch, values=critic.values(batch), returns=_returns(batch)) for batch in batches]
    (tokens,) = critic.all_sum([count_loss_tokens(batches)])
    sums = critic.update(batches, ValueLoss(int(tokens), clip=0.5))
    return finalise(sums) | {name: value for name, value in sums.items() if "/sums/" not in name}


def _returns(batch: MicroBatch) -> torch.Tensor:
    return (batch.input_ids % 7).float() / 7


def main(text: str) -> None:
    task = json.loads(text)
    rank, device = int(os.environ["RANK"]), task.get("device", "cpu")
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
        init_method=f"file://{task['init']}",
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=120),
    )
    to = Path(task["to"])
    for name, actor in task["variants"].items():
        critic = with_head(make_critic(actor, device=device))
        torch.save(scores_by_row(critic, critic.values), to / f"{name}.{rank}.pt")
        rows = [train_step(critic, step, cap=15) for step in range(SAVED_AT)]
        critic.save(to / name)
        again = make_critic(actor, seed=1, device=device)
        again.load(Path(task["from"]))
        rows += [train_step(again, step, cap=15) for step in range(SAVED_AT, STEPS)]
        if rank == 0:
            print(json.dumps({"variant": name, "rows": rows}), flush=True)
    dist.destroy_process_group()
