"""Keys of the trainer's checkpoints (`train_actor_rollout_ref.actor.checkpoint.*`), under verl's names."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class CheckpointConfig:
    async_save: bool = True
    """Copy weights and optimizer to host memory and train on while they are written; False: wait for the disk."""
