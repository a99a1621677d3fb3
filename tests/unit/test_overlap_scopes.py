"""Every estimator and objective on whole buffers and in chunks, on one rank and two, in float64 on a bigram table."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from functools import cache

import msgspec
import pytest
import torch
from bigram_backend import BigramBackend, make_groups, taken_of
from loss_batches import run_ranks
from test_train_step import CASES as STEPS
from test_train_step import make_config

from psrl.algorithms.metrics import stack, unstack
from psrl.config.overlap import FineGrainOverlapConfig
from psrl.trainer.chunks import chunk_plan, recorded_parts
from psrl.trainer.objective import kl_control
from psrl.trainer.step import train_step

pytestmark = pytest.mark.unit

GROUPS, SAMPLES = 8, 3
CASES = {name: case for name, case in STEPS.items() if dict(case.get("algorithm", {})).get("adv_estimator") != "gae"}
"""All that needs no critic."""


class OverlapBackend(BigramBackend):
    """The same table with an optimizer step in two halves, and the table of the buffer's start."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.sums, self.remembered, self.steps = [], None, 0

    def accumulate(self, batches, loss_fn):
        for batch in batches:
            log_probs, entropy = self._outputs(batch)
            loss, sums = loss_fn(log_probs, batch, entropy) if loss_fn.needs_entropy else loss_fn(log_probs, batch)
            loss.backward()
            self.sums.append(sums)

    def update(self, batches, loss_fn):
        self.accumulate(batches, loss_fn)
        return self.apply_gradients(0.0 if loss_fn.empty else 1.0)

    def apply_gradients(self, divisor=1.0):
        parts, self.sums = self.sums, []
        if not parts:
            return {"actor/grad_norm": 0.0, "actor/lr": self.lr, "actor/skipped_steps": 1.0}
        gradient = torch.tensor(self.all_sum(self.table.grad.flatten().tolist()), dtype=torch.float64) / (
            divisor or 1.0
        )
        self.table.grad = None
        with torch.no_grad():
            self.table -= self.lr * gradient.view_as(self.table)
        self.steps += 1
        names, sums, extreme, _ = stack(parts)
        metrics = unstack(names, torch.tensor(self.all_sum(sums.tolist())), [], sums[:0])
        skipped = float(divisor == 0.0)
        norm = {"actor/grad_norm": gradient.norm().item(), "actor/lr": self.lr, "actor/skipped_steps": skipped}
        return metrics | dict.fromkeys(extreme, 0.0) | norm

    def remember(self):
        self.remembered = self.table.detach().clone()

    @contextmanager
    def as_remembered(self):
        now = self.table.detach().clone()
        with torch.no_grad():
            self.table.copy_(now if self.remembered is None else self.remembered)
            yield
            self.table.copy_(now)


def config_of(case: Mapping, granularity: str, scope: str, multiplier: int, micro: int | None, ranks: int):
    config = make_config(**case | {"actor": {"ppo_mini_batch_size": 2, **case.get("actor", {})}})
    config.train_actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu = micro
    config.train_actor_rollout_ref.actor.ppo_max_token_len_per_gpu = 30
    config.psrl.staleness_buffer_entries, config.psrl.rollout_n = GROUPS, SAMPLES
    config.psrl.deployment.train_ngpus_per_node = ranks
    config.psrl.fine_grain_overlap = FineGrainOverlapConfig(granularity, multiplier, scope)
    return config


@cache
def train(name, granularity="none", scope="recompute", *, multiplier=1, micro=2, ranks=1, steps=2):
    """(table, metrics of the last buffer) after two buffers."""
    case = CASES[name]
    groups = make_groups(GROUPS, SAMPLES)
    if name == "remax":
        for group in groups:
            group.samples.append(msgspec.structs.replace(group.samples[-1], greedy=True, reward=0.3))
    config = config_of(case, granularity, scope, multiplier, micro, ranks)
    parts = recorded_parts(taken_of(groups), chunk_plan(config))
    assert (len(parts) > 1) == (granularity != "none")

    def of_rank(rank):
        def work(all_sum):
            actor = OverlapBackend(all_sum, rank, ranks)
            needed = config.algorithm.use_kl_in_reward or config.train_actor_rollout_ref.actor.use_kl_loss
            reference = BigramBackend(all_sum, rank, ranks, seed=9) if needed else None
            kl = kl_control(config)
            for _ in range(steps):
                result = train_step(actor, config, parts, lambda t: groups[t.ref.offset], reference=reference, kl=kl)
                kl = result.kl
            return actor.table.detach(), result.metrics

        return work

    results = run_ranks([of_rank(rank) for rank in range(ranks)])
    return results[0]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("granularity", "multiplier", "micro", "ranks"),
    [("mini_batch", 3, None, 2), ("micro_batch", 1, 2, 1)],
)
def test_recompute_is_the_same_step_bit_by_bit(name, granularity, multiplier, micro, ranks):
    whole, metrics = train(name, micro=micro, ranks=ranks)
    chunked, same = train(name, granularity, multiplier=multiplier, micro=micro, ranks=ranks)
    assert torch.equal(whole, chunked) and same == metrics
    assert not torch.equal(whole, OverlapBackend().table)


WHOLE_BUFFER = {name for name in CASES if "plus plus" in name or "plus_plus" in name or "normalised" in name}
SEVERAL_EPOCHS = {name for name, case in CASES.items() if case.get("actor", {}).get("ppo_epochs", 1) > 1}
KL_IN_REWARD = {name for name, case in CASES.items() if case.get("algorithm", {}).get("use_kl_in_reward")}


@pytest.mark.parametrize("name", sorted(set(CASES) - WHOLE_BUFFER - SEVERAL_EPOCHS))
@pytest.mark.parametrize(("multiplier", "ranks"), [(1, 1), (3, 2)])
def test_pre_step_is_exact_for_what_compares_within_groups(name, multiplier, ranks):
    whole, metrics = train(name, ranks=ranks)
    stepped, same = train(name, "mini_batch", "pre_step", multiplier=multiplier, ranks=ranks)
    torch.testing.assert_close(stepped, whole, rtol=0, atol=1e-12)
    assert same == pytest.approx(metrics, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", sorted(WHOLE_BUFFER))
def test_pre_step_is_another_step_for_what_compares_over_the_buffer(name):
    assert not torch.allclose(train(name)[0], train(name, "mini_batch", "pre_step")[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", sorted(set(CASES) - WHOLE_BUFFER))
@pytest.mark.parametrize(
    ("granularity", "multiplier", "micro", "ranks"),
    [("mini_batch", 1, None, 2), ("micro_batch", 2, 1, 1)],
)
def test_accumulate_is_the_same_step_up_to_the_order_of_divisions(name, granularity, multiplier, micro, ranks):
    if name in KL_IN_REWARD and granularity == "micro_batch":
        pytest.skip("refused by the configuration")
    whole, metrics = train(name, micro=micro, ranks=ranks)
    chunked, same = train(name, granularity, "accumulate", multiplier=multiplier, micro=micro, ranks=ranks)
    torch.testing.assert_close(chunked, whole, rtol=0, atol=1e-6)
    assert same == pytest.approx(metrics, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("scope", ["recompute", "pre_step", "accumulate"])
def test_every_mini_batch_that_is_rejected_whole_is_a_skipped_step(scope, monkeypatch):
    rejecting = {"correction": {"rollout_rs": "token_k2", "rollout_rs_threshold": 1e-12}}
    monkeypatch.setitem(CASES, "rejecting", rejecting)
    table, metrics = train("rejecting", "mini_batch", scope, steps=1)
    assert torch.equal(table, OverlapBackend().table)
    assert metrics["actor/skipped_steps"] == GROUPS // 2
    assert metrics["rollout_corr/rs_masked_fraction"] == 1.0
