"""Keys of the policy that trains: `train_actor_rollout_ref.actor`."""

from __future__ import annotations

from dataclasses import dataclass, field

from psrl.config.checkpoint import CheckpointConfig
from psrl.config.fsdp import FSDPConfig
from psrl.config.megatron import MegatronConfig


@dataclass
class OptimConfig:
    lr: float = 1e-6
    """Peak learning rate of AdamW."""
    weight_decay: float = 0.01
    """Decoupled weight decay."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Adam's decay rates of the two moments."""
    lr_warmup_steps: int = 0
    """Optimizer steps of linear warm-up."""
    lr_scheduler_type: str = "constant"
    """constant | cosine: from lr down to min_lr_ratio x lr at the end of trainer.total_training_steps."""
    min_lr_ratio: float = 0.0
    """Where the cosine ends, as a share of lr."""


@dataclass
class PolicyLossConfig:
    loss_mode: str = "vanilla"
    """vanilla: PPO's clipped ratio of each token | gspo: one ratio a sequence (clip ranges of about 3e-4, loss_agg_mode
    seq-mean-token-mean) | cispo: the ratio is a clipped weight without gradient."""


@dataclass
class ActorConfig:
    strategy: str = "fsdp2"
    """Trainer backend: fsdp2 | megatron (needs the extra psrl[megatron]; Llama, Qwen2, Qwen3 and Qwen3-MoE)."""
    ppo_mini_batch_size: int | None = None
    """Groups an optimizer step; null: the whole buffer."""
    ppo_micro_batch_size_per_gpu: int | None = None
    """Samples of a micro-batch on each rank, in batch order; null: micro-batches by ppo_max_token_len_per_gpu."""
    use_dynamic_bsz: bool = False
    """True: micro-batches by ppo_max_token_len_per_gpu even where ppo_micro_batch_size_per_gpu is set."""
    ppo_max_token_len_per_gpu: int = 16384
    """Token budget of a micro-batch on each GPU: rows x longest row, padding included (with use_remove_padding: real tokens), of
    which each rank has an equal part where ranks share rows (ulysses_sequence_parallel_size)."""
    use_remove_padding: bool | None = None
    """A micro-batch becomes one row of its real tokens (sequence packing); without ulysses_sequence_parallel_size,
    context_parallel_size and use_shared_prompt. null: on a GPU, for models with full attention in every layer whose heads and
    compute dtype (bfloat16) its kernel takes, unless a critic's rows are shared by tensor-parallel ranks."""
    use_shared_prompt: bool = True
    """Compute the prompt once for several responses of a group where the model allows it and it saves work, in rows with padding
    (use_remove_padding=False)."""
    ppo_epochs: int = 1
    """Passes over one buffer."""
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    clip_ratio: float = 0.2
    """PPO clip range on both sides, unless low or high is given."""
    clip_ratio_low: float | None = None
    """Clip range below 1; null: clip_ratio."""
    clip_ratio_high: float | None = None
    """Clip range above 1; null: clip_ratio. Larger than below: DAPO's clip-higher."""
    clip_ratio_c: float | None = 3.0
    """Dual clip: the loss of a token with a negative advantage is at most this times its size; null: no bound."""
    loss_agg_mode: str = "token-mean"
    """What the losses of an optimizer step are divided by, over all ranks: token-mean: its trainable tokens |
    seq-mean-token-sum: its sequences | seq-mean-token-mean: each sequence by its own length, then by sequences |
    seq-mean-token-sum-norm: by sequences x loss_scale_factor."""
    loss_scale_factor: float | None = None
    """The constant length of seq-mean-token-sum-norm; null: data.max_response_length."""
    entropy_coeff: float = 0.0
    """Bonus on the mean entropy of the token distributions."""
    calculate_entropy: bool = False
    """Report actor/entropy also when entropy_coeff is 0 (costs one more pass over the logits)."""
    use_kl_loss: bool = False
    """Add the KL to the initial policy to the loss; loads a frozen copy of the initial weights."""
    kl_loss_coef: float = 0.001
    """Coefficient of that KL."""
    kl_loss_type: str = "low_var_kl"
    """Its estimator: k1 or kl (as a loss only noise) | abs | k2 or mse | k3 or low_var_kl."""
    grad_clip: float = 1.0
    """Largest gradient norm."""
    mixed_precision: str = "float32"
    """Compute dtype: float32 | bfloat16."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    use_torch_compile: bool | None = None
    """Compile the decoder layers (fsdp2) and the log-probs: faster, after a minute at the start. null: on a GPU only."""
    ulysses_sequence_parallel_size: int = 1
    """fsdp2: trainer ranks that share each row, for long sequences; divides the trainer ranks and the attention heads."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)


def ranks_of_a_row(actor: ActorConfig) -> int:
    """Trainer ranks that hold a part of each row each (Ulysses or context parallelism)."""
    return actor.ulysses_sequence_parallel_size * actor.megatron.context_parallel_size


@dataclass
class TrainActorConfig:
    actor: ActorConfig = field(default_factory=ActorConfig)
