"""Weights from trainer ranks to rollout instances: one Protocol (base), two ways (nixl, filesystem)."""

from psrl.weights.channel.select import make_publisher, make_puller
from psrl.weights.mode import nixl_available

__all__ = ["make_publisher", "make_puller", "nixl_available"]
