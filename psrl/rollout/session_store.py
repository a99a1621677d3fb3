"""The sessions of one agent loop process: those that its groups' agents play, and guests."""

from __future__ import annotations

from zlib import crc32

from psrl.models.tokenizer import ChatTokenizer
from psrl.rollout.guests import Guests
from psrl.rollout.trajectory import Trajectory
from psrl.sessions.capture import SessionCapture
from psrl.sessions.session import Session, SessionLimits
from psrl.sessions.store import MemoryStore
from psrl.sessions.turns import TurnMaker

MAX_GUESTS = 4096


class RunSessions(MemoryStore):
    """A client that creates a session becomes a guest; sessions of groups are here from `open` to `close`."""

    def __init__(self, model: str, tokenizer: ChatTokenizer, guests: Guests, seed: int, limits: SessionLimits) -> None:
        super().__init__(model, tokenizer, self._arrive, limits, MAX_GUESTS)
        self._guests, self._seed = guests, seed
        self._session_limits = limits
        self._trajectories: dict[str, Trajectory] = {}

    def open(self, session_id: str, maker: TurnMaker) -> Session:
        """The session of a sample that trains."""
        session = Session(session_id, SessionCapture(self.tokenizer), maker, self._session_limits)
        self.sessions[session_id] = session
        return session

    def close(self, session: Session) -> None:
        """No client finds it from now on."""
        self.sessions.pop(session.id, None)

    async def end(self, session_id: str) -> bool:
        ended = await super().end(session_id)
        if (trajectory := self._trajectories.pop(session_id, None)) is not None:
            self._guests.leave(trajectory)
        return ended

    def _arrive(self, session_id: str) -> TurnMaker:
        trajectory = self._trajectories[session_id] = self._guests.arrive(self._seed ^ crc32(session_id.encode()))
        return trajectory
