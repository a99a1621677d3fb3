"""What one instance's KV cache is promised to. Pure bookkeeping in tokens, O(1) a change.

    remaining = capacity - (generating + env_token_weight x away - overlap + buffer_per_session x sessions)

`generating` are the tokens that sessions held when their turn began, and what the instance reports beyond that. `overlap` is
what samples of one group have in common there, their prompt: it counts once, with the weight of the one that counts most.
What samples of different groups share is not known here and counts for each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from psrl.coordinator.sessions.session import AWAY, HUNG, Session
from psrl.coordinator.sessions.settings import SessionSettings


class Account:
    """
    >>> account = Account(SessionSettings(buffer_per_session=10), capacity=1000)
    >>> for sample in range(2):
    ...     account.add(Session(group=0, sample=sample, version=0, prompt_tokens=100, tokens=300))
    >>> account.remaining  # 1000 - (600 - 100 + 20)
    480.0
    """

    def __init__(self, settings: SessionSettings, capacity: int = 0) -> None:
        self.settings = settings
        self.capacity = capacity
        """0: not known, and then everything fits."""
        self.sessions = 0
        self.grown = 0.0
        """Tokens that the instance reported beyond what its sessions held when their turns began."""
        self._generating = self._away = 0
        self._overlap = 0.0
        self._groups: dict[int, tuple[int, int, int]] = {}
        """Group -> prompt tokens, sessions generating, sessions away."""

    # ---- changes ---------------------------------------------------------------------------------------------

    def add(self, session: Session) -> None:
        """Its tokens count from now on, with the weight of its state."""
        self._change(session, 1)

    def remove(self, session: Session) -> None:
        """Before its tokens or its state change."""
        self._change(session, -1)

    def _change(self, session: Session, sign: int) -> None:
        assert session.state != HUNG  # who is hung holds nothing
        prompt, generating, away = self._groups.pop(session.group, (session.prompt_tokens, 0, 0))
        self._overlap -= self._shared(prompt, generating, away)
        self.sessions += sign
        if session.state == AWAY:
            away += sign
            self._away += sign * session.tokens
        else:
            generating += sign
            self._generating += sign * session.tokens
        if generating or away:
            self._groups[session.group] = prompt, generating, away
            self._overlap += self._shared(prompt, generating, away)
        if not self.sessions:
            self.grown = self._overlap = 0.0

    def report(self, capacity: int, held: int) -> None:
        """The engine's word on its capacity and on what its running samples hold."""
        self.capacity = capacity
        prompts = sum(p * (n - 1) for p, n, _ in self._groups.values() if n > 1)
        self.grown = float(max(0, held - (self._generating - prompts))) if self.sessions else 0.0

    def settle(self, grown_by: int) -> None:
        """A session whose turn ended has grown by so much: known from now on, so no more a part of `grown`."""
        self.grown = max(0.0, self.grown - max(0, grown_by))

    # ---- what is left ----------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Nobody holds KV here."""
        return not self.sessions

    @property
    def remaining(self) -> float:
        if not self.capacity:
            return math.inf
        held = self._generating + self.grown + self.settings.env_token_weight * self._away - self._overlap
        return self.capacity - (held + self.settings.buffer_per_session * self.sessions)

    def needs(self, session: Session) -> float:
        """What `remaining` would fall by if the session generated here; its prompt may be here already."""
        prompt, generating, away = self._groups.get(session.group, (session.prompt_tokens, 0, 0))
        shared = self._shared(prompt, generating + 1, away) - self._shared(prompt, generating, away)
        return session.tokens - shared + self.settings.buffer_per_session

    def frees(self, session: Session) -> float:
        """What `remaining` would rise by if the session, which counts here, were hung."""
        prompt, generating, away = self._groups[session.group]
        was_away = session.state == AWAY
        shared = self._shared(prompt, generating, away)
        shared -= self._shared(prompt, generating - (not was_away), away - was_away)
        weight = self.settings.env_token_weight if was_away else 1.0
        return weight * session.tokens - shared + self.settings.buffer_per_session

    def after(self, session: Session) -> float:
        """What would remain if a session that is away here generated again; less than now if those away count for less."""
        self.remove(session)
        remaining = self.remaining - self.needs(session)
        self.add(session)
        return remaining

    def admits_group(self, prompt_tokens: int, samples: int, usual_tokens: float) -> bool:
        """Whether a new group may begin here: it fits as it begins, beside those that are here with what they hold or with
        `usual_tokens` each, what a session holds in the middle of its life, whichever is more. They will grow; to go by what they
        hold now would let in any number at their beginning. Where nobody is, any group may begin.

        >>> account = Account(SessionSettings(buffer_per_session=0), capacity=1000)
        >>> account.add(Session(group=0, sample=0, version=0, prompt_tokens=100, tokens=100))
        >>> account.admits_group(100, 4, usual_tokens=900), account.admits_group(100, 4, usual_tokens=901)
        (True, False)
        """
        if not self.sessions or not self.capacity:
            return True
        held = max(self.capacity - self.remaining, self.sessions * usual_tokens)
        return held + prompt_tokens + samples * self.settings.buffer_per_session <= self.capacity

    def _shared(self, prompt: int, generating: int, away: int) -> float:
        if generating + away < 2:
            return 0.0
        weight = self.settings.env_token_weight
        most = max(1.0 if generating else 0.0, weight if away else 0.0)
        return prompt * (generating + weight * away - most)

    def check(self, sessions: Iterable[Session]) -> None:
        """An integrity check for tests: the same as if it were made anew of `sessions`. Raises AssertionError."""
        fresh = Account(self.settings, self.capacity)
        for session in sessions:
            fresh.add(session)
        fresh.grown = self.grown
        assert (fresh.sessions, fresh._groups) == (self.sessions, self._groups)
        assert math.isclose(fresh.remaining, self.remaining, abs_tol=1e-3) or fresh.remaining == self.remaining
