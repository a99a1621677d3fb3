"""While others still take new weights, whoever has them already gets no more than its share of the new groups.

A new version opens places for many groups at once, and instances end their pulls one after the other: the first one would get
all of these groups, and whatever is bound to where it began (sticky sessions, cached prefixes, samples that nobody moves)
would stay there. The share is an even part of all samples that are in flight or may begin now, so the others find theirs
when they come. Nobody is waited for longer than `patience_s`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable

from psrl.coordinator.views import InstanceView

log = logging.getLogger("psrl.coordinator")


class Shares:
    """`look` before new groups are handed out, then `sated` for each instance that was chosen for one."""

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self._share = math.inf
        """Samples of one instance; infinite while nobody is waited for."""
        self._sated: dict[str, InstanceView] = {}
        self._kept_since_s = math.inf
        """When a group was first kept for those that are awaited now."""
        self._absent_are_awaited = True

    @property
    def next_look_s(self) -> float:
        """When patience is over."""
        return self._kept_since_s + self.patience_s if self._sated else math.inf

    def look(
        self,
        *,
        samples: Callable[[], int],
        staying: int,
        pulling: int,
        absent: int,
        changed: Iterable[str],
        now_s: float,
    ) -> None:
        """What is in flight or may begin, `samples` (asked for only while somebody is awaited), is for `staying` instances, `pulling`
        of which take new weights, and for those that are `absent`: they have not come since the start. `changed`: instances whose
        load did."""
        absent *= self._absent_are_awaited
        if not pulling + absent:
            self._kept_since_s = math.inf
        patient = now_s < self._kept_since_s + self.patience_s
        if not patient and self._sated:
            log.info(
                "new groups go to others: %d instances are not ready after %g s", pulling + absent, self.patience_s
            )
            self._absent_are_awaited = False
        before, self._share = self._share, math.inf
        if pulling + absent and patient:
            self._share = even_share(samples(), staying + absent)
        looked_at = list(self._sated) if self._share > before else [name for name in changed if name in self._sated]
        for name in looked_at:
            if self._sated[name].in_flight < self._share:
                self._sated.pop(name).sated = False

    def sated(self, view: InstanceView, now_s: float) -> bool:
        """Whether `view` has its share; it is passed over from then on."""
        if view.in_flight < self._share:
            return False
        self._kept_since_s = min(self._kept_since_s, now_s)
        self._sated[view.name] = view
        view.sated = True
        return True


def even_share(samples: int, instances: int) -> int:
    """Samples of each of `instances`, rounded up.

    >>> even_share(48, 2), even_share(7, 2)
    (24, 4)
    """
    return -(-samples // max(1, instances))
