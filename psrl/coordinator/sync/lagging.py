"""Which instances are behind the published weights, kept by changes: looking costs nothing while nobody is."""

from __future__ import annotations

from collections.abc import Iterable

from psrl.coordinator.sync.strategy import is_behind
from psrl.coordinator.views import InstanceView


class Lagging:
    """Instances to decide about: behind, and not told to pull yet; and how many pull. Tell it of every change of a version or a pull."""

    def __init__(self) -> None:
        self.version = self.incarnation = -1
        self._behind: dict[str, InstanceView] = {}
        self._pulling: set[str] = set()

    @property
    def num_pulling(self) -> int:
        """Instances that take new weights now and whose last pull did not fail."""
        return len(self._pulling)

    def __len__(self) -> int:
        return len(self._behind)

    def aim(self, version: int, incarnation: int, instances: Iterable[InstanceView]) -> bool:
        """These weights are the published ones now; True if they were not before."""
        if (version, incarnation) == (self.version, self.incarnation):
            return False
        self.version, self.incarnation = version, incarnation
        self._behind.clear()
        for view in instances:
            self.consider(view)
        return True

    def consider(self, view: InstanceView) -> None:
        """This instance came, or its version changed, or a pull began or ended."""
        if view.pulling < 0 and is_behind(view, self.version, self.incarnation):
            self._behind[view.name] = view
        else:
            self._behind.pop(view.name, None)
        if view.pulling >= 0 and not (view.quarantined_until_s or view.leaving):
            self._pulling.add(view.name)
        else:
            self._pulling.discard(view.name)

    def forget(self, name: str) -> None:
        """It is gone."""
        self._behind.pop(name, None)
        self._pulling.discard(name)

    def all(self) -> list[InstanceView]:
        return list(self._behind.values())

    def among(self, names: Iterable[str]) -> list[InstanceView]:
        return [self._behind[name] for name in sorted(names) if name in self._behind] if self._behind else []
