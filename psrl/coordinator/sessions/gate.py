"""The gate that samples of several turns pass between two turns: who waits at it, and who may go on where.

It hears what happens to sessions, keeps the table, and acts on `thunder`'s decisions for instances that something happened
to. Samples that were interrupted in the middle of a turn do not pass it; they only count. An instance where somebody is
hung, or that has no room for a group, is `full` for new groups.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator

from psrl.coordinator.placement import Placement
from psrl.coordinator.sessions.session import AWAY, GENERATING, HUNG, Key, Session
from psrl.coordinator.sessions.settings import BUCKETED, SessionSettings
from psrl.coordinator.sessions.table import Place, SessionTable
from psrl.coordinator.sessions.thunder import Holder, Room, next_bucketed, next_global, to_hang
from psrl.coordinator.views import InstanceView
from psrl.coordinator.waiting import Waiting
from psrl.protocol.generation import EngineStats

log = logging.getLogger("psrl.coordinator")


class SessionGate:
    """`sticky`: a session's next turn is made where its KV is, as soon as there is a free place."""

    def __init__(
        self,
        settings: SessionSettings,
        placement: Placement,
        counters: Counter[str],
        *,
        sticky: bool,
        samples_per_group: int,
    ) -> None:
        self.settings = settings
        self.placement = placement
        self.counters = counters
        self.sticky = sticky
        self.samples_per_group = samples_per_group
        self.table = SessionTable(settings)
        self.looked_s = 0.0
        self.incarnation = 0
        self._touched: set[str] = set()
        """Instances that something happened to since the last look,"""
        self._asked: set[Key] = set()
        """and sessions that came back since then."""
        self._ended, self._ended_tokens = 0, 0.0
        """Sessions that are over, and what they held in the middle of their lives."""
        self._closed_to_groups = False
        """Somebody is hung who may go on anywhere."""

    # ---- what happens ----------------------------------------------------------------------------------------

    def opened(self, group: int, version: int, prompt_tokens: int, samples: int, instance: str) -> None:
        """A new group begins at `instance`."""
        for sample in range(samples):
            self.table.open(Session(group, sample, version, prompt_tokens, prompt_tokens, GENERATING, instance))
        self._touched.add(instance)

    def placed(self, waiting: Waiting, prompt_tokens: int, instance: str) -> None:
        """A sample that looked for a place, for whatever reason, got one."""
        session = self._known(waiting.group, waiting.sample, waiting.version, prompt_tokens)
        self._touched |= {session.instance, instance}
        was_hung = session.state == HUNG
        self.table.generate(session, instance, prompt_tokens + waiting.tokens)
        if was_hung:
            self.counters["sessions/continued"] += 1
            session.pinned = self.settings.force_pin

    def interrupted(self, waiting: Waiting, prompt_tokens: int) -> None:
        """It looks for a place in the middle of a turn. Its tokens go on counting where it was unless it has to leave."""
        session = self._known(waiting.group, waiting.sample, waiting.version, prompt_tokens)
        stays = not waiting.unbound and waiting.came_from in self.placement.instances
        self._touched |= {session.instance, waiting.came_from}
        session.pinned = session.pinned and stays
        self.table.generate(session, waiting.came_from if stays else "", prompt_tokens + waiting.tokens)

    def turn_ended(self, key: Key, version: int, prompt_tokens: int, instance: str, tokens: int) -> None:
        """It is at its environment."""
        session = self._known(*key, version, prompt_tokens)
        if session.state != GENERATING:  # it is said again: the first time may have been lost, or not
            return
        self._touched |= {session.instance, instance}
        if instance not in self.placement.instances:
            self.table.forget_kv(session, tokens)
        else:
            self.table.end_turn(session, instance, tokens)
        if session.state == HUNG:
            self.counters["sessions/hung"] += 1

    def over(self, key: Key) -> None:
        """It comes back no more."""
        if session := self.table.get(key):
            self._touched.add(session.instance)
            self._ended += 1
            self._ended_tokens += (session.prompt_tokens + session.tokens) / 2
            self.table.drop(session)

    def asks(self, waiting: Waiting, prompt_tokens: int) -> None:
        """It is back and wants its next turn: it gets it from `ready`."""
        session = self._known(waiting.group, waiting.sample, waiting.version, prompt_tokens)
        tokens = prompt_tokens + waiting.tokens
        if session.state == GENERATING:  # nobody said that its turn had ended
            self.turn_ended(session.key, waiting.version, prompt_tokens, waiting.came_from, tokens)
        self.table.set_tokens(session, tokens)
        self.table.ask(session, waiting)
        self._touched.add(session.instance)
        self._asked.add(session.key)

    def closed(self, group: int) -> None:
        self._touched.update(self.table.close(group))

    def forget_agent(self, groups: Iterable[int]) -> None:
        """Whoever holds these groups tells of their samples anew: what was said since the connection broke is lost."""
        for group in groups:
            self.closed(group)

    def instance_gone(self, name: str) -> None:
        hung = self.table.num_hung
        self.table.forget(name)
        self.counters["sessions/hung"] += self.table.num_hung - hung
        self.looked_s = -math.inf  # its sessions may go to any other one

    def reported(self, name: str, stats: EngineStats) -> None:
        self.table.place(name).account.report(stats.kv_capacity_tokens, stats.kv_tokens)
        self._touched.add(name)

    def _known(self, group: int, sample: int, version: int, prompt_tokens: int) -> Session:
        return self.table.get((group, sample)) or self.table.open(
            Session(group, sample, version, prompt_tokens, prompt_tokens)
        )

    # ---- who goes on -----------------------------------------------------------------------------------------

    @property
    def next_look_s(self) -> float:
        """When `ready` is due at the latest: something may have changed that nobody tells of."""
        waits = self.table.num_hung or self.table.num_back
        return self.looked_s + self.settings.check_interval_s if waits else math.inf

    def ready(self, now_s: float, incarnation: int) -> Iterator[tuple[Waiting, InstanceView | None]]:
        """Sessions that go on now, and where (None: wherever routing says). The caller has placed one before it asks for the
        next."""
        self.incarnation = incarnation
        names = self._touched | self.placement.changed
        if now_s >= self.looked_s + self.settings.check_interval_s:
            self.looked_s = now_s
            names |= self.placement.instances.keys()
        asked, self._asked, self._touched = self._asked, set(), set()
        here = sorted(names & self.placement.instances.keys() & self.table.places.keys())
        hung = self.table.num_hung
        for name in here:
            if self.placement.instances[name].leaving:
                self._vacate(name)
            self._hang(self.table.places[name])
        self.counters["sessions/hung"] += self.table.num_hung - hung
        for name in here:
            yield from self._keepers(self.table.places[name])
        if self.table.num_hung:
            yield from self._continue(here, asked)
        self._close_to_groups(names)

    def _hang(self, place: Place) -> None:
        """Take KV away from as many as needed; those that generate keep theirs until their turn ends."""
        place.marked.clear()
        if (remaining := place.account.remaining) >= 0:
            return
        holders = (Holder(s.key, s.state, s.tokens, place.account.frees(s)) for s in place.here.values())
        for key in to_hang(remaining, holders):
            if place.here[key].state == AWAY:
                self.table.hang(place.here[key])
            else:
                place.marked.add(key)

    def _vacate(self, name: str) -> None:
        """It takes nothing new from now on: whoever is between two turns there goes on elsewhere."""
        hung = self.table.num_hung
        self.table.vacate(name)
        if self.table.num_hung > hung:
            self.looked_s = -math.inf

    def _keepers(self, place: Place) -> Iterator[tuple[Waiting, InstanceView | None]]:
        """Those that are back and whose KV was kept, in order."""
        for session in list(place.back.values()):
            waiting = session.waiting
            assert waiting is not None  # that is what `back` means
            view = self.placement.instances[session.instance]
            if not (self.sticky or session.pinned):
                self.table.answer(session)
                yield waiting, None
            elif self._may_go(session, view):
                if self._fits(session, view):
                    yield waiting, view
                else:
                    self.table.hang(session)
                    self.counters["sessions/hung"] += 1

    def _continue(self, names: list[str], asked: set[Key]) -> Iterator[tuple[Waiting, InstanceView | None]]:
        """Those that are hung and fit again. Whoever is back goes before those whose room is only to be kept."""
        if self.settings.scope == BUCKETED:
            for name in names:
                yield from self._continue_here(name)
        back = {s.key: s for s in self._homeless() if s.waiting is not None}
        yield from self._continue_anywhere(back, names)  # elsewhere there is no more room than at the last look
        yield from self._continue_anywhere({key: back[key] for key in asked & back.keys()}, self.placement.instances)
        for name in names:
            self._keep_room_again(self.table.places[name])

    def _continue_here(self, name: str) -> Iterator[tuple[Waiting, InstanceView | None]]:
        place, view = self.table.places[name], self.placement.instances[name]
        while place.hung:
            back = [(s.tokens, s.key) for s in place.hung.values() if s.waiting is not None and self._may_go(s, view)]
            key = next_bucketed(self._room(name), back, lambda k: place.account.needs(place.hung[k]))
            if key is None:
                return
            yield self._go(place.hung[key], view)

    def _continue_anywhere(
        self, back: dict[Key, Session], names: Iterable[str]
    ) -> Iterator[tuple[Waiting, InstanceView | None]]:
        """Those of `back` that fit into one of these instances; they are taken out of it."""
        table, views = self.table, self.placement.instances
        while back:
            found = next_global(
                [self._room(name) for name in names],
                [(s.tokens, key) for key, s in back.items()],
                lambda key, name: table.place(name).account.needs(back[key]),
                lambda key, name: self._may_go(back[key], views[name]),
            )
            if found is None:
                return
            yield self._go(back.pop(found[0]), views[found[1]])

    def _homeless(self) -> Iterator[Session]:
        """Hung sessions that may go on anywhere: all with the global scope, else those whose instance is gone or leaves."""
        places = [self.table.place("")] if self.settings.scope == BUCKETED else self.table.places.values()
        for place in places:
            yield from place.hung.values()

    def _go(self, session: Session, view: InstanceView) -> tuple[Waiting, InstanceView]:
        waiting, account = session.waiting, self.table.place(view.name).account
        assert waiting is not None
        if account.needs(session) > account.remaining:
            self.counters["sessions/forced"] += 1
            log.info("sample %d of group %d goes on at %s, which is empty but too small", *session.key[::-1], view.name)
        return waiting, view

    def _keep_room_again(self, place: Place) -> None:
        """Those that are still at their environment get their room back, the smallest first, if nobody is waiting for it."""
        if any(s.waiting is not None for s in place.hung.values()):
            return
        for session in sorted(place.hung.values(), key=lambda s: (s.tokens, s.key)):
            if place.account.needs(session) > place.account.remaining:
                return
            self.table.reserve(session)
            self.counters["sessions/continued"] += 1

    def _room(self, name: str) -> Room:
        account = self.table.place(name).account
        return Room(name, account.remaining, account.idle)

    def _may_go(self, session: Session, view: InstanceView) -> bool:
        return (
            view.incarnation == self.incarnation
            and view.version >= session.version
            and self.placement.fleet.may_take(view, 1)
        )

    # ---- who else may come -----------------------------------------------------------------------------------

    def own_place(self, waiting: Waiting, chosen: InstanceView | None) -> InstanceView | None:
        """Where a sample goes that routing would send to `chosen`: there if it fits, else where its tokens count already. If
        it can go to neither, one between two turns is hung. One in the middle of a turn never waits for KV: it would wait in
        front of those that hold what it waits for."""
        session = self.table.get((waiting.group, waiting.sample))
        if session is None or session.state == HUNG:
            return chosen
        home = self.placement.instances.get(session.instance)
        for view in (chosen, home):
            if view is not None and self._may_go(session, view) and self._fits(session, view):
                return view
        if session.state == AWAY:
            self.table.hang(session)
            self.counters["sessions/hung"] += 1
            return None
        return chosen or self._roomiest(session)

    def _fits(self, session: Session, view: InstanceView) -> bool:
        """One that generates fits where it is, whatever remains: its tokens count there already."""
        account = self.table.place(view.name).account
        if view.name != session.instance:
            return account.idle or account.needs(session) <= account.remaining
        return session.state == GENERATING or account.sessions == 1 or account.after(session) >= 0

    def _roomiest(self, session: Session) -> InstanceView | None:
        """Of the instances that may take it, full or not, the one with the most room."""
        views = [view for view in self.placement.instances.values() if self._may_go(session, view)]
        return max(views, key=lambda view: (self._room(view.name).remaining, view.name), default=None)

    def holds(self, waiting: Waiting) -> bool:
        """Whether it was hung after it had passed the gate, since routing had no place for it at once."""
        session = self.table.get((waiting.group, waiting.sample))
        return session is not None and session.state == HUNG

    def has_room(self, view: InstanceView, prompt_tokens: int) -> bool:
        """Whether a new group may begin there. False: not before something happens there."""
        usual = self._ended_tokens / self._ended if self._ended else 0.0
        view.full = not self.table.place(view.name).account.admits_group(prompt_tokens, self.samples_per_group, usual)
        return not view.full

    def _close_to_groups(self, names: set[str]) -> None:
        closed = bool(self.table.num_hung) and next(self._homeless(), None) is not None
        if closed != self._closed_to_groups:
            self._closed_to_groups = closed
            names = names | self.placement.instances.keys()
        for name in names & self.placement.instances.keys():
            view = self.placement.instances[name]
            full = closed or bool(self.table.place(name).hung)
            if view.full != full:
                view.full = full
