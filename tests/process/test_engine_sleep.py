"""The embedded engine asleep: its memory is gone, and what it decodes afterwards is what it decoded before."""

from __future__ import annotations

import pytest
import torch

from psrl.config.schema import TinyModelConfig
from psrl.models.tiny import random_tiny
from psrl.protocol.generation import FINISH_REFUSED, GenerateRequest, SampleRequest, SamplingParams
from psrl.rollout.engines.torch_engine import TorchEngine
from psrl.rollout.engines.weight_set import weight_tensors

pytestmark = pytest.mark.process


def request(group: int) -> GenerateRequest:
    return GenerateRequest(
        group=group,
        min_version=0,
        incarnation=0,
        prompt_ids=(5, 6, 7),
        sampling=SamplingParams(temperature=0.0, ignore_eos=True),
        samples=(SampleRequest(sample=0, max_new_tokens=12, seed=1),),
    )


def decoded(engine: TorchEngine, group: int) -> list[int]:
    engine.submit(request(group))
    tokens: list[int] = []
    while engine.has_work():
        tokens += [token for chunk in engine.step() for token in chunk.token_ids]
    return tokens


def test_it_sleeps_without_memory_and_wakes_as_it_was() -> None:
    model = random_tiny(TinyModelConfig(hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1), 64, 64)
    weights = [(name, tensor.clone()) for name, tensor in weight_tensors(model).items()]
    engine = TorchEngine(model, eos_token_ids=(2,), max_num_seqs=4, max_model_len=64, kv_cache_tokens=256)
    engine.update_weights(0, weights)
    specs, before = dict(engine.weight_specs()), decoded(engine, 0)
    engine.submit(request(1))
    with pytest.raises(RuntimeError, match="abort them first"):
        engine.sleep()
    engine.abort()
    engine.sleep()
    assert engine.version == -1 and engine.weight_specs() == specs
    assert sum(tensor.untyped_storage().nbytes() for tensor in weight_tensors(model).values()) == 0
    engine.submit(request(2))
    assert [chunk.finish for chunk in engine.step()] == [FINISH_REFUSED]
    engine.wake()
    engine.update_weights(1, weights)
    assert len(before) == 12 and decoded(engine, 3) == before
    assert torch.equal(dict(weights)["model.norm.weight"], weight_tensors(model)["model.norm.weight"])
