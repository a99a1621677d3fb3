"""The parts of the vLLM engine that need no vLLM: what it is told, what is made of its figures, memory that is shared."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from transformers import Qwen3Config

from psrl.config.checks import check
from psrl.config.engine_checks import FIXED_BY_PSRL, HAS_A_KEY, check_engine, check_engine_model
from psrl.config.errors import ConfigError
from psrl.config.schema import Config
from psrl.rollout.engines.base import InWorkers
from psrl.rollout.engines.shared_tensors import SharedTensors, map_tensors
from psrl.rollout.engines.vllm_arguments import (
    NO_CHOICE,
    WeightBytes,
    draw_seed,
    engine_arguments,
    engine_seed,
    kv_bytes_a_token,
    share_without_arrivals,
    user_options,
    weight_bytes,
)
from psrl.rollout.engines.vllm_figures import EngineFigures
from psrl.rollout.engines.vllm_worker import PsrlWorker, loads_in_place
from psrl.rollout.worker_puller import WorkerPuller
from psrl.weights.channel.base import PullError

pytestmark = pytest.mark.unit


def config(**rollout: object) -> Config:
    found = Config()
    found.data.task, found.trainer.total_training_steps, found.psrl.rollout_n = "digit_sum", 1, 2
    found.gen_actor_rollout_ref.rollout.name = "vllm"
    for name, value in rollout.items():
        setattr(found.gen_actor_rollout_ref.rollout, name, value)
    return found


# ---- what it is told ---------------------------------------------------------------------------------------------


def test_a_users_arguments_win_over_the_keys_but_not_over_what_psrl_needs() -> None:
    gen = config(tensor_model_parallel_size=2, max_num_batched_tokens=4096).gen_actor_rollout_ref.rollout
    gen.engine_kwargs.vllm = {"swap_space": 1, "enforce_eager": True}
    arguments = engine_arguments(
        Path("/m"),
        dtype="bfloat16",
        max_num_seqs=8,
        max_model_len=64,
        kv_cache_bytes=None,
        options=user_options(gen) | {"load_format": "auto"},
    )
    assert (arguments["swap_space"], arguments["enforce_eager"], arguments["load_format"]) == (1, True, "dummy")
    assert (arguments["tensor_parallel_size"], arguments["max_num_batched_tokens"]) == (2, 4096)
    assert "kv_cache_memory_bytes" not in arguments
    assert set(FIXED_BY_PSRL) == set(NO_CHOICE)


def test_weights_that_arrive_have_their_part_of_a_gpu() -> None:
    gib = 2**30
    assert share_without_arrivals(0.9, 100 * gib, WeightBytes(20 * gib, 20 * gib)) == pytest.approx(0.7)
    assert share_without_arrivals(0.45, 100 * gib, WeightBytes(20 * gib, 20 * gib)) == pytest.approx(0.25)
    assert share_without_arrivals(0.9, 100 * gib, WeightBytes(10 * gib, 70 * gib)) == pytest.approx(0.2)
    said = r"gpu_memory_utilization=0.4 of 100.0 GiB is too little: each GPU must hold 20.0 GiB .* 30.0 GiB that arrive"
    with pytest.raises(ValueError, match=said):
        share_without_arrivals(0.4, 100 * gib, WeightBytes(20 * gib, 30 * gib))


def test_slices_arrive_where_they_can_be_written_in_place_and_whole_tensors_elsewhere() -> None:
    dense = {"model.layers.0.mlp.up_proj.weight": ((8, 4), torch.bfloat16), "lm_head.weight": ((16, 4), torch.bfloat16)}
    ranks = {"tensor_parallel_size": 4, "pipeline_parallel_size": 2}
    assert weight_bytes(dense, {}) == WeightBytes(192, 192)
    assert weight_bytes(dense, ranks) == WeightBytes(24, 24)
    assert weight_bytes(dense, ranks | {"quantization": "fp8"}) == WeightBytes(24, 96)
    experts = dense | {"model.layers.0.mlp.experts.down_proj": ((2, 4, 4), torch.bfloat16)}
    assert weight_bytes(experts, ranks) == WeightBytes(32, 128)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            lambda c: setattr(c.gen_actor_rollout_ref.rollout, "tensor_model_parallel_size", 2),
            "needs 2 GPUs an instance",
        ),
        (
            lambda c: setattr(c.gen_actor_rollout_ref.rollout, "gpu_memory_utilization", 1.5),
            "gpu_memory_utilization=1.5",
        ),
        (lambda c: setattr(c.gen_actor_rollout_ref.rollout, "top_p", 0.9), "top_p=0.9 at 1"),
        (
            lambda c: c.gen_actor_rollout_ref.rollout.engine_kwargs.vllm.update(load_format="auto"),
            "psrl sets it itself",
        ),
        (
            lambda c: c.gen_actor_rollout_ref.rollout.engine_kwargs.vllm.update(dtype="half"),
            "set gen_actor_rollout_ref",
        ),
        (lambda c: c.gen_actor_rollout_ref.rollout.engine_kwargs.vllm.update(seed=3), "set seed instead"),
        (lambda c: setattr(c.gen_actor_rollout_ref.rollout, "name", "torch"), "enforce_eager=True has no meaning with"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(spoil: Callable[[Config], None], said: str) -> None:
    wanted = config(enforce_eager=True)
    check_engine(wanted, vllm_installed=True)
    spoil(wanted)
    with pytest.raises(ConfigError, match=said):
        check_engine(wanted, vllm_installed=True)


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        (
            {"tensor_model_parallel_size": 6},
            r"tensor_model_parallel_size=6 does not divide the model's attention heads \(16\)",
        ),
        ({"pipeline_model_parallel_size": 29}, r"pipeline_model_parallel_size=29 is more than the model's 28 layers"),
    ],
)
def test_a_model_that_an_engines_gpus_cannot_share_is_refused(parallel: dict[str, int], said: str) -> None:
    model = {"num_attention_heads": 16, "num_hidden_layers": 28}
    check_engine_model(config(tensor_model_parallel_size=16, pipeline_model_parallel_size=28), model)
    check_engine_model(config(name="torch", **parallel), {})
    with pytest.raises(ConfigError, match=said):
        check_engine_model(config(**parallel), model)


def test_experts_are_loaded_layer_by_layer_everywhere() -> None:
    dense, sparse = torch.nn.Linear(2, 2), torch.nn.Module()
    sparse.register_parameter("w13_weight", torch.nn.Parameter(torch.zeros(2, 4, 2)))
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert loads_in_place(torch.nn.Sequential(dense), gpu, None)
    assert not loads_in_place(torch.nn.Sequential(dense), cpu, None)
    assert not loads_in_place(torch.nn.Sequential(dense), gpu, "fp8")
    assert not loads_in_place(torch.nn.Sequential(dense, sparse), gpu, None)


def test_without_vllm_the_message_says_how_to_get_it() -> None:
    with pytest.raises(ConfigError, match=r"the vllm package is not installed: `pip install 'psrl\[vllm\]'`"):
        check_engine(config(), vllm_installed=False)
    check(config(), only_planned=True)
    assert not set(HAS_A_KEY) & set(FIXED_BY_PSRL)


@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_routing_by_what_is_cached_needs_engines_that_cache(engine: str) -> None:
    found = config(name=engine, enable_prefix_caching=False)
    check(found, only_planned=True)
    found.psrl.rollout_coordination.routing_strategy.method = "cache_aware"
    with pytest.raises(ConfigError, match=r"method=cache_aware .*enable_prefix_caching=False: set it to True"):
        check(found, only_planned=True)


def test_no_two_starts_of_engines_draw_alike() -> None:
    starts = [
        (seed, f"instance-{i}", start) for seed in range(3) for i in range(10) for start in ("a 17", "a 18", "b 17")
    ]
    seeds = {engine_seed(*each) for each in starts}
    assert len(seeds) == len(starts) and all(0 <= seed < 2**32 for seed in seeds)
    assert engine_seed(*starts[0]) == engine_seed(*starts[0])


def test_the_cache_of_one_token() -> None:
    smollm2 = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}
    assert kv_bytes_a_token(smollm2, 4) == 2 * 30 * 3 * 64 * 4


def test_each_place_of_a_continuation_has_draws_of_its_own() -> None:
    seeds = {draw_seed(seed, prefix) for seed in (0, 1, 2, 2**63, -1) for prefix in range(200)}
    assert len(seeds) == 1000 and all(0 <= seed < 2**63 for seed in seeds)
    assert draw_seed(5, 3) == draw_seed(5, 3)


# ---- its figures -------------------------------------------------------------------------------------------------


def figures_after(*steps: tuple[str, str, int], turns: int = 1) -> EngineFigures:
    """Each step: who got a token, who ended with it, how many wait."""
    figures = EngineFigures(kv_capacity_tokens=100, turns=turns)
    figures.submitted(3)
    for made, ended, waiting in steps:
        figures.step(made=set(made), ended=set(ended), waiting=waiting, kv_usage=0.5)
    return figures


@pytest.mark.parametrize(
    ("steps", "turns", "preemptions"),
    [
        ([("ab", "", 1), ("abc", "", 0)], 1, 0),
        ([("abc", "", 0), ("ab", "", 1), ("a", "", 2), ("abc", "", 0)], 1, 2),
        ([("abc", "c", 0), ("ab", "", 0)], 1, 0),
        ([("ab", "", 1), ("c", "", 0), ("ab", "", 0)], 2, 0),
        ([("a", "", 0), ("b", "", 0), ("c", "", 0), ("a", "", 0), ("b", "", 0), ("c", "", 0)], 3, 0),
        ([("ab", "", 0), ("c", "", 0), ("a", "", 1)], 2, 1),  # b's turn was with a
        ([("ab", "", 0), ("c", "", 0), ("a", "", 1), ("c", "", 1), ("a", "", 1)], 2, 1),  # counted once
        ([("ab", "", 0), ("c", "", 0), ("a", "", 1), ("cb", "", 0), ("a", "", 0), ("c", "", 1)], 2, 2),
        ([("ab", "b", 0), ("c", "", 0), ("a", "", 1)], 2, 0),
    ],
)
def test_who_had_a_token_and_is_left_out_was_preempted(
    steps: list[tuple[str, str, int]], turns: int, preemptions: int
) -> None:
    assert figures_after(*steps, turns=turns).stats(samples=3).preemptions == preemptions


def test_who_was_taken_away_or_starts_again_was_not_preempted() -> None:
    figures = figures_after(("abc", "", 0))
    figures.forget("b")
    figures.step(made=set("ac"), ended=(), waiting=0, kv_usage=0.5)
    figures.all_start_again()
    figures.step(made=set("a"), ended=(), waiting=1, kv_usage=0.5)
    assert figures.stats(samples=2).preemptions == 0


def test_gauges_follow_what_is_known_between_two_reports() -> None:
    figures = figures_after(("ab", "", 1))
    figures.submitted(2)
    assert (figures.stats(5).running, figures.stats(5).waiting) == (2, 3)
    figures.left(waiting=3)
    assert (figures.stats(2).running, figures.stats(2).waiting, figures.stats(2).kv_tokens) == (2, 0, 50)
    assert (figures.stats(0).running, figures.stats(0).waiting, figures.stats(0).kv_usage) == (0, 0, 0.0)


def test_busy_time_is_the_time_with_work() -> None:
    figures = EngineFigures(kv_capacity_tokens=1)
    for working, now_s in ((False, 0.0), (True, 10.0), (True, 11.0), (False, 13.0), (False, 20.0), (True, 30.0)):
        figures.busy(working, now_s)
    assert figures.stats(0).busy_s == 3.0


# ---- shared memory -----------------------------------------------------------------------------------------------


def test_memory_is_taken_when_something_first_comes_that_way() -> None:
    shared = SharedTensors("psrl-test", {"a": ((300, 1000), torch.float32)})
    taken = [Path(shared.path).stat().st_blocks * 512]
    shared.fill([("a", torch.ones(300, 1000))])
    taken.append(Path(shared.path).stat().st_blocks * 512)
    shared.close()
    assert taken[0] == 0 and taken[1] >= 4 * 300 * 1000


def test_what_one_process_fills_another_sees_and_nothing_is_left_behind() -> None:
    specs = {"a": ((3, 5), torch.float32), "b": ((7,), torch.bfloat16), "c": ((), torch.float32)}
    given = {name: torch.randn(shape).to(dtype) for name, (shape, dtype) in specs.items()}
    shared = SharedTensors("psrl-test", specs)
    _, mapped = map_tensors(shared.path, shared.layout)
    there = dict(mapped)
    shared.fill(given.items())
    shared.close()
    assert there.keys() == given.keys() and all(torch.equal(there[name], given[name]) for name in given)


# ---- weights that workers pull themselves ------------------------------------------------------------------------


class Pulled(msgspec.Struct):
    nbytes: int
    transport: str


class PullFailed(msgspec.Struct):
    cause: str
    retryable: bool


class Receiver:
    """Has its version at the second look; version 9 never comes."""

    def __init__(
        self, *, tensors: dict, fused: bool, rank: int, elsewhere: frozenset[str], device: torch.device, place: str
    ) -> None:
        self.specs, self.rank, self.place, self.looks = tensors, rank, place, 0

    def start(self, version: int, incarnation: int, timeout_s: float) -> None:
        self.version, self.looks = version, 0

    def poll(self) -> Pulled | PullFailed | None:
        self.looks += 1
        if self.looks < 2 + self.rank:
            return None
        if self.version == 9 and self.rank == 1:
            return PullFailed(cause="no such version", retryable=False)
        return Pulled(nbytes=4 * len(self.specs), transport="test") if self.looks == 2 + self.rank else None

    def staged_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, torch.full(shape, float(self.version))) for name, (shape, _) in self.specs.items())

    def switched(self) -> None:
        pass


class Runner:
    """A model runner on a CPU, whose head has a packed copy of the embedding that only its own processing renews."""

    def __init__(self) -> None:
        self.model = torch.nn.Module()
        self.model.embedding, self.model.head = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
        self.model.head.weight = self.model.embedding.weight
        for layer in (self.model.embedding, self.model.head):
            layer.quant_method = self

    def get_model(self) -> torch.nn.Module:
        return self.model

    def reload_weights(self, weights_iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights_iterator:
            self.model.embedding.weight.data.copy_(tensor)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.packed = layer.weight.item()


class TwoWorkers:
    """Of an engine for the model in `directory`."""

    def __init__(self, directory: Path) -> None:
        Qwen3Config(num_hidden_layers=1).save_pretrained(directory)
        self.shared = SharedTensors("psrl-test", {"w": ((1, 1), torch.float32)})
        self.workers = [PsrlWorker(), PsrlWorker()]
        for rank, worker in enumerate(self.workers):
            worker.model_runner, worker.device, worker.rank = Runner(), torch.device("cpu"), rank
            worker.model_config = SimpleNamespace(quantization=None, model=str(directory))
            worker.parallel_config = SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=1)
        self.call_workers("psrl_prepare", self.shared.path, self.shared.layout, timeout_s=1)

    def call_workers(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        return [getattr(worker, method)(*args) for worker in self.workers]

    def heads(self) -> list[float]:
        return [worker.model_runner.model.head.packed for worker in self.workers]


def test_workers_load_what_is_shared_and_what_they_have_pulled_themselves(tmp_path: Path) -> None:
    engine = TwoWorkers(tmp_path)
    engine.shared.fill([("w", torch.full((1, 1), 7.0))])
    engine.call_workers("psrl_switch", False, timeout_s=1)
    assert engine.heads() == [7.0, 7.0]
    puller = WorkerPuller(engine, f"{__name__}:Receiver", {"place": "here"})
    staged = puller.pull(3, 0, deadline_s=time.monotonic() + 10)
    assert (staged.version, staged.nbytes, staged.tensors(), puller.transport) == (3, 8, InWorkers(3), "test")
    assert engine.heads() == [7.0, 7.0], "a pull alone changes nothing"
    engine.call_workers("psrl_switch", True, timeout_s=1)
    assert engine.heads() == [3.0, 3.0]


def test_a_pull_fails_with_one_of_its_workers_or_when_it_is_cancelled(tmp_path: Path) -> None:
    puller = WorkerPuller(TwoWorkers(tmp_path), f"{__name__}:Receiver", {"place": "here"})
    with pytest.raises(PullError, match="no such version") as failed:
        puller.pull(9, 0, deadline_s=time.monotonic() + 10)
    assert not failed.value.retryable
    puller.cancel()
    with pytest.raises(PullError, match="cancelled"):
        puller.pull(4, 0, deadline_s=time.monotonic() + 10)
