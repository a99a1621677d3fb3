"""Who listens where: one immutable file per role and generation, `rendezvous/<name>.<generation>`; the newest wins."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from psrl.rundir.layout import RunDir
from psrl.rundir.publish import publish, read_published
from psrl.rundir.retry import UnreadableError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A socket that is bound already. `address` is as a client connects to it, for example tcp://10.0.0.7:41234."""

    address: str
    node: str
    pid: int
    epoch: int = 0
    """The coordinator's epoch; 0 for other roles."""


def publish_endpoint(run_dir: RunDir, name: str, generation: int, endpoint: Endpoint) -> None:
    """Publish generation `generation` of role `name`. Raises FileExistsError if that generation is there already."""
    publish(run_dir.rendezvous / _file_name(name, generation), msgspec.json.encode(endpoint))


def publish_next_endpoint(run_dir: RunDir, name: str, endpoint: Endpoint) -> int:
    """Publish under the next free generation and return it. Restarts and requeues thus never meet an old name."""
    generation = max(_generations(run_dir, name), default=-1) + 1
    while True:
        try:
            publish_endpoint(run_dir, name, generation, endpoint)
            return generation
        except FileExistsError:
            generation += 1


def latest_endpoint(run_dir: RunDir, name: str, deadline_s: float = 0.0) -> tuple[int, Endpoint] | None:
    """(generation, endpoint) of the newest readable publication of `name`, None if there is none.

    A newest file that is still torn after `deadline_s` is passed over for now; ask again later. A caller must not go
    back to an older generation than it has already used.
    """
    for generation in sorted(_generations(run_dir, name), reverse=True):
        path = run_dir.rendezvous / _file_name(name, generation)
        try:
            return generation, msgspec.json.decode(read_published(path, deadline_s), type=Endpoint)
        except UnreadableError:
            continue
    return None


def endpoint_of(run_dir: RunDir, name: str, generation: int, deadline_s: float = 0.0) -> Endpoint:
    """What was published as this generation of `name`. Raises UnreadableError if it cannot be read within `deadline_s`."""
    return msgspec.json.decode(
        read_published(run_dir.rendezvous / _file_name(name, generation), deadline_s), type=Endpoint
    )


def _generations(run_dir: RunDir, name: str) -> list[int]:
    return _matching((entry.name for entry in run_dir.rendezvous.iterdir()), name)


def _matching(names: Iterable[str], role_name: str) -> list[int]:
    pattern = re.compile(re.escape(role_name) + r"\.(\d{6,})")
    return [int(match[1]) for match in map(pattern.fullmatch, names) if match]


def _file_name(name: str, generation: int) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"role name {name!r} may hold letters, digits, '-' and '_' only, and starts with no '-' or '_'"
        )
    if generation < 0:
        raise ValueError(f"generation {generation} of {name!r} must be 0 or more")
    return f"{name}.{generation:06d}"
