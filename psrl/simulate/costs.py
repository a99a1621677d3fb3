"""What things cost in seconds, and how many decode steps fit into a time. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from psrl.protocol.cost_model import CostModel

EPSILON_S = 1e-9
"""A step that ends this much later than asked for counts as done: sums of floats are not exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """All in seconds. `decode` is the time of a decode step; `step_overhead_s` passes between two of them."""

    decode: CostModel
    step_overhead_s: float = 0.0
    prefill_s: float = 0.0
    prefill_s_per_token: float = 0.0
    train_s: float = 0.0
    train_s_per_token: float = 0.0
    push_s: float = 0.0
    pull_s: float = 0.0
    switch_s: float = 0.0
    checkpoint_s: float = 0.0
    reward_s: float = 0.0
    dispatch_s: float = 0.0

    def train_seconds(self, tokens: int) -> float:
        """One training step on `tokens` tokens, prompts included."""
        return self.train_s + self.train_s_per_token * tokens

    def prefill_seconds(self, tokens: int) -> float:
        """One prefill; nothing to compute costs nothing."""
        return self.prefill_s + self.prefill_s_per_token * tokens if tokens else 0.0


def steps_seconds(first_s: float, growth_s: float, steps: int) -> float:
    """`steps` decode steps of a batch that does not change: the first takes `first_s`, each later one `growth_s` more,
    since every sequence holds one token more. `steps_seconds(1.0, 0.5, 3) == 1 + 1.5 + 2`"""
    return steps * first_s + growth_s * (steps * (steps - 1) / 2)


def steps_within(first_s: float, growth_s: float, seconds: float) -> int:
    """Most whole steps that end within `seconds`. `steps_within(1.0, 0.5, 2.6) == 2`"""
    if seconds <= 0:
        return 0
    seconds += EPSILON_S
    if growth_s <= 0:
        return int(seconds / first_s)
    # growth/2 m^2 + (first - growth/2) m = seconds
    half = first_s - growth_s / 2
    steps = int((math.sqrt(half * half + 2 * growth_s * seconds) - half) / growth_s)
    while steps_seconds(first_s, growth_s, steps + 1) <= seconds:
        steps += 1
    while steps and steps_seconds(first_s, growth_s, steps) > seconds:
        steps -= 1
    return steps
