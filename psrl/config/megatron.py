"""Keys of the Megatron-core backend (`train_actor_rollout_ref.actor.megatron.*`), under verl's names."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class MegatronConfig:
    tensor_model_parallel_size: int = 1
    """Trainer ranks that share each layer's matrices; divides the trainer ranks, the attention heads and the key-value heads."""
    pipeline_model_parallel_size: int = 1
    """Stages that the layers are dealt to, as evenly as they divide; micro-batches go through them one behind the other, so a step
    wants several times as many micro-batches as stages."""
    context_parallel_size: int = 1
    """Trainer ranks that share each row, for long sequences (Ulysses); divides the attention heads of a tensor-parallel rank."""
    expert_model_parallel_size: int = 1
    """Ranks that share the experts of a mixture-of-experts model, of those that have the same layers (data and context parallel), which it
    divides. Tensor-parallel ranks share them too."""
    use_distributed_optimizer: bool = True
    """Each of the ranks that hold the same parameters keeps the optimizer's state of some of them only (ZeRO stage 1)."""
