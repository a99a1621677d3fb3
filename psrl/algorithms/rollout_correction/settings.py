"""What a rollout correction consists of, as plain numbers; the configuration's strings are parsed elsewhere."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rule:
    """One rejection rule, for example Rule("seq_mean_k1", 0.999, 1.001).

    `name` is scope_estimate with scope token | seq_sum | seq_mean | seq_max and estimate k1 | k2 | k3. For k1 `low` and `high`
    bound the ratio itself; for k2 and k3 `high` bounds the estimate and `low` is None.
    """

    name: str
    low: float | None
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """`level` of the importance weights: token | sequence | None (no weights). `high` truncates them; with `low` set, a
    weight outside [low, high] becomes 0 instead. `batch_normalize` divides them by their mean over the buffer."""

    level: str | None = None
    low: float | None = None
    high: float = 2.0
    batch_normalize: bool = False
    rules: tuple[Rule, ...] = ()
    bypass_mode: bool = False
    reinforce: bool = False
    """The loss of bypass mode: REINFORCE in place of a clipped ratio."""

    @property
    def weighs(self) -> bool:
        """Whether weights multiply the loss. Not in bypass mode with a ratio: that is the importance weight already."""
        return self.level is not None and (self.reinforce or not self.bypass_mode)

    @property
    def needs_whole_buffer(self) -> bool:
        """Whether it can only be applied once the training log-probs of the whole buffer are known: what is rejected and
        what the weights are divided by changes the denominators of every micro-batch."""
        return bool(self.rules) or (self.weighs and self.batch_normalize)
