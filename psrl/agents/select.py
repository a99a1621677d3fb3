"""Which agent a configuration means."""

from __future__ import annotations

from psrl.agents.base import Endpoint, SampleAgent
from psrl.agents.black_box import make_black_box
from psrl.agents.environments import environment_factory
from psrl.agents.multi_turn import ToolAgent, TurnLimits
from psrl.config.agents import BLACK_BOX, GO_ON, TOOL
from psrl.config.schema import Config


def make_agent(config: Config, endpoint: Endpoint | None = None) -> SampleAgent | None:
    """The agent that makes every sample of the run; None: a sample is one response to its prompt, no session is needed.

    `endpoint` is needed by black_box_agent. Raises ConfigError with one sentence for what cannot be imported or built."""
    rollout = config.gen_actor_rollout_ref.rollout
    if rollout.agent.default_agent_loop == TOOL:
        turns = rollout.multi_turn
        return ToolAgent(
            environment_factory(turns, hidden=[config.run_dir] if config.run_dir else []),  # it holds keys
            TurnLimits(
                max_assistant_turns=turns.max_assistant_turns,
                max_tokens_per_turn=turns.max_tokens_per_turn,
                go_on_after_cut=turns.cut_message == GO_ON,
                step_timeout_s=turns.step_timeout_s,
                max_env_retries=turns.max_env_retries,
            ),
        )
    if rollout.agent.default_agent_loop == BLACK_BOX:
        assert endpoint is not None, "a black box needs an endpoint"
        return make_black_box(rollout.agent.black_box, endpoint)
    return None
