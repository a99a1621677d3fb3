"""What is refused of the weight channel's settings."""

from __future__ import annotations

import importlib.util

from psrl.config.errors import ConfigError
from psrl.config.schema import Config


def check_weights(config: Config) -> None:
    """Raises ConfigError with one sentence."""
    p = config.psrl
    if p.weights.route != "auto" and p.ps_mode == "filesystem":
        raise ConfigError(
            f"psrl.weights.route={p.weights.route} has no meaning with psrl.ps_mode=filesystem: "
            "leave it at auto, or set psrl.ps_mode=nixl."
        )
    if p.broadcast_init and p.ps_mode == "filesystem":
        raise ConfigError(
            "psrl.broadcast_init=True has no meaning with psrl.ps_mode=filesystem, where every instance reads the files: "
            "set it to False, or psrl.ps_mode=nixl."
        )
    if p.broadcast_init and p.weights.route in ("vram", "shm"):
        raise ConfigError(
            f"psrl.broadcast_init=True sends weights from node to node, psrl.weights.route={p.weights.route} keeps them on one: set "
            "broadcast_init=False, or route=auto or nixl."
        )
    if (
        p.ps_mode == "nixl"
        and importlib.util.find_spec("nixl_cu13") is None
        and importlib.util.find_spec("nixl") is None
    ):
        raise ConfigError(
            "psrl.ps_mode=nixl but the nixl package is not installed: `pip install nixl-cu13`, or psrl.ps_mode=filesystem."
        )
