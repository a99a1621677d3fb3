"""The backend that `train_actor_rollout_ref.actor.strategy` names. megatron-core is imported only where it is asked for."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from psrl.config.schema import ActorConfig
from psrl.trainer.backends.core import BackendCore


def make_backend(
    model: PreTrainedModel,
    actor: ActorConfig,
    *,
    temperature: float,
    total_steps: int | None = None,
    trainable: bool = True,
    device: torch.device | str = "cpu",
) -> BackendCore:
    """One trainer rank's backend; see FSDP2Backend and MegatronBackend."""
    if actor.strategy == "megatron":
        from psrl.trainer.backends.megatron import MegatronBackend

        return MegatronBackend(
            model, actor, temperature=temperature, total_steps=total_steps, trainable=trainable, device=device
        )
    from psrl.trainer.backends.fsdp2 import FSDP2Backend

    return FSDP2Backend(
        model, actor, temperature=temperature, total_steps=total_steps, trainable=trainable, device=device
    )
