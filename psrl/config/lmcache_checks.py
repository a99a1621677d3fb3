"""What is refused of `psrl.lmcache.*` and of the transfers built on it: one sentence each. Pure: what is installed is an argument."""

from __future__ import annotations

import importlib.util

from psrl.config.errors import ConfigError
from psrl.config.lmcache import BACKENDS, CACHE_POLICIES, P2P_CHANNELS, LMCacheConfig, fetches_first
from psrl.config.schema import Config

PREFIX = "psrl.lmcache"
TRANSFER = "psrl.rollout_coordination.routing_strategy.kv_transfer"
TRANSFER_MODES = ("async", "sync", "pin_sync")
LONGEST_WAIT_MS = 120_000
CHOICES = {"backend": BACKENDS, "cache_policy": CACHE_POLICIES, "p2p_transfer_channel": P2P_CHANNELS}
ONLY = {"gpu_pin_block_budget": 0}
POSITIVE = ("offload_size_gb", "max_disk_size_gb")
AT_LEAST = {
    "chunk_size": 1,
    "reserve_local_cpu_size": 0,
    "controller_pull_port": 1,
    "controller_reply_port": 1,
}


def has_lmcache() -> bool:
    """Whether LMCache can be imported."""
    return importlib.util.find_spec("lmcache") is not None


def check_lmcache(config: Config, *, installed: bool) -> list[str]:
    """Refuse what contradicts itself or could serve another version's keys and values (ConfigError); return warnings."""
    settings = config.psrl.lmcache
    for name, allowed in CHOICES.items():
        if getattr(settings, name) not in allowed:
            raise ConfigError(
                f"{PREFIX}.{name}={getattr(settings, name)} is refused: allowed is {' | '.join(allowed)}."
            )
    for name in POSITIVE:
        if (value := getattr(settings, name)) is not None and not value > 0:
            raise ConfigError(f"{PREFIX}.{name}={value:g} is refused: it must be greater than 0.")
    for name, least in AT_LEAST.items():
        if not getattr(settings, name) >= least:
            raise ConfigError(f"{PREFIX}.{name}={getattr(settings, name):g} is refused: it must be at least {least}.")
    for name, only in ONLY.items():
        if getattr(settings, name) != only:
            raise ConfigError(
                f"{PREFIX}.{name}={getattr(settings, name)} is not in this version of psrl: LMCache moves entries out of the "
                f"offload tier, never out of the engine's own cache; use {only}."
            )
    _check_transfer(config)
    if settings.enable:
        _check_enabled(config, installed)
        _check_backend(settings)
    elif settings.enable_p2p:
        raise ConfigError(
            f"{PREFIX}.enable_p2p=True shares an offload tier that {PREFIX}.enable=False leaves out: set enable=True too."
        )
    if settings.enable_p2p:
        _check_shared(settings)
        _check_channel(config)
        if not fetches_first(config.psrl.rollout_coordination.routing_strategy.kv_transfer):
            _check_controller(settings)
    return _warnings(settings)


def _check_enabled(config: Config, installed: bool) -> None:
    settings, engine = config.psrl.lmcache, config.gen_actor_rollout_ref.rollout.name
    if engine != "vllm":
        raise ConfigError(
            f"{PREFIX}.enable=True needs gen_actor_rollout_ref.rollout.name=vllm but it is {engine}: the embedded engine has "
            "no offload tier."
        )
    if not installed:
        raise ConfigError(
            f"{PREFIX}.enable=True but LMCache is not installed: `pip install 'psrl[lmcache]'`, or {PREFIX}.enable=False."
        )
    if not settings.multi_version_kv and not settings.clear_on_weight_update:
        raise ConfigError(
            f"{PREFIX}.multi_version_kv=False with {PREFIX}.clear_on_weight_update=False would serve keys and values of older "
            "weights: set multi_version_kv=True (entries are tagged), or clear_on_weight_update=True."
        )
    if not settings.multi_version_kv and settings.backend == "disk":
        raise ConfigError(
            f"{PREFIX}.multi_version_kv=False with {PREFIX}.backend=disk is refused: files are written in the background, and one "
            "could land after the tier was emptied; set multi_version_kv=True."
        )


def _check_backend(settings: LMCacheConfig) -> None:
    if settings.backend == "disk" and not settings.disk_path:
        raise ConfigError(
            f"{PREFIX}.backend=disk needs {PREFIX}.disk_path but it is null: name a directory on a disk of the node, or use "
            "backend=cpu."
        )
    if settings.backend == "cpu":
        for name in ("disk_path", "max_disk_size_gb"):
            if getattr(settings, name) is not None:
                raise ConfigError(
                    f"{PREFIX}.{name}={getattr(settings, name)} has no meaning with {PREFIX}.backend=cpu: use backend=disk, "
                    "or leave it null."
                )


def _check_shared(settings: LMCacheConfig) -> None:
    if not settings.multi_version_kv or settings.clear_on_weight_update:
        raise ConfigError(
            f"{PREFIX}.enable_p2p=True needs multi_version_kv=True and clear_on_weight_update=False, not "
            f"{settings.multi_version_kv} and {settings.clear_on_weight_update}: a shared tier cannot be emptied for one "
            "instance, only version tags keep stale entries away."
        )


def _check_channel(config: Config) -> None:
    """UCX_TLS=tcp holds for the whole process of an engine, and UCX does not reach GPU memory with it."""
    settings, p = config.psrl.lmcache, config.psrl
    pulls_over_ucx = p.ps_mode != "filesystem" and p.weights.route != "shm"
    if settings.p2p_transfer_channel == "tcp" and pulls_over_ucx:
        raise ConfigError(
            f"{PREFIX}.p2p_transfer_channel=tcp (UCX_TLS=tcp) is refused with psrl.ps_mode={p.ps_mode} and psrl.weights.route="
            f"{p.weights.route}: the same processes pull weights into GPU memory through UCX, which needs more than TCP; use "
            "p2p_transfer_channel=nixl, or psrl.ps_mode=filesystem, or psrl.weights.route=shm where all is on one host."
        )


def _check_controller(settings: LMCacheConfig) -> None:
    if settings.controller_host is None:
        raise ConfigError(
            f"{PREFIX}.enable_p2p=True needs {PREFIX}.controller_host but it is null: name the host where the LMCache "
            f"controller runs (docs/lmcache.md says how to start one), or use {TRANSFER}.transfer_mode=sync, which needs none."
        )
    if settings.controller_pull_port == settings.controller_reply_port:
        raise ConfigError(
            f"{PREFIX}.controller_pull_port and controller_reply_port are both {settings.controller_pull_port}: the "
            "controller listens on two ports."
        )


def _check_transfer(config: Config) -> None:
    transfer = config.psrl.rollout_coordination.routing_strategy.kv_transfer
    if transfer.transfer_mode not in TRANSFER_MODES:
        raise ConfigError(
            f"{TRANSFER}.transfer_mode={transfer.transfer_mode} is refused: allowed is {' | '.join(TRANSFER_MODES)}."
        )
    if transfer.transfer_timeout_ms < 1:
        raise ConfigError(
            f"{TRANSFER}.transfer_timeout_ms={transfer.transfer_timeout_ms} is refused: it must be at least 1."
        )
    if fetches_first(transfer) and transfer.transfer_timeout_ms > LONGEST_WAIT_MS:
        raise ConfigError(
            f"{TRANSFER}.transfer_timeout_ms={transfer.transfer_timeout_ms} is refused with transfer_mode="
            f"{transfer.transfer_mode}: entries are kept for a transfer for {LONGEST_WAIT_MS} ms at most."
        )
    if transfer.enable and not config.psrl.lmcache.enable_p2p:
        raise ConfigError(
            f"{TRANSFER}.enable=True moves entries between instances but {PREFIX}.enable_p2p=False: set it to True, or "
            f"{TRANSFER}.enable=False."
        )


def _warnings(settings: LMCacheConfig) -> list[str]:
    if settings.enable and settings.multi_version_kv and settings.clear_on_weight_update:
        return [
            f"{PREFIX}.clear_on_weight_update=True empties what {PREFIX}.multi_version_kv=True keeps apart: one of them is enough"
        ]
    return []
