"""psrl.rollout_coordination.session_strategy.*: defaults, refusals, warnings, and what the coordinator gets."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from psrl.config.checks import check
from psrl.config.compose import compose_config
from psrl.config.errors import ConfigError
from psrl.config.flat import flatten
from psrl.configured_sessions import session_settings
from psrl.coordinator.sessions.settings import SessionSettings

pytestmark = pytest.mark.unit

T = "psrl.rollout_coordination.session_strategy.thunder_agent"
ON = f"{T}.enable=True"
TURNS = [
    "gen_actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent",
    "gen_actor_rollout_ref.rollout.multi_turn.tools=[calculator]",
]
STICKY = "psrl.rollout_coordination.routing_strategy.enable_trajectory_sticky=True"


def composed(*overrides: str):
    return OmegaConf.to_object(compose_config(["preset=laptop", "task=chain_sum", *overrides]))


def test_defaults() -> None:
    shipped = flatten(OmegaConf.to_container(compose_config(["preset=cluster"])))
    own = {key.removeprefix(f"{T}."): value for key, value in shipped.items() if key.startswith(T)}
    assert own == {
        "enable": False,
        "check_interval_in_ms": 1000,
        "env_token_weight": 1.0,
        "buffer_per_session": 100,
        "continue_scope": "bucketed",
        "continue_force_pin": False,
    }


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([f"{T}.check_interval_in_ms=0"], ["check_interval_in_ms=0", "at least 1"]),
        ([f"{T}.env_token_weight=-0.5"], ["env_token_weight=-0.5", "at least 0"]),
        ([f"{T}.buffer_per_session=-1"], ["buffer_per_session=-1", "at least 0"]),
        ([f"{T}.continue_scope=everywhere"], ["continue_scope=everywhere", "bucketed | global"]),
        ([ON, STICKY, f"{T}.continue_scope=global"], ["continue_scope=global", "enable_trajectory_sticky=True", "bucketed"]),
        ([ON, STICKY, "psrl.status_collection.enable=False"], [f"{T}.enable=True", "psrl.status_collection.enable=False"]),
        ([f"{T}.scope=global"], [f"Unknown key {T}.scope"]),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_sentence(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check(composed(*overrides))
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([ON, *TURNS], ["enable_trajectory_sticky=False", "may go elsewhere"]),
        ([f"{T}.buffer_per_session=50"], ["has no effect", f"{T}.enable=False"]),
        ([ON, STICKY], ["nothing to schedule", "default_agent_loop=single_turn_agent"]),
        ([ON, STICKY, *TURNS], []),
        ([ON, *TURNS, f"{T}.continue_scope=global", f"{T}.continue_force_pin=True"], []),
    ],
)
def test_what_is_not_as_it_seems_is_said(overrides: list[str], words: list[str]) -> None:
    warnings = [w for w in check(composed(*overrides)) if T in w]
    assert len(warnings) == bool(words)
    for word in words:
        assert word in warnings[0]


def test_the_coordinator_gets_what_is_set() -> None:
    assert session_settings(composed()) is None
    chosen = composed(
        ON, f"{T}.check_interval_in_ms=250", f"{T}.env_token_weight=0.5", f"{T}.buffer_per_session=7",
        f"{T}.continue_scope=global", f"{T}.continue_force_pin=True",
    )  # fmt: skip
    assert session_settings(chosen) == SessionSettings(
        env_token_weight=0.5, buffer_per_session=7, scope="global", force_pin=True, check_interval_s=0.25
    )
