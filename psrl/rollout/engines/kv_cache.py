"""Keys and values of all running sequences, in the shape that transformers' attention layers ask for.

Per layer one tensor [rows, kv_heads, length, head_dim] for keys and one for values, grown when needed. A decode step
writes one position in each of the first n rows in place and attends over a view: nothing is concatenated or copied.
Whole blocks of rows go to a `BlockStore` and come back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from psrl.rollout.engines.block_store import BlockStore
from psrl.rollout.engines.prefix_cache import BlockRun

LENGTH_CHUNK = 64


class _Step:
    """What the forward in hand does; shared by all layers. `length` 0 means a prefill from position 0."""

    def __init__(self) -> None:
        self.rows = torch.empty(0, dtype=torch.int64)
        self.positions = torch.empty(0, dtype=torch.int64)
        self.tokens: tuple[torch.Tensor, torch.Tensor] | None = None
        """Which of the forward's tokens are real, (row of the batch, column), one for each of `rows` and `positions`; set
        where sequences are continued, each by a number of its own."""
        self.batch_rows = self.rows
        """Then the row of each sequence of the batch."""
        self.length = 0
        self.row_capacity = 0
        self.length_capacity = 0


class SlotLayer(CacheLayerMixin):
    """One layer's rows."""

    is_sliding = False
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, step: _Step) -> None:
        super().__init__()
        self._step = step

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate the capacity reserved so far; head counts and sizes are those of the first keys and values."""
        self.keys = self._grown(None, key_states)
        self.values = self._grown(None, value_states)
        self.is_initialized = True

    def _grown(self, old: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        # Zeros, not empty memory: a masked position may hold anything finite, but a NaN would leak through the mask.
        new = like.new_zeros(self._step.row_capacity, like.shape[1], self._step.length_capacity, like.shape[3])
        if old is not None:
            new[: old.shape[0], :, : old.shape[2]] = old
        return new

    def grow(self) -> None:
        if self.is_initialized:
            self.keys = self._grown(self.keys, self.keys)
            self.values = self._grown(self.values, self.values)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values [n, kv_heads, q_len, head_dim]; return what this forward attends over."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        step = self._step
        if not step.length:
            width = key_states.shape[2]
            self.keys[step.rows, :, :width] = key_states
            self.values[step.rows, :, :width] = value_states
            return key_states, value_states
        if step.tokens is not None:
            batch, column = step.tokens
            self.keys[step.rows, :, step.positions] = key_states[batch, :, column]
            self.values[step.rows, :, step.positions] = value_states[batch, :, column]
            return self.keys[step.batch_rows, :, : step.length], self.values[step.batch_rows, :, : step.length]
        self.keys[step.rows, :, step.positions] = key_states[:, :, 0]
        self.values[step.rows, :, step.positions] = value_states[:, :, 0]
        n = key_states.shape[0]
        return self.keys[:n, :, : step.length], self.values[:n, :, : step.length]

    def release(self) -> None:
        """Give the memory back; the next keys and values allocate it anew."""
        if self.is_initialized:
            del self.keys, self.values
            self.is_initialized = False

    def copy_rows(self, sources: torch.Tensor, destinations: torch.Tensor, length: int) -> None:
        if self.is_initialized:
            self.keys[destinations, :, :length] = self.keys[sources, :, :length]
            self.values[destinations, :, :length] = self.values[sources, :, :length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Only a prefill leaves the mask to transformers; decode steps bring their own."""
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class SlotCache(Cache):
    """A transformers Cache whose batch rows come and go.

    Memory is rows x longest row, at most `max_rows` x `max_length` positions; it grows in steps and is kept.
    """

    def __init__(
        self, *, num_layers: int, max_rows: int, max_length: int, block_size: int, device: torch.device | str
    ) -> None:
        """`block_size`: tokens of a block that can be stored; 0 if none ever is."""
        self._step = _Step()
        self._max_rows = max_rows
        self._max_length = max_length
        self._device = device
        self._all_rows = torch.arange(max_rows, device=device)
        self._store = BlockStore(num_layers=num_layers, block_size=block_size, device=device)
        self._slots = [SlotLayer(self._step) for _ in range(num_layers)]
        super().__init__(layers=list(self._slots))

    def begin_prefill(self, rows: Sequence[int], width: int) -> None:
        """The next forward is given whole sequences of up to `width` tokens, one per row, from position 0."""
        self._reserve(max(rows) + 1, width)
        self._step.rows = torch.tensor(rows, device=self._device)
        self._step.length, self._step.tokens = 0, None

    def begin_extend(self, rows: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> None:
        """The next forward is given `counts[i]` tokens, padded on the right, that follow the first `starts[i]` of row
        `rows[i]`."""
        length = max(start + count for start, count in zip(starts, counts, strict=True))
        self._reserve(max(rows) + 1, length)
        tokens = [
            (i, column, row, start + column)
            for i, (row, start, count) in enumerate(zip(rows, starts, counts, strict=True))
            for column in range(count)
        ]
        batch, columns, row, positions = torch.tensor(tokens, device=self._device).unbind(1)
        step = self._step
        step.tokens, step.rows, step.positions, step.length = (batch, columns), row, positions, length
        step.batch_rows = torch.tensor(rows, device=self._device)

    def begin_decode(self, positions: torch.Tensor, length: int) -> None:
        """The next forward is given one token for each of rows 0 .. n-1, at `positions` int64 [n] below `length`."""
        self._reserve(len(positions), length)
        self._step.rows = self._all_rows[: len(positions)]
        self._step.positions = positions
        self._step.length, self._step.tokens = length, None

    def copy_rows(self, moves: Sequence[tuple[int, int]], length: int) -> None:
        """Copy the first `length` positions of each source row to its destination. No row may be both."""
        if not moves or length <= 0:
            return
        self._reserve(max(destination for _, destination in moves) + 1, length)
        sources, destinations = torch.tensor(moves, device=self._device).unbind(1)
        for layer in self._slots:
            layer.copy_rows(sources, destinations, length)

    def store_blocks(self, runs: Sequence[BlockRun]) -> None:
        """Copy blocks of rows to the store."""
        self._store.take(self._slots, runs)

    def restore_blocks(self, runs: Sequence[BlockRun]) -> None:
        """Copy blocks of the store to rows."""
        for run in runs:
            self._reserve(run.row + 1, self._store.block_size * (run.first + len(run.slots)))
        self._store.give(self._slots, runs)

    def release(self) -> None:
        """Give all memory back, and with it what every row and the store hold."""
        self._store.release()
        self._step.row_capacity = self._step.length_capacity = 0
        for layer in self._slots:
            layer.release()

    def _reserve(self, rows: int, length: int) -> None:
        step = self._step
        if rows <= step.row_capacity and length <= step.length_capacity:
            return
        if rows > step.row_capacity:
            step.row_capacity = min(self._max_rows, max(rows, 2 * step.row_capacity))
        if length > step.length_capacity:
            wanted = max(length, step.length_capacity * 5 // 4)
            step.length_capacity = min(self._max_length, -(-wanted // LENGTH_CHUNK) * LENGTH_CHUNK)
        for layer in self._slots:
            layer.grow()
