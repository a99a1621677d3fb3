"""One line that says what a figure was measured on."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path


def describe_machine() -> str:
    """Date, processor, cores, load, versions."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    packages = ", ".join(f"{p} {version(p)}" for p in ("torch", "transformers"))
    load = os.getloadavg()[0]
    return (
        f"{datetime.now(UTC):%Y-%m-%d %H:%M}Z, {names[0] if names else platform.machine()}, {os.cpu_count()} cores, load {load:.1f} at the end, "
        f"Python {platform.python_version()}, {packages}"
    )
