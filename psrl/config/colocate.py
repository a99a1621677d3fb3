"""Keys of GPU memory that is released and taken again, for trainer and rollout on the same GPUs."""

from __future__ import annotations

from dataclasses import dataclass

RANGES = (None, "train", "all")


@dataclass
class TmsConfig:
    range: str | None = None
    """How a trainer rank's GPU memory is released with psrl.colocate: null (its tensors are copied to pinned host memory and back) | train (torch-memory-saver pauses it: addresses stay) | all (the trainer as with train, and enable_cuda_graph is allowed). An engine's memory is always released by vLLM's own sleep mode, never by torch-memory-saver."""
    enable_nixl: bool = False
    """Buffers that weights travel in stay on the GPU over both turns, registered once: faster switches for the memory of the weights that they hold. False: they are in host memory. They are never in the saver's regions, which peers read slowly."""
    enable_cuda_graph: bool = False
    """The engine's CUDA graphs stay captured while it sleeps, and so does their memory; needs range=all. False: with psrl.colocate it decodes without them."""
