"""Plans are checked by carrying them out on plain memory: the engine's whole tensors must arrive, bit for bit."""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from psrl.protocol.weights import ShardEntry, ShardLayout
from psrl.trainer.backends.base import WeightShard
from psrl.weights.channel.base import PullError
from psrl.weights.channel.select import choose_mode
from psrl.weights.checksum import checksum
from psrl.weights.pack import lay_out, pack
from psrl.weights.plan import ALIGNMENT, Place, PullPlan, Segment, plan_pull, same_place, windows
from psrl.weights.staging import Staging

pytestmark = pytest.mark.unit

F32, BF16 = torch.float32, torch.bfloat16


def cut(tensors: dict[str, torch.Tensor], bounds: dict[str, list[int]], dtype: torch.dtype | None = None):
    """Layouts and payloads of ranks that hold rows [bounds[name][r], bounds[name][r + 1]) of each tensor."""
    num_ranks = len(next(iter(bounds.values()))) - 1
    layouts, payloads, sums = [], [], []
    for rank in range(num_ranks):
        shards = [
            WeightShard(name, tuple(full.shape), bounds[name][rank], full[bounds[name][rank] : bounds[name][rank + 1]])
            for name, full in tensors.items()
        ]
        layout = lay_out(shards, rank, num_ranks, dtype)
        payload = torch.zeros(layout.nbytes, dtype=torch.uint8)
        sums.append(pack(shards, layout, payload))
        layouts.append(layout)
        payloads.append(payload)
    return layouts, payloads, sums


def carry_out(plan: PullPlan, payloads: list[torch.Tensor]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    staging = torch.full((plan.nbytes,), 0xA5, dtype=torch.uint8)
    for segments, payload in zip(plan.segments, payloads, strict=True):
        for segment in segments:
            moved = payload[segment.source : segment.source + segment.nbytes]
            assert moved.numel() == segment.nbytes
            staging[segment.target : segment.target + segment.nbytes] = moved
    return {
        tensor.name: staging[tensor.offset : tensor.offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for tensor in plan.tensors
    }, staging


@st.composite
def sharded_models(draw: st.DrawFn):
    num_ranks = draw(st.integers(1, 4))
    tensors, bounds = {}, {}
    for index in range(draw(st.integers(1, 6))):
        rows, columns = draw(st.integers(0, 9)), draw(st.integers(0, 40))
        seed = draw(st.integers(0, 1000))
        tensors[f"t{index}"] = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
        inner = sorted(draw(st.lists(st.integers(0, rows), min_size=num_ranks - 1, max_size=num_ranks - 1)))
        bounds[f"t{index}"] = [0, *inner, rows]
    return tensors, bounds, draw(st.sampled_from([F32, BF16]))


@settings(max_examples=200, deadline=None)
@given(sharded_models())
def test_any_split_into_rows_arrives_whole(model) -> None:
    tensors, bounds, dtype = model
    layouts, payloads, sums = cut(tensors, bounds, dtype)
    plan = plan_pull(layouts, {name: (tuple(full.shape), dtype) for name, full in tensors.items()})
    arrived, staging = carry_out(plan, payloads)
    assert set(arrived) == set(tensors)
    for name, full in tensors.items():
        assert torch.equal(arrived[name], full.to(dtype))
    assert [checksum(staging.numpy(), pieces) for pieces in plan.pieces] == sums
    assert all(tensor.offset % ALIGNMENT == 0 for tensor in plan.tensors)


def test_one_rank_moves_in_one_piece() -> None:
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7), "c": torch.randn(2, 2)}
    layouts, _, _ = cut(tensors, {name: [0, full.shape[0]] for name, full in tensors.items()})
    plan = plan_pull(layouts, {name: (tuple(full.shape), F32) for name, full in tensors.items()})
    assert plan.segments == ((Segment(0, 0, plan.nbytes),),)


def test_joined_segments_spare_the_rows_of_other_ranks() -> None:
    # Rank 0's padding after its 32 bytes of a is as long as rank 1's part of a: joining over it would overwrite that.
    tensors = {"a": torch.arange(16.0).reshape(2, 8), "b": torch.arange(16.0, 32.0).reshape(2, 8)}
    layouts, payloads, _ = cut(tensors, {"a": [0, 1, 2], "b": [0, 2, 2]})
    plan = plan_pull(layouts, dict.fromkeys(tensors, ((2, 8), F32)))
    arrived, _ = carry_out(plan, [payloads[1], payloads[0]][::-1])
    assert all(torch.equal(arrived[name], full) for name, full in tensors.items())
    reordered = PullPlan(plan.nbytes, plan.tensors, plan.segments[::-1], plan.pieces)
    arrived, _ = carry_out(reordered, payloads[::-1])
    assert all(torch.equal(arrived[name], full) for name, full in tensors.items())


def layout(*entries: tuple, rank: int = 0, num_ranks: int = 1) -> ShardLayout:
    """Entries (name, full_shape, row_start, rows), float32, back to back at aligned offsets."""
    made, end = [], 0
    for name, shape, row_start, rows in entries:
        nbytes = rows * torch.Size(shape[1:]).numel() * 4
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        made.append(ShardEntry(name, shape, "float32", row_start, rows, offset, nbytes))
        end = offset + nbytes
    return ShardLayout(rank, num_ranks, end, tuple(made))


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


def test_fused_engine_tensors_are_filled_from_several_published_ones() -> None:
    q, k, v = torch.randn(4, 3), torch.randn(2, 3), torch.randn(2, 3)
    rows = {"q": 0, "k": 4, "v": 6}
    place: Place = lambda name: ("qkv", rows[name]) if name in rows else same_place(name)  # noqa: E731
    tensors = {"q": q, "k": k, "v": v, "o": torch.randn(3, 4)}
    layouts, payloads, _ = cut(tensors, {"q": [0, 2, 4], "k": [0, 1, 2], "v": [0, 1, 2], "o": [0, 2, 3]})
    plan = plan_pull(layouts, {"qkv": ((8, 3), F32), "o": ((3, 4), F32)}, place)
    arrived, _ = carry_out(plan, payloads)
    assert torch.equal(arrived["qkv"], torch.cat([q, k, v]))
    with pytest.raises(ValueError, match=r"rows 8\.\.8 of qkv \(9 rows\) are published by no rank"):
        plan_pull(layouts, {"qkv": ((9, 3), F32), "o": ((3, 4), F32)}, place)


def test_a_tensor_without_dimensions_is_one_row() -> None:
    layout_ = lay_out([WeightShard("scale", (), 0, torch.tensor(2.5))], 0, 1, None)
    assert layout_.entries[0].rows == 1
    plan = plan_pull([layout_], {"scale": ((), F32)})
    assert (plan.tensors[0].shape, plan.nbytes) == ((), 4)


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


@pytest.mark.parametrize("limit", [1, 7, 64, 10**9])
def test_windows_cover_every_segment_in_order(limit: int) -> None:
    segments = [Segment(0, 100, 130), Segment(200, 0, 1), Segment(300, 500, 64)]
    groups = windows(segments, limit)
    sizes = [sum(part.nbytes for part in group) for group in groups]
    assert all(size == limit for size in sizes[:-1]) and 0 < sizes[-1] <= limit
    covered = [(part.source + i, part.target + i) for group in groups for part in group for i in range(part.nbytes)]
    assert covered == [(seg.source + i, seg.target + i) for seg in segments for i in range(seg.nbytes)]
    with pytest.raises(ValueError, match="must be positive"):
        windows(segments, 0)


NBYTES = 3 * 65536 + 13


@pytest.mark.parametrize("position", [0, 7, 65535, 65536, 2 * 65536 + 9, 3 * 65536, NBYTES - 1])
def test_checksum_sees_any_changed_byte(position: int) -> None:
    data = torch.arange(NBYTES).to(torch.uint8).numpy()
    before = checksum(data, [(0, NBYTES)])
    data[position] ^= 0x80
    assert checksum(data, [(0, NBYTES)]) != before


def test_checksum_depends_on_content_and_order_but_not_on_place() -> None:
    data = torch.randint(0, 256, (4 * 65536,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    one, two = data[:70001], data[70001 : 70001 + 1003]
    moved = torch.zeros(200_000, dtype=torch.uint8)
    moved[90_003 : 90_003 + 70001], moved[5 : 5 + 1003] = one, two
    pieces = [(0, 70001), (70001, 1003)]
    assert checksum(data.numpy(), pieces) == checksum(moved.numpy(), [(90_003, 70001), (5, 1003)])
    assert checksum(data.numpy(), pieces) != checksum(data.numpy(), pieces[::-1])
    swapped = torch.cat([data[65536:131072], data[:65536], data[131072:]])
    whole = [(0, data.numel())]
    assert checksum(data.numpy(), whole) != checksum(swapped.numpy(), whole)


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
