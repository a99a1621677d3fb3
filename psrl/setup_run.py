"""Before a run starts, on whatever machine: where it lives, whether it goes on, and everything that its roles meet by."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from psrl.config.checks import check_resume
from psrl.config.errors import ConfigError
from psrl.config.flat import flatten
from psrl.config.schema import Config
from psrl.outcome import COMPLETED, Outcome, read_outcome
from psrl.role import load_config
from psrl.rundir.keys import create_keys
from psrl.rundir.layout import RunDir
from psrl.rundir.publish import write_atomic
from psrl.rundir.snapshot import snapshot_code
from psrl.telemetry.record import SIMULATION


def choose_run_dir(config: Config) -> Path:
    """What `run_dir` names, else a fresh safe name under runs/."""
    if config.run_dir:
        return Path(config.run_dir).expanduser().resolve()
    words = re.sub(
        r"[^a-z0-9]+",
        "-",
        f"{config.model.name}-{config.data.reasoning_gym.dataset or config.data.task or 'data'}".lower(),
    ).strip("-")
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return Path("runs", f"{stamp}-{words}-{secrets.token_hex(2)}").resolve()


def completed_before(run_dir: RunDir, config: Config) -> Outcome | None:
    """The verdict, if this run is completed and no more steps are asked for: there is nothing to do.

    Raises ConfigError if the directory was started with a configuration that this one cannot go on from."""
    if not run_dir.config.exists():
        return None
    if (run_dir.path / SIMULATION).exists():
        raise ConfigError(f"run_dir={run_dir.path} holds a simulation: a run needs a directory of its own.")
    check_resume(flatten(_plain(load_config(run_dir))), flatten(_plain(config)))
    previous, steps = read_outcome(run_dir), config.trainer.total_training_steps
    if previous is None or previous.status != COMPLETED or (steps is not None and steps > previous.version):
        return None
    return previous


def sweep_entry(sweep_dir: str | Path, number: int, overrides: Sequence[str]) -> dict[str, Any]:
    """What `run.json` says of a sweep's member. The id is the directory's: launching into it again adds to the sweep."""
    path = Path(sweep_dir).resolve()
    return {
        "id": hashlib.sha256(str(path).encode()).hexdigest()[:8],
        "dir": str(path),
        "number": number,
        "overrides": list(overrides),
    }


def already_completed(run_dir: RunDir, outcome: Outcome) -> str:
    return f"psrl: {run_dir.path} is completed (version {outcome.version}); ask for more with trainer.total_training_steps=N"


def lay_out(run_dir: RunDir, config: Config, sweep: Mapping[str, Any] | None = None) -> None:
    """Everything that roles need to meet: keys, code, the configuration, the run's identity.

    `sweep` says which member of which sweep this is (id, dir, number, overrides)."""
    create_keys(run_dir)
    snapshot_code(run_dir)
    config.run_dir = str(run_dir.path)
    temporary = run_dir.config.with_suffix(".new")
    temporary.write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))
    temporary.rename(run_dir.config)
    if not run_dir.run.exists():
        identity = {"run_id": secrets.token_hex(4), "created": datetime.now(UTC).isoformat(timespec="seconds")}
        write_atomic(run_dir.run, json.dumps(identity | ({"sweep": sweep} if sweep else {}), indent=1).encode())


def _plain(config: Config) -> Any:
    return OmegaConf.to_container(OmegaConf.structured(config))
