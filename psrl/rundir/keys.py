"""The run's two CURVE key pairs: one for everything that listens, one for everything that connects."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

import msgspec
import zmq

from psrl.rundir.layout import RunDir, exposure_fault
from psrl.rundir.publish import publish, read_published
from psrl.rundir.retry import DEADLINE_S

KEY_FILE = "curve.keys"


class RunKeys(msgspec.Struct, frozen=True, kw_only=True):
    """Z85 text, 40 characters each. A listener admits exactly `client_public`; all roles of a run are one user's."""

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str

    def __repr__(self) -> str:
        return f"RunKeys(server_public={self.server_public!r}, client_public={self.client_public!r})"


def create_keys(run_dir: RunDir) -> RunKeys:
    """Make the run's keys, or load them if the run has some already (a resume keeps its keys)."""
    _refuse_exposed(run_dir.rendezvous, "chmod 700")
    try:
        publish(run_dir.rendezvous / KEY_FILE, msgspec.json.encode(new_keys()))
    except FileExistsError:
        pass
    return load_keys(run_dir)


def load_keys(run_dir: RunDir, deadline_s: float = DEADLINE_S) -> RunKeys:
    """Read the run's keys. PermissionError if anyone else could, UnreadableError if they do not appear in time."""
    _refuse_exposed(run_dir.rendezvous, "chmod 700")
    path = run_dir.rendezvous / KEY_FILE
    payload = read_published(path, deadline_s)
    _refuse_exposed(path, "chmod 600")
    return msgspec.json.decode(payload, type=RunKeys)


def new_keys() -> RunKeys:
    """Two fresh key pairs."""
    server_public, server_secret = zmq.curve_keypair()
    client_public, client_secret = zmq.curve_keypair()
    return RunKeys(
        server_public=server_public.decode(),
        server_secret=server_secret.decode(),
        client_public=client_public.decode(),
        client_secret=client_secret.decode(),
    )


def _refuse_exposed(path: Path, remedy: str) -> None:
    fault = exposure_fault(path)
    if fault:
        raise PermissionError(
            f"{path} {fault}: whoever reads the run's keys can control the run; "
            f"run `{remedy} {path}` as its owner, or start in a new run directory"
        )


def session_token(keys: RunKeys) -> str:
    """The bearer token of the run's session endpoints: whoever may read its keys may use them."""
    return blake2b(b"sessions", key=keys.client_secret.encode(), digest_size=20).hexdigest()
