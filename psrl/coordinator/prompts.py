"""Which prompt is next: a shuffled pass over the data an epoch, prompts that came back first.

The source is pure and follows the journal: `peek` proposes, `apply` of the same record that moves the staleness state
moves the source, so a replay leaves both where they were.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from psrl.coordinator.records import (
    FAILURE_REASONS,
    REQUEUED,
    YIELDING_REASONS,
    AnyRecord,
    Occupy,
    Position,
    Release,
    Reserve,
)


def order(seed: int, data_epoch: int, num_prompts: int) -> np.ndarray:
    """A permutation of range(num_prompts), int64 [num_prompts], the same on every machine and in every numpy.

    Sorts raw PCG64 words: numpy keeps bit streams stable for ever, but not what `Generator.permutation` makes of them,
    and a run may be resumed after an upgrade.
    """
    words = np.random.PCG64(np.random.SeedSequence([seed, data_epoch])).random_raw(num_prompts)
    return np.argsort(words, kind="stable")


def steps_in_data(num_prompts: int, total_epochs: int | None, buffer_entries: int, drop_last: bool) -> int | None:
    """Training steps that the data gives when no group is dropped; None when it repeats without end.

    `steps_in_data(3, 1, 2, drop_last=False) == 2` (the last buffer holds one group), with drop_last 1.
    Raises ValueError when not even one buffer can be trained.
    """
    if num_prompts < 1:
        raise ValueError("the data holds no prompt: check data.train_files and data.max_prompt_length")
    if total_epochs is None:
        return None
    prompts = num_prompts * total_epochs
    steps = prompts // buffer_entries if drop_last else -(-prompts // buffer_entries)
    if steps == 0:
        raise ValueError(
            f"{prompts} prompts < batch {buffer_entries}: psrl.staleness_buffer_entries={buffer_entries} groups never "
            f"fill from {num_prompts} prompts x trainer.total_epochs={total_epochs}; lower the first, raise the last, "
            "or set data.drop_last=False to train one short buffer"
        )
    return steps


class PromptSource:
    """Prompts in order; every prompt of an epoch is handed out until it is sealed or dropped, each once at a time.

    >>> source = PromptSource(num_prompts=3, seed=0, shuffle=False, total_epochs=1)
    >>> source.peek()
    Position(data_epoch=0, prompt=0, attempt=0, protected=False)
    """

    __slots__ = (
        "_cursor",
        "_epoch",
        "_open",
        "_order",
        "_returned",
        "num_prompts",
        "seed",
        "shuffle",
        "total_epochs",
    )

    def __init__(
        self,
        *,
        num_prompts: int,
        seed: int,
        shuffle: bool = True,
        total_epochs: int | None = None,
    ) -> None:
        if num_prompts < 1:
            raise ValueError("the data holds no prompt: check data.train_files and data.max_prompt_length")
        if total_epochs is not None and total_epochs < 1:
            raise ValueError(f"trainer.total_epochs={total_epochs}: give 1 or more, or null to repeat without end")
        self.num_prompts = num_prompts
        self.seed = seed
        self.shuffle = shuffle
        self.total_epochs = total_epochs
        self._epoch = 0
        self._cursor = 0
        self._order = self._order_of(0)
        self._returned: deque[Position] = deque()
        self._open: dict[int, Position] = {}

    def _order_of(self, data_epoch: int) -> np.ndarray:
        return order(self.seed, data_epoch, self.num_prompts) if self.shuffle else np.arange(self.num_prompts)

    def _from_data(self) -> Position | None:
        if self.total_epochs is not None and self._epoch >= self.total_epochs:
            return None
        return Position(self._epoch, int(self._order[self._cursor]))

    def peek(self) -> Position | None:
        """The next prompt, or None while there is none (one in flight may still come back)."""
        return self._returned[0] if self._returned else self._from_data()

    @property
    def exhausted(self) -> bool:
        """No prompt is left and none is in flight: no group will ever be made again."""
        return not self._open and self.peek() is None

    @property
    def returned(self) -> int:
        """Prompts that came back and wait for another try."""
        return len(self._returned)

    def apply(self, record: AnyRecord) -> None:
        """Follow one record of the journal. Raises ValueError if the data is not what the journal was written with."""
        kind = type(record)
        if kind is Reserve:
            self._hand_out(record)  # type: ignore[arg-type]
        elif kind is Occupy:
            self._open.pop(record.group, None)  # type: ignore[union-attr]
        elif kind is Release:
            self._give_back(record)  # type: ignore[arg-type]

    def _hand_out(self, record: Reserve) -> None:
        position = record.position
        expected = self.peek()
        if position != expected:
            raise ValueError(
                f"the ledger hands out prompt {position.prompt} of data epoch {position.data_epoch} (attempt "
                f"{position.attempt}) as group {record.group}, but the data gives {expected}: the data, data.seed, "
                "data.shuffle or trainer.total_epochs differ from those of the run; restore them or use a new run_dir"
            )
        self._open[record.group] = position
        if self._returned:
            self._returned.popleft()
            return
        self._cursor += 1
        if self._cursor == self.num_prompts:
            self._cursor = 0
            self._epoch += 1
            self._order = self._order_of(self._epoch)

    def _give_back(self, record: Release) -> None:
        # A group that was sealed before it was dropped is no longer open here, and stays gone.
        position = self._open.pop(record.group, None)
        if position is not None and record.outcome == REQUEUED:
            failed = record.reason in FAILURE_REASONS
            protected = position.protected or record.reason in YIELDING_REASONS
            self._returned.append(position._replace(attempt=position.attempt + failed, protected=protected))

    def snapshot(self) -> dict[str, object]:
        """The whole state in plain values, for comparison."""
        return {
            "epoch": self._epoch,
            "cursor": self._cursor,
            "returned": list(self._returned),
            "open": dict(self._open),
        }
