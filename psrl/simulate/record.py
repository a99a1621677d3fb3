"""The run directory of a simulation: what a run leaves behind, apart from samples and weights, so that the same report is made."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from omegaconf import OmegaConf

from psrl.config.errors import ConfigError
from psrl.config.schema import Config
from psrl.config.simulation import SimulationConfig
from psrl.coordinator.ledger import Ledger
from psrl.coordinator.records import AnyRecord
from psrl.outcome import COMPLETED, Outcome, publish_outcome
from psrl.rundir.layout import RunDir
from psrl.rundir.publish import write_atomic
from psrl.simulate.result import metrics_row
from psrl.simulate.trainer import SimStep
from psrl.telemetry.metrics import MetricsWriter
from psrl.telemetry.record import SIMULATION


class SimulationRecord:
    """Ledger, metrics and configuration of one simulation. Its ledger can be audited as a run's."""

    def __init__(
        self, run_dir: RunDir, config: Config, simulation: SimulationConfig, sweep: Mapping[str, Any] | None = None
    ) -> None:
        """Raises ConfigError if the directory holds a run already."""
        if run_dir.config.exists():
            raise ConfigError(f"run_dir={run_dir.path} holds a run already: a simulation needs a directory of its own.")
        run_dir.create()
        self.run_dir = run_dir
        config.run_dir = str(run_dir.path)
        run_dir.config.write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))
        (run_dir.path / SIMULATION).write_text(OmegaConf.to_yaml(OmegaConf.structured(simulation)))
        identity = {"run_id": secrets.token_hex(4), "created": datetime.now(UTC).isoformat(timespec="seconds")}
        write_atomic(run_dir.run, json.dumps(identity | ({"sweep": sweep} if sweep else {}), indent=1).encode())
        self._metrics = MetricsWriter(run_dir.metrics)
        self._ledger = Ledger.open(run_dir.ledger)
        self._steps = 0
        self._counters: dict[str, int] = {}

    def append(self, records: list[AnyRecord]) -> None:
        self._ledger.append(records)

    def on_step(self, step: SimStep) -> None:
        self._steps += 1
        self._metrics.write(metrics_row(step, self._steps, self._counters))
        self._counters = step.counters
        self._ledger.flush(sync=False)

    def close(self, counters: Mapping[str, int]) -> None:
        """The end, with a verdict."""
        self._ledger.flush(sync=False)
        self._ledger.close()
        self._metrics.close()
        publish_outcome(
            self.run_dir, Outcome(status=COMPLETED, cause="simulated", version=self._steps, counters=dict(counters))
        )
