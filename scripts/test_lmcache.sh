#!/usr/bin/env bash
# Makes .venv-lmcache, psrl beside LMCache, then runs the tests that need a real LMCache; none needs a GPU. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/install_lmcache_cpu.sh
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 WANDB_MODE=offline TOKENIZERS_PARALLELISM=false LMCACHE_TRACK_USAGE=false
python=.venv-lmcache/bin/python
$python -c "import lmcache, nixl"  # without the first they would all be skipped, without the second half of them fail
# They wait for processes that start more than they compute: a file on each core.
exec $python -m pytest -m lmcache -n 2 --dist loadfile tests/process/test_lmcache_*.py "$@"
