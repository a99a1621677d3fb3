"""Fine-grain overlap on the trainer's own code: recorded buffers in chunks against the same buffers whole, then real runs."""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from replay_ranks import changed, replay_on
from runs import ONE_INSTANCE, NewRun, Run, of

from psrl.coordinator.records import Publish, Start, Take
from psrl.telemetry.metrics import read_metrics
from psrl.trainer.arrivals import InterruptedStepError
from psrl.trainer.backends.base import MicroBatch
from psrl.trainer.backends.fsdp2 import FSDP2Backend
from psrl.trainer.chunks import chunk_plan, recorded_parts
from psrl.trainer.replay import Replay, recorded_buffers

pytestmark = pytest.mark.process

OVERLAP = "psrl.fine_grain_overlap"
ACTOR = "train_actor_rollout_ref.actor"
REWARD = '''
import pathlib, time

def reward(data_source, solution_str, ground_truth, extra_info):
    """Any two responses may differ in it. Slow while the file `slow` exists, so that a buffer fills over seconds."""
    if (pathlib.Path(__file__).parent / "slow").exists():
        time.sleep(0.15)
    return float(sum(map(ord, solution_str)) % 3)
'''
SETTINGS: dict[str, object] = ONE_INSTANCE | {
    "reward.function": "overlap_reward:reward",
    "psrl.staleness": 0,
    "psrl.staleness_buffer_entries": 8,
    "psrl.rollout_n": 3,
    f"{ACTOR}.ppo_mini_batch_size": 2,
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": 2,
}
"""Micro-batches of 2 samples, mini-batches of 6, buffers of 24: groups of 3 are split between micro-batches."""


@pytest.fixture(scope="module")
def recorded(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Three buffers, kept."""
    directory = tmp_path_factory.mktemp("recorded")
    (directory / "overlap_reward.py").write_text(REWARD)
    kept = {"model": tiny_model, "trainer.keep_samples": True, "trainer.total_training_steps": 3}
    run = Run(directory / "run", SETTINGS | kept, module_dir=directory)
    try:
        assert run.launch() == 0, run.story()
        yield run
    finally:
        run.close()


class Watched(Replay):
    """Keeps what the actor is trained on."""

    def __init__(self, run: Run, changes: Mapping[str, object]) -> None:
        super().__init__(run.dir, changed(run.dir, changes))
        self.trained: list[MicroBatch] = []
        through = self.actor.accumulate

        def accumulate(batches, loss_fn):
            self.trained += batches
            through(batches, loss_fn)

        self.actor.accumulate = accumulate  # type: ignore[method-assign]

    def train(self, steps: int | None = None) -> Watched:
        self.curve = list(self.rows(steps))
        assert self.curve and all(row["actor/grad_norm"] > 0 for row in self.curve)
        return self

    def weights(self) -> dict[str, torch.Tensor]:
        """Copies of them, the critic's too where there is one."""
        models = {"actor": self.actor} | ({"critic": self.critic} if self.critic else {})
        return {f"{model}.{s.name}": s.local.clone() for model, of in models.items() for s in of.weight_shards()}


def assert_equal_batches(left: list[MicroBatch], right: list[MicroBatch]) -> None:
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        for field in dataclasses.fields(MicroBatch):
            a, b = getattr(one, field.name), getattr(other, field.name)
            if isinstance(a, torch.Tensor):
                assert torch.equal(a, b), field.name
            else:
                assert (a is None) == (b is None), field.name


def assert_same_weights(left: Replay, right: Replay) -> None:
    one, other = left.weights(), right.weights()
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


WholeRuns = Callable[[Mapping[str, object]], Watched]


@pytest.fixture(scope="module")
def whole_runs(recorded: Run) -> WholeRuns:
    """The run trained again on whole buffers with other settings, once for each."""
    known: dict[str, Watched] = {}

    def whole(changes: Mapping[str, object]) -> Watched:
        name = json.dumps(changes, sort_keys=True)
        if name not in known:
            known[name] = Watched(recorded, changes).train()
        return known[name]

    return whole


CHUNKS = [
    {f"{OVERLAP}.granularity": "mini_batch"},
    {f"{OVERLAP}.granularity": "mini_batch", f"{OVERLAP}.multiplier": 3},
    {f"{OVERLAP}.granularity": "micro_batch"},
    {f"{OVERLAP}.granularity": "micro_batch", f"{OVERLAP}.multiplier": 2},
]


EVERYTHING = {
    "algorithm.use_kl_in_reward": True,
    f"{ACTOR}.use_kl_loss": True,
    f"{ACTOR}.entropy_coeff": 0.01,
    f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean",
    "algorithm.rollout_correction.rollout_rs": "token_k1",
    "algorithm.rollout_correction.rollout_rs_threshold": "0.5_2.0",
}
"""Each of these adds a stage or a denominator."""


@pytest.mark.parametrize("common", [{}, {f"{ACTOR}.ppo_epochs": 2}, EVERYTHING], ids=["plain", "epochs", "everything"])
@pytest.mark.parametrize("chunks", CHUNKS)
def test_recompute_trains_the_same_batches_to_the_same_weights(
    recorded: Run, whole_runs: WholeRuns, chunks: dict, common: dict
) -> None:
    whole = whole_runs(common)
    chunked = Watched(recorded, common | chunks | {f"{OVERLAP}.overlap_scope": "recompute"}).train()
    assert any(batch.old_log_probs is not None for batch in whole.trained)
    assert_equal_batches(whole.trained, chunked.trained)
    assert_same_weights(whole, chunked)


@pytest.mark.parametrize("estimator", ["rloo", "reinforce_plus_plus", "gae"])
def test_recompute_is_exact_for_every_estimator(recorded: Run, whole_runs: WholeRuns, estimator: str) -> None:
    """grpo is above; remax needs a greedy sample in each group: see test_overlap_scopes."""
    whole = whole_runs({"algorithm.adv_estimator": estimator})
    chunked = Watched(recorded, {"algorithm.adv_estimator": estimator} | CHUNKS[2]).train()
    assert_equal_batches(whole.trained, chunked.trained)
    assert_same_weights(whole, chunked)


def test_recompute_is_exact_with_micro_batches_by_tokens(recorded: Run) -> None:
    by_tokens = {f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_max_token_len_per_gpu": 200}
    whole = Watched(recorded, by_tokens).train()
    chunked = Watched(recorded, by_tokens | CHUNKS[0]).train()
    assert_equal_batches(whole.trained, chunked.trained)
    assert_same_weights(whole, chunked)


PRE_STEP = {f"{OVERLAP}.granularity": "mini_batch", f"{OVERLAP}.overlap_scope": "pre_step"}


@pytest.mark.parametrize(
    ("multiplier", "common"),
    [(1, {}), (3, {}), (1, {"algorithm.rollout_correction.bypass_mode": True}), (1, EVERYTHING)],
)
def test_pre_step_takes_the_steps_of_the_whole_buffer_one_by_one(
    recorded: Run, whole_runs: WholeRuns, multiplier: int, common: dict
) -> None:
    """With grpo: the same mini-batches, with the old log-probs of the weights that the buffer began with."""
    whole = whole_runs(common)
    stepped = Watched(recorded, common | PRE_STEP | {f"{OVERLAP}.multiplier": multiplier}).train()
    assert_equal_batches(whole.trained, stepped.trained)
    assert_same_weights(whole, stepped)


def test_pre_step_without_the_weights_of_the_buffers_start_would_be_another_step(
    recorded: Run, whole_runs: WholeRuns
) -> None:
    whole = whole_runs({})
    forgetful = Watched(recorded, PRE_STEP)
    forgetful.actor.as_remembered = nullcontext  # type: ignore[method-assign,assignment]
    forgetful.train()
    old = [(a.old_log_probs, b.old_log_probs) for a, b in zip(whole.trained, forgetful.trained, strict=True)]
    assert any(a is not None and not torch.equal(a, b) for a, b in old)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("multiplier", [1, 2])
def test_accumulate_is_the_unchunked_step_to_a_millionth(recorded: Run, multiplier: int, mode: str) -> None:
    """Gradients of a buffer that is one mini-batch: after a step from fresh moments they are (1 - beta1) x gradient."""
    one_step = {f"{ACTOR}.ppo_mini_batch_size": None, f"{ACTOR}.grad_clip": 0.0, f"{ACTOR}.loss_agg_mode": mode}
    chunks = {f"{OVERLAP}.granularity": "micro_batch", f"{OVERLAP}.multiplier": multiplier}
    whole = Watched(recorded, one_step).train(steps=1)
    chunked = Watched(recorded, one_step | chunks | {f"{OVERLAP}.overlap_scope": "accumulate"}).train(steps=1)
    assert chunked.curve[0] == pytest.approx(whole.curve[0], rel=1e-6, abs=1e-9)
    largest = 0.0
    for name, moment in moments(whole.actor).items():
        torch.testing.assert_close(moments(chunked.actor)[name], moment, rtol=0, atol=1e-6)
        largest = max(largest, float(moment.abs().max()))
    assert largest > 1e-3


@pytest.mark.parametrize(("epochs", "chunks"), [(1, CHUNKS[1]), (1, CHUNKS[3]), (2, CHUNKS[2])])
def test_accumulate_follows_the_unchunked_run(recorded: Run, whole_runs: WholeRuns, epochs: int, chunks: dict) -> None:
    common = {f"{ACTOR}.ppo_epochs": epochs} if epochs > 1 else {}
    whole = whole_runs(common)
    accumulate = chunks | {f"{OVERLAP}.overlap_scope": "accumulate"}
    chunked = Watched(recorded, common | accumulate).train()
    for row, other in zip(whole.curve, chunked.curve, strict=True):
        assert other == pytest.approx(row, rel=1e-3, abs=1e-5)
    assert whole.actor.steps == chunked.actor.steps == 3 * 4 * epochs


def moments(actor: FSDP2Backend) -> dict[str, torch.Tensor]:
    return {name: value / 0.1 for name, value in actor._state().items() if name.startswith("exp_avg.")}


@contextmanager
def broken_off(parts: list, after: int) -> Iterator[Iterator]:
    """`parts`, of which no more than `after` come."""

    def some() -> Iterator:
        yield from parts[:after]
        raise InterruptedStepError(None)  # type: ignore[arg-type]

    with pytest.raises(InterruptedStepError):
        yield some()


@pytest.mark.parametrize("scope", ["recompute", "pre_step", "accumulate"])
def test_an_interrupted_step_leaves_no_trace(recorded: Run, scope: str) -> None:
    """Two whole buffers with an interrupted try of the second between them are two whole buffers."""
    settings = CHUNKS[0] | {f"{OVERLAP}.overlap_scope": scope}
    plain, disturbed = Watched(recorded, settings), Watched(recorded, settings)
    buffers = list(recorded_buffers(recorded.dir, plain.config))[:2]
    plan = chunk_plan(plain.config)
    for replay in (plain, disturbed):
        replay.train_buffer(recorded_parts(buffers[0], plan))
    with broken_off(recorded_parts(buffers[1], plan), after=2) as parts:
        disturbed.train_buffer(parts)
    stepped = disturbed.actor.steps
    disturbed.actor.go_back()
    assert (stepped, disturbed.actor.steps) == (4 if scope == "recompute" else 6, 4)
    for replay in (plain, disturbed):
        replay.train_buffer(recorded_parts(buffers[1], plan))
    assert_same_weights(plain, disturbed)


TWO_RANKS = {
    "pre_step": PRE_STEP,
    "accumulate": {f"{OVERLAP}.granularity": "micro_batch", f"{OVERLAP}.overlap_scope": "accumulate"},
    "recompute": {f"{OVERLAP}.granularity": "micro_batch", f"{OVERLAP}.overlap_scope": "recompute"},
}


@pytest.fixture(scope="module")
def two_ranks(recorded: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, float]]]:
    """The curve of each scope."""
    return replay_on(2, recorded.dir.path, TWO_RANKS, tmp_path_factory.mktemp("two_ranks"))


@pytest.mark.parametrize("scope", TWO_RANKS)
def test_two_ranks_follow_one(two_ranks: dict[str, list], whole_runs: WholeRuns, scope: str) -> None:
    assert len(two_ranks[scope]) == 3
    for row, other in zip(whole_runs({}).curve, two_ranks[scope], strict=True):
        assert other == pytest.approx(row, rel=2e-3, abs=2e-5)


# ---- real runs -----------------------------------------------------------------------------------------------


STEPS = 3


def slow_run(new_run: NewRun, directory: Path, **changes: object) -> Run:
    """A run whose buffers fill over seconds, 4 chunks each, until the file `slow` is gone."""
    (directory / "overlap_reward.py").write_text(REWARD)
    (directory / "slow").touch()
    return new_run(SETTINGS | PRE_STEP | {"trainer.total_training_steps": STEPS, "trainer.save_freq": 1} | changes)


def takes(run: Run) -> list[tuple[int, int, list[int]]]:
    """(incarnation, buffer, groups) of each chunk."""
    found, incarnation = [], -1
    for record in run.records():
        if isinstance(record, Start):
            incarnation = record.incarnation
        elif isinstance(record, Take):
            found.append((incarnation, record.buffer, record.groups))
    return found


def begun(run: Run, chunks: int = 2) -> tuple[int, list[int]] | None:
    """(buffer, groups) of the newest buffer if `chunks` chunks of it were cut, but not all, and a checkpoint is behind it."""
    records = run.records()
    version = next((r.version for r in reversed(records) if isinstance(r, Publish | Start)), 0)
    cut = [r.groups for r in of(records, Take) if r.buffer == version]
    return (version, [g for groups in cut for g in groups]) if version >= 1 and len(cut) == chunks else None


def test_training_begins_while_rollout_fills_the_buffer(new_run: NewRun, tmp_path: Path) -> None:
    run = slow_run(new_run, tmp_path)
    assert run.launch() == 0, run.story()
    report = run.audit()
    assert report.status == "completed" and report.fates["trained"] == STEPS * 8
    assert [(buffer, len(groups)) for _, buffer, groups in takes(run)] == [
        (b, 2) for b in range(STEPS) for _ in range(4)
    ]
    assert len(of(run.records(), Publish)) == STEPS, "the version advances once a buffer"
    rows = read_metrics(run.dir.metrics)
    assert [row["overlap/parts"] for row in rows] == [4] * STEPS
    assert all(0 < row["overlap/hidden_fraction"] < 1 for row in rows)
    # The engine's weights are those of the buffer's start, and so are the old log-probs of every chunk.
    assert all(abs(row["rollout_corr/kl"]) < 1e-3 for row in rows)
    run.nothing_left()


def test_a_trainer_killed_inside_a_buffer_trains_it_again_with_the_same_groups(new_run: NewRun, tmp_path: Path) -> None:
    run = slow_run(new_run, tmp_path)
    run.start()
    trainer = run.until(lambda: run.find("trainer-0"), "the trainer was there")
    buffer, groups = run.until(lambda: begun(run), "a buffer was begun")
    trainer.kill()
    assert run.wait() == 1
    (tmp_path / "slow").unlink()
    assert run.launch() == 0, run.story()
    again = [g for incarnation, b, cut in takes(run) if (incarnation, b) == (1, buffer) for g in cut]
    assert again[: len(groups)] == groups and len(again) == 8
    report = run.audit()
    assert report.status == "completed" and report.fates["trained"] == STEPS * 8
    assert run.steps() == list(range(1, STEPS + 1))


def test_a_coordinator_killed_inside_a_buffer_goes_on_with_the_next_chunk(new_run: NewRun, tmp_path: Path) -> None:
    run = slow_run(new_run, tmp_path)
    run.start()
    coordinator = run.until(lambda: run.find("coordinator"), "the coordinator was there")
    buffer, groups = run.until(lambda: begun(run), "a buffer was begun")
    coordinator.kill()
    (tmp_path / "slow").unlink()
    assert run.wait() == 0, run.story()
    chunks = [cut for incarnation, b, cut in takes(run) if b == buffer]
    assert [g for cut in chunks for g in cut][: len(groups)] == groups and [len(cut) for cut in chunks] == [2] * 4
    assert len(of(run.records(), Start)) == 1 and run.audit().fates["trained"] == STEPS * 8


@pytest.mark.slow
def test_ctrl_c_inside_a_buffer_saves_the_weights_from_before_it(new_run: NewRun, tmp_path: Path) -> None:
    run = slow_run(new_run, tmp_path, **{"trainer.save_freq": 0})
    run.start()
    buffer, groups = run.until(lambda: begun(run), "a buffer was begun")
    run.interrupt(signal.SIGINT)
    run.wait()
    (tmp_path / "slow").unlink()
    assert run.launch() == 0, run.story()
    starts = of(run.records(), Start)
    assert [s.version for s in starts] == [0, buffer], "the checkpoint of the drain is that of the last whole buffer"
    again = [g for incarnation, b, cut in takes(run) if (incarnation, b) == (1, buffer) for g in cut]
    assert again[: len(groups)] == groups
    assert run.audit().fates["trained"] == STEPS * 8
