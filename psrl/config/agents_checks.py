"""What is refused of agents: one sentence each."""

from __future__ import annotations

import shlex
from dataclasses import replace

from psrl.config.agents import (
    AGENT_LOOPS,
    BLACK_BOX,
    END,
    GO_ON,
    SINGLE_TURN,
    TOOL,
    TRUNCATE_SIDES,
    AgentConfig,
    MultiTurnConfig,
    plays_turns,
    serves_sessions,
)
from psrl.config.errors import ConfigError
from psrl.config.schema import Config

ROLLOUT = "gen_actor_rollout_ref.rollout"
AGENT, TURNS = f"{ROLLOUT}.agent", f"{ROLLOUT}.multi_turn"
LOOP, BOX = f"{AGENT}.default_agent_loop", f"{AGENT}.black_box"
CHOICES = {
    LOOP: AGENT_LOOPS,
    f"{TURNS}.cut_message": (END, GO_ON),
    f"{TURNS}.tool_response_truncate_side": TRUNCATE_SIDES,
}
AT_LEAST = {
    f"{BOX}.max_concurrent": 1,
    f"{TURNS}.max_assistant_turns": 1,
    f"{TURNS}.max_tokens_per_turn": 1,
    f"{TURNS}.max_parallel_calls": 1,
    f"{TURNS}.max_tool_response_length": 1,
    f"{TURNS}.max_env_retries": 0,
    f"{TURNS}.sandbox.max_processes": 1,
}
POSITIVE = (
    f"{AGENT}.turn_timeout_s",
    f"{AGENT}.max_body_mb",
    f"{BOX}.timeout_s",
    f"{TURNS}.step_timeout_s",
    f"{TURNS}.sandbox.timeout_s",
    f"{TURNS}.sandbox.max_memory_gb",
    f"{TURNS}.sandbox.max_file_mb",
)


def check_agents(config: Config) -> list[str]:
    """Raises ConfigError for what contradicts itself; returns what has no effect."""
    rollout = config.gen_actor_rollout_ref.rollout
    loop = rollout.agent.default_agent_loop
    if loop != SINGLE_TURN:
        _check_surroundings(config, loop)
    if loop == TOOL:
        _check_turns(rollout.multi_turn)
        if rollout.ignore_eos:
            _check_endless(rollout.multi_turn)
    if loop == BLACK_BOX:
        _check_box(rollout.agent)
    return _warnings(rollout.agent, rollout.multi_turn)


def _check_turns(turns: MultiTurnConfig) -> None:
    if turns.environment is None and not turns.tools:
        raise ConfigError(
            f"{LOOP}={TOOL} has nobody to take turns with: name {TURNS}.tools (calculator, python, module:object) or "
            f"{TURNS}.environment."
        )
    if turns.environment is not None and turns.tools:
        raise ConfigError(
            f"{TURNS}.environment={turns.environment} has its own tools, so {TURNS}.tools={turns.tools} would not be used: set one of "
            "them."
        )
    if turns.environment is None and turns.environment_params:
        raise ConfigError(f"{TURNS}.environment_params={turns.environment_params} needs {TURNS}.environment: name one.")
    if twice := {name for name in turns.tools if turns.tools.count(name) > 1}:
        raise ConfigError(f"{TURNS}.tools names {', '.join(sorted(twice))} twice: name each tool once.")
    if "python" in turns.tools and turns.sandbox.timeout_s >= turns.step_timeout_s:
        raise ConfigError(
            f"{TURNS}.sandbox.timeout_s={turns.sandbox.timeout_s:g} is not below {TURNS}.step_timeout_s={turns.step_timeout_s:g}: a slow "
            "program would fail its trajectory where it should be told to the model; lower the first or raise the second."
        )


def _check_endless(turns: MultiTurnConfig) -> None:
    """With ignore_eos no message ends by itself."""
    if turns.max_tokens_per_turn is None or turns.cut_message != GO_ON:
        raise ConfigError(
            f"{ROLLOUT}.ignore_eos=True never ends a message, so {LOOP}={TOOL} would have one turn only: set it to False, or cut messages with "
            f"{TURNS}.max_tokens_per_turn and {TURNS}.cut_message={GO_ON}."
        )


def _check_box(agent: AgentConfig) -> None:
    box = agent.black_box
    if box.max_memory_gb is not None and not box.max_memory_gb > 0:
        raise ConfigError(
            f"{BOX}.max_memory_gb={box.max_memory_gb:g} is refused: it must be greater than 0, or null for no limit."
        )
    if (box.function is None) == (box.command is None):
        said = f"function={box.function} and command={box.command} are both set" if box.function else "neither is set"
        raise ConfigError(
            f"{LOOP}={BLACK_BOX} runs one of {BOX}.function and {BOX}.command, but {said}: set one of them."
        )
    if box.command is None:
        return
    try:
        words = shlex.split(box.command)
    except ValueError as error:
        raise ConfigError(f"{BOX}.command={box.command} cannot be split into words: {error}.") from error
    if not words:
        raise ConfigError(f"{BOX}.command is empty: name a program and its arguments.")


def _check_surroundings(config: Config, loop: str) -> None:
    """Keys of a run that sessions cannot work with."""
    if config.data.synthetic_lengths.mean_tokens is not None:
        raise ConfigError(
            f"data.synthetic_lengths.mean_tokens={config.data.synthetic_lengths.mean_tokens:g} draws the length of a single response, which "
            f"{LOOP}={loop} does not make: leave it null."
        )
    if config.psrl.rollout_coordination.partial_rollout.interrupt_as_prompt:
        raise ConfigError(
            f"psrl.rollout_coordination.partial_rollout.interrupt_as_prompt=True counts what was written before a weight update as prompt, which "
            f"{LOOP}={loop} cannot (a turn's mask says who wrote it): set it to False."
        )
    if config.trainer.test_freq > 0:
        raise ConfigError(
            f"trainer.test_freq={config.trainer.test_freq} validates with single responses, which would say nothing about {LOOP}={loop}: set it to -1."
        )


def _warnings(agent: AgentConfig, turns: MultiTurnConfig) -> list[str]:
    unused = []
    unread = (
        turns if not serves_sessions(agent) else replace(turns, max_assistant_turns=None)
    )  # sessions have this limit
    if agent.default_agent_loop != TOOL and unread != MultiTurnConfig():
        unused.append(f"{TURNS} has no effect with {LOOP}={agent.default_agent_loop}: it is read by {TOOL}")
    if agent.default_agent_loop != BLACK_BOX and (agent.black_box.function or agent.black_box.command):
        unused.append(f"{BOX} has no effect with {LOOP}={agent.default_agent_loop}: it is read by {BLACK_BOX}")
    usual, serves = AgentConfig(), serves_sessions(agent)
    if agent.turn_timeout_s != usual.turn_timeout_s and not (plays_turns(agent) or serves):
        unused.append(
            f"{AGENT}.turn_timeout_s has no effect: with {LOOP}={SINGLE_TURN} there are no sessions unless they are served"
        )
    if agent.max_body_mb != usual.max_body_mb and not serves:
        unused.append(f"{AGENT}.max_body_mb has no effect: with {LOOP}={agent.default_agent_loop} nothing is served")
    return unused
