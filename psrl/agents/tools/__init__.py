"""Tools by name."""

from __future__ import annotations

from collections.abc import Callable

from psrl.agents.sandbox import Limits
from psrl.agents.tools.base import Tool
from psrl.agents.tools.calculator import Calculator
from psrl.agents.tools.python import PythonTool
from psrl.config.errors import ConfigError
from psrl.tasks.registry import import_object

KEY = "gen_actor_rollout_ref.rollout.multi_turn.tools"
BUILT_IN = ("calculator", "python")


def make_tool(name: str, limits: Limits) -> Callable[[], Tool]:
    """What makes the tool for one trajectory. Raises ConfigError with one sentence if there is no such tool."""
    if name == "calculator":
        return Calculator
    if name == "python":
        return lambda: PythonTool(limits)
    if ":" not in name:
        raise ConfigError(
            f"{KEY} names {name}, which is unknown: allowed are {', '.join(BUILT_IN)}, or your own as module:object."
        )
    factory = import_object(name, KEY)
    try:
        tool = factory()
    except Exception as error:  # user code
        raise ConfigError(f"{KEY} names {name}: making it raised {type(error).__name__}: {error}.") from error
    lacks = [part for part in ("name", "description", "parameters", "run") if not hasattr(tool, part)]
    if lacks:
        raise ConfigError(f"{KEY} names {name}, which gave a {type(tool).__name__} without {', '.join(lacks)}.")
    return factory
