"""The device of a trainer rank."""

from __future__ import annotations

import logging
import os

import torch

from psrl.config.errors import ConfigError

log = logging.getLogger("psrl.trainer")


def why_no_cuda() -> str | None:
    """Why PyTorch cannot compute on a GPU in this process; None if it can."""
    if torch.version.cuda is None:
        return "this PyTorch is built without CUDA"
    if not torch.cuda.is_available():
        return f"PyTorch finds no usable GPU (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')})"
    return None


def check_device(asked: str) -> None:
    """Refuse `trainer.device=cuda` where there is none (ConfigError)."""
    if asked == "cuda" and (missing := why_no_cuda()):
        raise ConfigError(
            f"trainer.device=cuda but {missing}: set trainer.device=cpu, or start the run where there is one."
        )


def take_device(asked: str, memory_fraction: float) -> torch.device:
    """The device that `trainer.device` means for this rank, made the current one: before any tensor, and before NCCL. The
    supervisor shows a rank its own GPU first. ConfigError for cuda where there is none."""
    check_device(asked)
    missing = why_no_cuda()
    if asked == "cpu" or missing:
        given = os.environ.get("CUDA_VISIBLE_DEVICES") and missing
        log.log(logging.WARNING if given else logging.INFO, "trainer.device=%s: cpu (%s)", asked, missing or "as asked")
        return torch.device("cpu")
    device = torch.device("cuda", 0)
    torch.cuda.init()  # or a device mesh would make the device of LOCAL_RANK current
    torch.cuda.set_device(device)
    if memory_fraction < 1.0:
        torch.cuda.set_per_process_memory_fraction(memory_fraction, device)
    log.info(
        "trainer.device=%s: %s, of which %g may be taken", asked, torch.cuda.get_device_name(device), memory_fraction
    )
    return device


def warn_of_float32(device: torch.device, mixed_precision: str) -> None:
    """It is the default for CPUs, and nothing but the time would say so."""
    if device.type == "cuda" and mixed_precision == "float32":
        log.warning(
            "train_actor_rollout_ref.actor.mixed_precision=float32 on a GPU, which computes bfloat16 many times as fast: set it to bfloat16, "
            "and gen_actor_rollout_ref.rollout.dtype too"
        )
