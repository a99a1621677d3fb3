"""Who came to the running run and may leave it at any time, and how a role leaves without losing anything.

A leaving instance hands its samples back to their agent loops, which say so; once none is known to be there, neither
running nor on its way, it is dismissed. A leaving agent loop's open groups return to the queue.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from psrl.coordinator.state import RunState
from psrl.protocol import control as c

log = logging.getLogger("psrl.coordinator")

CLAIM_GRACE_S = 15.0
"""After a coordinator restart roles have this long to say hello before anything is concluded from their absence."""
REFUSED = "refused"
"""Status that a supervisor hears whose roles have no place in this run, which goes on."""


class Joiners(RunState):
    """Handlers for supervisors that joined. `joined` and `leaving` are all that is known of them."""

    def _joiner_hello(self, name: str, state: c.SupervisorState) -> None:
        known, children = name in self.joined, set(state.children)
        self.joined[name] = children
        if known:
            return
        log.info("%s joins with %s", name, ", ".join(sorted(children)))
        if self.settings.colocate:
            self._refuse(
                name, "psrl.colocate=True takes turns on the trainer's own GPUs, an instance elsewhere has none"
            )
            return
        others = len(self.placement.instances.keys() - children)
        if others + len(children) > self.settings.max_instances:
            self._refuse(
                name,
                f"there is no room for {len(children)} more roles beside {others} instances: open files allow for "
                f"{self.settings.max_instances}; raise their limit (`ulimit -Hn`, LimitNOFILE of slurmd) for the whole run",
            )

    def _refuse(self, name: str, cause: str) -> None:
        """Send away a supervisor and all that joined with it."""
        log.error("%s is sent away: %s", name, cause)
        self._say(name, c.Shutdown(status=REFUSED, cause=cause))
        self._retire_all(self.joined[name], cause)

    def _joiner_gone(self, name: str, cause: str) -> None:
        log.info("%s, which had joined, is gone (%s)", name, cause)
        self.leaving -= self.joined.pop(name)

    def _joined_child_gone(self, joiner: str, child: str) -> None:
        self.joined[joiner].discard(child)
        self.leaving.discard(child)

    def _joiner_of(self, child: str) -> str | None:
        """The supervisor that joined with this role; None for one that the run counts on."""
        return next((name for name, children in self.joined.items() if child in children), None)

    # ---- leaving ---------------------------------------------------------------------------------------------

    def _leave(self, sender: str, leave: c.Leave, now_s: float) -> None:
        log.info(
            "%s leaves within %g s (%s): %s",
            sender,
            leave.grace_s,
            leave.reason,
            ", ".join(leave.children) or "no role",
        )
        self._retire_all(leave.children, leave.reason)

    def _retire_all(self, names: Iterable[str], reason: str) -> None:
        self.leaving.update(names)
        for name in names:
            self._retire(name, reason)

    def _retire(self, name: str, reason: str) -> None:
        """Tell a role that is here to leave, and give it nothing new. One that is not hears it when it says hello."""
        if view := self.placement.instances.get(name) or self.placement.agents.get(name):
            view.leaving = True
            self.placement.changed.add(name)
            self.retiring.add(name)
            self._say(name, c.Retire(reason=reason))

    def _dismiss(self) -> None:
        """Leaving instances that nobody has anything with may go."""
        if not self.retiring:  # called after every event, with any number of instances
            return
        self.retiring &= self.placement.instances.keys()
        views = [self.placement.instances[name] for name in sorted(self.retiring)]
        for view in [v for v in views if not v.in_flight]:
            log.info("instance %s has handed everything back and leaves", view.name)
            self._say(view.name, c.Dismissed())
            self._remove_instance(view.name)

    # ---- the last one ----------------------------------------------------------------------------------------

    def _check_last(self, now_s: float) -> None:
        """The run ends when all instances, or all agent loops, that psrl.deployment counts are gone for good and none
        that joined is there, be it that it starts just now."""
        if self.epoch > 1 and now_s - self.started_s < CLAIM_GRACE_S:
            return
        instances, agents = self.placement.instances.keys(), self.placement.agents.keys()
        joined = {child for children in self.joined.values() for child in children} - self.leaving
        for role, what, counted, here, others in (
            ("instance", "rollout instance", self.settings.num_instances, instances, agents),
            ("agent_loop", "agent loop", self.settings.num_agents, agents, instances),
        ):
            gone = self.gone_for_good[role]
            if len(gone) >= counted and not here - gone.keys() and not joined - others:
                name, cause = list(gone.items())[-1]
                self.end("failed", f"the last {what} is gone: {name} ended by {cause}, no restart is left")
