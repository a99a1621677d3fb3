"""What colocation decides for the parts that do not know of turns: engines and the weight channel. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from psrl.config.schema import Config


def vllm_options(config: Config) -> dict[str, Any]:
    """Arguments of vLLM's engine that let it sleep, over those that the user gives; empty where it never has to."""
    if not config.psrl.colocate:
        return {}
    eager = {} if config.psrl.tms.enable_cuda_graph else {"enforce_eager": True}
    return {"enable_sleep_mode": True, **eager}


def publishes_from_host(config: Config) -> bool:
    """Published weights must not stay on the GPU, which the other side needs."""
    return config.psrl.colocate and not config.psrl.tms.enable_nixl
