"""Whose turn it is on GPUs that trainer and rollout share. It follows from what the trainer waits for, so nothing is kept.

The trainer releases its memory before it asks for a buffer and takes it again before it trains: while it waits the GPUs are
the rollout's. An instance that is told to sleep hands back what it has, as it does for new weights, and loses its own: it
wakes without any and pulls like a new one. Whoever is late is waited for by the locks of the GPUs (psrl.colocate), not here.
"""

from __future__ import annotations

from psrl.coordinator.state import RunState
from psrl.coordinator.views import InstanceView
from psrl.protocol import control as c


class Turns(RunState):
    """Orders to instances; without `settings.colocate` there are none."""

    def _give_turn(self) -> None:
        """Tell whoever has not heard it. Nothing is known, and nothing said, before the trainer is here."""
        if not self.settings.colocate or not self.trainer:
            return
        awake = self.rollouts_turn
        names = self.placement.changed if awake == self.turn_given else self.placement.instances
        self.turn_given = awake
        for name in sorted(names):
            view = self.placement.instances.get(name)
            if view is not None and view.asleep == awake:
                self._wake(view) if awake else self._sleep(view)

    def _wake(self, view: InstanceView) -> None:
        view.asleep = False
        self.placement.changed.add(view.name)
        self._say(view.name, c.Wake())

    def _sleep(self, view: InstanceView) -> None:
        view.asleep, view.draining = True, False
        view.version = view.pulling = -1
        self.lagging.consider(view)
        self._say(view.name, c.Sleep())
