"""Which way the bytes of one trainer rank go to one reader: decided by where the two ends are. Pure.

vram   device memory to device memory by NIXL, on one GPU or between peers (NVLink)
shm    a segment of host memory that both map, on one host; registered with CUDA where there is a GPU
nixl   NIXL over the network: out of device memory where both ends have it and hardware that reads it, else out of host memory
"""

from __future__ import annotations

from dataclasses import dataclass

from psrl.protocol.weights import Location

ROUTES = ("auto", "vram", "shm", "nixl")
VRAM, HOST = "vram", "host"
"""The publisher's two kinds of memory."""


class RouteError(ValueError):
    """The route that was asked for by name does not exist between these two ends."""


@dataclass(frozen=True, slots=True)
class Route:
    """`memory`: which of the publisher's memories is read. `why` in a few words, for the log."""

    name: str
    memory: str
    why: str


def choose_route(publisher: Location, reader: Location, wanted: str = "auto") -> Route:
    """The fastest route between them, or the one wanted by name. RouteError if that one is impossible."""
    same_host = publisher.host == reader.host
    devices = bool(publisher.gpu and reader.gpu)
    one_gpu = devices and same_host and publisher.gpu == reader.gpu
    direct = one_gpu or (devices and same_host and publisher.gpu in reader.peers)
    near = "on one GPU" if one_gpu else "the reader's GPU reads the trainer's" if direct else "on one host"
    if wanted == "vram" or (wanted == "auto" and direct):
        if not direct:
            raise RouteError(f"psrl.weights.route=vram is impossible: {_not_direct(publisher, reader)}; use auto.")
        return Route("vram", VRAM, near)
    if wanted == "shm" or (wanted == "auto" and same_host):
        if not same_host:
            raise RouteError(
                "psrl.weights.route=shm is impossible: trainer and reader are on different hosts; use auto or nixl."
            )
        return Route("shm", HOST, near if wanted == "auto" else "asked for")
    if wanted not in ("auto", "nixl"):
        raise RouteError(f"psrl.weights.route={wanted} is unknown: use one of {', '.join(ROUTES)}.")
    if same_host:
        return Route("nixl", VRAM if direct else HOST, "asked for")
    return Route("nixl", VRAM if devices and publisher.rdma and reader.rdma else HOST, "apart")


def _not_direct(publisher: Location, reader: Location) -> str:
    if not publisher.gpu:
        return "the trainer's weights are in host memory"
    if not reader.gpu:
        return "the engine's weights are in host memory"
    if publisher.host != reader.host:
        return "trainer and reader are on different hosts"
    return f"GPU {reader.gpu} cannot read GPU {publisher.gpu} directly"
