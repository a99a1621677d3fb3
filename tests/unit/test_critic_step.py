"""The training step with a critic, on tables in float64: what it learns, whatever the split, and when."""

from __future__ import annotations

import pytest
import torch
from bigram_backend import VOCABULARY, make_groups, taken_of
from loss_batches import run_ranks
from test_overlap_scopes import OverlapBackend
from test_train_step import make_config

from psrl.config.critic import CriticConfig
from psrl.config.overlap import FineGrainOverlapConfig
from psrl.trainer.chunks import chunk_plan, recorded_parts
from psrl.trainer.step import train_step

pytestmark = pytest.mark.unit

GROUPS, SAMPLES = 6, 3


class TableCritic(OverlapBackend):
    """A value for each token that may stand before the one to be written: the first column of the table, 0 at first."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.table = torch.zeros(VOCABULARY, VOCABULARY, dtype=torch.float64).requires_grad_()
        self.forwarded = 0

    def _outputs(self, batch):
        columns = torch.arange(batch.input_ids.shape[1]) - 1
        places = columns.expand(batch.input_ids.shape) if batch.layout is None else batch.layout.predictors
        values = self.table[batch.input_ids.gather(1, places.clamp(min=0)), 0]
        return torch.where(batch.loss_mask, values, 0.0), None

    def accumulate(self, batches, loss_fn):
        for batch in batches:
            loss, sums = loss_fn(self._outputs(batch)[0], batch)
            loss.backward()
            self.sums.append(sums)

    def values(self, batch):
        self.forwarded += 1
        with torch.no_grad():
            return self._outputs(batch)[0]

    def update(self, batches, loss_fn):
        return {name.replace("actor/", "critic/"): v for name, v in super().update(batches, loss_fn).items()}


def make_gae(granularity="none", scope="recompute", ranks=1, micro=None, **critic):
    config = make_config(
        {"ppo_mini_batch_size": 2, "ppo_max_token_len_per_gpu": 30}, {"adv_estimator": "gae", "lam": 0.9}
    )
    config.critic = CriticConfig(**critic)
    config.train_actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu = micro
    config.psrl.staleness_buffer_entries, config.psrl.rollout_n = GROUPS, SAMPLES
    config.psrl.deployment.train_ngpus_per_node = ranks
    config.psrl.fine_grain_overlap = FineGrainOverlapConfig(granularity, 1, scope)
    return config


def train(config, groups, *, ranks=1, steps=2, share=False, lr=0.5, only_critic=False):
    """(policy's table, critic's table, metrics of each buffer, forward passes of the critic) of rank 0."""
    parts = recorded_parts(taken_of(groups), chunk_plan(config))

    def of_rank(rank):
        def work(all_sum):
            actor = OverlapBackend(all_sum, rank, ranks, can_share_prompts=share)
            critic = TableCritic(all_sum, rank, ranks, lr=lr)
            rows = [
                train_step(
                    actor, config, parts, lambda t: groups[t.ref.offset], critic=critic, only_critic=only_critic
                ).metrics
                for _ in range(steps)
            ]
            return actor.table.detach(), critic.table.detach(), rows, critic.forwarded

        return work

    results = run_ranks([of_rank(rank) for rank in range(ranks)]) if ranks > 1 else [of_rank(0)(list)]
    assert all(torch.equal(a, results[0][0]) and torch.equal(c, results[0][1]) for a, c, _, _ in results)
    return results[0]


def test_it_learns_a_constant_return():
    groups = make_groups(GROUPS, SAMPLES, broken=False)
    for group in groups:
        for sample in group.samples:
            sample.reward = 0.75
    config = make_gae(cliprange_value=None)
    config.algorithm.lam = 1.0
    _, _, rows, _ = train(config, groups, steps=30, lr=2.0)
    assert rows[0]["critic/values/mean"] == 0.0
    assert rows[0]["critic/returns/mean"] == pytest.approx(0.75)
    losses = [row["critic/vf_loss"] for row in rows]
    assert losses[-1] < losses[0] / 100
    assert rows[-1]["critic/values/mean"] == pytest.approx(0.75, abs=0.02)


def test_it_explains_returns_that_depend_on_the_prompt():
    groups = make_groups(GROUPS, SAMPLES, broken=False)
    for group in groups:
        for sample in group.samples:
            sample.response_ids = int(group.group).to_bytes(4, "little") * (len(sample.response_ids) // 4)
            sample.reward = group.group / GROUPS
        group.prompt_ids = int(group.group).to_bytes(4, "little") * 2
    _, _, rows, _ = train(make_gae(), groups, steps=30, lr=2.0)
    assert rows[0]["critic/vf_explained_var"] == pytest.approx(0.0, abs=1e-9)
    assert rows[-1]["critic/vf_explained_var"] > 0.95


def test_one_step_by_hand():
    """A single one-token sample of reward 1: V = 0, R = 1, so the value moves by lr x (R - V)."""
    (group,) = make_groups(1, 1, broken=False)
    (sample,) = group.samples
    sample.response_ids, sample.logprobs, sample.mask, sample.reward = (5).to_bytes(4, "little"), b"\0\0\0\0", b"", 1.0
    last = int.from_bytes(group.prompt_ids[-4:], "little")
    config = make_gae()
    config.psrl.staleness_buffer_entries = config.psrl.rollout_n = 1
    config.train_actor_rollout_ref.actor.ppo_mini_batch_size = None
    _, values, rows, _ = train(config, [group], steps=1, lr=0.25)
    assert rows[0]["critic/vf_loss"] == pytest.approx(0.5)
    assert values[last, 0].item() == pytest.approx(0.25)
    assert values.abs().sum().item() == pytest.approx(0.25)


@pytest.mark.parametrize(("ranks", "share", "tokens"), [(1, False, 16), (2, False, 16), (3, True, 20)])
def test_no_split_changes_the_step(ranks, share, tokens):
    groups = make_groups(GROUPS, SAMPLES)
    expected = train(make_gae(ppo_epochs=2), groups)
    config = make_gae(ranks=ranks, ppo_epochs=2)
    config.train_actor_rollout_ref.actor.ppo_max_token_len_per_gpu = tokens
    actor, values, rows, _ = train(config, groups, ranks=ranks, share=share)
    torch.testing.assert_close(actor, expected[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(values, expected[1], rtol=0, atol=1e-6)
    for name in ("vf_loss", "vf_explained_var", "values/mean", "returns/mean", "grad_norm"):
        assert rows[-1][f"critic/{name}"] == pytest.approx(expected[2][-1][f"critic/{name}"], rel=1e-5, abs=1e-7)


@pytest.mark.parametrize(
    ("granularity", "micro", "ranks"), [("mini_batch", None, 1), ("micro_batch", 2, 1), ("micro_batch", 1, 2)]
)
def test_recompute_in_chunks_is_the_same_step_bit_by_bit(granularity, micro, ranks):
    groups = make_groups(GROUPS, SAMPLES)
    whole = train(make_gae(micro=micro, ranks=ranks), groups, ranks=ranks)
    chunked = train(make_gae(granularity, micro=micro, ranks=ranks), groups, ranks=ranks)
    assert torch.equal(whole[0], chunked[0]) and torch.equal(whole[1], chunked[1]) and whole[2] == chunked[2]


def test_under_pre_step_values_are_those_of_the_buffers_start_and_the_critic_learns_from_all_of_it():
    groups = make_groups(GROUPS, SAMPLES)
    whole = train(make_gae(), groups, steps=1)
    stepped = train(make_gae("mini_batch", "pre_step"), groups, steps=1)
    torch.testing.assert_close(stepped[1], whole[1], rtol=0, atol=1e-12)
    assert stepped[2][0]["critic/vf_loss"] == pytest.approx(whole[2][0]["critic/vf_loss"], rel=1e-12)
    assert stepped[3] == whole[3] == whole[2][0]["training/num_micro_batches"]  # one forward pass each


def test_a_critic_that_shares_its_samples_otherwise_than_the_policy_is_refused():
    with pytest.raises(ValueError, match=r"share .* \(0, 1\) of the policy's and \(1, 2\) of the critic's"):
        train_step(OverlapBackend(), make_gae(), [], lambda _: None, critic=TableCritic(rank=1, world_size=2))


def test_during_its_warm_up_the_policy_stays_as_it_is():
    groups = make_groups(GROUPS, SAMPLES)
    policy, values, rows, _ = train(make_gae(), groups, steps=1, only_critic=True)
    assert torch.equal(policy, OverlapBackend().table.detach())
    assert values.any() and rows[0]["actor/skipped_steps"] == GROUPS // 2 and rows[0]["critic/skipped_steps"] == 0.0
    assert torch.equal(values, train(make_gae(), groups, steps=1)[1])
