"""Pulls of an engine that is cut into pipeline stages: each stage gets its own tensors, bit for bit, and reads no others."""

from __future__ import annotations

from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_weight_plan import arrive, cut
from torch import nn

from psrl.config.schema import Config
from psrl.protocol.weights import ShardLayout
from psrl.rollout.engines.vllm_worker import PsrlWorker, held_elsewhere
from psrl.weights.channel.select import engine_split
from psrl.weights.engine_layout import fused_place, stage_place
from psrl.weights.plan import PullPlan, plan_pull, same_place
from psrl.weights.split import Split

pytestmark = pytest.mark.unit

F32 = torch.float32
KV_HEADS, HIDDEN, VOCABULARY = 2, 6, 70
LAYERS = 3
DEALT = {1: [range(3)], 2: [range(2), range(2, 3)], 3: [range(1), range(1, 2), range(2, 3)]}
"""Stages -> the layers of each."""


def published(tied: bool) -> dict[str, torch.Tensor]:
    """A small dense decoder under Hugging Face's names; no number occurs twice."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        attention, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
        shapes |= {
            f"model.layers.{layer}.input_layernorm.weight": (HIDDEN,),
            f"{attention}q_proj.weight": (8, HIDDEN), f"{attention}k_proj.weight": (4, HIDDEN),
            f"{attention}v_proj.weight": (4, HIDDEN), f"{attention}o_proj.weight": (HIDDEN, 8),
            f"{mlp}gate_proj.weight": (10, HIDDEN), f"{mlp}up_proj.weight": (10, HIDDEN),
            f"{mlp}down_proj.weight": (HIDDEN, 10),
        }  # fmt: skip
    shapes["model.norm.weight"] = (HIDDEN,)
    if not tied:
        shapes["lm_head.weight"] = (VOCABULARY, HIDDEN)
    made, start = {}, 0.0
    for name, shape in shapes.items():
        made[name] = torch.arange(start, start + prod(shape)).reshape(shape)
        start += prod(shape)
    return made


class PPMissingLayer(nn.Identity):
    """What vLLM puts in the place of a module that another stage has; psrl goes by the name."""


class Stage:
    """Rank `rank` of `ways` of stage `number` of `stages`, built as vLLM builds it."""

    def __init__(self, tied: bool, stages: int, number: int, ways: int = 1, rank: int = 0) -> None:
        self.layers, self.ways, self.rank = DEALT[stages][number], ways, rank
        first, last = number == 0, number == stages - 1
        self.names = list(published(tied))
        self.model = nn.Module()
        self.model.model = nn.Module()
        self.model.model.embed_tokens = nn.Module() if first or (tied and last) else PPMissingLayer()
        here = [nn.Module() if layer in self.layers else PPMissingLayer() for layer in range(LAYERS)]
        self.model.model.layers = nn.ModuleList(here)
        self.model.model.norm = nn.Module() if last else PPMissingLayer()
        self.model.lm_head = nn.Module() if last else PPMissingLayer()
        self.wanted = self._wanted({name: tensor.numpy() for name, tensor in published(tied).items()}, first, last)
        for name, array in self.wanted.items():
            _set(self.model, name, nn.Parameter(torch.full(array.shape, -1.0), requires_grad=False))
        if tied and last:
            self.model.lm_head.weight = self.model.model.embed_tokens.weight

    def _wanted(self, full: dict[str, np.ndarray], first: bool, last: bool) -> dict[str, np.ndarray]:
        """By numpy and nothing else; -1 where nothing is published."""
        ways, rank, tied = self.ways, self.rank, "lm_head.weight" not in full
        pad = lambda x: np.pad(x, ((0, 128 - VOCABULARY), (0, 0)), constant_values=-1)  # noqa: E731
        rows = lambda x: np.split(x, ways)[rank]  # noqa: E731
        found = {"model.embed_tokens.weight": rows(pad(full["model.embed_tokens.weight"]))}
        found = found if first or (tied and last) else {}
        for layer in (f"model.layers.{layer}." for layer in self.layers):
            found[f"{layer}input_layernorm.weight"] = full[f"{layer}input_layernorm.weight"]
            for name in (f"{layer}self_attn.o_proj.weight", f"{layer}mlp.down_proj.weight"):
                found[name] = np.split(full[name], ways, axis=1)[rank]
            for module, fused, parts in (("self_attn", "qkv", "qkv"), ("mlp", "gate_up", ("gate", "up"))):
                together = [rows(full[f"{layer}{module}.{part}_proj.weight"]) for part in parts]
                found[f"{layer}{module}.{fused}_proj.weight"] = np.concatenate(together)
        if last:
            found["model.norm.weight"] = full["model.norm.weight"]
        if last and not tied:
            found["lm_head.weight"] = rows(pad(full["lm_head.weight"]))
        return found

    def plan(self, layouts: list[ShardLayout]) -> PullPlan:
        """As the worker and its receiver plan."""
        specs = {name: (tuple(each.shape), each.dtype) for name, each in self.model.named_parameters()}
        place = fused_place(Split(self.ways, KV_HEADS), self.rank)
        return plan_pull(layouts, specs, stage_place(place, held_elsewhere(self.model, self.names)))


def _set(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    *path, last = name.split(".")
    for step in path:
        if not hasattr(model, step):
            model.add_module(step, nn.Module())
        model = getattr(model, step)
    model.register_parameter(last, parameter)


def laid_out(full: dict[str, torch.Tensor], split: Split, num_ranks: int = 2):
    """Layouts and payloads of trainer ranks that hold about as many rows each."""
    bounds = {
        name: [rank * tensor.shape[0] // num_ranks for rank in range(num_ranks + 1)] for name, tensor in full.items()
    }
    layouts, payloads, _ = cut(full, bounds, F32, split)
    return layouts, payloads


def test_without_the_stages_facts_a_name_of_another_stage_is_unexpected() -> None:
    layouts, _ = laid_out(published(tied=True), Split())
    stage = Stage(True, 2, 0)
    specs = {name: (tuple(each.shape), each.dtype) for name, each in stage.model.named_parameters()}
    with pytest.raises(ValueError, match=r"unexpected model\.layers\.2\.input_layernorm"):
        plan_pull(layouts, specs, fused_place(Split(1, KV_HEADS), 0))


CASES = [(stages, tied, ways) for stages in DEALT for tied in (True, False) for ways in (1, 2)]


@pytest.mark.parametrize(("stages", "tied", "ways"), CASES)
def test_each_stage_gets_its_own_rows_and_reads_nothing_else(stages: int, tied: bool, ways: int) -> None:
    full = published(tied)
    layouts, payloads = laid_out(full, Split(ways, KV_HEADS, stages))
    read: set[str] = set()
    for stage in (Stage(tied, stages, number, ways, rank) for number in range(stages) for rank in range(ways)):
        plan = stage.plan(layouts)
        parameters = dict(stage.model.named_parameters())
        arrive(plan, payloads).copies(parameters).run()
        assert parameters.keys() == stage.wanted.keys()
        for name, wanted in stage.wanted.items():
            assert np.array_equal(parameters[name].numpy(), wanted), name
        entries = [
            entry
            for layout, reads in zip(layouts, plan.reads, strict=True)
            for entry in layout.entries
            if any(one.source <= entry.offset < one.source + one.nbytes for one in reads) and entry.nbytes
        ]
        here = sum(int((wanted >= 0).sum()) for wanted in stage.wanted.values()) * F32.itemsize
        assert sum(entry.nbytes for entry in entries) == here
        read |= {entry.name for entry in entries}
    assert read == full.keys()


def test_a_layout_for_an_engine_in_one_piece_serves_stages_too() -> None:
    layouts, payloads = laid_out(published(tied=True), Split(2, KV_HEADS))
    for number in range(3):
        stage = Stage(True, 3, number, ways=2, rank=1)
        parameters = dict(stage.model.named_parameters())
        arrive(stage.plan(layouts), payloads).copies(parameters).run()
        assert all(np.array_equal(parameters[name].numpy(), wanted) for name, wanted in stage.wanted.items())


def test_stages_that_load_whole_tensors_read_their_own_alone() -> None:
    full = published(tied=False)
    layouts, payloads = laid_out(full, Split(stages=2))
    for number in range(2):
        elsewhere = held_elsewhere(Stage(False, 2, number).model, full)
        mine = {name: (tuple(each.shape), F32) for name, each in full.items() if name not in elsewhere}
        plan = plan_pull(layouts, mine, stage_place(same_place, elsewhere))
        arrived = dict(arrive(plan, payloads).tensors())
        assert arrived.keys() == mine.keys() and all(torch.equal(arrived[name], full[name]) for name in mine)
        assert plan.nbytes < sum(each.nbytes for each in full.values())


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.mlp.typo_proj.weight", (4, 4)),
        ("model.layers.2.mlp.typo_proj.weight", (4, 4)),
        ("model.layers.3.input_layernorm.weight", (HIDDEN,)),  # the model has three
        ("model.layers.10.input_layernorm.weight", (HIDDEN,)),
        ("transformer.h.0.attn.c_attn.weight", (HIDDEN, 18)),
        ("model.embed_tokens.bias", (HIDDEN,)),
        ("lm_head.weight", (VOCABULARY, HIDDEN)),  # tied: none is published
    ],
)
@pytest.mark.parametrize("stages", DEALT)
def test_a_name_that_no_stage_has_is_refused_by_each(stages: int, name: str, shape: tuple[int, ...]) -> None:
    layouts, _ = laid_out(published(tied=True) | {name: torch.zeros(shape)}, Split(1, KV_HEADS, stages))
    for number in range(stages):
        with pytest.raises(ValueError, match=f"do not match the engine's: unexpected {name}$"):
            Stage(True, stages, number).plan(layouts)


@pytest.mark.parametrize(
    ("name", "owners", "message"),
    [
        ("model.embed_tokens.weight", {0, 2}, r"missing model\.embed_tokens\.weight$"),
        ("model.norm.weight", {2}, r"missing model\.norm\.weight$"),
        ("model.layers.1.input_layernorm.weight", {1}, r"missing model\.layers\.1\.input_layernorm\.weight$"),
        ("model.layers.1.mlp.up_proj.weight", {1}, r"rows 10\.\.19 of .*1\.mlp\.gate_up_proj.* published by no rank"),
        (
            "model.layers.1.mlp.gate_proj.weight",
            {1},
            r"1\.mlp\.up_proj\.weight is published without .*\.1\.mlp\.gate_proj",
        ),
    ],
)
def test_a_tensor_that_is_missing_is_refused_by_the_stages_that_have_it(
    name: str, owners: set[int], message: str
) -> None:
    full = published(tied=True)
    del full[name]
    layouts, _ = laid_out(full, Split(1, KV_HEADS, 3))
    for number in range(3):
        if number in owners:
            with pytest.raises(ValueError, match=message):
                Stage(True, 3, number).plan(layouts)
        else:
            Stage(True, 3, number).plan(layouts)


def test_the_publisher_lays_out_for_the_stages_of_the_configuration() -> None:
    config = Config()
    assert engine_split(SimpleNamespace(config=config)) == Split()  # type: ignore[arg-type]
    config.gen_actor_rollout_ref.rollout.pipeline_model_parallel_size = 2
    split = engine_split(SimpleNamespace(config=config))  # type: ignore[arg-type]
    units = [split.unit(f"model.{name}.weight") for name in ("layers.1.mlp.up_proj", "layers.10.mlp.up_proj", "norm")]
    assert units == ["model.layers.1", "model.layers.10", "model.norm.weight"]


class Told:
    """In place of a receiver: what a worker tells it."""

    def __init__(self, **told: Any) -> None:
        self.told = told


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_worker_tells_its_receiver_what_other_stages_have(device: str) -> None:
    stage, full, worker = Stage(False, 3, 1), published(tied=False), PsrlWorker()
    worker.model_runner, worker.device = SimpleNamespace(get_model=lambda: stage.model), torch.device(device)
    worker.model_config, worker.psrl_tensors = SimpleNamespace(quantization=None), full
    worker.rank, worker.parallel_config = 3, SimpleNamespace(tensor_parallel_size=2)
    worker.psrl_attach(f"{__name__}:Told", {})
    told = worker.psrl_receiver.told
    mine = {name for name in full if name.startswith("model.layers.1.")}
    assert (told["rank"], told["fused"], told["elsewhere"]) == (1, device == "cuda", full.keys() - mine)
    assert told["tensors"].keys() == (stage.wanted.keys() if device == "cuda" else mine)


def test_modules_are_told_by_whole_names() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(1, 1), *(PPMissingLayer() for _ in range(1))])
    names = ["layers.0.weight", "layers.1.weight", "layers.10.weight", "layers.1"]
    assert held_elsewhere(model, names) == {"layers.1.weight"}
    assert held_elsewhere(nn.Linear(1, 1), names) == frozenset()
