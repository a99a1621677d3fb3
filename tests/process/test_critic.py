"""The critic on FSDP2: its values, its checkpoint, every way to spread it, and a run of PPO that is replayed with it."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_launch import launch as launch_ranks
from critic_ranks import SAVED_AT, STEPS, make_critic, train_step, with_head
from fsdp2_ranks import end_process_group, make_actor, make_batches, make_groups, make_model, scores_by_row
from test_replay import launch, replayed

from psrl.algorithms.value import ValueLoss, finalise
from psrl.rundir.layout import RunDir
from psrl.telemetry.metrics import read_metrics
from psrl.trainer import checkpoints
from psrl.trainer.backends.critic import FSDP2Critic
from psrl.trainer.backends.fsdp2 import FSDP2Backend
from psrl.trainer.batch import count_loss_tokens
from psrl.trainer.replay import CURVE, Replay
from psrl.trainer.saving import CRITIC, Saver, load_checkpoint

pytestmark = pytest.mark.process

BFLOAT16 = {"mixed_precision": "bfloat16"}
VARIANTS: dict[str, dict[str, Any]] = {
    "fsdp2-2": {},
    "hsdp-2x1": {"fsdp_config": {"fsdp_size": 1}, "gradient_checkpointing": True},
    "ulysses-2": {"ulysses_sequence_parallel_size": 2, "gradient_checkpointing": True},
    "tensor-parallel-policy": {"strategy": "megatron", "megatron": {"tensor_model_parallel_size": 2}},
    "bfloat16": BFLOAT16 | {"gradient_checkpointing": True},
    "bfloat16-ulysses-2": BFLOAT16 | {"ulysses_sequence_parallel_size": 2},
}
"""On two ranks."""
ACTOR = "train_actor_rollout_ref.actor"
TWO_RANKS = (f"{ACTOR}.strategy=megatron", f"{ACTOR}.megatron.tensor_model_parallel_size=2")
if importlib.util.find_spec("megatron") is None:
    TWO_RANKS = ()
"""A policy whose ranks share a model, which a critic's share rows beside; without megatron-core a sharded one."""
PRECISIONS: dict[str, dict[str, Any]] = {"float32": {}, "bfloat16": BFLOAT16}


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory):
    """By precision: (values by row, rows of STEPS steps) of a critic on one rank, and the directory of its checkpoint after
    SAVED_AT steps in float32, from which the other one goes on too."""
    saved = tmp_path_factory.mktemp("one") / "critic"
    found = {}
    for precision, actor in PRECISIONS.items():
        critic = with_head(make_critic(actor))
        values = scores_by_row(critic, critic.values)
        rows = [train_step(critic, step) for step in range(SAVED_AT)]
        if precision == "float32":
            critic.save(saved)
        else:
            critic = make_critic(actor, seed=1)
            critic.load(saved)
        rows += [train_step(critic, step) for step in range(SAVED_AT, STEPS)]
        found[precision] = values, rows
    end_process_group()  # that of one rank, which mixed precision insists on
    return found, saved


@pytest.fixture(scope="module")
def two_ranks(one_rank, tmp_path_factory: pytest.TempPathFactory):
    """Rows by variant, and the directory with what the ranks left."""
    to = tmp_path_factory.mktemp("two")
    task = {"from": str(one_rank[1]), "to": str(to), "variants": VARIANTS}
    printed = launch_ranks(to, 2, script="critic_ranks", **task)
    return {line["variant"]: line["rows"] for line in printed}, to


@pytest.mark.parametrize("name", VARIANTS)
def test_two_ranks_are_one_critic_however_they_share_it(name: str, one_rank, two_ranks) -> None:
    precision = VARIANTS[name].get("mixed_precision", "float32")
    near = {"rel": 2e-4, "abs": 2e-6} if precision == "float32" else {"rel": 0.05, "abs": 0.01}
    (values, expected), (rows, to) = one_rank[0][precision], two_ranks
    got: dict[tuple[int, ...], torch.Tensor] = {}
    for rank in range(2):
        got |= torch.load(to / f"{name}.{rank}.pt", weights_only=False)
    assert got.keys() == values.keys()
    for row, value in values.items():
        torch.testing.assert_close(got[row], value, rtol=0, atol=1e-5 if precision == "float32" else 0.02)
    for ours, other in zip(
        rows[name], expected, strict=True
    ):  # the first from scratch, the last from one rank's checkpoint
        assert ours == pytest.approx(other, **near)
    single = make_critic(seed=1)
    single.load(to / name)
    assert single.steps == SAVED_AT
    exact = one_rank[0]["float32"][1]
    for step in range(SAVED_AT, STEPS):
        assert train_step(single, step) == pytest.approx(exact[step], **near)


def test_one_rank_in_bfloat16_is_near_float32(one_rank) -> None:
    exact, rounded = (one_rank[0][precision][1] for precision in PRECISIONS)
    for row, other in zip(exact, rounded, strict=True):
        assert row != other
        assert other["critic/vf_loss"] == pytest.approx(row["critic/vf_loss"], rel=0.05)
        assert other["critic/grad_norm"] == pytest.approx(row["critic/grad_norm"], rel=0.1)


def learn(critic: FSDP2Critic, steps: int, target: float = 0.75) -> list[dict[str, float]]:
    """Train it on one and the same return for all tokens of the same groups."""
    rows = []
    for _ in range(steps):
        batches = make_batches(make_groups(0), 0, 1, cap=64)
        for i, batch in enumerate(batches):
            returns = torch.full_like(batch.advantages, target)
            batches[i] = replace(batch, values=critic.values(batch), returns=returns)
        sums = critic.update(batches, ValueLoss(count_loss_tokens(batches)))
        rows.append(finalise(sums) | {"critic/grad_norm": sums["critic/grad_norm"]})
    return rows


@pytest.mark.parametrize("tied", [True, False])
def test_a_value_is_the_head_on_the_hidden_state_before_the_token(tied):
    critic = make_critic(tied=tied)
    batches = make_batches(make_groups(0), 0, 1, cap=64)
    assert all(not critic.values(batch).any() for batch in batches)
    with_head(critic)
    trunk = make_model(tied).double().model
    head = critic._parameters["lm_head.weight"].detach().double()[0]
    for batch in batches:
        values = critic.values(batch)
        assert not values.requires_grad and not values[~batch.loss_mask].any()
        for row, column in batch.loss_mask.nonzero().tolist():
            with torch.no_grad():
                hidden = trunk(input_ids=batch.input_ids[row, :column][None]).last_hidden_state[0, -1]
            assert values[row, column].item() == pytest.approx(float(hidden @ head), abs=1e-4)


def test_shared_prompts_give_the_same_values():
    critic = with_head(make_critic())
    groups = make_groups(3, num_groups=4, size=5)
    values = {}
    for shared in (False, True):
        batches = make_batches(groups, 0, 1, 1024, shared)
        assert (batches[0].layout is not None) is shared
        values[shared] = torch.cat([critic.values(b)[b.loss_mask] for b in batches]).sort().values
    torch.testing.assert_close(values[True], values[False], atol=2e-5, rtol=0)


def test_it_learns_a_constant_return():
    rows = learn(make_critic(weight_decay=0.0), steps=25)
    assert rows[0]["critic/vf_loss"] == pytest.approx(0.75**2 / 2) and rows[0]["critic/values/mean"] == 0.0
    assert rows[-1]["critic/vf_loss"] < 0.01
    assert rows[-1]["critic/values/mean"] == pytest.approx(0.75, abs=0.15)


def test_both_models_are_in_one_checkpoint_and_go_on_from_it(tmp_path):
    actor, critic = FSDP2Backend(make_model(), make_actor(), temperature=1.0), make_critic()
    learn(critic, 2)
    saver = Saver(actor, tmp_path, 0, lambda: None, background=True, critic=critic)
    saver.begin(1)
    assert saver.wait() is not None
    path = checkpoints.step_directory(tmp_path, 1)
    checkpoints.finish(path, {"version": 1})
    expected = learn(critic, 2)
    again = make_critic(seed=1)
    load_checkpoint(path, FSDP2Backend(make_model(seed=1), make_actor(), temperature=1.0), again)
    assert again.steps == 2
    for row, other in zip(expected, learn(again, 2), strict=True):
        assert other == pytest.approx(row, rel=1e-6)
    next((path / CRITIC).glob("*.distcp")).unlink()  # without the critic it is not complete
    assert checkpoints.newest_complete(tmp_path)[0] is None


def test_a_run_is_replayed_with_its_critic_and_from_its_checkpoint(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    launch(
        run_dir, "algorithm=ppo", "trainer.keep_samples=True", "trainer.save_freq=4", "model.tiny.warm_start_steps=50",
        "train_actor_rollout_ref.actor.ppo_mini_batch_size=4", "psrl.fine_grain_overlap.granularity=mini_batch",
    )  # fmt: skip
    trained = [{name: row[name] for name in CURVE} for row in read_metrics(run_dir / "metrics.jsonl")]
    assert len(trained) == 8 and trained[0]["critic/values/mean"] == 0.0 != trained[-1]["critic/values/mean"]
    for row, again in zip(trained, replayed(run_dir, 1, tmp_path / "one"), strict=True):
        assert again == pytest.approx(row, rel=1e-6, abs=1e-9)
    for row, again in zip(trained, replayed(run_dir, 2, tmp_path / "two", *TWO_RANKS), strict=True):
        assert again == pytest.approx(row, rel=5e-4, abs=5e-6)
    resumed = Replay(RunDir(run_dir))
    resumed.load(checkpoints.step_directory(run_dir / "checkpoints", 4))
    for row, again in zip(trained[4:], resumed.rows(), strict=True):
        assert again == pytest.approx(row, rel=1e-5, abs=1e-8)
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "completed"
