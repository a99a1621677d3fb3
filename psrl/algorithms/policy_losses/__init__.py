"""Policy losses by the name that `actor.policy_loss.loss_mode` gives them, one file each; `reinforce` belongs to bypass mode."""

from psrl.algorithms.policy_losses.base import Clip, PolicyLossFn, PolicyTokens, TokenLosses
from psrl.algorithms.policy_losses.cispo import cispo
from psrl.algorithms.policy_losses.gspo import gspo
from psrl.algorithms.policy_losses.reinforce import reinforce
from psrl.algorithms.policy_losses.vanilla import vanilla

POLICY_LOSSES: dict[str, PolicyLossFn] = {"vanilla": vanilla, "gspo": gspo, "cispo": cispo}

__all__ = [
    "POLICY_LOSSES",
    "Clip",
    "PolicyLossFn",
    "PolicyTokens",
    "TokenLosses",
    "cispo",
    "gspo",
    "reinforce",
    "vanilla",
]
