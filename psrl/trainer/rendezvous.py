"""How trainer ranks find each other: rank 0 binds a store on a free port, then publishes it in the run directory."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from psrl.net.addresses import interface_of
from psrl.role import Role
from psrl.rundir.endpoints import Endpoint, latest_endpoint, publish_endpoint

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""Longest wait in one collective: far beyond a step's skew, and a hang ends as an error."""
_LOOK_S = 0.05


def init_process_group(role: Role, rank: int, world_size: int, device: torch.device) -> None:
    """Join the ranks of this attempt: gloo for what is on the host, NCCL for what is on a GPU. A single rank needs no group.
    TimeoutError names who was waited for; RuntimeError if ranks compute on different kinds of device."""
    if world_size == 1:
        return
    # Left alone, gloo binds to whatever the host's name resolves to, on many systems 127.0.1.1.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(role.address))
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface_of(role.address)}")
    name = f"trainer-store-{role.attempt}"
    timeout_s = role.config.psrl.fault_tolerance.startup_timeout_s
    if rank == 0:
        store = dist.TCPStore(
            role.address, 0, world_size, is_master=True, wait_for_workers=False, timeout=COLLECTIVE_TIMEOUT
        )
        store.set("device", device.type)
        publish_endpoint(
            role.run_dir, name, 0, Endpoint(address=f"{role.address}:{store.port}", node=role.node, pid=os.getpid())
        )
    else:
        host, _, port = _wait_for(role, name, timeout_s).address.rpartition(":")
        store = dist.TCPStore(host, int(port), world_size, is_master=False, timeout=COLLECTIVE_TIMEOUT)
    if (first := store.get("device").decode()) != device.type:
        raise RuntimeError(
            f"trainer rank {rank} computes on {device.type}, rank 0 on {first}: give all of them a GPU, or set trainer.device=cpu"
        )
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT)


def barrier(world_size: int) -> None:
    """Wait for all ranks, on the host: NCCL would keep the GPUs of those that wait busy."""
    if world_size > 1:
        dist.all_reduce(torch.zeros(1))


def _wait_for(role: Role, name: str, timeout_s: float) -> Endpoint:
    deadline = time.monotonic() + timeout_s
    while (found := latest_endpoint(role.run_dir, name)) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"trainer rank 0 published no store within psrl.fault_tolerance.startup_timeout_s={timeout_s:g} s"
            )
        time.sleep(_LOOK_S)
    return found[1]
