"""Settings of the session strategy."""

from __future__ import annotations

from dataclasses import dataclass

BUCKETED, GLOBAL = "bucketed", "global"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """`psrl.rollout_coordination.session_strategy.thunder_agent`."""

    env_token_weight: float = 1.0
    """What a token of a session at its environment counts for."""
    buffer_per_session: int = 100
    """Tokens kept free for each session, for what its turn generates."""
    scope: str = BUCKETED
    """Where a session goes on that was hung: bucketed (where it was) | global (where it fits best)."""
    force_pin: bool = False
    """It stays where it went on."""
    check_interval_s: float = 1.0
    """Longest time between two looks at what is hung."""
