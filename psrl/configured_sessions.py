"""The coordinator's settings of the session strategy, out of the configuration."""

from __future__ import annotations

from psrl.config.schema import Config
from psrl.coordinator.sessions.settings import SessionSettings


def session_settings(config: Config) -> SessionSettings | None:
    """None: the strategy is off."""
    thunder = config.psrl.rollout_coordination.session_strategy.thunder_agent
    if not thunder.enable:
        return None
    return SessionSettings(
        env_token_weight=thunder.env_token_weight,
        buffer_per_session=thunder.buffer_per_session,
        scope=thunder.continue_scope,
        force_pin=thunder.continue_force_pin,
        check_interval_s=thunder.check_interval_in_ms / 1000,
    )
