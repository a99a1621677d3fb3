"""Every session and where it stands; what each instance has promised. Pure bookkeeping: the decisions are in `thunder`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from psrl.coordinator.sessions.account import Account
from psrl.coordinator.sessions.session import AWAY, GENERATING, HUNG, Key, Session
from psrl.coordinator.sessions.settings import SessionSettings
from psrl.coordinator.waiting import Waiting


@dataclass(slots=True)
class Place:
    """One instance: its account, who counts there, and who was there and is hung."""

    account: Account
    here: dict[Key, Session] = field(default_factory=dict)
    back: dict[Key, Session] = field(default_factory=dict)
    """Those of `here` that are away no more and want their next turn, in order of asking."""
    hung: dict[Key, Session] = field(default_factory=dict)
    marked: set[Key] = field(default_factory=set)
    """Those that generate and hang when their turn ends."""


class SessionTable:
    """An instance is known from its first session or report on, a session until its group is closed or it is over."""

    def __init__(self, settings: SessionSettings) -> None:
        self.settings = settings
        self.places: dict[str, Place] = {"": Place(Account(settings))}
        """By instance; "" has those that are nowhere: hung, or looking for a place, after their instance was lost."""
        self.groups: dict[int, dict[int, Session]] = {}
        self.num_hung = self.num_back = 0
        """Sessions that are hung, and those that are back with their KV kept."""

    def get(self, key: Key) -> Session | None:
        return self.groups.get(key[0], {}).get(key[1])

    def place(self, instance: str) -> Place:
        if instance not in self.places:
            self.places[instance] = Place(Account(self.settings))
        return self.places[instance]

    def __iter__(self) -> Iterator[Session]:
        return (session for group in self.groups.values() for session in group.values())

    # ---- moves -----------------------------------------------------------------------------------------------

    def generate(self, session: Session, instance: str, tokens: int) -> None:
        """Its next turn, or the rest of one, is made at `instance`; "": it looks for a place in the middle of a turn."""
        self._move(session, GENERATING, instance, tokens)
        session.waiting = None

    def ask(self, session: Session, waiting: Waiting) -> None:
        """It is back from its environment and wants its next turn."""
        assert session.state != GENERATING
        session.waiting = waiting
        if session.state == AWAY:
            self.place(session.instance).back[session.key] = session
            self.num_back += 1

    def answer(self, session: Session) -> None:
        """Somebody else looks for its place from now on."""
        assert session.state == AWAY
        session.waiting = None
        del self.place(session.instance).back[session.key]
        self.num_back -= 1

    def end_turn(self, session: Session, instance: str, tokens: int) -> None:
        """Its turn ended at `instance` and it holds `tokens`: it is away, or hung if it was marked."""
        if session.instance == instance and session.state == GENERATING:
            self.place(instance).account.settle(tokens - session.tokens)
        hangs = session.key in self.place(session.instance).marked
        self._move(session, HUNG if hangs else AWAY, instance, tokens)

    def forget_kv(self, session: Session, tokens: int) -> None:
        """Its turn ended, and the instance that held its KV is gone."""
        self._move(session, HUNG, "", tokens)

    def hang(self, session: Session) -> None:
        """A session that is away gives its KV up."""
        assert session.state == AWAY
        self._move(session, HUNG, session.instance)

    def reserve(self, session: Session) -> None:
        """A session that is hung, and at its environment, gets its room back where it was."""
        assert session.state == HUNG and session.waiting is None
        self._move(session, AWAY, session.instance)

    def set_tokens(self, session: Session, tokens: int) -> None:
        """It came back with so many."""
        self._move(session, session.state, session.instance, tokens)

    def drop(self, session: Session) -> None:
        """It is over."""
        self._leave(session)
        samples = self.groups[session.group]
        del samples[session.sample]
        if not samples:
            del self.groups[session.group]

    def close(self, group: int) -> list[str]:
        """The group is; returns the instances where its sessions stood."""
        sessions = list(self.groups.get(group, {}).values())
        for session in sessions:
            self.drop(session)
        return [session.instance for session in sessions]

    def vacate(self, instance: str) -> None:
        """It takes nothing new: who is between two turns there is hung, nowhere."""
        place = self.place(instance)
        for session in [*place.here.values(), *place.hung.values()]:
            if session.state != GENERATING:
                session.pinned = False
                self._move(session, HUNG, "")

    def forget(self, instance: str) -> None:
        """It is gone, and with it all KV: who generated there looks for a place, the others are hung, nowhere."""
        self.vacate(instance)
        for session in list(self.place(instance).here.values()):
            session.pinned = False
            self._move(session, GENERATING, "")
        del self.places[instance]

    def open(self, session: Session) -> Session:
        """A session that was not known, as it stands."""
        assert self.get(session.key) is None
        self.groups.setdefault(session.group, {})[session.sample] = session
        self._arrive(session)
        return session

    def _move(self, session: Session, state: str, instance: str, tokens: int | None = None) -> None:
        self._leave(session)
        session.state, session.instance = state, instance
        if tokens is not None:
            session.tokens = max(tokens, session.prompt_tokens)  # a place that was given up unused will be wanted again
        self._arrive(session)

    def _leave(self, session: Session) -> None:
        place = self.place(session.instance)
        if session.state == HUNG:
            del place.hung[session.key]
            self.num_hung -= 1
        else:
            del place.here[session.key]
            place.marked.discard(session.key)
            self.num_back -= place.back.pop(session.key, None) is not None
            place.account.remove(session)

    def _arrive(self, session: Session) -> None:
        place = self.place(session.instance)
        if session.state == HUNG:
            place.hung[session.key] = session
            self.num_hung += 1
        else:
            place.here[session.key] = session
            if session.state == AWAY and session.waiting is not None:
                place.back[session.key] = session
                self.num_back += 1
            place.account.add(session)

    # ---- integrity -------------------------------------------------------------------------------------------

    def check(self) -> None:
        """For tests and idle moments: what is kept twice is the same. Raises AssertionError."""
        everyone = list(self)
        assert self.num_hung == sum(s.state == HUNG for s in everyone)
        assert self.num_back == sum(s.state == AWAY and s.waiting is not None for s in everyone)
        for name, place in self.places.items():
            own = [s for s in everyone if s.instance == name]
            assert place.hung == {s.key: s for s in own if s.state == HUNG}, name
            assert place.here == {s.key: s for s in own if s.state != HUNG}, name
            assert place.back == {s.key: s for s in own if s.state == AWAY and s.waiting is not None}, name
            assert place.marked <= {s.key for s in own if s.state == GENERATING}, name
            place.account.check(place.here.values())
        for session in everyone:
            assert session.instance or session.state != AWAY, session
            assert session.waiting is None or session.state != GENERATING, session
