"""Weights and optimizer moments as they were at a moment, beside those that train on.

When optimizer steps are taken before the whole buffer is there, the weights at its start are still needed: for the old
log-probs of what arrives later, and to go back to when the run is stopped in the middle. The cost is a second copy of both,
on the device where they live, made once a buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch


class Remembered:
    """A copy of `weights` and `moments` (the live tensors, this rank's shards).

    `changed` is called whenever weights were replaced, for whoever keeps something that was made from them.
    """

    def __init__(
        self,
        weights: Iterable[torch.Tensor],
        moments: Iterable[torch.Tensor],
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._weights = [(live, torch.empty_like(live)) for live in weights]
        self._moments = [(live, torch.empty_like(live)) for live in moments]
        self._changed = changed

    @torch.no_grad()
    def take(self) -> None:
        """Remember what they are now, in place of what was remembered before."""
        for live, copy in [*self._weights, *self._moments]:
            copy.copy_(live)

    @torch.no_grad()
    def go_back(self) -> None:
        """The live tensors become what is remembered."""
        for live, copy in [*self._weights, *self._moments]:
            live.copy_(copy)
        self._changed()

    @contextmanager
    def weights(self) -> Iterator[None]:
        """The live weights are the remembered ones inside; bit by bit what they were before afterwards."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for live, copy in self._weights:
            held = live.clone()  # one tensor at a time
            live.copy_(copy)
            copy.copy_(held)
        self._changed()
