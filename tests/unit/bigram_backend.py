"""A TrainBackend small enough for tests of the whole step: a bigram table in float64, plain gradient descent, ranks as threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import numpy as np
import torch

from psrl.algorithms.metrics import stack, unstack
from psrl.protocol.control import TakenGroup
from psrl.protocol.samples import Group, Sample, SampleRef

VOCABULARY = 11


class BigramBackend:
    """log p(token | the one before it) from a table of logits; knows shared rows by their `predictors`."""

    hidden_size = 4
    device = torch.device("cpu")

    def __init__(
        self, all_sum: Callable = list, rank=0, world_size=1, seed=0, lr=0.5, can_share_prompts=False, pads=True
    ) -> None:
        self.all_sum, self.rank, self.world_size, self.lr = all_sum, rank, world_size, lr
        self.dp_rank, self.dp_size = rank, world_size
        self.can_share_prompts, self.pads = can_share_prompts, pads
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64).requires_grad_()
        self.forwards = 0

    def log_probs(self, batch):
        self.forwards += 1
        with torch.no_grad():
            return self._outputs(batch)[0]

    def log_probs_of(self, batches):
        return [self.log_probs(batch) for batch in batches]

    def _outputs(self, batch):
        columns = torch.arange(batch.input_ids.shape[1]) - 1
        places = columns.expand(batch.input_ids.shape) if batch.layout is None else batch.layout.predictors
        before = batch.input_ids.gather(1, places.clamp(min=0))
        log_p = torch.log_softmax(self.table[before], -1)
        own = log_p.gather(-1, batch.input_ids[..., None]).squeeze(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        return torch.where(batch.loss_mask, own, 0.0), torch.where(batch.loss_mask, entropy, 0.0)

    as_remembered = nullcontext

    def update(self, batches, loss_fn):
        if not batches:
            return {"actor/grad_norm": 0.0, "actor/lr": self.lr, "actor/skipped_steps": 1.0}
        parts = []
        for batch in batches:
            log_probs, entropy = self._outputs(batch)
            loss, sums = loss_fn(log_probs, batch, entropy) if loss_fn.needs_entropy else loss_fn(log_probs, batch)
            loss.backward()
            parts.append(sums)
        gradient = torch.tensor(self.all_sum(self.table.grad.flatten().tolist()), dtype=torch.float64)
        self.table.grad = None
        with torch.no_grad():
            self.table -= self.lr * gradient.view_as(self.table)
        names, sums, extreme, _ = stack(parts)
        metrics = unstack(names, torch.tensor(self.all_sum(sums.tolist())), [], sums[:0])
        least = dict.fromkeys(extreme, 0.0)  # extremes over ranks are not what is tested here
        return (
            metrics
            | least
            | {
                "actor/grad_norm": gradient.norm().item(),
                "actor/lr": self.lr,
                "actor/skipped_steps": float(loss_fn.empty),
            }
        )


def make_groups(num_groups=4, size=3, seed=0, broken=True) -> list[Group]:
    """Ragged prompts and responses with gaps in the masks; with `broken`, two samples have no reward and one no response."""
    random = np.random.default_rng(seed)

    def sample(reward, length) -> Sample:
        mask = random.integers(0, 4, length) > 0
        if length:
            mask[0] = True
        return Sample(
            response_ids=random.integers(0, VOCABULARY, length).astype("<i4").tobytes(),
            logprobs=(-2.4 + 0.3 * random.normal(size=length)).astype("<f4").tobytes(),
            reward=reward,
            finish="stop",
            spans=[],
            mask=mask.astype(np.uint8).tobytes(),
        )

    bad = {(0, 1), (2, 2)} if broken else set()
    return [
        Group(
            group=g, data_epoch=0, prompt=g, version=0,
            prompt_ids=random.integers(0, VOCABULARY, int(random.integers(2, 6))).astype("<i4").tobytes(),
            samples=[
                sample(None if (g, s) in bad else float(random.normal()), 0 if broken and (g, s) == (1, 0) else int(random.integers(1, 8)))
                for s in range(size)
            ],
        )
        for g in range(num_groups)
    ]  # fmt: skip


def taken_of(groups: Sequence[Group]) -> list[TakenGroup]:
    """As the coordinator hands them out; the reference's offset is the position in `groups`."""
    return [
        TakenGroup(
            group=g.group, prompt=g.prompt, data_epoch=0, version=0,
            ref=SampleRef(
                segment="", offset=i, length=0, crc=0, prompt_tokens=len(g.prompt_ids) // 4,
                tokens=[
                    (len(g.prompt_ids) + len(s.response_ids)) // 4 if s.reward is not None and s.response_ids and not s.greedy else 0
                    for s in g.samples
                ],
            ),
        )
        for i, g in enumerate(groups)
    ]  # fmt: skip
