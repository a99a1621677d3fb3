"""`+profile=...`: workloads as presets of rollout coordination; the command line wins over them."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from psrl.config.checks import check
from psrl.config.compose import compose_config, conf_dir
from psrl.config.flat import flatten

pytestmark = pytest.mark.unit

COORDINATION = "psrl.rollout_coordination."
PROFILES = sorted(path.stem for path in (conf_dir() / "profile").glob("*.yaml"))


def values(*overrides: str) -> dict[str, object]:
    return flatten(OmegaConf.to_container(compose_config(["preset=laptop", "task=chain_sum", *overrides])))


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_runs_as_it_is_and_touches_rollout_coordination_only(profile: str) -> None:
    before, after = values(), values(f"+profile={profile}")
    changed = {key for key in after if after[key] != before[key]}
    assert changed and all(key.startswith(COORDINATION) for key in changed)
    check(OmegaConf.to_object(compose_config(["preset=laptop", "task=chain_sum", f"+profile={profile}"])))


def test_the_reasoning_profile_is_the_recommended_one() -> None:
    chosen = values("+profile=reasoning")
    assert chosen[f"{COORDINATION}routing_strategy.method"] == "request_num_balance"
    assert chosen[f"{COORDINATION}routing_strategy.max_num_waiting_reqs_after_preemption"] == 0
    mig = {key.rpartition(".")[2]: value for key, value in chosen.items() if ".mig." in key}
    assert mig == {
        "enable": True,
        "indicator": "request_num",
        "threshold": 5,
        "stop_indicator": "request_num",
        "stop_threshold": 10,
    }


def test_the_agentic_profile_keeps_a_trajectory_where_its_prefix_is() -> None:
    chosen = values("+profile=agentic")
    assert chosen[f"{COORDINATION}routing_strategy.method"] == "cache_aware_v1"
    assert chosen[f"{COORDINATION}routing_strategy.enable_trajectory_sticky"] is True
    assert chosen[f"{COORDINATION}session_strategy.thunder_agent.enable"] is True
    assert chosen[f"{COORDINATION}session_strategy.thunder_agent.continue_scope"] == "bucketed"


def test_the_command_line_wins_over_a_profile() -> None:
    key = f"{COORDINATION}sync_and_mig_strategy.mig.threshold"
    assert values(f"{key}=3", "+profile=reasoning")[key] == 3


def test_an_unknown_profile_names_those_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"profile=mine .*agentic, reasoning"):
        values("+profile=mine")
