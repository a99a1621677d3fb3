"""What is refused of trainer and rollout on the same GPUs. Pure: what a node has is an argument."""

from __future__ import annotations

from psrl.config.colocate import RANGES
from psrl.config.errors import ConfigError
from psrl.config.schema import Config

CHOICES = {"psrl.tms.range": RANGES}
POSITIVE = ("psrl.fault_tolerance.turn_timeout_s",)
TMS = "psrl.tms"


def check_colocate(config: Config) -> list[str]:
    """Raises ConfigError with one sentence; returns notices."""
    p = config.psrl
    _check_saver(config)
    if not p.colocate:
        return []
    d = p.deployment
    train = d.train_nnodes * d.train_ngpus_per_node
    rollout = d.n_rollout_instances * d.rollout_ngpus_per_node_per_instance
    if train != rollout:
        raise ConfigError(
            f"psrl.colocate=True gives trainer and rollout the same GPUs, but psrl.deployment asks for {train} GPUs to train and {rollout} to "
            "generate: make train_nnodes x train_ngpus_per_node equal to n_rollout_instances x rollout_ngpus_per_node_per_instance."
        )
    if p.fine_grain_overlap.granularity != "none":
        raise ConfigError(
            f"psrl.fine_grain_overlap.granularity={p.fine_grain_overlap.granularity} trains while the buffer fills, which psrl.colocate=True "
            "cannot: set it to none, or psrl.colocate=False."
        )
    if d.n_validate_instances:
        raise ConfigError(
            f"psrl.deployment.n_validate_instances={d.n_validate_instances} would generate in the trainer's turn with psrl.colocate=True: set it "
            "to 0 and trainer.test_freq=-1, or psrl.colocate=False."
        )
    if p.weights.route == "vram" and not p.tms.enable_nixl:
        raise ConfigError(
            "psrl.weights.route=vram keeps published weights on the GPU, which psrl.tms.enable_nixl=False with psrl.colocate=True does not: set "
            "enable_nixl=True (and a psrl.tms.range), or route=auto."
        )
    partial = p.rollout_coordination.partial_rollout.enable
    if p.staleness and not partial:
        raise ConfigError(
            f"psrl.staleness={p.staleness} with psrl.colocate=True hands unfinished samples back when the trainer's turn begins, which "
            "psrl.rollout_coordination.partial_rollout.enable=False forbids: enable it, or use staleness=0."
        )
    if p.staleness > 1:
        return [
            f"psrl.staleness={p.staleness} with psrl.colocate=True gains nothing over 1: trainer and rollout never work at the same time, and "
            "1 already keeps the engines full until a buffer is ready."
        ]
    return []


def _check_saver(config: Config) -> None:
    tms = config.psrl.tms
    asked = [("range", tms.range), ("enable_nixl", tms.enable_nixl), ("enable_cuda_graph", tms.enable_cuda_graph)]
    if not config.psrl.colocate and (key := next((f"{name}={value}" for name, value in asked if value), None)):
        raise ConfigError(
            f"{TMS}.{key} releases memory for the other side's turn, but psrl.colocate=False gives it none: set psrl.colocate=True, or leave "
            f"{TMS} as it is."
        )
    if tms.enable_cuda_graph and tms.range != "all":
        raise ConfigError(
            f"{TMS}.enable_cuda_graph=True leaves the engine's CUDA graphs on the GPU in the trainer's turn, which {TMS}.range="
            f"{tms.range or 'null'} does not allow: set range=all, or enable_cuda_graph=False."
        )
    if tms.enable_nixl and tms.range is None:
        raise ConfigError(
            f"{TMS}.enable_nixl=True keeps registered buffers beside memory that is saved, but {TMS}.range=null saves none: set range=train or "
            "all, or enable_nixl=False."
        )
    if tms.enable_nixl and config.psrl.ps_mode == "filesystem":
        raise ConfigError(
            f"{TMS}.enable_nixl=True but psrl.ps_mode=filesystem registers no buffers: use psrl.ps_mode=nixl, or enable_nixl=False."
        )


def refuse_without_saver(config: Config, *, has_gpu: bool, installed: bool) -> None:
    """ConfigError, one sentence, if psrl.tms asks for what this node does not have."""
    chosen = config.psrl.tms.range
    if chosen is None:
        return
    if not has_gpu:
        raise ConfigError(
            f"{TMS}.range={chosen} releases GPU memory, but there is no GPU here: leave it null (psrl.colocate=True then takes turns on the CPU)."
        )
    if not installed:
        raise ConfigError(
            f"{TMS}.range={chosen} but torch-memory-saver is not installed: `pip install 'psrl[tms]'`, or {TMS}.range=null."
        )
