"""Keys of `psrl.rollout_coordination.session_strategy.*`: samples of many turns, and the KV cache they come back to."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class ThunderAgentConfig:
    enable: bool = False
    """Keep room in an instance's KV cache for sessions (samples of several turns) that are away at their environment. Where that
    does not fit, sessions wait between two turns, without KV, until it does; what is being generated is never interrupted. Needs
    psrl.status_collection.enable."""
    check_interval_in_ms: int = 1000
    """Upper bound between two looks at whether sessions that wait fit again; most looks follow events."""
    env_token_weight: float = 1.0
    """What a token of a session at its environment counts for, against one of a session that generates; 0 keeps no room for
    those that are away."""
    buffer_per_session: int = 100
    """Tokens of KV kept free for each session, for what its turn generates."""
    continue_scope: str = "bucketed"
    """Where a session goes on that has waited: bucketed (at the instance where it was, the smallest first; required with
    routing_strategy.enable_trajectory_sticky) | global (at whichever instance it fits best, the largest first)."""
    continue_force_pin: bool = False
    """A session that has waited stays at the instance where it went on, for all its further turns, as if sticky."""


@dataclass
class SessionStrategyConfig:
    thunder_agent: ThunderAgentConfig = field(default_factory=ThunderAgentConfig)
