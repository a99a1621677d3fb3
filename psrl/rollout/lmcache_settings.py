"""`psrl.lmcache.*` in the words of vLLM and LMCache (0.5). Pure but for reading the user's own settings file; imports neither."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from psrl.config.coordination import KVTransferConfig
from psrl.config.errors import ConfigError
from psrl.config.lmcache import LMCacheConfig, fetches_first

CONNECTOR = "psrl.rollout.lmcache_connector:LMCacheBlockConnector"
"""LMCache within each worker of the engine. (A user's own `LMCacheMPConnector` works too: requests carry its salt.)"""
PORTS_PER_RANK = 3
CHUNK_HASH = "sha256_cbor"
"""How chunks are named: vLLM's, the same in every process. LMCache's own default is Python's, which knows no such promise; it
falls back to that where there is no vLLM, hence the fixed seed."""
LOOK_AGAIN_S = 0.001
"""vLLM's scheduler sleeps so long in each step for each request that waits for a peer; LMCache's own default is 0.01."""


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where the ranks of one instance can be reached by other instances and by the controller. A port of each kind a rank."""

    host: str
    worker_ports: tuple[int, ...]
    init_ports: tuple[int, ...]
    lookup_ports: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LMCacheSettings:
    kv_transfer_config: dict[str, Any]
    """vLLM's argument of the same name."""
    environment: dict[str, str] = field(default_factory=dict)
    """To be set before the engine's processes start."""

    @property
    def engine_config(self) -> dict[str, Any]:
        """LMCache's settings by LMCache's names."""
        extra = self.kv_transfer_config["kv_connector_extra_config"]
        return {key.removeprefix("lmcache."): value for key, value in extra.items()}


def lmcache_settings(
    config: LMCacheConfig,
    transfer: KVTransferConfig,
    *,
    instance: str,
    ranks: int,
    peer: PeerAddress | None = None,
) -> LMCacheSettings:
    """Settings of one instance with `ranks` GPUs (tensor times pipeline parallel). `peer` is needed where `engines_ask`.

    A transfer is the new instance's own doing. Its engine asks the controller who has the prefix and loads it from there, for
    `transfer_timeout_ms` at most; or psrl has fetched it before (sync, pin_sync) and the engine finds it in its own tier.

    Raises ConfigError if `config_file` is unreadable or names a setting that is made here.
    """
    values: dict[str, Any] = {
        "chunk_size": config.chunk_size,
        "local_cpu": True,
        "max_local_cpu_size": config.offload_size_gb / ranks,
        "reserve_local_cpu_size": config.reserve_local_cpu_size,
        "save_decode_cache": config.save_decode_cache,
        "cache_policy": config.cache_policy,
        "lmcache_instance_id": instance,
        "pre_caching_hash_algorithm": CHUNK_HASH,
    }
    if config.backend == "disk":
        assert config.disk_path is not None  # psrl.config.lmcache_checks refuses null
        values["local_disk"] = f"{Path(config.disk_path).absolute() / instance}/"
        values["max_local_disk_size"] = (config.max_disk_size_gb or config.offload_size_gb) / ranks
    if engines_ask(config, transfer):
        assert peer is not None
        values |= _sharing(config, peer)
        if transfer.enable:
            values["lookup_timeout_ms"] = transfer.transfer_timeout_ms
    environment = {"PYTHONHASHSEED": "0", "LMCACHE_TRACK_USAGE": "false"}
    if config.enable_p2p and config.p2p_transfer_channel == "tcp":
        environment["UCX_TLS"] = "tcp"
    if config.config_file is not None:
        _refuse_said_twice(config.config_file, values)
        environment["LMCACHE_CONFIG_FILE"] = config.config_file
    module, _, name = CONNECTOR.partition(":")
    return LMCacheSettings(
        kv_transfer_config={
            "kv_connector": name,
            "kv_connector_module_path": module,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {f"lmcache.{key}": value for key, value in values.items()},
        },
        environment=environment,
    )


def engines_ask(config: LMCacheConfig, transfer: KVTransferConfig) -> bool:
    """Whether engines ask each other for entries, through a controller."""
    return config.enable_p2p and not fetches_first(transfer)


def peer_address(host: str, ports: Sequence[int]) -> PeerAddress:
    """Deal free `ports`, PORTS_PER_RANK for each rank, to their uses."""
    ranks = len(ports) // PORTS_PER_RANK
    return PeerAddress(host, *(tuple(ports[i * ranks : (i + 1) * ranks]) for i in range(PORTS_PER_RANK)))


def _sharing(config: LMCacheConfig, peer: PeerAddress) -> dict[str, Any]:
    return {
        "enable_controller": True,
        "controller_pull_url": f"{config.controller_host}:{config.controller_pull_port}",
        "controller_reply_url": f"{config.controller_host}:{config.controller_reply_port}",
        "lmcache_worker_ports": list(peer.worker_ports),
        "enable_p2p": True,
        "p2p_host": peer.host,
        "p2p_init_ports": list(peer.init_ports),
        "p2p_lookup_ports": list(peer.lookup_ports),
        "transfer_channel": "nixl",
        "enable_async_loading": True,  # LMCache asks peers in no other mode
        "extra_config": {"lookup_backoff_time": LOOK_AGAIN_S},
    }


def _refuse_said_twice(file: str, values: dict[str, Any]) -> None:
    try:
        given = OmegaConf.to_container(OmegaConf.load(file))
    except Exception as error:
        raise ConfigError(f"psrl.lmcache.config_file={file} cannot be read: {' '.join(str(error).split())}.") from error
    if not isinstance(given, dict):
        raise ConfigError(f"psrl.lmcache.config_file={file} is not a mapping of LMCache's settings.")
    if twice := sorted(given.keys() & values.keys()):
        raise ConfigError(
            f"psrl.lmcache.config_file={file} names {', '.join(map(str, twice))}, which psrl.lmcache.* decides: take it out of the file."
        )
