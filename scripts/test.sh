#!/usr/bin/env bash
# Everything that can be tested without a GPU in one environment: installs into .venv, checks style and types, then runs the tests,
# those marked slow left out (`-m "not gpu"` brings them back). Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

bash scripts/install.sh dev,smollm2,megatron
unset PYTHONDONTWRITEBYTECODE  # hundreds of processes would each compile psrl anew
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1 WANDB_MODE=offline TOKENIZERS_PARALLELISM=false

.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy

echo "left out here, in environments of their own: a real vLLM (scripts/test_vllm.sh), LMCache (scripts/test_lmcache.sh)" >&2
# Many tests wait for Slurm and for deadlines, so there are two workers a core, eight at most. A worker takes whole files, so that
# fixtures are shared, the longest first (tests/conftest.py).
cores=$(nproc)
workers=$((cores < 4 ? 2 * cores : 8))
exec .venv/bin/python -m pytest -m "not gpu and not slow" -n "$workers" --dist loadfile --no-loadscope-reorder "$@"
