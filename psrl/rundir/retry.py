"""Reading what another node wrote: names and attributes are cached for up to a minute, so try again by deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

DEADLINE_S = 90.0
"""Network filesystems cache names and attributes for up to 60 s; beyond this a file is really missing or damaged."""

FIRST_PAUSE_S = 0.005
LONGEST_PAUSE_S = 1.0


class TornError(Exception):
    """What was read is incomplete or fails its checksum; it may be whole a moment later."""


class UnreadableError(RuntimeError):
    """It did not become readable by the deadline, or its writer is gone."""


def retry(
    read: Callable[[], T],
    what: str,
    deadline_s: float = DEADLINE_S,
    gone: Callable[[], str | None] | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Call `read` until it neither raises FileNotFoundError nor TornError; pauses grow from 5 ms to 1 s.

    `gone` returns a cause as soon as the other side is known to be dead: then one last read decides (it may have
    finished just before). Raises UnreadableError naming `what` and the last fault. `deadline_s` 0 reads once.
    """
    end = clock() + deadline_s
    pause = FIRST_PAUSE_S
    while True:
        cause = gone() if gone is not None else None
        try:
            return read()
        except FileNotFoundError:
            fault = "it does not exist"
        except TornError as error:
            fault = str(error)
        if cause is not None:
            raise UnreadableError(f"cannot read {what}: {fault}, and its writer is gone ({cause})")
        left = end - clock()
        if left <= 0:
            raise UnreadableError(f"cannot read {what} within {deadline_s:g} s: {fault}")
        sleep(min(pause, left))
        pause = min(2 * pause, LONGEST_PAUSE_S)
