"""Where this process keeps weights: the host as the kernel names it, the GPU and its peers as the driver names them."""

from __future__ import annotations

import ctypes
import logging
import os
from contextlib import suppress
from pathlib import Path

import torch

from psrl.protocol.weights import Location

_P2P_READ = 0
"""NVML_P2P_CAPS_INDEX_READ; a status of 0 says yes."""
_UUID_BYTES = 96

log = logging.getLogger(__name__)


def locate(device: torch.device) -> Location:
    """This host and, for a CUDA device, its GPU. Containers on one host have the same: they share its kernel."""
    host, rdma = Path("/proc/sys/kernel/random/boot_id").read_text().strip(), has_rdma()
    if device.type != "cuda":
        return Location(host, rdma=rdma)
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    try:
        return Location(host, gpu, _peers(gpu), rdma)
    except (OSError, AttributeError, RuntimeError) as error:
        log.warning("the peers of GPU %s are unknown, only its own memory is read directly: %s", gpu, error)
        return Location(host, gpu, rdma=rdma)


def has_rdma(devices: Path = Path("/sys/class/infiniband"), verbs: Path = Path("/dev/infiniband")) -> bool:
    """Whether this process can use network hardware that reads memory by itself: InfiniBand, RoCE and EFA are all listed there. A
    container may see the host's `devices` and have no `verbs`; a port may be down."""
    active = any(_is_active(state) for state in devices.glob("*/ports/*/state"))
    return active and any(os.access(verb, os.R_OK | os.W_OK) for verb in verbs.glob("uverbs*"))


def _is_active(state: Path) -> bool:
    with suppress(OSError):  # a port that goes away
        return "ACTIVE" in state.read_text()
    return False


def _peers(gpu: str) -> tuple[str, ...]:
    """Uuids of the GPUs whose memory this one reads. NVML sees those too that CUDA_VISIBLE_DEVICES hides."""
    nvml = ctypes.CDLL("libnvidia-ml.so.1")

    def call(name: str, *arguments: object) -> None:
        if code := getattr(nvml, name)(*arguments):
            raise RuntimeError(f"{name} returned {code}")

    call("nvmlInit_v2")
    try:
        own, count = ctypes.c_void_p(), ctypes.c_uint()
        call("nvmlDeviceGetHandleByUUID", f"GPU-{gpu.removeprefix('GPU-')}".encode(), ctypes.byref(own))
        call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        found = []
        for index in range(count.value):
            other, status = ctypes.c_void_p(), ctypes.c_int(-1)
            with suppress(RuntimeError):  # a GPU that this process may not look at
                call("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(other))
                if other.value == own.value:
                    continue
                call("nvmlDeviceGetP2PStatus", own, other, _P2P_READ, ctypes.byref(status))
                if status.value == 0:
                    name = ctypes.create_string_buffer(_UUID_BYTES)
                    call("nvmlDeviceGetUUID", other, name, _UUID_BYTES)
                    found.append(name.value.decode().removeprefix("GPU-"))
        return tuple(found)
    finally:
        nvml.nvmlShutdown()
