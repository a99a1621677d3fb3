"""`python -m psrl.cost_model fit` on the embedded engine, over a grid that takes seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from psrl.cost_model.files import load_cost_models

pytestmark = pytest.mark.process


def test_fit_measures_reports_plots_and_writes(tmp_path: Path) -> None:
    out = tmp_path / "tiny.json"
    arguments = ["fit", "--out", str(out), "--num-seqs", "1", "8", "32", "--tokens-per-seq", "16", "64", "256"]
    done = subprocess.run(
        [sys.executable, "-m", "psrl.cost_model", *arguments, "--repeats", "2", "--steps", "3", "--key", "TP1_PP1"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert sum(line.endswith("held out") for line in lines) == 2
    assert any(line.startswith("error on held-out points: median") for line in lines)
    (model,) = load_cost_models(out).values()
    # Not an accuracy test (a loaded machine): 32 sequences cost more than one, and less than 32 steps of one.
    assert model.latency_s(1, 16) < model.latency_s(32, 32 * 16) < 32 * model.latency_s(1, 16)
    assert b"<svg" in out.with_suffix(".svg").read_bytes()
