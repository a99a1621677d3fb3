"""What all tests share: one thread a process, no examples on the clock, the longest files first, one tiny model for whole runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import cast

import hypothesis
import pytest
from omegaconf import OmegaConf
from runs import DEADLINE_S, SMALL

from psrl.config.compose import compose_config
from psrl.config.schema import Config
from psrl.rundir.layout import RunDir
from psrl.setup_run import lay_out
from psrl.supervisor.node import role_environment

os.environ.setdefault("OMP_NUM_THREADS", "1")  # workers share the cores: threads that wait for each other burn them
# An example that the machine holds up is no fault.
hypothesis.settings.register_profile("psrl", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("psrl")

LONGEST = (
    "test_time_limit",
    "test_faults",
    "test_interruptions",
    "test_sweep",
    "test_overlap",
    "test_mini_slurm",
    "test_replay",
    "test_templates",
    "test_sessions_run",
    "test_redundancy",
    "test_elastic",
    "test_join",
    "test_backends",
    "test_examples_submitted",
    "test_weight_channel",
    "test_weight_readers_die",
    "test_routing_live",
    "test_broadcast",
    "test_examples_run",
)
"""Files of minutes, those that wait for Slurm among those that compute."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first (and go to workers in this order with `--no-loadscope-reorder`), so that in the end no
    worker is alone with one; the files of pure logic come last."""
    rank = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (rank.get(item.path.stem, len(rank)), "unit" in item.path.parts))


MODEL = {
    "data.max_response_length": 256,
    "model.tiny.hidden_size": 64,
    "model.tiny.num_layers": 2,
    "model.tiny.warm_start_steps": 0,
}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory for `model=`, with random weights: what a run learns is not the point here."""
    run_dir = RunDir(tmp_path_factory.mktemp("model") / "run")
    run_dir.create()
    config = compose_config([f"{key}={value}" for key, value in (SMALL | MODEL).items()])
    lay_out(run_dir, cast(Config, OmegaConf.to_object(config)))
    prepare = [sys.executable, "-m", "psrl.prepare", str(run_dir.path)]
    subprocess.run(prepare, env=role_environment(run_dir), check=True, timeout=DEADLINE_S)
    return run_dir.path / "model"
