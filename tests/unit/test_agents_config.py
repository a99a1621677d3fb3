"""Which agent a configuration means, and what is refused before anything starts."""

from __future__ import annotations

from typing import Any, cast

import pytest
from omegaconf import OmegaConf

from psrl.agents.base import Endpoint
from psrl.agents.black_box import BlackBoxAgent
from psrl.agents.multi_turn import ToolAgent
from psrl.agents.select import make_agent
from psrl.config.checks import check
from psrl.config.compose import compose_config, normalise
from psrl.config.errors import ConfigError
from psrl.config.schema import Config

pytestmark = pytest.mark.unit

ROLLOUT = "gen_actor_rollout_ref.rollout"
TOOL = f"{ROLLOUT}.agent.default_agent_loop=tool_agent"
BOX = f"{ROLLOUT}.agent.default_agent_loop=black_box_agent"
HIDDEN_SUM = f"{ROLLOUT}.multi_turn.environment=hidden_sum"
FUNCTION = f"{ROLLOUT}.agent.black_box.function=my.agents:play"


def config_of(*overrides: str) -> Config:
    words, _ = normalise(overrides, has_accelerator=False, on_slurm=False)
    return cast(Config, OmegaConf.to_object(compose_config(words)))


@pytest.mark.parametrize(
    ("overrides", "kind"),
    [
        ([], type(None)),
        ([f"{ROLLOUT}.agent.serve_sessions=true"], type(None)),
        ([TOOL, HIDDEN_SUM], ToolAgent),
        ([TOOL, f"{ROLLOUT}.multi_turn.tools=[calculator,python]"], ToolAgent),
        (
            [
                TOOL,
                HIDDEN_SUM,
                f"{ROLLOUT}.ignore_eos=true",
                f"{ROLLOUT}.multi_turn.max_tokens_per_turn=8",
                f"{ROLLOUT}.multi_turn.cut_message=go_on",
            ],
            ToolAgent,
        ),
        ([BOX, f"{ROLLOUT}.agent.black_box.function=json:dumps"], BlackBoxAgent),
        ([BOX, f"{ROLLOUT}.agent.black_box.command='python agent.py'"], BlackBoxAgent),
    ],
)
def test_the_loop_is_chosen_by_key(overrides: list[str], kind: type) -> None:
    config = config_of(*overrides)
    assert check(config) == check(config_of())
    assert type(make_agent(config, Endpoint("http://127.0.0.1:1", "k"))) is kind


REFUSED: list[tuple[list[str], str]] = [
    ([f"{ROLLOUT}.agent.default_agent_loop=react"], "allowed is single_turn_agent | tool_agent | black_box_agent"),
    ([TOOL], "has nobody to take turns with"),
    ([TOOL, HIDDEN_SUM, f"{ROLLOUT}.multi_turn.tools=[python]"], "has its own tools"),
    ([TOOL, f"{ROLLOUT}.multi_turn.tools=[python,python]"], "names python twice"),
    (
        [TOOL, f"{ROLLOUT}.multi_turn.tools=[python]", f"{ROLLOUT}.multi_turn.environment_params.x=1"],
        "needs gen_actor_rollout_ref.rollout.multi_turn.environment: name one",
    ),
    (
        [TOOL, f"{ROLLOUT}.multi_turn.tools=[python]", f"{ROLLOUT}.multi_turn.step_timeout_s=10"],
        "multi_turn.sandbox.timeout_s=10 is not below",
    ),
    ([TOOL, HIDDEN_SUM, f"{ROLLOUT}.ignore_eos=true"], "ignore_eos=True never ends a message"),
    (
        [TOOL, HIDDEN_SUM, f"{ROLLOUT}.ignore_eos=true", f"{ROLLOUT}.multi_turn.max_tokens_per_turn=8"],
        "or cut messages with",
    ),
    ([f"{ROLLOUT}.multi_turn.cut_message=stop"], "allowed is end | go_on"),
    (
        [TOOL, HIDDEN_SUM, f"{ROLLOUT}.ignore_eos=true", "data.synthetic_lengths.mean_tokens=9"],
        "mean_tokens=9 draws the length of a single response",
    ),
    ([TOOL, HIDDEN_SUM, "trainer.test_freq=5", "psrl.deployment.n_validate_instances=1"], "validates with single"),
    (
        [BOX, FUNCTION, "psrl.rollout_coordination.partial_rollout.interrupt_as_prompt=true"],
        "partial_rollout.interrupt_as_prompt=True",
    ),
    ([BOX], "neither is set"),
    ([BOX, FUNCTION, f"{ROLLOUT}.agent.black_box.max_memory_gb=0"], "or null for no limit"),
    ([BOX, FUNCTION, f"{ROLLOUT}.agent.black_box.command=agent"], "are both set"),
    ([BOX, f"{ROLLOUT}.agent.black_box.command='agent \"'"], "cannot be split into words: No closing quotation"),
    ([BOX, f"{ROLLOUT}.agent.black_box.command=' '"], "black_box.command is empty"),
    ([f"{ROLLOUT}.agent.black_box.timeout_s=0"], "must be greater than 0"),
    ([f"{ROLLOUT}.agent.turn_timeout_s=0"], "agent.turn_timeout_s=0.0 is refused: it must be greater than 0"),
    ([f"{ROLLOUT}.agent.max_body_mb=-1"], "agent.max_body_mb=-1.0 is refused: it must be greater than 0"),
    ([f"{ROLLOUT}.multi_turn.max_assistant_turns=0"], "must be at least 1"),
    ([f"{ROLLOUT}.multi_turn.tool_response_truncate_side=both"], "allowed is left | right | middle"),
    ([f"{ROLLOUT}.multi_turn.sandbox.max_processes=0"], "must be at least 1"),
]


@pytest.mark.parametrize(("overrides", "said"), REFUSED)
def test_what_cannot_work_is_refused_in_one_sentence(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(config_of(*overrides))
    assert said in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([f"{ROLLOUT}.multi_turn.tools=[python]"], "multi_turn has no effect with"),
        ([FUNCTION], "black_box has no effect with"),
        ([TOOL, HIDDEN_SUM, FUNCTION], "black_box has no effect with"),
        ([f"{ROLLOUT}.agent.turn_timeout_s=60"], "agent.turn_timeout_s has no effect"),
        ([TOOL, HIDDEN_SUM, f"{ROLLOUT}.agent.max_body_mb=64"], "agent.max_body_mb has no effect"),
    ],
)
def test_what_has_no_effect_is_told(overrides: list[str], said: str) -> None:
    assert any(said in warning for warning in check(config_of(*overrides)))


@pytest.mark.parametrize(
    "overrides",
    [
        [TOOL, HIDDEN_SUM, f"{ROLLOUT}.agent.turn_timeout_s=60"],
        [
            f"{ROLLOUT}.agent.serve_sessions=true",
            f"{ROLLOUT}.agent.turn_timeout_s=60",
            f"{ROLLOUT}.agent.max_body_mb=64",
        ],
        [BOX, FUNCTION, f"{ROLLOUT}.agent.turn_timeout_s=60", f"{ROLLOUT}.agent.max_body_mb=64"],
        [BOX, FUNCTION, f"{ROLLOUT}.multi_turn.max_assistant_turns=4"],
    ],
)
def test_limits_of_sessions_are_not_told_of_where_they_hold(overrides: list[str]) -> None:
    assert check(config_of(*overrides)) == check(config_of())


def test_parameters_of_an_environment_are_free() -> None:
    given: dict[str, Any] = config_of(
        TOOL, f"{ROLLOUT}.multi_turn.environment=my.world:make", f"{ROLLOUT}.multi_turn.environment_params.size=3"
    ).gen_actor_rollout_ref.rollout.multi_turn.environment_params
    assert given == {"size": 3}
