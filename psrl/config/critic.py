"""Keys of the critic (`critic.*`), under verl's names. All else about it is as `train_actor_rollout_ref.actor` says."""

from __future__ import annotations

from dataclasses import dataclass, field

from psrl.config.actor import OptimConfig


@dataclass
class CriticConfig:
    ppo_epochs: int = 1
    """Passes of the critic over one buffer, in the actor's mini-batches."""
    cliprange_value: float | None = 0.5
    """A value that moved further than this from where it was at the buffer's start has no gradient; null: no clip."""
    grad_clip: float = 1.0
    """Largest gradient norm of the critic."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
