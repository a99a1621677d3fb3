#!/usr/bin/env bash
# Makes .venv-lmcache: psrl beside LMCache on a machine without a GPU, an environment of its own since LMCache needs numpy below 2.3.
# LMCache moves entries through NIXL under the name `nixl`, whose own requirements are both CUDA variants; one is enough. See docs/lmcache.md.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
stamp=.venv-lmcache/psrl-installed
want="$(cat pyproject.toml constraints.txt "$0" | sha256sum)"
if [ -f "$stamp" ] && grep -qxF "$want" "$stamp"; then exit 0; fi

echo "installing psrl and LMCache into .venv-lmcache ..." >&2
[ -x .venv-lmcache/bin/python ] || "$python" -m venv .venv-lmcache
constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
pip() { .venv-lmcache/bin/python -m pip install -q --disable-pip-version-check --constraint "$constraints" "$@"; }
grep -v '^\(numpy\|protobuf\|wandb\|opentelemetry-.*\)==' constraints.txt >"$constraints"

pip torch
pip -e '.[dev]' lmcache==0.5.6
pip --no-deps nixl==1.5.1
echo "$want" >>"$stamp"
