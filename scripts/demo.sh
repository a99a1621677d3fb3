#!/usr/bin/env bash
# From a fresh clone to a trained tiny model: installs into .venv, then runs the main job. Arguments go to psrl.launch.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/install.sh
exec .venv/bin/python -m psrl.launch "$@"
