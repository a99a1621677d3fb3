"""What is refused of `psrl.rollout_coordination.session_strategy.*`."""

from __future__ import annotations

from psrl.config.agents import SINGLE_TURN, plays_turns
from psrl.config.errors import ConfigError
from psrl.config.schema import Config
from psrl.config.session_strategy import ThunderAgentConfig

PREFIX = "psrl.rollout_coordination.session_strategy.thunder_agent"
STICKY = "psrl.rollout_coordination.routing_strategy.enable_trajectory_sticky"
LOOP = "gen_actor_rollout_ref.rollout.agent.default_agent_loop"
SCOPES = ("bucketed", "global")
AT_LEAST = {"check_interval_in_ms": 1, "env_token_weight": 0, "buffer_per_session": 0}


def check_sessions(config: Config) -> None:
    """Raises ConfigError, one sentence, for a value or a combination that cannot be."""
    thunder = config.psrl.rollout_coordination.session_strategy.thunder_agent
    for name, least in AT_LEAST.items():
        if not (value := getattr(thunder, name)) >= least:
            raise ConfigError(f"{PREFIX}.{name}={value} is refused: it must be at least {least}.")
    if thunder.continue_scope not in SCOPES:
        raise ConfigError(
            f"{PREFIX}.continue_scope={thunder.continue_scope} is refused: allowed is {' | '.join(SCOPES)}."
        )
    if not thunder.enable:
        return
    if (
        config.psrl.rollout_coordination.routing_strategy.enable_trajectory_sticky
        and thunder.continue_scope == "global"
    ):
        raise ConfigError(
            f"{PREFIX}.continue_scope=global moves a session to another instance but {STICKY}=True keeps it where it was: "
            "use continue_scope=bucketed, or switch stickiness off."
        )
    if not config.psrl.status_collection.enable:
        raise ConfigError(
            f"{PREFIX}.enable=True goes by the KV capacity that instances report but psrl.status_collection.enable=False: "
            "set it to True, or switch the strategy off."
        )


def session_warnings(config: Config) -> list[str]:
    """What has no effect, or another one than it seems."""
    coordination = config.psrl.rollout_coordination
    thunder, sticky = (
        coordination.session_strategy.thunder_agent,
        coordination.routing_strategy.enable_trajectory_sticky,
    )
    if not thunder.enable:
        return [f"{PREFIX} has no effect with {PREFIX}.enable=False"] if thunder != ThunderAgentConfig() else []
    warnings = []
    if not plays_turns(config.gen_actor_rollout_ref.rollout.agent):
        warnings.append(
            f"{PREFIX}.enable=True has nothing to schedule: {LOOP}={SINGLE_TURN} makes a sample in one turn"
        )
    if not sticky and not thunder.continue_force_pin:
        warnings.append(
            f"{PREFIX}.enable=True keeps room for a session where it was, but with {STICKY}=False its next turn may go elsewhere; "
            f"set {STICKY}=True"
        )
    return warnings
