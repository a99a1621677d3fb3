"""Values of `simulation.*` that are refused."""

from __future__ import annotations

from dataclasses import asdict

from psrl.config.errors import ConfigError
from psrl.config.flat import flatten
from psrl.config.simulation import SimulationConfig

DISTRIBUTIONS = ("lognormal", "fixed", "trace")
POSITIVE = ("simulation.tick_s", "simulation.lengths.mean_tokens")
SHARES = ("simulation.lengths.prompt_share", "simulation.uniform_reward_share")
AT_LEAST_ONE = ("simulation.steps", "simulation.prompt_tokens", "simulation.environment.turns")


def check_simulation(simulation: SimulationConfig) -> None:
    """Raises ConfigError with one sentence for the first value that cannot be simulated."""
    values = flatten({"simulation": asdict(simulation)})
    for key, value in values.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            _check_number(key, value)
    if simulation.lengths.distribution not in (None, *DISTRIBUTIONS):
        raise ConfigError(
            f"simulation.lengths.distribution={simulation.lengths.distribution} is refused: allowed is {' | '.join(DISTRIBUTIONS)}."
        )
    if simulation.lengths.trace is not None and simulation.lengths.distribution != "trace":
        raise ConfigError(
            f"simulation.lengths.trace={simulation.lengths.trace} is not used by simulation.lengths.distribution="
            f"{simulation.lengths.distribution}: set simulation.lengths.distribution=trace, or leave the trace out."
        )
    if simulation.prompt_tokens is not None and simulation.shared_prompt_tokens > simulation.prompt_tokens:
        raise ConfigError(
            f"simulation.shared_prompt_tokens={simulation.shared_prompt_tokens} is refused: a prompt has no more than "
            f"simulation.prompt_tokens={simulation.prompt_tokens}."
        )
    warmup = simulation.warmup_steps
    if warmup is not None and warmup >= simulation.steps:
        raise ConfigError(
            f"simulation.warmup_steps={warmup} leaves nothing of simulation.steps={simulation.steps}: simulate more steps."
        )


def _check_number(key: str, value: float) -> None:
    if key in AT_LEAST_ONE and value < 1:
        raise ConfigError(f"{key}={value} is refused: it must be at least 1.")
    if key in POSITIVE and value <= 0:
        raise ConfigError(f"{key}={value} is refused: it must be greater than 0.")
    if key in SHARES and not 0 <= value <= 1:
        raise ConfigError(f"{key}={value} is refused: it is a share, from 0 to 1.")
    if value < 0:
        raise ConfigError(f"{key}={value} is refused: it must be at least 0.")
