"""What to copy from where to where, so that the trainer ranks' row shards become the engine's whole tensors.

Pure: layouts in, plan out. Rows of dim 0 are contiguous on both sides, hence every shard lands in its final place
by the transfer itself and no rank, and no reader, ever assembles a second copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from psrl.protocol.weights import ShardEntry, ShardLayout

if TYPE_CHECKING:
    import torch

ALIGNMENT = 64
"""Every shard and every staged tensor starts at a multiple of this many bytes."""

_NAMED = 5  # names listed in an error before "and n more"

Specs = Mapping[str, tuple[tuple[int, ...], "torch.dtype"]]
Place = Callable[[str], tuple[str, int]]
"""Where a published tensor belongs: (the engine's tensor, the row there at which it starts). A fused engine tensor is
several published ones at different rows: `{"k": ("qkv", q_rows)}`."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Copy `nbytes` from byte `source` of a rank's payload to byte `target` of the staging buffer."""

    source: int
    target: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StagedTensor:
    """One tensor of the engine, contiguous at bytes [offset, offset + nbytes) of the staging buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class PullPlan:
    """`segments[r]` moves all of rank r; `pieces[r]`: (target, nbytes) of its entries in order, for the checksum."""

    nbytes: int
    tensors: tuple[StagedTensor, ...]
    segments: tuple[tuple[Segment, ...], ...]
    pieces: tuple[tuple[tuple[int, int], ...], ...]


def aligned(offset: int) -> int:
    """The next multiple of ALIGNMENT; `aligned(1) == 64`, `aligned(64) == 64`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def same_place(name: str) -> tuple[str, int]:
    """The usual `Place`: the engine calls the tensor as the publisher does."""
    return name, 0


def plan_pull(layouts: Sequence[ShardLayout], expected: Specs, place: Place = same_place) -> PullPlan:
    """Plan the pull of all ranks' shards into one staging buffer.

    Raises ValueError if a name is unknown to the engine or missing from the ranks, if a shape or dtype differs, or if
    the ranks' rows do not cover a tensor exactly once; the sentence names the first few offenders.

    >>> # two ranks hold rows 0-1 and 2-3 of w [4, 8] float32: rank 1's 64 bytes land at byte 64
    >>> # plan.segments == ((Segment(0, 0, 64),), (Segment(0, 64, 64),))
    """
    _check_ranks(layouts)
    _check_names(layouts, expected, place)
    order = list(dict.fromkeys(place(entry.name)[0] for layout in layouts for entry in layout.entries))
    tensors, nbytes = _stage(order, expected)
    segments, pieces, covered = [], [], {name: [] for name in order}  # type: ignore[var-annotated]
    for layout in layouts:
        moves = []
        for entry in layout.entries:
            name, first_row = place(entry.name)
            tensor = tensors[name]
            _check_entry(entry, tensor, layout, renamed=name != entry.name)
            row = first_row + entry.row_start
            covered[name].append((row, row + entry.rows))
            row_nbytes = tensor.nbytes // _rows(tensor.shape) if tensor.nbytes else 0
            moves.append((entry, tensor, tensor.offset + row * row_nbytes))
        pieces.append(tuple((target, entry.nbytes) for entry, _, target in moves))
        segments.append(_coalesce(moves))
    for name, spans in covered.items():
        _check_cover(name, _rows(tensors[name].shape), spans)
    return PullPlan(nbytes, tuple(tensors.values()), tuple(segments), tuple(pieces))


def windows(segments: Sequence[Segment], limit: int) -> list[list[Segment]]:
    """The segments in order, cut and grouped into windows of at most `limit` bytes, so that a long transfer can be
    given up between two of them. `windows([Segment(0, 0, 5)], 2)` gives windows of 2, 2 and 1 bytes."""
    if limit <= 0:
        raise ValueError(f"a window of {limit} bytes moves nothing; it must be positive")
    groups: list[list[Segment]] = []
    room = 0
    for segment in segments:
        done = 0
        while done < segment.nbytes:
            if room == 0:
                groups.append([])
                room = limit
            nbytes = min(room, segment.nbytes - done)
            groups[-1].append(Segment(segment.source + done, segment.target + done, nbytes))
            done += nbytes
            room -= nbytes
    return groups


def _rows(shape: tuple[int, ...]) -> int:
    return shape[0] if shape else 1


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _check_ranks(layouts: Sequence[ShardLayout]) -> None:
    ranks = [layout.rank for layout in layouts]
    sizes = {layout.num_ranks for layout in layouts}
    if ranks != list(range(len(layouts))) or sizes != {len(layouts)}:
        raise ValueError(
            f"weights of ranks {ranks} were given, of worlds of {sorted(sizes)} ranks; each rank is needed once"
        )


def _check_names(layouts: Sequence[ShardLayout], expected: Specs, place: Place) -> None:
    targets = {entry.name: place(entry.name)[0] for layout in layouts for entry in layout.entries}
    unexpected = [name for name, target in targets.items() if target not in expected]
    missing = [name for name in expected if name not in set(targets.values())]
    found = [f"unexpected {_few(unexpected)}"] if unexpected else []
    found += [f"missing {_few(missing)}"] if missing else []
    if found:
        raise ValueError(f"published weights do not match the engine's: {'; '.join(found)}")


def _stage(order: Sequence[str], expected: Specs) -> tuple[dict[str, StagedTensor], int]:
    tensors, end = {}, 0
    for name in order:
        shape, dtype = expected[name]
        offset, nbytes = aligned(end), prod(shape) * dtype.itemsize
        tensors[name] = StagedTensor(name, tuple(shape), dtype, offset, nbytes)
        end = offset + nbytes
    return tensors, end


def _check_entry(entry: ShardEntry, tensor: StagedTensor, layout: ShardLayout, renamed: bool) -> None:
    if entry.dtype != _dtype_name(tensor.dtype):
        raise ValueError(
            f"{entry.name} is published as {entry.dtype}, the engine needs {_dtype_name(tensor.dtype)}; "
            "the publisher casts to the engine's dtype, so give it that one"
        )
    same = entry.full_shape[1:] == tensor.shape[1:] if renamed else entry.full_shape == tensor.shape
    if not same:
        raise ValueError(
            f"{entry.name} is published as {entry.full_shape}, the engine needs {tensor.shape} of {tensor.name}"
        )
    row_nbytes = prod(entry.full_shape[1:]) * tensor.dtype.itemsize
    inside = entry.offset >= 0 and entry.offset + entry.nbytes <= layout.nbytes
    if not inside or entry.rows < 0 or entry.nbytes != entry.rows * row_nbytes:
        raise ValueError(
            f"{entry.name} of rank {layout.rank} does not lie inside its payload of {layout.nbytes} bytes: {entry}"
        )


def _check_cover(name: str, rows: int, spans: list[tuple[int, int]]) -> None:
    position = 0
    for start, end in [*sorted(span for span in spans if span[0] < span[1]), (rows, rows)]:
        if start > position:
            raise ValueError(f"rows {position}..{start - 1} of {name} ({rows} rows) are published by no rank")
        if start < position:
            raise ValueError(
                f"rows {start}..{position - 1} of {name} ({rows} rows) are published more than once or beyond its end"
            )
        position = end


def _coalesce(moves: Sequence[tuple[ShardEntry, StagedTensor, int]]) -> tuple[Segment, ...]:
    """Join neighbours that keep their distance. The gap may hold only padding: a whole tensor ends before it and the
    next one starts after it, otherwise the joined copy would write over rows of another rank."""
    joined: list[Segment] = []
    last: StagedTensor | None = None
    for entry, tensor, target in moves:
        if entry.nbytes == 0:
            continue
        if joined and last is not None:
            before = joined[-1]
            end = before.target + before.nbytes
            step = target - end
            touching = step == 0
            padding = 0 < step < ALIGNMENT and end == last.offset + last.nbytes and target == tensor.offset
            if (touching or padding) and entry.offset - (before.source + before.nbytes) == step:
                joined[-1] = Segment(before.source, before.target, target + entry.nbytes - before.target)
                last = tensor
                continue
        joined.append(Segment(entry.offset, target, entry.nbytes))
        last = tensor
    return tuple(joined)
