"""Validation as configured, and its metrics file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from psrl.config.schema import Config
from psrl.coordinator.validation import NEVER, ValidationSettings
from psrl.rundir.layout import RunDir
from psrl.telemetry.metrics import STEP_KEY, MetricsWriter, read_metrics


def validation_settings(config: Config, run_dir: RunDir) -> ValidationSettings | None:
    """None without validation. Versions that the metrics file has are not validated again."""
    trainer = config.trainer
    if trainer.test_freq <= 0:
        return None
    rows = read_metrics(run_dir.validation)
    return ValidationSettings(
        every=trainer.test_freq,
        timeout_s=trainer.val_timeout_s,
        before_train=trainer.val_before_train,
        num_validators=config.psrl.deployment.n_validate_instances,
        validated=rows[-1][STEP_KEY] if rows else NEVER,
    )


def append_validations(run_dir: RunDir, rows: Iterable[dict[str, Any]]) -> None:
    """One line a validated version."""
    with MetricsWriter(run_dir.validation) as writer:
        for row in rows:
            writer.write(row)
