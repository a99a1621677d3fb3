"""`python -m psrl.simulate [KEY=VALUE ...]`: what a run with these settings would do, before it is paid for."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from psrl.config.checks import check
from psrl.config.command_line import prepare_overrides
from psrl.config.compose import sweep_members
from psrl.config.errors import ConfigError
from psrl.config.schema import Config
from psrl.config.simulation import SimulationConfig
from psrl.report import write_report, write_sweep_report
from psrl.rundir.layout import RunDir
from psrl.setup_run import choose_run_dir, sweep_entry
from psrl.simulate.build import simulate
from psrl.simulate.compose import compose_simulation, render_help, synchronous
from psrl.simulate.record import SimulationRecord
from psrl.simulate.result import Result, table
from psrl.telemetry.members import sweep_members as members_of

EXIT_REFUSED = 2
SWEEP_DIR = "hydra.sweep.dir="


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 simulated, 2 refused."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if "-h" in argv or "--help" in argv:
        print(render_help())
        return 0
    try:
        if argv[:1] == ["calibrate"]:
            from psrl.simulate.calibrate import main as calibrate

            return calibrate(argv[1:])
        if "-m" in argv or "--multirun" in argv:
            return sweep([a for a in argv if a not in ("-m", "--multirun")])
        config, simulation = prepare(prepare_overrides(argv))
        result = Simulator().run(config, simulation)
        print("\n".join(table(*result)))
        return 0
    except ConfigError as error:
        print(f"psrl.simulate: {error}", file=sys.stderr)
        return EXIT_REFUSED


def prepare(overrides: Sequence[str]) -> tuple[Config, SimulationConfig]:
    """Composed and checked as a launch would; what only running needs is a warning."""
    config, simulation = compose_simulation(overrides)
    for warning in check(config, only_planned=True):
        print(f"psrl.simulate: warning: {warning}", file=sys.stderr)
    if config.psrl.colocate:
        raise ConfigError("psrl.colocate=True is not simulated: simulate psrl.colocate=False, or run it.")
    return config, simulation


class Simulator:
    """Simulates configurations, and the synchronous partner of each only once."""

    def __init__(self) -> None:
        self._partners: dict[str, Result] = {}

    def run(
        self, config: Config, simulation: SimulationConfig, sweep: Mapping[str, Any] | None = None
    ) -> tuple[Result, Result | None]:
        """The figures, and those of the same work at staleness 0 unless this is it. Writes run_dir if asked to."""
        if not simulation.write:
            result = simulate(config, simulation)
        else:
            run_dir = RunDir(choose_run_dir(config))
            record = SimulationRecord(run_dir, config, simulation, sweep)
            result = simulate(
                config, simulation, journal=record, timeline_dir=run_dir.timeline, observers=[record.on_step]
            )
            record.close(result.counters)
            print(f"report: {write_report(run_dir)}")
        if config.psrl.staleness == 0 or not simulation.compare_synchronous:
            return result, None
        return result, self._partner(config, simulation)

    def _partner(self, config: Config, simulation: SimulationConfig) -> Result:
        partner = synchronous(config)
        partner.run_dir = None
        key = repr((partner, simulation))
        if key not in self._partners:
            self._partners[key] = simulate(partner, simulation)
        return self._partners[key]


def sweep(argv: Sequence[str]) -> int:
    """One simulation for each combination, one after the other; all are composed before the first one starts."""
    named = [a.removeprefix(SWEEP_DIR) for a in argv if a.startswith(SWEEP_DIR)]
    directory = Path(named[-1] if named else datetime.now().strftime("multirun/%Y-%m-%d/%H-%M-%S")).resolve()
    overrides = sweep_members(prepare_overrides([a for a in argv if not a.startswith(SWEEP_DIR)]))
    members = [(chosen, *prepare(chosen)) for chosen in overrides]
    common = set.intersection(*(set(chosen) for chosen, _, _ in members))
    simulator = Simulator()
    for number, (chosen, config, simulation) in enumerate(members):
        config = copy.deepcopy(config)
        config.run_dir = str(directory / str(number))
        result = simulator.run(config, simulation, sweep_entry(directory, number, chosen))
        print(f"\n[{number}] {' '.join(o for o in chosen if o not in common)}")
        print("\n".join(table(*result)))
    if written := members_of(directory):
        print(f"\nsweep: {write_sweep_report(directory, written)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
