"""What a decision about a pull may look at besides the instance itself, at one moment."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from psrl.coordinator.load import free_slots
from psrl.coordinator.views import InstanceView


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The fleet and its work now. `version` and `incarnation` are those that a pull would bring."""

    version: int
    incarnation: int
    now_s: float
    instances: Collection[InstanceView] = ()
    waiting: Mapping[int, int] = field(default_factory=dict)
    """Requests that wait for an instance, by the version of their group."""
    room: Callable[[int], int] = lambda version: 0
    """Groups that may still be reserved at an instance of this version."""
    samples_per_group: int = 1
    more_groups: bool = True
    """A prompt is left to reserve for, and an agent loop to make it."""
    next_ready: bool = False
    """The next buffer to train has all its groups."""
    limit: int = 1 << 30
    """Most samples that the router places at one instance."""
    reject_on_waiting: bool = False
    mean_response_tokens: float = 0.0
    """Of the samples finished so far; 0 before the first."""
    _startable: dict[int, int] = field(default_factory=dict, repr=False)
    """What was counted already."""

    def free_slots(self, view: InstanceView) -> int:
        return free_slots(view, self.limit, self.reject_on_waiting)

    def waiting_for(self, version: int) -> int:
        """Waiting requests that an instance of `version` may serve.

        >>> Moment(version=4, incarnation=0, now_s=0.0, waiting={2: 3, 4: 1}).waiting_for(3)
        3
        """
        return sum(count for needs, count in self.waiting.items() if needs <= version)

    def startable(self, version: int) -> int:
        """Samples that instances of `version` could start, had they places without end: waiting ones and new groups."""
        if version not in self._startable:
            groups = self.room(version) if self.more_groups else 0
            self._startable[version] = self.waiting_for(version) + groups * self.samples_per_group
        return self._startable[version]
