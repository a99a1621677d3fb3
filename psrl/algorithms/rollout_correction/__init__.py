"""Correction for samples that another policy than the trained one has drawn: older weights, another engine's kernels.

rho_t = p_train(token t) / p_rollout(token t) is the ratio of the weights that train to those that sampled. Importance
weights (`weights`) say how much a token counts, rejection (`rejection`) whether it counts at all, `apply` does both for a
buffer, and `describe` reports the distance.
"""

from psrl.algorithms.rollout_correction.apply import Applied, apply_correction
from psrl.algorithms.rollout_correction.describe import correction_sums, finalise
from psrl.algorithms.rollout_correction.rejection import accepted_tokens
from psrl.algorithms.rollout_correction.settings import Correction, Rule
from psrl.algorithms.rollout_correction.weights import importance_weights, log_ratios

__all__ = [
    "Applied",
    "Correction",
    "Rule",
    "accepted_tokens",
    "apply_correction",
    "correction_sums",
    "finalise",
    "importance_weights",
    "log_ratios",
]
