"""Which environment a configuration means: a built-in one, the user's own, or one made of tools."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

from psrl.agents.environment import Environment
from psrl.agents.environments.hidden_sum import HiddenSumEnvironment
from psrl.agents.sandbox import Limits
from psrl.agents.tool_environment import ToolEnvironment
from psrl.agents.tools import make_tool
from psrl.config.agents import MultiTurnConfig
from psrl.config.errors import ConfigError
from psrl.tasks.registry import import_object

BUILT_IN: dict[str, Callable[..., Environment]] = {"hidden_sum": HiddenSumEnvironment}
KEY = "gen_actor_rollout_ref.rollout.multi_turn.environment"


def environment_factory(turns: MultiTurnConfig, hidden: Sequence[str] = ()) -> Callable[[], Environment]:
    """What makes one trajectory's environment; `hidden` directories are not for the eyes of its tools. Raises ConfigError with
    one sentence if there is no such environment or tool, or if it does not take its parameters."""
    if turns.environment is None:
        limits = Limits.from_config(turns.sandbox, hidden)
        make_tools = [make_tool(name, limits) for name in turns.tools]
        return lambda: ToolEnvironment(
            [make() for make in make_tools],
            max_parallel_calls=turns.max_parallel_calls,
            max_response_length=turns.max_tool_response_length,
            truncate_side=turns.tool_response_truncate_side,
        )
    if ":" in turns.environment:
        factory = import_object(turns.environment, KEY)
    elif turns.environment in BUILT_IN:
        factory = BUILT_IN[turns.environment]
    else:
        raise ConfigError(
            f"{KEY}={turns.environment} is unknown: allowed are {', '.join(BUILT_IN)}, or your own as module:factory."
        )
    params = dict(turns.environment_params)
    try:
        inspect.signature(factory).bind(**params)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{KEY}={turns.environment} refuses {KEY}_params={params}: {error}.") from error
    return lambda: factory(**params)
