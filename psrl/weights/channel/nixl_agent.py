"""NIXL behind the few calls that the weight channel needs: register, meet, read, make progress.

Measured with 1.5.1, and the reason for most of what stands here and in `nixl_puller`:
- the progress thread spins on a whole core, so it is off and both sides make progress by hand;
- `release` of an unfinished read says yes, but its bytes go on arriving in the buffer;
- destroying an agent with an unfinished read can abort the process at the *other* end.
Hence a read is never released before it has ended, and its buffer lives as long.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import socket
from collections.abc import Iterable
from typing import Any

import torch

from psrl.net.addresses import interface_address
from psrl.weights.mode import load_nixl

CPU_TRANSPORTS = "posix,cma,tcp"
PROGRESS_S = 0.0003
"""Pause between two rounds of progress while something moves; a socket transport stalls if it is much longer."""


class TransferError(Exception):
    """NIXL refused or lost something; the text is its own."""


def prepare_environment(address: str | None) -> str:
    """Choose how bytes travel, before the library is loaded: on a host without a GPU by shared memory, cross-memory
    attach and TCP over the interface of `address` (None: any). What the user has set stays. Returns it for the log."""
    if torch.cuda.is_available():
        os.environ.setdefault("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "on")  # else reads of device memory run at 0.5 GB/s
    elif "UCX_TLS" not in os.environ:
        os.environ["UCX_TLS"] = CPU_TRANSPORTS
        if address is not None and (interface := _interface_of(address)) is not None:
            os.environ.setdefault("UCX_NET_DEVICES", interface)
    return f"nixl ({os.environ.get('UCX_TLS', 'chosen by ucx')})"


def _interface_of(address: str) -> str | None:
    for _, name in socket.if_nameindex():
        try:
            if interface_address(name) == address:
                return name
        except OSError:
            continue  # an interface without an IPv4 address
    return None


def memory_type(buffer: torch.Tensor) -> str:
    """NIXL's name for the memory that a tensor lies in."""
    return "VRAM" if buffer.is_cuda else "DRAM"


def device_index(buffer: torch.Tensor) -> int:
    return buffer.device.index or 0


class Read:
    """A read that was posted. `state()` until it is not "PROC", then `end()`."""

    def __init__(self, agent: Any, handle: Any, errors: tuple[type[Exception], ...]) -> None:
        self._agent, self._handle, self._errors = agent, handle, errors
        self._done = False

    def post(self) -> None:
        self._done = self._call(self._agent.transfer) == "DONE"

    def done(self) -> bool:
        """True once every byte has arrived, False while it goes on; TransferError if it failed."""
        if not self._done:
            self._done = self._call(self._agent.check_xfer_state) == "DONE"
        return self._done

    def end(self) -> None:
        """Free the handle of a read that is done or has failed."""
        try:
            self._handle.release()
        except self._errors as error:
            raise TransferError(str(error)) from error

    def _call(self, function: Any) -> str:
        try:
            state = function(self._handle)
        except self._errors as error:
            raise TransferError(f"{type(error).__name__}: {error}") from error
        if state == "ERR":
            raise TransferError("the transfer ended with an error")
        return state


class TransferAgent:
    """One NIXL agent without a thread of its own. Not thread-safe: the owner holds a lock or uses one thread."""

    def __init__(self, name: str) -> None:
        api = load_nixl()
        bindings = importlib.import_module(f"{api.__package__}._bindings")
        self._errors = tuple(
            value for key, value in vars(bindings).items() if key.startswith("nixl") and key.endswith("Error")
        )
        self.name = name
        try:
            self._agent: Any = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False))
        except (*self._errors, RuntimeError) as error:
            raise TransferError(f"nixl cannot start its UCX backend: {error}") from error
        if "UCX" not in self._agent.backends:
            raise TransferError("nixl has no UCX plugin here")

    def register(self, buffer: torch.Tensor) -> Any:
        """Make a contiguous tensor readable and writable by transfers; returns what `deregister` takes."""
        region = (buffer.data_ptr(), buffer.nbytes, device_index(buffer), "")
        try:
            return self._agent.register_memory([region], mem_type=memory_type(buffer))
        except self._errors as error:
            raise TransferError(f"nixl cannot register {buffer.nbytes} bytes: {error}") from error

    def deregister(self, registration: Any) -> None:
        self._agent.deregister_memory(registration)

    def metadata(self) -> bytes:
        """What a reader needs to reach the memory registered so far."""
        return self._agent.get_agent_metadata()

    def add_peer(self, metadata: bytes) -> str:
        """Meet a publisher's agent (34-98 ms: do it once); returns its name."""
        try:
            name = self._agent.add_remote_agent(metadata)
        except self._errors as error:
            raise TransferError(f"nixl cannot reach the publisher: {error}") from error
        return name.decode() if isinstance(name, bytes) else name

    def remove_peer(self, name: str) -> None:
        try:
            self._agent.remove_remote_agent(name)
        except self._errors as error:
            raise TransferError(str(error)) from error

    def read(self, peer: str, into: torch.Tensor, address: int, device: int) -> Read:
        """Post a read of `peer`'s memory at `address` of its `device` into the registered tensor `into`. Both ends are of one
        kind, host or device memory: anything mixed is slower than a disk. It may be done already."""
        kind, nbytes = memory_type(into), into.nbytes
        try:
            local = self._agent.get_xfer_descs([(into.data_ptr(), nbytes, device_index(into))], mem_type=kind)
            remote = self._agent.get_xfer_descs([(address, nbytes, device)], mem_type=kind)
            handle = self._agent.initialize_xfer("READ", local, remote, peer)
        except self._errors as error:
            raise TransferError(f"{type(error).__name__}: {error}") from error
        read = Read(self._agent, handle, self._errors)
        read.post()
        return read

    def progress(self) -> None:
        """Let transfers go on that others have started on this agent's memory."""
        self._agent.get_new_notifs()

    def outlive_process(self, buffers: Iterable[torch.Tensor]) -> None:
        """Never destroy this agent and the buffers, not even at the interpreter's end: reads are still under way."""
        for part in (self._agent, self._agent.agent, *buffers):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(part))
