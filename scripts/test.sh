#!/usr/bin/env bash
# Installs, checks style and types, then runs every test that needs no GPU. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/install.sh dev,smollm2
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1 WANDB_MODE=offline TOKENIZERS_PARALLELISM=false
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
exec .venv/bin/python -m pytest -m "not gpu" "$@"
