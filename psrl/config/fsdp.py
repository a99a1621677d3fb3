"""Keys of the FSDP2 backend (`train_actor_rollout_ref.actor.fsdp_config.*`), under verl's names."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class FSDPConfig:
    fsdp_size: int = -1
    """Trainer ranks that share one copy of the model; fewer than all, and a divisor, gives replicas of it (HSDP). -1: all."""
    param_offload: bool = False
    """Keep weights, gradients and optimizer in host memory and step them there; layers visit the GPU. No effect on a CPU."""
    optimizer_offload: bool = False
    """Keep only Adam's two moments in host memory; they visit the GPU for the step. No effect on a CPU."""
