"""A time limit that is hit. A file of its own: it takes minutes, most of them waiting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sweeps import hurry, launch_one, paced

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1200)]


def test_a_time_limit_of_three_minutes_is_hit(mini_slurm: Any, tiny_model: Path, tmp_path: Path) -> None:
    """B20: the warning comes in time, the run drains, requeues itself and goes on, whatever the limit."""
    overrides = paced(tmp_path, 0.3) | {
        "model": tiny_model, "trainer.total_training_steps": 60, "trainer.save_freq": 10,
        "hydra.launcher.timeout_min": 3, "hydra.launcher.signal_delay_s": 80,
    }  # fmt: skip
    member = launch_one(mini_slurm, tmp_path / "sweep", overrides)
    member.until(lambda: member.restarts >= 1, "the requeue", timeout_s=400)
    hurry(tmp_path)
    member.completed(steps=60, timeout_s=700)
    assert member.restarts >= 1
    assert "SIGUSR2" in member.job_log and "DUE TO TIME LIMIT" not in member.job_log
