"""Checkpoints that are written while training goes on: what they hold, what a kill leaves, who can go on from them."""

from __future__ import annotations

import importlib.util
import signal
import threading

import pytest
from backend_launch import launch
from fsdp2_ranks import make_actor, make_model, settings, train_step
from torch.distributed.checkpoint import FileSystemWriter

from psrl.trainer import checkpoints
from psrl.trainer.backends.core import BackendCore
from psrl.trainer.backends.make import make_backend
from psrl.trainer.saving import Saver

pytestmark = pytest.mark.process

STEPS = 4
MEGATRON = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")
TP2 = {"strategy": "megatron", "megatron": {"tensor_model_parallel_size": 2}}


def backend(seed: int = 0, **actor) -> BackendCore:
    return make_backend(make_model(seed=seed), make_actor(**settings({"actor": actor})), temperature=0.8)


@pytest.fixture(scope="module")
def curve() -> list[dict[str, float]]:
    """The loss curve of one undisturbed rank."""
    one = backend()
    return [train_step(one, step) for step in range(STEPS)]


@pytest.fixture
def slow_disk(monkeypatch) -> threading.Event:
    """No file is written before the event is set."""
    released = threading.Event()
    write = FileSystemWriter.write_data

    def later(self, plan, planner):
        assert released.wait(60)
        return write(self, plan, planner)

    monkeypatch.setattr(FileSystemWriter, "write_data", later)
    return released


@pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("megatron", marks=MEGATRON)])
def test_it_holds_the_state_of_its_beginning_though_training_went_on(tmp_path, slow_disk, curve, strategy):
    trained = backend(strategy=strategy)
    saver = Saver(trained, tmp_path, 0, lambda: None, background=True)
    train_step(trained, 0)
    saver.begin(1)
    assert saver.finished() is None
    with pytest.raises(RuntimeError, match=r"checkpoint of 2 cannot begin: that of 1 is still being written"):
        saver.begin(2)
    for step in (1, 2):
        assert train_step(trained, step) == pytest.approx(curve[step], rel=2e-4, abs=2e-6)
    slow_disk.set()
    saved = saver.wait()
    assert saved is not None and saved.version == 1 and saved.seconds > 0
    assert saver.wait() is None and saver.finished() is None
    checkpoints.finish(checkpoints.step_directory(tmp_path, 1), {})
    again = backend(seed=1, strategy=strategy)
    again.load(tmp_path / "step_1")
    for step in range(1, STEPS):
        assert train_step(again, step) == pytest.approx(curve[step], rel=2e-4, abs=2e-6)


def test_without_background_it_is_written_when_begin_returns(tmp_path):
    trained = backend()
    saver = Saver(trained, tmp_path, 0, lambda: None, background=False)
    saver.begin(1)
    saved = saver.finished()
    assert saved is not None and saved.version == saver.version == 1
    assert list((tmp_path / "step_1").glob("*.distcp"))


def test_a_disk_that_fails_is_an_error_with_the_name_of_the_checkpoint(tmp_path, monkeypatch):
    def full(self, plan, planner):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FileSystemWriter, "write_data", full)
    saver = Saver(backend(), tmp_path, 0, lambda: None, background=True)
    saver.begin(1)
    with pytest.raises(RuntimeError, match=r"cannot write the checkpoint .*step_1(.|\n)*No space left"):
        saver.wait()
    assert checkpoints.newest_complete(tmp_path)[0] is None


@pytest.mark.parametrize(
    ("ranks", "actor"),
    [pytest.param(2, {}, id="fsdp2-2"), pytest.param(2, TP2, id="megatron-tp2", marks=MEGATRON)],
)
def test_killed_while_writing_the_older_one_is_used_on_any_number_of_ranks(tmp_path, curve, ranks, actor):
    launch(
        tmp_path, ranks, expect=-signal.SIGKILL, steps=STEPS, save_at=[1, 3], background=True, killed=True, actor=actor
    )
    root = tmp_path / "checkpoints"
    found, skipped = checkpoints.newest_complete(root)
    assert found == root / "step_1"
    assert [name for name, _ in skipped] == ["step_3"]

    one = backend(seed=1)
    one.load(found)
    rows = [train_step(one, step) for step in range(1, STEPS)]
    two = launch(tmp_path, 2, steps=STEPS, save_at=[3], background=True, seed=1, cap=15, actor=actor)
    for ours, theirs, expected in zip(rows, two, curve[1:], strict=True):
        assert ours == pytest.approx(expected, rel=2e-4, abs=2e-6)
        assert theirs == pytest.approx(expected, rel=2e-4, abs=2e-6)
    assert checkpoints.newest_complete(root) == (root / "step_3", [])
