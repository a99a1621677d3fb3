"""Plans are checked by carrying them out on plain memory: the engine's tensors must arrive, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from psrl.protocol.weights import Location, ShardEntry, ShardLayout
from psrl.trainer.backends.base import WeightShard
from psrl.weights.channel.base import PullError, StagedWeights
from psrl.weights.checksum import checksum, fold
from psrl.weights.copies import LARGE_BYTES
from psrl.weights.engine_layout import fused_place
from psrl.weights.location import has_rdma
from psrl.weights.mode import choose_mode
from psrl.weights.pack import lay_out, pack
from psrl.weights.plan import ALIGNMENT, PullPlan, Read, plan_pull, windows
from psrl.weights.route import RouteError, choose_route
from psrl.weights.split import Split
from psrl.weights.staging import Staging

pytestmark = pytest.mark.unit

F32, BF16 = torch.float32, torch.bfloat16


def cut(
    tensors: dict[str, torch.Tensor],
    bounds: dict[str, list[int]],
    dtype: torch.dtype | None = None,
    split: Split | None = None,
):
    """Layouts and payloads of ranks that hold rows [bounds[name][r], bounds[name][r + 1]) of each tensor."""
    num_ranks = len(next(iter(bounds.values()))) - 1
    layouts, payloads, sums = [], [], []
    for rank in range(num_ranks):
        shards = [
            WeightShard(name, tuple(full.shape), bounds[name][rank], full[bounds[name][rank] : bounds[name][rank + 1]])
            for name, full in tensors.items()
        ]
        layout = lay_out(shards, rank, num_ranks, dtype, split)
        payload = torch.zeros(layout.nbytes, dtype=torch.uint8)
        sums.append(pack(shards, layout, payload))
        layouts.append(layout)
        payloads.append(payload)
    return layouts, payloads, sums


def arrive(plan: PullPlan, payloads: list[torch.Tensor]) -> StagedWeights:
    """Carry the reads out; no byte of a payload may be read twice, no byte of the buffer written twice."""
    buffer = torch.zeros(plan.nbytes, dtype=torch.uint8)
    written = torch.zeros(plan.nbytes, dtype=torch.int)
    for reads, payload in zip(plan.reads, payloads, strict=True):
        taken = torch.zeros(payload.numel(), dtype=torch.int)
        for read in reads:
            buffer[read.target : read.target + read.nbytes] = payload[read.source : read.source + read.nbytes]
            written[read.target : read.target + read.nbytes] += 1
            taken[read.source : read.source + read.nbytes] += 1
        assert not taken.numel() or taken.max() <= 1
    assert not written.numel() or written.max() <= 1
    return StagedWeights(0, 0, plan, buffer, "test")


def plain(tensors: dict[str, torch.Tensor], dtype: torch.dtype = F32):
    return {name: (tuple(full.shape), dtype) for name, full in tensors.items()}


@st.composite
def row_bounds(draw: st.DrawFn, rows: int, num_ranks: int) -> list[int]:
    inner = sorted(draw(st.lists(st.integers(0, rows), min_size=num_ranks - 1, max_size=num_ranks - 1)))
    return [0, *inner, rows]


@st.composite
def sharded_models(draw: st.DrawFn):
    num_ranks = draw(st.integers(1, 4))
    tensors, bounds = {}, {}
    for index in range(draw(st.integers(1, 6))):
        rows, columns = draw(st.integers(0, 9)), draw(st.integers(0, 40))
        seed = draw(st.integers(0, 1000))
        tensors[f"t{index}"] = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
        bounds[f"t{index}"] = draw(row_bounds(rows, num_ranks))
    return tensors, bounds, draw(st.sampled_from([F32, BF16]))


@settings(max_examples=100)
@given(sharded_models())
def test_any_split_into_rows_arrives_whole(model) -> None:
    tensors, bounds, dtype = model
    layouts, payloads, sums = cut(tensors, bounds, dtype)
    plan = plan_pull(layouts, plain(tensors, dtype))
    staged = arrive(plan, payloads)
    arrived = dict(staged.tensors())
    assert set(arrived) == set(tensors)
    assert all(torch.equal(arrived[name], full.to(dtype)) for name, full in tensors.items())
    for reads, found in zip(plan.reads, sums, strict=True):
        for read in reads:
            assert checksum(staged.buffer[read.target : read.target + read.nbytes]) == found[read.section]


@dataclass(frozen=True)
class Decoder:
    """Sizes of a small dense decoder; its published weights hold distinct numbers."""

    kv_heads: int
    tied: bool
    vocabulary: int
    heads: int = 4
    head_dim: int = 2
    hidden: int = 6
    inner: int = 8

    def published(self) -> dict[str, torch.Tensor]:
        q, kv, layer = self.heads * self.head_dim, self.kv_heads * self.head_dim, "model.layers.0."
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocabulary, self.hidden),
            f"{layer}input_layernorm.weight": (self.hidden,),
            f"{layer}self_attn.q_proj.weight": (q, self.hidden), f"{layer}self_attn.k_proj.weight": (kv, self.hidden),
            f"{layer}self_attn.v_proj.weight": (kv, self.hidden), f"{layer}self_attn.q_proj.bias": (q,),
            f"{layer}self_attn.k_proj.bias": (kv,), f"{layer}self_attn.v_proj.bias": (kv,),
            f"{layer}self_attn.o_proj.weight": (self.hidden, q), f"{layer}mlp.gate_proj.weight": (self.inner, self.hidden),
            f"{layer}mlp.up_proj.weight": (self.inner, self.hidden), f"{layer}mlp.down_proj.weight": (self.hidden, self.inner),
        }  # fmt: skip
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocabulary, self.hidden)
        made, start = {}, 0.0
        for name, shape in shapes.items():
            made[name] = torch.arange(start, start + prod(shape)).reshape(shape)
            start += prod(shape)
        return made

    def engine(self, ways: int, rank: int) -> dict[str, np.ndarray]:
        """What rank `rank` of `ways` must hold, by numpy and nothing else; -1 where nothing is published."""
        full = {name: tensor.numpy() for name, tensor in self.published().items()}
        rows = lambda x: np.split(x, ways)[rank]  # noqa: E731
        heads = lambda x: np.repeat(np.split(x, self.kv_heads), max(1, ways // self.kv_heads), axis=0)  # noqa: E731
        kv = lambda x: np.concatenate(np.split(heads(x), ways)[rank])  # noqa: E731
        part = -(-self.vocabulary // 64) * 64 // ways
        pad = lambda x: np.pad(x, ((0, part * ways - len(x)), (0, 0)), constant_values=-1)  # noqa: E731
        layer, attention, mlp = "model.layers.0.", "model.layers.0.self_attn.", "model.layers.0.mlp."
        found = {
            f"{layer}input_layernorm.weight": full[f"{layer}input_layernorm.weight"],
            f"{attention}o_proj.weight": np.split(full[f"{attention}o_proj.weight"], ways, axis=1)[rank],
            f"{mlp}down_proj.weight": np.split(full[f"{mlp}down_proj.weight"], ways, axis=1)[rank],
            f"{mlp}gate_up_proj.weight": np.concatenate([rows(full[f"{mlp}{x}_proj.weight"]) for x in ("gate", "up")]),
        }
        for kind in ("weight", "bias"):
            q, k, v = (full[f"{attention}{x}_proj.{kind}"] for x in "qkv")
            found[f"{attention}qkv_proj.{kind}"] = np.concatenate([rows(q), kv(k), kv(v)])
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            if name in full:
                found[name] = rows(pad(full[name]))
        return found


@settings(max_examples=100)
@given(st.data())
def test_any_trainer_layout_becomes_any_engine_layout(data: st.DataObject) -> None:
    ways, num_ranks = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.integers(1, 3))
    model = Decoder(data.draw(st.sampled_from([1, 2, 4])), data.draw(st.booleans()), data.draw(st.integers(3, 130)))
    laid_out_for = data.draw(
        st.sampled_from([ways, 1])
    )  # an engine of other parallelism than was laid out for fits, too
    published = model.published()
    bounds = {name: data.draw(row_bounds(full.shape[0], num_ranks)) for name, full in published.items()}
    layouts, payloads, _ = cut(published, bounds, F32, Split(laid_out_for, model.kv_heads))
    large, read = data.draw(st.sampled_from([64, LARGE_BYTES])), 0
    for rank in range(ways):
        wanted = model.engine(ways, rank)
        specs = {name: (whole.shape, F32) for name, whole in wanted.items()}
        plan = plan_pull(layouts, specs, fused_place(Split(ways, model.kv_heads), rank))
        tensors = {name: torch.full(shape, -1.0) for name, (shape, _) in specs.items()}
        with patch("psrl.weights.copies.LARGE_BYTES", large):
            arrive(plan, payloads).copies(tensors).run()
        for name, whole in wanted.items():
            assert np.array_equal(tensors[name].numpy(), whole), name
        read += sum(read.nbytes for reads in plan.reads for read in reads)
        assert all(len(reads) <= 2 for reads in plan.reads)
    if laid_out_for == ways and model.kv_heads % ways == 0:  # only what every engine rank needs is read more than once
        shared = sum(layout.sections[-1][1] for layout in layouts) * (ways - 1) if ways > 1 else 0
        assert read == sum(nbytes for layout in layouts for _, nbytes in layout.sections) + shared


def test_one_rank_moves_in_one_piece_and_needs_no_assembly() -> None:
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7), "c": torch.randn(2, 2)}
    layouts, payloads, _ = cut(tensors, {name: [0, full.shape[0]] for name, full in tensors.items()})
    plan = plan_pull(layouts, plain(tensors))
    assert plan.reads == ((Read(0, 0, 0, layouts[0].nbytes),),)
    staged = arrive(plan, payloads)
    start = staged.buffer.data_ptr()
    assert all(0 <= tensor.data_ptr() - start < plan.nbytes for _, tensor in staged.tensors())


@pytest.mark.parametrize(
    ("name", "shape", "ways", "message"),
    [
        ("l.self_attn.q_proj.weight", (6, 2), 4, "q_proj.weight: 6 rows or columns cannot be cut for 4"),
        ("l.mlp.down_proj.weight", (4, 9), 2, "down_proj.weight: 9 rows or columns cannot be cut for 2"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(name: str, shape: tuple[int, ...], ways: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Split(ways, ways).blocks(name, shape)
    with pytest.raises(ValueError, match="3 key-value heads cannot be dealt to 4"):
        fused_place(Split(4, 3), 0)("a.k_proj.weight", {"a.q_proj.weight": (8, 2), "a.k_proj.weight": (6, 2)})


def layout(*entries: tuple, rank: int = 0, num_ranks: int = 1) -> ShardLayout:
    """Entries (name, full_shape, row_start, rows), float32, back to back at aligned offsets."""
    made, end = [], 0
    for name, shape, row_start, rows in entries:
        nbytes = rows * torch.Size(shape[1:]).numel() * 4
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        made.append(ShardEntry(name, shape, "float32", row_start, rows, offset, nbytes))
        end = offset + nbytes
    return ShardLayout(rank, num_ranks, end, tuple(made), ((0, end),))


W = ("w", (4, 2))
SPEC_W = {"w": ((4, 2), F32)}


@pytest.mark.parametrize(
    ("layouts", "expected", "message"),
    [
        ([layout((*W, 0, 4), ("b", (2,), 0, 2))], SPEC_W, "unexpected b"),
        ([layout((*W, 0, 4))], SPEC_W | {"c": ((1,), F32)}, "missing c"),
        ([layout((*W, 0, 4))], dict.fromkeys("cdefghi", ((1,), F32)), "unexpected w; missing c, d, e, f, g and 2 more"),
        ([layout((*W, 0, 4))], {"w": ((4, 2), BF16)}, "w is published as float32, the engine needs bfloat16"),
        ([layout((*W, 0, 4))], {"w": ((2, 4), F32)}, r"w is published as \(4, 2\), the engine needs \(2, 4\)"),
        ([layout((*W, 0, 3))], SPEC_W, r"rows 3\.\.3 of w \(4 rows\) are published by no rank"),
        ([layout((*W, 1, 3))], SPEC_W, r"rows 0\.\.0 of w \(4 rows\) are published by no rank"),
        ([layout((*W, 0, 3), (*W, 2, 2))], SPEC_W, r"rows 2\.\.2 of w \(4 rows\) are published more than once"),
        ([layout((*W, 0, 4), (*W, 0, 4))], SPEC_W, "more than once"),
        ([layout((*W, 2, 4))], SPEC_W, r"rows 0\.\.1 of w \(4 rows\) are published by no rank"),
        ([layout((*W, 0, 5))], SPEC_W, "beyond its end"),
        ([layout((*W, -1, 5))], SPEC_W, "more than once or beyond"),
        ([layout((*W, 0, 2), num_ranks=2)], SPEC_W, "each rank is needed once"),
        ([layout((*W, 0, 2), num_ranks=2)] * 2, SPEC_W, "each rank is needed once"),
        ([], SPEC_W, "each rank is needed once"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(layouts, expected, message) -> None:
    with pytest.raises(ValueError, match=message):
        plan_pull(layouts, expected)


@pytest.mark.parametrize("changed", [{"offset": 8}, {"offset": -64}, {"nbytes": 64}, {"rows": -1}])
def test_an_entry_outside_its_payload_is_refused(changed: dict) -> None:
    good = layout((*W, 0, 4))
    bad = msgspec.structs.replace(good, entries=(msgspec.structs.replace(good.entries[0], **changed),))
    with pytest.raises(ValueError, match="does not lie inside"):
        plan_pull([bad], SPEC_W)


def test_renamed_and_stale_names_are_an_error_and_nothing_is_planned() -> None:
    # The engine would otherwise go on with its old c.weight and nobody would notice.
    weights = {"a.weight": torch.randn(2, 2), "b.weight": torch.randn(2)}
    layouts, _, _ = cut(weights, {"a.weight": [0, 2], "b.weight": [0, 2]}, BF16)
    staging = Staging({"a.weight": ((2, 2), BF16), "c.weight": ((2,), BF16)})
    with pytest.raises(PullError, match=r"unexpected b\.weight; missing c\.weight") as caught:
        staging.prepare(layouts)
    assert not caught.value.retryable and staging.buffer.numel() == 0


def test_a_tensor_without_dimensions_is_one_row() -> None:
    layout_ = lay_out([WeightShard("scale", (), 0, torch.tensor(2.5))], 0, 1, None)
    assert layout_.entries[0].rows == 1
    plan = plan_pull([layout_], {"scale": ((), F32)})
    assert (plan.tensors[0].shape, plan.tensors[0].nbytes, plan.nbytes) == ((), 4, ALIGNMENT)


def test_the_cast_happens_at_the_publisher_and_leaves_integers_alone() -> None:
    weights = [WeightShard("w", (2,), 0, torch.tensor([1.0, 1.001])), WeightShard("n", (1,), 0, torch.tensor([7]))]
    made = lay_out(weights, 0, 1, BF16)
    assert [(entry.dtype, entry.nbytes) for entry in made.entries] == [("bfloat16", 4), ("int64", 8)]
    payload = torch.zeros(made.nbytes, dtype=torch.uint8)
    pack(weights, made, payload)
    assert torch.equal(payload[:4].view(BF16), torch.tensor([1.0, 1.001]).to(BF16))


def test_a_tied_tensor_published_twice_is_refused() -> None:
    shard = WeightShard("w", (2,), 0, torch.zeros(2))
    with pytest.raises(ValueError, match="publishes w more than once"):
        lay_out([shard, shard], 0, 1, None)


@pytest.mark.parametrize("other", [[], [("w", 1)], [("v", 0)]])
def test_a_rank_may_not_change_what_it_publishes(other: list) -> None:
    first = [WeightShard("w", (2, 2), 0, torch.zeros(1, 2))]
    made = lay_out(first, 0, 2, None)
    later = [WeightShard(name, (2, 2), row, torch.zeros(1, 2)) for name, row in other]
    with pytest.raises(ValueError, match="at first"):
        pack(later, made, torch.zeros(made.nbytes, dtype=torch.uint8))


def test_windows_cover_everything_in_order() -> None:
    assert windows(5, 2) == [(0, 2), (2, 2), (4, 1)]
    assert windows(4, 10**9) == [(0, 4)] and windows(0, 1) == []
    with pytest.raises(ValueError, match="must be positive"):
        windows(1, 0)


NBYTES = 3 * 65536 + 13


@pytest.mark.parametrize("position", [0, 7, 65535, 65536, 2 * 65536 + 9, 3 * 65536, NBYTES - 1])
def test_checksum_sees_any_changed_byte(position: int) -> None:
    data = torch.arange(NBYTES).to(torch.uint8)
    before = checksum(data)
    data[position] ^= 0x80
    assert checksum(data) != before


def test_checksum_depends_on_content_order_and_length_but_not_on_place() -> None:
    data = torch.randint(0, 256, (4 * 65536,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    moved = torch.cat([torch.zeros(64, dtype=torch.uint8), data])[64:]
    assert checksum(moved) == checksum(data)
    swapped = torch.cat([data[65536:131072], data[:65536], data[131072:]])
    assert checksum(swapped) != checksum(data)
    assert checksum(torch.cat([data, torch.zeros(8, dtype=torch.uint8)])) != checksum(data)
    assert fold((1, 2)) != fold((2, 1))


HERE, THERE = Location("one"), Location("two")
A, B, C = Location("one", "a", ("b",)), Location("one", "b", ("a",)), Location("one", "c")
FAR, LINKED, FAR_LINKED = Location("two", "d"), Location("one", "a", rdma=True), Location("two", "d", rdma=True)


@pytest.mark.parametrize(
    ("publisher", "reader", "wanted", "route"),
    [
        (A, A, "auto", ("vram", "vram")), (A, B, "auto", ("vram", "vram")), (A, C, "auto", ("shm", "host")),
        (A, HERE, "auto", ("shm", "host")), (HERE, A, "auto", ("shm", "host")), (HERE, HERE, "auto", ("shm", "host")),
        (A, FAR, "auto", ("nixl", "host")), (LINKED, FAR, "auto", ("nixl", "host")), (A, FAR_LINKED, "auto", ("nixl", "host")),
        (LINKED, FAR_LINKED, "auto", ("nixl", "vram")), (LINKED, Location("two", rdma=True), "auto", ("nixl", "host")),
        (A, THERE, "auto", ("nixl", "host")), (HERE, FAR, "auto", ("nixl", "host")),
        (A, B, "vram", ("vram", "vram")), (A, A, "shm", ("shm", "host")), (HERE, HERE, "nixl", ("nixl", "host")),
        (A, B, "nixl", ("nixl", "vram")), (A, C, "nixl", ("nixl", "host")),
    ],
)  # fmt: skip
def test_the_route_follows_from_the_places(publisher: Location, reader: Location, wanted: str, route) -> None:
    found = choose_route(publisher, reader, wanted)
    assert (found.name, found.memory) == route


@pytest.mark.parametrize(
    ("publisher", "reader", "wanted", "message"),
    [
        (HERE, A, "vram", "route=vram is impossible: the trainer's weights are in host memory"),
        (A, HERE, "vram", "route=vram is impossible: the engine's weights are in host memory"),
        (A, FAR, "vram", "route=vram is impossible: trainer and reader are on different hosts"),
        (A, C, "vram", "route=vram is impossible: GPU c cannot read GPU a directly"),
        (HERE, THERE, "shm", "route=shm is impossible: trainer and reader are on different hosts; use auto or nixl"),
        (HERE, THERE, "rdma", "route=rdma is unknown: use one of auto, vram, shm, nixl"),
    ],
)
def test_an_impossible_route_is_refused_by_name(publisher: Location, reader: Location, wanted: str, message) -> None:
    with pytest.raises(RouteError, match=message):
        choose_route(publisher, reader, wanted)


@pytest.mark.parametrize(
    ("ps_mode", "missing", "chosen"),
    [("auto", None, "nixl"), ("auto", "no wheel", "filesystem"), ("nixl", None, "nixl"),
     ("filesystem", None, "filesystem"), ("filesystem", "no wheel", "filesystem")],
)  # fmt: skip
def test_mode(ps_mode: str, missing: str | None, chosen: str, caplog: pytest.LogCaptureFixture) -> None:
    assert choose_mode(ps_mode, missing) == chosen
    assert ("no wheel" in caplog.text) == (ps_mode == "auto" and missing is not None)


@pytest.mark.parametrize(
    ("ps_mode", "error", "message"),
    [("nixl", RuntimeError, "psrl.ps_mode=nixl.*no wheel.*psrl.ps_mode=filesystem"),
     ("rdma", ValueError, "psrl.ps_mode=rdma.*auto, nixl, filesystem")],
)  # fmt: skip
def test_mode_refused(ps_mode: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        choose_mode(ps_mode, "no wheel")


def test_weights_handed_out_are_stale_after_the_next_pull_begins() -> None:
    staging = Staging({"w": ((4, 2), F32)})
    assert staging.prepare([layout((*W, 0, 4))])
    staged = staging.hand_out(3, 0, "test")
    assert [name for name, _ in staged.tensors()] == ["w"] and staged.nbytes == 32
    staging.discard()
    with pytest.raises(RuntimeError, match="staged weights 3 are gone"):
        list(staged.tensors())
    assert not staging.prepare([layout((*W, 0, 4))])


def test_network_hardware_that_reads_memory_is_seen_where_it_can_be_used(tmp_path: Path) -> None:
    devices, verbs = tmp_path / "class", tmp_path / "dev"
    assert not has_rdma(devices, verbs)
    state = devices / "mlx5_0" / "ports" / "1" / "state"
    state.parent.mkdir(parents=True)
    verbs.mkdir()
    state.write_text("4: ACTIVE\n")
    assert not has_rdma(devices, verbs), "a container that sees the host's devices and may not use them"
    (verbs / "uverbs0").touch()
    assert has_rdma(devices, verbs)
    state.write_text("1: DOWN\n")
    assert not has_rdma(devices, verbs)
