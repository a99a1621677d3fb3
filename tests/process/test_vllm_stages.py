"""A real vLLM engine of two pipeline stages: each worker has some layers, and decodes with the weights that are its own."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator

import pytest
import torch
from test_engine_conformance import (
    EOS,
    HEADS,
    SIZES,
    Outputs,
    generated,
    make_model,
    prompt,
    request,
    run,
    run_until,
    weights_for,
)
from transformers import Qwen3Config
from weight_world import DEADLINE_S, World

from psrl.models.load import checkpoint_specs
from psrl.rollout.engines.base import Engine
from psrl.rollout.worker_puller import StagedInWorkers, WorkerPuller
from psrl.trainer.backends.base import WeightShard
from psrl.weights.channel import nixl_available
from psrl.weights.channel.base import PullError
from psrl.weights.channel.select import RECEIVER
from psrl.weights.split import Split

pytestmark = [
    pytest.mark.process,
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]

CONFIG = Qwen3Config(**SIZES | {"head_dim": 32, "num_hidden_layers": 3}, **HEADS, tie_word_embeddings=True)
KV_TOKENS = 128


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    from psrl.rollout.engines.vllm_engine import VllmEngine

    directory = tmp_path_factory.mktemp("model")
    make_model(CONFIG, seed=3).save_pretrained(directory)
    made = VllmEngine(
        directory,
        dtype="float32",
        specs=checkpoint_specs(directory, "float32"),
        eos_token_ids=(EOS,),
        max_num_seqs=8,
        max_model_len=64,
        kv_cache_tokens=KV_TOKENS,
        options={
            "pipeline_parallel_size": 2,
            "distributed_executor_backend": "mp",
            "enforce_eager": True,
            "max_num_batched_tokens": 160,
            "block_size": 32,
            "num_gpu_blocks_override": KV_TOKENS // 32 + 1,
            "gpu_memory_utilization": 0.3,
        },
    )
    yield made
    made.close()


def test_preemptions_are_counted_though_samples_take_turns(engine: Engine) -> None:
    model = make_model(CONFIG, seed=3)
    engine.update_weights(0, weights_for(engine, model))
    for group in range(2):  # in one block of the cache each: nobody gives way
        engine.submit(request(group, prompt(9, group), [20]))
    run(engine)
    assert engine.stats().preemptions == 0
    outputs: Outputs = {}
    for group in range(2):
        engine.submit(request(group, prompt(9, group), [50]))
    run_until(engine, outputs, 10)
    # More than there is room for, however late they come; one behind the other, so they are in different steps from now on.
    for group in range(2, 5):
        engine.submit(request(group, prompt(9, group), [50]))
        run_until(engine, outputs, 12 + group)
    run(engine, outputs)
    assert engine.stats().preemptions > 0
    for group in range(5):
        assert outputs[group, 0].tokens == generated(model, prompt(9, group), 50)


class Trainer:
    """One rank that publishes, and the workers that pull from it."""

    def __init__(self, engine: Engine, world: World) -> None:
        from psrl.weights.channel.nixl_publisher import NixlPublisher

        self.publisher = NixlPublisher(world.run_dir, 0, 1, torch.float32, split=Split(stages=2))
        self.publisher.serve()
        self._puller = WorkerPuller(engine, RECEIVER, {"run_dir": str(world.run_dir.path)})  # type: ignore[arg-type]

    def pulled(self, version: int, weights: list[tuple[str, torch.Tensor]]) -> StagedInWorkers:
        self.publisher.publish(version, 0, [WeightShard(name, tuple(full.shape), 0, full) for name, full in weights])
        return self._puller.pull(version, 0, time.monotonic() + DEADLINE_S)


@pytest.fixture
def trainer(engine: Engine, world: World) -> Iterator[Trainer]:
    if (why := nixl_available()) is not None:
        pytest.skip(f"nixl: {why}")
    made = Trainer(engine, world)
    yield made
    made.publisher.close()


def test_each_stage_pulls_what_is_its_own(engine: Engine, trainer: Trainer) -> None:
    for version, seed in ((11, 5), (12, 6)):
        model = make_model(CONFIG, seed)
        weights = weights_for(engine, model)
        staged = trainer.pulled(version, weights)
        tied = dict(weights)["model.embed_tokens.weight"].nbytes  # the last stage's output head
        assert staged.nbytes == sum(full.nbytes for _, full in weights) + tied
        engine.update_weights(version, staged.tensors())
        engine.submit(request(0, prompt(9), [12]))
        assert run(engine)[0, 0].tokens == generated(model, prompt(9), 12)


def test_what_no_stage_has_ends_the_pull_for_good(engine: Engine, trainer: Trainer) -> None:
    weights = [*weights_for(engine, make_model(CONFIG, 5)), ("model.layers.2.mlp.typo_proj.weight", torch.zeros(2, 2))]
    with pytest.raises(PullError, match=r"unexpected model\.layers\.2\.mlp\.typo_proj\.weight") as caught:
        trainer.pulled(21, weights)
    assert not caught.value.retryable
