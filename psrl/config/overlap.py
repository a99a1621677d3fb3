"""Keys of fine-grain overlap: training begins on part of a buffer while rollout fills the rest."""

from __future__ import annotations

from dataclasses import dataclass

GRANULARITIES = ("none", "mini_batch", "micro_batch")
SCOPES = ("recompute", "pre_step", "accumulate")


@dataclass
class FineGrainOverlapConfig:
    granularity: str = "none"
    """The base unit of a chunk: none (wait for the whole buffer) | mini_batch (ppo_mini_batch_size groups) | micro_batch (ppo_micro_batch_size_per_gpu samples on each rank)."""
    multiplier: int = 1
    """Base units in a chunk. A micro_batch chunk above a mini-batch becomes one mini-batch, a mini_batch chunk above the buffer the whole buffer."""
    overlap_scope: str = "recompute"
    """What is done with a chunk when it arrives: recompute (forward passes; the update waits for the whole buffer and is that of granularity none) | pre_step (also an optimizer step for each of its mini-batches) | accumulate (also the backward passes; each step is taken when its mini-batch is complete)."""
