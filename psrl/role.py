"""What every role process does first: find its run, read the configuration, write a readable log."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from omegaconf import OmegaConf

from psrl.config.schema import Config
from psrl.net.addresses import bind_address
from psrl.outcome import current_attempt
from psrl.rundir.layout import RunDir


@dataclass(frozen=True, slots=True)
class Role:
    """One process of a run. `name` is unique in the run, for example "instance-1"."""

    run_dir: RunDir
    config: Config
    name: str
    node: str
    local: bool
    """All roles are on this host (everything binds to loopback)."""
    attempt: str
    """Names this start of the whole run: the same in all its roles, another after a requeue."""

    @property
    def address(self) -> str:
        """The address that this role's sockets bind to."""
        return bind_address(self.config.psrl.net.interface, self.local)


def load_config(run_dir: RunDir) -> Config:
    """The configuration that this run was started with."""
    return parse_config(run_dir.config.read_text())


def parse_config(text: str) -> Config:
    """A resolved configuration from its YAML."""
    merged = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(text))
    return OmegaConf.to_object(merged)  # type: ignore[return-value]


def start_role(argv: Sequence[str] | None = None) -> Role:
    """Parse `RUN_DIR NAME`, set up the log, load the configuration."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("name")
    args = parser.parse_args(argv)
    setup_logging(args.name)
    run_dir = RunDir(args.run_dir.resolve())
    node = os.environ.get("PSRL_NODE", socket.gethostname())
    local = os.environ.get("PSRL_LOCAL") == "1"
    return Role(run_dir, load_config(run_dir), args.name, node, local, current_attempt())


def setup_logging(name: str, stream=None) -> None:
    """One line an event: time (UTC), role, level, text."""
    formatter = logging.Formatter(f"%(asctime)s.%(msecs)03dZ {name} %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for noisy in ("matplotlib", "urllib3", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def run_role(main: Callable[[], int]) -> NoReturn:
    """Run a role's `main`, which closes all that it opened, and end the process with its exit code.

    The interpreter's own teardown is left out: with torch and transformers loaded it takes seconds in which the node
    is held for nothing. What has been loaded until now stays, and no garbage collection looks at it (`psrl.start`).
    """
    gc.freeze()
    gc.enable()
    try:
        code = main()
    except Exception:  # said as the interpreter would have said it
        traceback.print_exc()
        code = 1
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
