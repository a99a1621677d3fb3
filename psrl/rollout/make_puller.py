"""Who fetches the weights of an engine: the instance, or the processes that own the engine's GPUs."""

from __future__ import annotations

from psrl.role import Role
from psrl.rollout.engines.base import Engine
from psrl.rollout.worker_puller import WorkerPuller, Workers
from psrl.weights.channel.base import WeightPuller
from psrl.weights.channel.select import RECEIVER, make_puller, receiver_settings


def make_engine_puller(role: Role, engine: Engine) -> WeightPuller:
    """Device memory is read by the process whose device it is; everything else is pulled by the instance."""
    settings = receiver_settings(role) if engine.on_gpu else None
    if settings is not None:
        assert isinstance(engine, Workers), "an engine on GPUs has workers"
        return WorkerPuller(engine, RECEIVER, settings)
    return make_puller(role, engine.weight_specs())
