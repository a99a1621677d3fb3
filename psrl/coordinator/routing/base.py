"""What is to be placed, what may take it, and the protocol of the methods that choose.

A method never looks at the whole fleet: it is told of each instance that changed (`update`) and keeps its own index, so
that a choice among ten thousand costs little more than one among ten. Instances with the same weights form a pool; the
caller says which pools come into question. What "may take work" means is `load.free_slots`, the same for every method:
not leaving, not draining, no queue of its own (if that is asked for), and room for all samples under both limits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from psrl.coordinator.views import InstanceView
from psrl.protocol.generation import CacheEvents

Pool = tuple[int, int]
"""(incarnation, version): the weights that its instances serve."""


@dataclass(frozen=True, slots=True)
class Work:
    """Samples of one group that go to one instance together."""

    num_samples: int = 1
    tokens: float = 0.0
    """Prompt and response so far of each sample; 0 where the method does not ask (`Router.counts_tokens`)."""
    remaining: float = 0.0
    """Response tokens still expected of each; 0 where the method does not ask (`Router.counts_budget`)."""
    blocks: tuple[int, ...] = ()
    """Names of the cache blocks of one sample, each standing for all tokens up to its end (`Router.block_size`)."""
    may_wait: bool = True
    """The method may hold it back for a better moment; False once it has waited long enough."""

    @property
    def weight(self) -> float:
        """KV tokens that all samples together count for."""
        return self.num_samples * (self.tokens + self.remaining)


class Router(ABC):
    """One routing method. `update` comes before `choose` for everything that changed in between."""

    counts_tokens = False
    """It wants `Work.tokens`."""
    counts_budget = False
    """It wants `Work.remaining` too."""
    block_size = 0
    """It wants `Work.blocks` of this many tokens; 0: no."""

    @abstractmethod
    def update(self, view: InstanceView, free: int) -> None:
        """`view` is new or has changed; `free` more samples may go there now."""

    @abstractmethod
    def forget(self, view: InstanceView) -> None:
        """`view` is gone."""

    @abstractmethod
    def choose(self, work: Work, pools: Sequence[Pool]) -> InstanceView | None:
        """An instance of `pools` with room for all of `work`; among equally good ones one of the earliest pool. None: no
        instance has the room, or (only if `work.may_wait`) waiting is better."""

    def placed(self, view: InstanceView, work: Work) -> None:  # noqa: B027 - most methods remember nothing
        """`work` goes to `view`, by this method's choice or for another reason."""

    def left_behind(self, view: InstanceView, work: Work) -> None:  # noqa: B027
        """`work` was at `view` until now, and its keys and values may still be cached there."""

    def cache_reported(self, view: InstanceView, events: CacheEvents | None) -> None:  # noqa: B027
        """With each report of an instance: what changed in its engine's prefix cache; None: nothing, or it does not say."""

    def tidy(self, now_s: float) -> None:  # noqa: B027
        """Called every few moments: forget what is too much, if it is time."""


def pool_of(view: InstanceView) -> Pool:
    return view.incarnation, view.version


def kv_load(view: InstanceView) -> float:
    """KV tokens that count for an instance: those placed there, and what they had grown by when it last reported."""
    return view.placed_tokens + view.grown_tokens if view.in_flight else 0.0
