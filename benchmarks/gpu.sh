#!/usr/bin/env bash
# What is checked and measured on GPUs, part by part: benchmarks/gpu.sh OUT PART...
#
#   one GPU       tests packing trainer weights rollout pulls whole_path learning agentic shared turns
#   two GPUs      tests headline
#
# Each part's output is shown and kept in OUT/PART.txt, its other results beside it. One that fails or takes too long does not keep the
# next ones from running, and the last line says which did. TESTS (../tests/gpu, more than one call has time for) are files, named from
# benchmarks/, for tests; SIZE (0.6b) is the model of rollout, pulls and headline; agentic, shared and headline go on where an earlier call
# with the same OUT ended, shared with AT_ONCE (1) settings side by side, on a GPU each.
# Needs torch with CUDA, vLLM, nixl-cu13, pytest, for tests and trainer megatron-core, for tests, shared and turns torch-memory-saver;
# tests that need LMCache are skipped without it.
set -uo pipefail
if [ $# -lt 2 ]; then
  sed -n '2,5p' "$0" >&2
  exit 2
fi
out=$(mkdir -p "$1" && cd "$1" && pwd)
shift
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1 WANDB_MODE=offline VLLM_NO_USAGE_STATS=1 VLLM_USE_FLASHINFER_SAMPLER=0 PYTHONUNBUFFERED=1
export PYTHONPATH=$PWD:$PWD/tests/process${PYTHONPATH:+:$PYTHONPATH}
size=${SIZE:-0.6b}
bad=()

part() { # part NAME SECONDS PROGRAM ARGUMENT...: a program of benchmarks/, or a module with -m
  local name=$1 seconds=$2 begun=$SECONDS
  shift 2
  echo "== $name: $*"
  (cd benchmarks && timeout -k 10 "$seconds" python3 "$@" 2>&1) | tee "$out/$name.txt"
  local code=${PIPESTATUS[0]}
  echo "== $name ended with $code after $((SECONDS - begun)) s"
  [ "$code" = 0 ] || bad+=("$name")
}

for name in "$@"; do
  case $name in
  tests) part tests 580 -m pytest ${TESTS:-../tests/gpu} --noconftest -p no:cacheprovider -m "" -q ;;
  packing) part packing 240 gpu_trainer.py --packing --budget-s 210 ;;
  trainer) part trainer 300 gpu_trainer.py ;;
  weights) part weights 200 gpu_weights.py --reader-gpus 0 --rounds 7 ;;
  rollout) part rollout 420 gpu_rollout.py --size "$size" --out "$out/rollout.json" ;;
  pulls) part pulls 300 gpu_rollout.py --size "$size" --turns 1 --new-tokens 256 --without-bare --out "$out/pulls-$size.json" ;;
  whole_path) part whole_path 400 gpu_whole_path.py --out "$out/whole_path" ;;
  learning) part learning 580 gpu_learning.py --out "$out/learning" ;;
  agentic) part agentic 560 agentic.py --gpu --steps 5 --rows "$out/agentic.json" --only "+ ThunderAgent" request_num_balance ;;
  shared) part shared 590 gpu_headline.py --gpus 1 --at-once "${AT_ONCE:-1}" --size 0.6b --groups 16 --mean 192 --cap 1024 --steps 8 \
    --minutes 9 --out "$out/shared" ;;
  turns) part turns 120 gpu_turns.py ;;
  headline) part headline 590 gpu_headline.py --gpus 2 --size "$size" --groups 16 --mean 256 --cap 2048 --steps 9 \
    --minutes 9 --out "$out/headline" ;;
  *) echo "no part $name: see the head of $0" >&2; bad+=("$name") ;;
  esac
done
if [ ${#bad[@]} -gt 0 ]; then
  echo "not well: ${bad[*]}"
  exit 1
fi
echo "all parts ran"
