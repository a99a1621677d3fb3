"""What to read from each trainer rank, and which of it belongs where in the engine's tensors. Pure: layouts in, plan out.

The sections that an engine rank needs arrive as they are, each in one run; nobody assembles whole tensors on the way. What
remains are the moves, rectangles of what has arrived into rectangles of the engine's tensors: fused ones, rows or columns.
They are carried out where the engine copies its new weights anyway.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from psrl.protocol.weights import ShardEntry, ShardLayout

if TYPE_CHECKING:
    import torch

ALIGNMENT = 64
"""Every entry, section and staged tensor starts at a multiple of this many bytes."""

_NAMED = 5  # names listed in an error before "and n more"

Specs = Mapping[str, tuple[tuple[int, ...], "torch.dtype"]]


@dataclass(frozen=True, slots=True)
class Part:
    """What an engine wants of a published tensor: `rows` and, of these, `columns` ([start, stop), None: all), at row `at` of
    its own `tensor`. Behind it come `padding` rows that nothing is published for."""

    tensor: str
    at: int = 0
    rows: tuple[int, int] | None = None
    columns: tuple[int, int] | None = None
    padding: int = 0


Shapes = Mapping[str, tuple[int, ...]]
"""Full shape of each published tensor."""
Place = Callable[[str, Shapes], Sequence[Part]]
"""Where the published tensor of this name belongs; nowhere (no parts) if other ranks of the engine have it. A name that it
does not know comes back as it is, to be refused as unexpected."""


@dataclass(frozen=True, slots=True)
class Read:
    """Section `section` of a rank: `nbytes` from byte `source` of its payload to byte `target` of the arrival buffer."""

    section: int
    source: int
    target: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Move:
    """A rectangle of `rows` x `columns` elements. It arrives at byte `source`, `stride` elements from row to row, and belongs
    at (row, column) of the engine's tensor, seen as [rows, everything else]."""

    source: int
    stride: int
    row: int
    column: int
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One tensor of the engine and what makes it up."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    moves: tuple[Move, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def whole_at(self) -> int | None:
        """The byte of the arrival buffer at which the tensor lies whole and contiguous, None if it has to be put together."""
        if not self.nbytes:
            return 0
        first = self.moves[0]
        contiguous = first.rows == 1 or first.stride == first.columns
        return first.source if contiguous and first.rows * first.columns == prod(self.shape) else None


@dataclass(frozen=True, slots=True)
class PullPlan:
    """`reads[r]`: what to read from rank r, into an arrival buffer of `nbytes` bytes."""

    nbytes: int
    tensors: tuple[PlannedTensor, ...]
    reads: tuple[tuple[Read, ...], ...]


def aligned(offset: int) -> int:
    """The next multiple of ALIGNMENT; `aligned(1) == 64`, `aligned(64) == 64`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def same_place(name: str, _shapes: Shapes) -> Sequence[Part]:
    """The usual `Place`: the engine calls the tensor as the publisher does and has all of it."""
    return (Part(name),)


def plan_pull(layouts: Sequence[ShardLayout], expected: Specs, place: Place = same_place) -> PullPlan:
    """Plan the pull of what an engine (or one rank of it) needs of all ranks' shards.

    Raises ValueError if a name is unknown to the engine or missing from the ranks, if a shape or dtype differs, or if
    what is published does not cover a tensor exactly once; the sentence names the first few offenders.

    >>> # rank 0 holds rows 0-1 and rank 1 rows 2-3 of w [4, 8] float32, the engine wants all of it:
    >>> # plan.reads == ((Read(0, 0, 0, 64),), (Read(0, 0, 64, 64),)), w's moves are rows 0 and 2, two rows each
    """
    _check_ranks(layouts)
    shapes = {entry.name: entry.full_shape for layout in layouts for entry in layout.entries}
    parts = {name: place(name, shapes) for name in shapes}
    _check_names(parts, expected)
    for layout in layouts:
        for entry in layout.entries:
            for part in parts[entry.name]:
                _check_entry(entry, part, *expected[part.tensor], layout)
    moves: dict[str, list[Move]] = defaultdict(list)
    reads, end = [], 0
    for layout in layouts:
        found = [
            (entry, part, where)
            for entry in layout.entries
            for part in parts[entry.name]
            if (where := _overlap(entry, part)) is not None
        ]
        mine = []
        for section in sorted({_section(layout, entry) for entry, _, _ in found}):
            source, nbytes = layout.sections[section]
            mine.append(Read(section, source, end, nbytes))
            end = aligned(end + nbytes)
        reads.append(tuple(mine))
        arrives = {read.section: read.target - read.source for read in mine}
        for entry, part, where in found:
            begin = entry.offset + arrives[_section(layout, entry)]
            moves[part.tensor].append(_move(entry, part, where, begin, expected[part.tensor][1].itemsize))
    padding = {part.tensor: _padding(part, shapes[name]) for name in parts for part in parts[name] if part.padding}
    tensors = []
    for name, (shape, dtype) in expected.items():
        ordered = sorted(moves[name], key=lambda move: (move.column, move.row))
        _check_cover(name, shape, ordered, padding.get(name))
        tensors.append(PlannedTensor(name, tuple(shape), dtype, _join(ordered, dtype.itemsize)))
    return PullPlan(end, tuple(tensors), tuple(reads))


def windows(nbytes: int, limit: int) -> list[tuple[int, int]]:
    """(offset, nbytes) of runs of at most `limit` bytes that make up `nbytes`, so that a long transfer can be given up
    between two of them. `windows(5, 2) == [(0, 2), (2, 2), (4, 1)]`."""
    if limit <= 0:
        raise ValueError(f"a window of {limit} bytes moves nothing; it must be positive")
    return [(offset, min(limit, nbytes - offset)) for offset in range(0, nbytes, limit)]


# ---- rectangles: rows of dim 0, columns in elements of everything behind it ----------------------------------------

Rectangle = tuple[tuple[int, int], tuple[int, int]]


def _rows(shape: Sequence[int]) -> int:
    return shape[0] if shape else 1


def _width(shape: Sequence[int]) -> int:
    return prod(shape[1:])


def _scaled(columns: tuple[int, int] | None, shape: Sequence[int]) -> tuple[int, int]:
    """Columns of dim 1 as elements of a row."""
    if columns is None:
        return 0, _width(shape)
    each = prod(shape[2:])
    return columns[0] * each, columns[1] * each


def _columns(entry: ShardEntry) -> tuple[int, int]:
    return _scaled(entry.columns, entry.full_shape)


def _overlap(entry: ShardEntry, part: Part) -> Rectangle | None:
    """Rows and columns of the full tensor that the entry has and the part wants, None if there are none."""
    rows, columns = (entry.row_start, entry.row_start + entry.rows), _columns(entry)
    both = _meet(rows, part.rows or rows), _meet(columns, _scaled(part.columns, entry.full_shape))
    return None if any(start == stop for start, stop in both) else both


def _move(entry: ShardEntry, part: Part, where: Rectangle, begin: int, itemsize: int) -> Move:
    """`where` of the full tensor, out of an entry that arrives at byte `begin`, into the part's place."""
    (top, bottom), (left, right) = where
    entry_left, entry_right = _columns(entry)
    width = entry_right - entry_left
    inside = (top - entry.row_start) * width + left - entry_left
    row = part.at + top - (part.rows[0] if part.rows else 0)
    column = left - _scaled(part.columns, entry.full_shape)[0]
    return Move(begin + inside * itemsize, width, row, column, bottom - top, right - left)


def _join(moves: Sequence[Move], itemsize: int) -> tuple[Move, ...]:
    """The same moves, neighbours on both sides made one."""
    joined: list[Move] = []
    for move in moves:
        if joined:
            last = joined[-1]
            alike = (last.stride, last.column, last.columns) == (move.stride, move.column, move.columns)
            below = last.row + last.rows == move.row
            behind = last.source + last.rows * last.stride * itemsize == move.source
            if alike and below and behind:
                joined[-1] = replace(last, rows=last.rows + move.rows)
                continue
        joined.append(move)
    return tuple(joined)


def _padding(part: Part, shape: Sequence[int]) -> tuple[int, int]:
    """Rows of the engine's tensor that nothing is published for."""
    start, stop = part.rows or (0, _rows(shape))
    return part.at + stop - start, part.at + stop - start + part.padding


def _meet(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    start = max(one[0], other[0])
    return start, max(start, min(one[1], other[1]))


def _section(layout: ShardLayout, entry: ShardEntry) -> int:
    """The last section that begins at or before the entry; sections lie one after the other."""
    number = bisect_right(layout.sections, entry.offset, key=lambda section: section[0]) - 1
    start, nbytes = layout.sections[number] if number >= 0 else (0, -1)
    if entry.offset + entry.nbytes > start + nbytes:
        raise ValueError(
            f"{entry.name} of rank {layout.rank} does not lie inside its payload of {layout.nbytes} bytes: {entry}"
        )
    return number


# ---- what is refused -----------------------------------------------------------------------------------------------


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


def _check_names(parts: Mapping[str, Sequence[Part]], expected: Specs) -> None:
    targets = {name: [part.tensor for part in found] for name, found in parts.items()}
    unexpected = [name for name, tensors in targets.items() if not expected.keys() >= set(tensors)]
    wanted = {tensor for tensors in targets.values() for tensor in tensors}
    missing = [name for name in expected if name not in wanted]
    found = [f"unexpected {_few(unexpected)}"] if unexpected else []
    found += [f"missing {_few(missing)}"] if missing else []
    if found:
        raise ValueError(f"published weights do not match the engine's: {'; '.join(found)}")


def _check_entry(
    entry: ShardEntry, part: Part, shape: tuple[int, ...], dtype: torch.dtype, layout: ShardLayout
) -> None:
    if entry.dtype != _dtype_name(dtype):
        raise ValueError(
            f"{entry.name} is published as {entry.dtype}, the engine needs {_dtype_name(dtype)}; "
            "the publisher casts to the engine's dtype, so give it that one"
        )
    rest = entry.full_shape[1:]
    if part.columns is not None:
        rest = (part.columns[1] - part.columns[0], *rest[1:])
    alone = part == Part(part.tensor) and part.tensor == entry.name
    if rest != tuple(shape[1:]) or (alone and entry.full_shape != tuple(shape)):
        raise ValueError(
            f"{entry.name} is published as {entry.full_shape}, the engine needs {tuple(shape)} of {part.tensor}"
        )
    left, right = _columns(entry)
    inside = entry.offset >= 0 and entry.offset + entry.nbytes <= layout.nbytes
    if not inside or entry.rows < 0 or entry.nbytes != entry.rows * (right - left) * dtype.itemsize:
        raise ValueError(
            f"{entry.name} of rank {layout.rank} does not lie inside its payload of {layout.nbytes} bytes: {entry}"
        )


def _check_cover(name: str, shape: tuple[int, ...], moves: Sequence[Move], padding: tuple[int, int] | None) -> None:
    """Strips of columns side by side, in each of them the rows one after the other."""
    if not prod(shape):
        return
    strips: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for move in moves:
        strips[move.column, move.column + move.columns].append((move.row, move.row + move.rows))
    _tile(
        f"columns {{}}..{{}} of {name} ({_width(shape)} columns)", _width(shape), sorted(strips) or [(0, _width(shape))]
    )
    for rows in strips.values() or [[]]:
        _tile(
            f"rows {{}}..{{}} of {name} ({_rows(shape)} rows)",
            _rows(shape),
            sorted([*rows, padding] if padding else rows),
        )


def _tile(what: str, length: int, spans: Sequence[tuple[int, int]]) -> None:
    position = 0
    for start, end in [*spans, (length, length)]:
        if start > position:
            raise ValueError(f"{what.format(position, start - 1)} are published by no rank")
        if start < position:
            raise ValueError(f"{what.format(start, position - 1)} are published more than once or beyond its end")
        position = end
