"""`python -m psrl.sessions RUN_DIR`: where a running run's OpenAI-compatible endpoints are, as lines for a shell."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from psrl.rundir.endpoints import latest_endpoint
from psrl.rundir.keys import load_keys, session_token
from psrl.rundir.layout import RunDir

SUFFIX = "-sessions"
"""Of the name under which an agent loop publishes its endpoint."""


def endpoints(run_dir: RunDir) -> Iterator[tuple[str, str]]:
    """(agent loop, base URL) of each that serves sessions, as its newest start published it."""
    pattern = re.compile(rf"(.+){SUFFIX}\.\d+")
    names = {match[1] for entry in run_dir.rendezvous.iterdir() if (match := pattern.fullmatch(entry.name))}
    for name in sorted(names):
        if found := latest_endpoint(run_dir, name + SUFFIX):
            yield name, found[1].address


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m psrl.sessions", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    path = parser.parse_args(argv).run_dir
    run_dir = RunDir(path)
    if not run_dir.rendezvous.is_dir():
        print(f"{path} is no run directory.", file=sys.stderr)
        return 2
    found = list(endpoints(run_dir))
    if not found:
        print(
            f"No agent loop of {path} serves sessions: start the run with "
            "gen_actor_rollout_ref.rollout.agent.serve_sessions=True, or wait until its agent loops are there.",
            file=sys.stderr,
        )
        return 1
    print(f"export OPENAI_API_KEY={session_token(load_keys(run_dir, deadline_s=1.0))}")
    for name, url in found:
        print(f"export OPENAI_BASE_URL={url}/v1   # {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
