"""Keys of `psrl.lmcache.*`: keys and values that leave an engine's own cache are kept in host memory or on disk."""

from __future__ import annotations

from dataclasses import dataclass

from psrl.config.coordination import KVTransferConfig

BACKENDS = ("cpu", "disk")
CACHE_POLICIES = ("LRU", "FIFO")
P2P_CHANNELS = ("nixl", "tcp")


@dataclass
class LMCacheConfig:
    enable: bool = False
    """Keep keys and values beyond the engine's own cache, so that a prefix seen before is loaded instead of computed."""
    backend: str = "cpu"
    """cpu: host memory | disk: host memory and, behind it, files under disk_path."""
    offload_size_gb: float = 100.0
    """Host memory of one instance for this, GB, divided over its ranks."""
    chunk_size: int = 256
    """Tokens a chunk; only whole chunks are kept."""
    multi_version_kv: bool = True
    """Tag each entry with the weights that made it: what other weights made is never found and ages out."""
    clear_on_weight_update: bool = False
    """Empty the offload tier at each change of weights; what instances with older weights could still use goes too."""
    save_decode_cache: bool = True
    """Keep responses too, not prompts only: what an interrupted or multi-turn sample goes on from."""
    cache_policy: str = "LRU"
    """What gives way first: LRU (the longest unused) | FIFO (the oldest)."""
    disk_path: str | None = None
    """backend=disk: a directory on a disk of the node; each instance uses one below it."""
    max_disk_size_gb: float | None = None
    """backend=disk: disk space of one instance, GB, divided over its ranks; null: as offload_size_gb."""
    reserve_local_cpu_size: float = 0.0
    """GB of host memory that each rank leaves free, even if it then keeps less than its share of offload_size_gb. (LMCache
    0.5 heeds it for models with latent attention only.)"""
    config_file: str | None = None
    """A YAML file with further settings of LMCache; one that names a setting made here is refused."""
    enable_p2p: bool = False
    """Instances with the same weights load prefixes from each other. They find each other through an LMCache controller,
    except with kv_transfer.transfer_mode sync and pin_sync."""
    p2p_transfer_channel: str = "nixl"
    """How entries move between instances: nixl (RDMA, shared memory or TCP, as UCX finds) | tcp (NIXL over TCP and nothing
    else; only where weights do not travel through UCX: psrl.ps_mode=filesystem, or psrl.weights.route=shm)."""
    controller_host: str | None = None
    """Host of the LMCache controller, where one is needed."""
    controller_pull_port: int = 8300
    """Its port for what instances announce."""
    controller_reply_port: int = 8400
    """Its port for what instances ask."""
    gpu_pin_block_budget: int = 0
    """Blocks of the engine's own cache that may be held for transfers; only 0, transfers read the offload tier."""


def fetches_first(transfer: KVTransferConfig) -> bool:
    """Whether psrl fetches a moved sample's keys and values before its engine gets it (else the engine asks for them)."""
    return transfer.enable and transfer.transfer_mode != "async"
