"""Open files: connections beyond the limit hang in silence, so the limit is raised or the start refused."""

from __future__ import annotations

import resource

import zmq

RESERVE = 128
"""Descriptors for everything but peers: logs, ledger, segments, libraries."""


def descriptors_needed(peers: int) -> int:
    """One per peer, one for a peer's successor while its old connection dies, and a reserve."""
    return 2 * peers + RESERVE


def descriptor_fault(hard_limit: int, peers: int) -> str | None:
    """Why `peers` connections cannot be served under `hard_limit` open files, or None."""
    needed = descriptors_needed(peers)
    if hard_limit == resource.RLIM_INFINITY or hard_limit >= needed:
        return None
    return (
        f"the hard limit of {hard_limit} open files is too small for {peers} peers ({needed} are needed): raise it "
        f"(`ulimit -Hn`, LimitNOFILE of slurmd) or start fewer roles"
    )


def raise_descriptor_limit(peers: int) -> int:
    """Raise this process's soft limit of open files to the hard one and return it; OSError if that is too small."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fault = descriptor_fault(hard, peers)
    if fault:
        raise OSError(fault)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def new_context(sockets: int = 1) -> zmq.Context:
    """A context of its own that may hold `sockets` sockets (the library's default is 1023)."""
    context: zmq.Context = zmq.Context()
    wanted = sockets + RESERVE
    largest = context.get(zmq.SOCKET_LIMIT)
    if wanted > largest:
        raise OSError(f"{sockets} sockets in one process are more than the library's limit of {largest}")
    context.set(zmq.MAX_SOCKETS, max(1023, wanted))
    return context
