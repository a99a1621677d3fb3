#!/usr/bin/env bash
# What is checked and measured on GPUs, part by part: benchmarks/gpu.sh OUT PART...
# Each part's output is shown and kept in OUT/PART.txt; one that fails or takes too long does not keep the next ones from running,
# and the last line says which did. Needs torch with CUDA, vLLM, nixl-cu13 and, for some, megatron-core and torch-memory-saver; pytest.
#
#   one GPU       tests packing rollout whole_path weights learning agentic
#   two GPUs      tests shared headline
set -uo pipefail
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1 WANDB_MODE=offline VLLM_NO_USAGE_STATS=1 VLLM_USE_FLASHINFER_SAMPLER=0 PYTHONUNBUFFERED=1
export PYTHONPATH=$PWD:$PWD/tests/process${PYTHONPATH:+:$PYTHONPATH}
out=$(mkdir -p "$1" && cd "$1" && pwd)
shift
bad=()

part() { # part NAME SECONDS COMMAND...
  local name=$1 seconds=$2 begun=$SECONDS
  shift 2
  echo "== $name: $*"
  timeout -k 10 "$seconds" "$@" 2>&1 | tee "$out/$name.txt"
  local code=${PIPESTATUS[0]}
  echo "== $name ended with $code after $((SECONDS - begun)) s"
  [ "$code" = 0 ] || bad+=("$name")
}

b=benchmarks
for name in "$@"; do
  case $name in
  tests) part tests "${TESTS_S:-300}" python3 -m pytest tests/gpu --noconftest -p no:cacheprovider -m "" -q ;;
  packing) part packing 150 python3 $b/gpu_trainer.py --packing --budget-s 120 ;;
  trainer) part trainer 300 python3 $b/gpu_trainer.py ;;
  weights) part weights 200 python3 $b/gpu_weights.py --reader-gpus 0 --rounds 7 ;;
  rollout) part rollout 420 python3 $b/gpu_rollout.py --size "${SIZE:-0.6b}" --out "$out/rollout.json" ;;
  whole_path) part whole_path 400 python3 $b/gpu_whole_path.py --out /tmp/whole_path ;;
  learning) part learning 580 python3 $b/gpu_learning.py --out /tmp/gpu_learning; cp /tmp/gpu_learning/reward.png "$out/" ;;
  agentic) part agentic 420 bash -c "cd $b && python3 agentic.py --gpu --steps ${STEPS:-6}" ;;
  shared) part shared 590 python3 $b/gpu_headline.py --gpus 1 --at-once 2 --size 0.6b --groups 16 --mean 192 --cap 1024 --steps 9 \
    --minutes 9 --out "${HEADLINE:-/tmp/shared}"; cp "${HEADLINE:-/tmp/shared}"/headline.* "$out/" ;;
  headline) part headline 590 python3 $b/gpu_headline.py --gpus 2 --size "${SIZE:-0.6b}" --groups 16 --mean 256 --cap 2048 --steps 9 \
    --minutes 9 --out "${HEADLINE:-/tmp/headline}"; cp "${HEADLINE:-/tmp/headline}"/headline.* "$out/" ;;
  *) echo "no part $name" >&2; bad+=("$name") ;;
  esac
done
[ ${#bad[@]} = 0 ] && echo "all parts ran" || { echo "not well: ${bad[*]}"; exit 1; }
