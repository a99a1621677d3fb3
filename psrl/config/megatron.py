"""Keys of the Megatron-core backend (`train_actor_rollout_ref.actor.megatron.*`), under verl's names."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class MegatronConfig:
    tensor_model_parallel_size: int = 1
    """Trainer ranks that share each layer's matrices; divides the trainer ranks, the attention heads and the key-value heads."""
    pipeline_model_parallel_size: int = 1
    """Stages that the layers are dealt to; only 1 in this version."""
    context_parallel_size: int = 1
    """Ranks that share each sequence; only 1 in this version (fsdp2 has ulysses_sequence_parallel_size)."""
    expert_model_parallel_size: int = 1
    """Ranks that share the experts of a mixture-of-experts model; only 1 in this version, which trains dense models."""
