#!/usr/bin/env bash
# Installs, checks style and types, then runs the tests that need no GPU, without those marked slow
# (`-m "not gpu"` brings them back). Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/install.sh dev,smollm2,megatron
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1 WANDB_MODE=offline TOKENIZERS_PARALLELISM=false
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
# Whole files go to a worker, so that fixtures are shared, the longest first (tests/conftest.py). Many wait for Slurm and for
# deadlines, so there is a worker more for every two cores.
cores=$(nproc)
workers=$((cores < 4 ? cores + cores / 2 : 6))
exec .venv/bin/python -m pytest -m "not gpu and not slow" -n "$workers" --dist loadfile --no-loadscope-reorder "$@"
