"""A simulation's command line: that of a launch, and the section `simulation.*` that a launch does not have."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import fields

from omegaconf import OmegaConf

from psrl.config.compose import compose_config
from psrl.config.help import add_section, documented_keys
from psrl.config.schema import Config
from psrl.config.simulation import SimulatedConfig, SimulationConfig
from psrl.config.simulation_checks import check_simulation


def compose_simulation(overrides: Sequence[str]) -> tuple[Config, SimulationConfig]:
    """Both parts, typed. Raises ConfigError with one sentence for anything that is refused."""
    add_section("simulation.", SimulationConfig)
    both: SimulatedConfig = OmegaConf.to_object(compose_config(overrides, SimulatedConfig))  # type: ignore[assignment]
    check_simulation(both.simulation)
    if both.trainer.total_training_steps is None and both.trainer.total_epochs is None:
        both.trainer.total_training_steps = both.simulation.steps
    return Config(**{f.name: getattr(both, f.name) for f in fields(Config)}), both.simulation


def synchronous(config: Config) -> Config:
    """The same work without asynchrony."""
    partner = copy.deepcopy(config)
    partner.psrl.staleness = 0
    return partner


def render_help() -> str:
    """What `--help` prints."""
    add_section("simulation.", SimulationConfig)
    lines = [
        "python -m psrl.simulate [KEY=VALUE ...]          simulate what `python -m psrl.launch` with the same keys would do",
        "python -m psrl.simulate -m KEY=V1,V2 [...]       a sweep: one simulation for each combination",
        "python -m psrl.simulate calibrate RUN_DIR [-o FILE]   costs and lengths of a real run, for simulation.calibration=FILE",
        "",
        "Keys of a launch (`python -m psrl.launch --help`), and:",
        "",
    ]
    for entry in documented_keys().values():
        if entry.key.startswith("simulation."):
            default = "null" if entry.default is None else entry.default
            lines += [f"  {entry.key} = {default}   ({entry.type_name})", f"      {entry.doc}"]
    return "\n".join(lines)
