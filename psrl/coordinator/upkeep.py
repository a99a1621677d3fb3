"""The instances' own affairs: what they report, when they pull new weights, when one hands its samples back.

A look follows events: an instance is looked at when its load or its weights changed, everybody at the latest after
`check_interval_s` or when a version is published. Pulls come first; migration sees only who is left.
"""

from __future__ import annotations

import logging
import math
from collections import Counter

from psrl.coordinator.load import free_slots, observe
from psrl.coordinator.membership import Membership
from psrl.coordinator.migration import to_relieve
from psrl.coordinator.sync.moment import Moment
from psrl.coordinator.sync.strategy import idle_pulls, pulls, serves_nothing
from psrl.coordinator.views import UNLIMITED, InstanceView
from psrl.protocol import control as c
from psrl.protocol.generation import EngineStats

log = logging.getLogger("psrl.coordinator")

QUARANTINE_S = 2.0
"""After a failed pull an instance is left alone this long before the next try."""


class Upkeep(Membership):
    """Handlers of what instances say, and the looks at sync and migration."""

    # ---- what instances say ----------------------------------------------------------------------------------

    def _instance_status(self, sender: str, status: c.InstanceStatus, now_s: float) -> None:
        if view := self.placement.instances.get(sender):
            if sender == self.migrations.source:
                status.stats.waiting = 0  # its queue is being emptied: that must not keep samples from coming back
            self._count_prefill(view.stats, status.stats)
            observe(view, status.stats, status.at_s or now_s, now_s)
            self.router.cache_reported(view, status.cache)
            if self.gate is not None:
                self.gate.reported(sender, status.stats)
            self.placement.changed.add(sender)

    def _count_prefill(self, before: EngineStats, now: EngineStats) -> None:
        """Prompt tokens that were computed, and those that a prefix cache held. Less than before: a new engine counts."""
        for name in ("prompt_tokens", "prefix_hit_tokens"):
            had, has = getattr(before, name), getattr(now, name)
            self.counters[name] += has - had if has >= had else has

    def _pull_started(self, sender: str, message: c.PullStarted, now_s: float) -> None:
        if (view := self.placement.instances.get(sender)) and not view.asleep:
            view.pulling = message.version
            self.lagging.consider(view)

    def _switching(self, sender: str, message: c.Switching, now_s: float) -> None:
        if (view := self.placement.instances.get(sender)) and not view.asleep:
            view.draining = True

    def _pull_done(self, sender: str, done: c.PullDone, now_s: float) -> None:
        if (view := self.placement.instances.get(sender)) and not view.asleep:
            view.version, view.incarnation = done.version, done.incarnation
            view.pause_s, view.quarantined_until_s = done.pause_s, 0.0
            self.counters["pulls"] += 1
            self._pull_ended(view)

    def _pull_failed(self, sender: str, failed: c.PullFailed, now_s: float) -> None:
        if view := self.placement.instances.get(sender):
            log.warning(
                "%s could not pull version %d: %s; next try in %g s",
                sender,
                failed.version,
                failed.cause,
                QUARANTINE_S,
            )
            self.counters["failed_pulls"] += 1
            view.quarantined_until_s = now_s + QUARANTINE_S
            self._pull_ended(view)

    def _pull_ended(self, view: InstanceView) -> None:
        view.pulling, view.draining = -1, False
        self.lagging.consider(view)
        self.placement.changed.add(view.name)

    def _sample_moves(self, sender: str, moves: c.SampleMoves, now_s: float) -> None:
        for group, instance, count in moves.left:
            self.placement.leave(group, instance, count)
            self.migrations.left(group, instance, count)
            if (view := self.placement.instances.get(instance)) and view.fits < UNLIMITED:
                view.fits += count

    # ---- looks -----------------------------------------------------------------------------------------------

    @property
    def next_look_s(self) -> float:
        """When `advance` is due at the latest, event or not."""
        look_s = math.inf if not self.lagging and self.settings.migration is None else self._whole_look_s
        if self.gate is not None:
            look_s = min(look_s, self.gate.next_look_s)
        look_s = min(look_s, self.shares.next_look_s)
        if not self.waiting_routes:
            return look_s
        return min(look_s, self.considered_s + self.settings.placing.check_interval_s)

    @property
    def _whole_look_s(self) -> float:
        return self.looked_s + self.settings.sync.check_interval_s

    def _look(self, now_s: float) -> bool:
        """Sync, then migration, for whom something may have changed. True: for everybody."""
        due = now_s >= self._whole_look_s
        if due:
            self.looked_s = now_s
        whole = due
        if self._can_be_pulled:
            newest = self.staleness.version, self.staleness.incarnation
            whole = self.lagging.aim(*newest, self.placement.instances.values()) or due
            self._sync(now_s, whole)
        if due:
            self._migrate(now_s)
        return whole

    @property
    def _can_be_pulled(self) -> bool:
        """What the ledger knows as published can be fetched from the trainer that is here now."""
        return self.pullable_version >= self.staleness.version

    def _sync(self, now_s: float, whole: bool) -> None:
        """Tell instances to pull."""
        looked_at = self.lagging.all() if whole else self.lagging.among(self.placement.changed)
        if self.sync_strategy.whole_fleet and not whole:
            looked_at = [i for i in looked_at if serves_nothing(i, self.staleness.incarnation)]
        if looked_at:
            for view in pulls(self.sync_strategy, looked_at, self._moment(now_s)):
                self._order_pull(view)

    def _pull_idle(self, now_s: float, whole: bool) -> None:
        """Whoever is behind and got nothing to do pulls, whatever the strategy says: see `sync.strategy`."""
        if self.lagging and self._can_be_pulled:
            looked_at = self.lagging.all() if whole else self.lagging.among(self.placement.changed)
            for view in idle_pulls(looked_at, now_s):
                self._order_pull(view)
        self.placement.changed.clear()

    def _order_pull(self, view: InstanceView) -> None:
        partial = self.settings.partial_rollout
        view.pulling = self.lagging.version
        view.draining = not partial
        self.lagging.consider(view)
        order = c.Pull(version=self.lagging.version, incarnation=self.lagging.incarnation, abort_running=partial)
        self._say(view.name, order)

    def _migrate(self, now_s: float) -> None:
        """Tell one far too busy instance to hand back its samples, if another one can take them."""
        settings, migrations = self.settings.migration, self.migrations
        if settings is None or migrations.under_way(self.placement.groups, now_s):
            return
        views = migrations.believed(self._serving(), settings)
        migrations.note_relief(views, settings)
        waiting = self._moment(now_s).waiting_for
        found = to_relieve(
            views,
            settings,
            may_give=lambda i: migrations.may_give(i, now_s),
            may_take=lambda i: self._free_slots(i) > 0 and not waiting(i.version),
            newest_group=self.placement.newest_versions,
        )
        if found is not None:
            busy, least = found
            log.info(
                "%s has %d samples, %s %d: the first hands back", busy.name, busy.in_flight, least.name, least.in_flight
            )
            self.counters["migrations"] += 1
            migrations.begin(busy.name, self.placement.samples_at(busy.name), now_s)
            busy.stats.waiting = 0
            self._say(busy.name, c.HandBack())

    # ---- facts -----------------------------------------------------------------------------------------------

    def _serving(self) -> list[InstanceView]:
        """Instances that serve this incarnation and will do so for a while: they neither leave nor pull."""
        incarnation = self.staleness.incarnation
        return [
            i
            for i in self.placement.instances.values()
            if i.incarnation == incarnation and i.version >= 0 > i.pulling and not (i.leaving or i.draining)
        ]

    def _free_slots(self, view: InstanceView) -> int:
        return free_slots(view, self.settings.max_concurrent, self.settings.reject_on_waiting)

    def _moment(self, now_s: float) -> Moment:
        staleness = self.staleness
        return Moment(
            version=staleness.version,
            incarnation=staleness.incarnation,
            now_s=now_s,
            instances=self.placement.instances.values(),
            waiting=self._waiting_versions(),
            room=staleness.room,
            samples_per_group=self.settings.samples_per_group,
            more_groups=self.draining is None and bool(self.placement.agents) and self.prompts.peek() is not None,
            next_ready=staleness.ready(staleness.lo),
            limit=self.settings.max_concurrent,
            reject_on_waiting=self.settings.reject_on_waiting,
            mean_response_tokens=self.finished_tokens / self.finished_samples if self.finished_samples else 0.0,
        )

    def _waiting_versions(self) -> Counter[int]:
        """Requests that wait for an instance, by the version of their group."""
        return Counter(w.version for w in self.waiting_routes if w.group in self.placement.groups)
