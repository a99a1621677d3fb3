"""Recorded buffers give the same loss curve again: in the run itself, on one rank, on two ranks, with FSDP2 shards."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from replay_ranks import replay_on

from psrl.telemetry.metrics import read_metrics
from psrl.trainer.replay import CURVE

pytestmark = pytest.mark.process

TOLERANCE = 2e-4
"""Relative, between one and two ranks after 8 steps: additions in another order, amplified by Adam's division."""
RECORDED = ("trainer.keep_samples=True", "model.tiny.warm_start_steps=150")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("recorded") / "run"
    launch(run_dir, *RECORDED)
    return run_dir


def launch(run_dir: Path, *overrides: str) -> None:
    command = [
        sys.executable, "-m", "psrl.launch", "preset=laptop", f"run_dir={run_dir}", "psrl.staleness_buffer_entries=8", "psrl.rollout_n=4",
        "model.tiny.hidden_size=64", "model.tiny.num_layers=2", "trainer.total_training_steps=8", "trainer.logger=[console]", "trainer.report=False",
        "psrl.deployment.n_rollout_instances=1", *overrides,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def replayed(run_dir: Path, world_size: int, store: Path, *overrides: str) -> list[dict[str, float]]:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "psrl.trainer.replay", str(run_dir), *overrides],
            env=os.environ
            | {"RANK": str(rank), "WORLD_SIZE": str(world_size), "STORE": str(store), "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0] * world_size
    return [json.loads(line) for line in outputs[0].splitlines()]


def test_one_rank_repeats_the_run_and_two_ranks_agree_with_it(recorded: Path, tmp_path: Path) -> None:
    trained = [{name: row[name] for name in CURVE if name in row} for row in read_metrics(recorded / "metrics.jsonl")]
    one = replayed(recorded, 1, tmp_path / "one")
    two = replayed(recorded, 2, tmp_path / "two")
    assert len(one) == len(two) == len(trained) == 8
    for row, again, sharded in zip(trained, one, two, strict=True):
        assert again == pytest.approx(row, rel=1e-6, abs=1e-9)
        assert sharded == pytest.approx(row, rel=TOLERANCE, abs=2e-6)
    assert len({row["actor/pg_loss"] for row in one}) > 4  # a curve, not a constant


ACTOR = "train_actor_rollout_ref.actor"
HAS_MEGATRON = importlib.util.find_spec("megatron") is not None
MEGATRON = pytest.mark.skipif(not HAS_MEGATRON, reason="megatron-core is not installed")


SPREAD: dict[str, dict[str, object]] = {
    "hsdp-2x1": {f"{ACTOR}.fsdp_config.fsdp_size": 1},
    "ulysses-2": {f"{ACTOR}.ulysses_sequence_parallel_size": 2},
    "unpadded-2": {f"{ACTOR}.use_remove_padding": True},
    "megatron-tp2": {f"{ACTOR}.strategy": "megatron", f"{ACTOR}.megatron.tensor_model_parallel_size": 2},
    "megatron-unpadded-tp2": {
        f"{ACTOR}.strategy": "megatron",
        f"{ACTOR}.use_remove_padding": True,
        f"{ACTOR}.megatron.tensor_model_parallel_size": 2,
    },
}


@pytest.fixture(scope="module")
def two_ranks(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, float]]]:
    """The curve of each way to spread the model over two ranks."""
    variants = {name: spread for name, spread in SPREAD.items() if HAS_MEGATRON or "megatron" not in name}
    return replay_on(2, recorded, variants, tmp_path_factory.mktemp("two_ranks"))


@pytest.mark.parametrize(
    "spread", [pytest.param(name, marks=[MEGATRON] if "megatron" in name else []) for name in SPREAD]
)
def test_every_backend_gives_the_curve_of_the_run_on_two_ranks(
    recorded: Path, two_ranks: dict[str, list[dict[str, float]]], spread: str
) -> None:
    same_curve(recorded, two_ranks[spread])


@MEGATRON
def test_megatron_gives_the_curve_of_the_run_on_one_rank(recorded: Path, tmp_path: Path) -> None:
    same_curve(recorded, replayed(recorded, 1, tmp_path / "store", f"{ACTOR}.strategy=megatron"))


@pytest.mark.parametrize("budget", [16384, 64])
def test_without_padding_it_is_the_curve_of_the_run(recorded: Path, tmp_path: Path, budget: int) -> None:
    """In one micro-batch and in several."""
    changes = (f"{ACTOR}.use_remove_padding=True", f"{ACTOR}.ppo_max_token_len_per_gpu={budget}")
    same_curve(recorded, replayed(recorded, 1, tmp_path / "store", *changes))


def same_curve(recorded: Path, again: list[dict[str, float]]) -> None:
    trained = [{name: row[name] for name in CURVE if name in row} for row in read_metrics(recorded / "metrics.jsonl")]
    assert len(again) == 8
    for row, other in zip(trained, again, strict=True):
        assert other == pytest.approx(row, rel=TOLERANCE, abs=2e-6)


@pytest.mark.parametrize(
    ("ps_mode", "settings"),
    [
        ("nixl", ("psrl.weights.route=nixl",)),
        ("filesystem", ()),
        pytest.param(
            "auto", (f"{ACTOR}.strategy=megatron", f"{ACTOR}.megatron.tensor_model_parallel_size=2"), marks=MEGATRON
        ),
    ],
)
def test_two_trainer_ranks_train_end_to_end(
    recorded: Path, tmp_path: Path, ps_mode: str, settings: tuple[str, ...]
) -> None:
    run_dir = tmp_path / "run"
    launch(
        run_dir,
        f"model={recorded / 'model'}",
        "psrl.deployment.train_ngpus_per_node=2",
        f"psrl.ps_mode={ps_mode}",
        "trainer.save_freq=4",
        *settings,
    )
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "completed" and summary["steps"] == 8 and summary["max_staleness"] <= 1
    assert summary["transport"].split()[0] == {"auto": "shm"}.get(ps_mode, ps_mode)
    kl = [abs(row["rollout_corr/kl"]) for row in read_metrics(run_dir / "metrics.jsonl") if row["staleness/max"] == 0]
    assert kl and max(kl) < 1e-3  # what the instances sampled with is what the ranks trained: no stale or torn weights


@MEGATRON
def test_a_run_goes_on_with_another_backend_on_other_ranks(recorded: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(recorded, run_dir)  # a run may be moved
    launch(
        run_dir,
        *RECORDED,
        "trainer.total_training_steps=12",
        f"{ACTOR}.strategy=megatron",
        f"{ACTOR}.megatron.tensor_model_parallel_size=2",
        "psrl.deployment.train_ngpus_per_node=2",
    )
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "completed" and summary["steps"] == 12
    rows = read_metrics(run_dir / "metrics.jsonl")
    kl = [abs(row["rollout_corr/kl"]) for row in rows[8:] if row["staleness/max"] == 0]
    assert len(rows) == 12 and kl and max(kl) < 1e-3
