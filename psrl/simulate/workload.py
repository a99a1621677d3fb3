"""What there is to do: prompts, response lengths, turns and environment times."""

from __future__ import annotations

import math
from dataclasses import dataclass

from psrl.config.simulation import EnvironmentConfig
from psrl.simulate.lengths import Lengths, random_of
from psrl.simulate.samples import SimGroup, SimSample


@dataclass(frozen=True, slots=True)
class Workload:
    prompt_tokens: int
    lengths: Lengths
    environment: EnvironmentConfig
    uniform_reward_share: float
    seed: int

    @property
    def multi_turn(self) -> bool:
        return self.environment.turns > 1

    def draw(self, group: SimGroup, n: int) -> list[int]:
        """Give `group` its samples; returns their lengths."""
        lengths = self.lengths.draw(group.data_epoch, group.prompt, n)
        turns = self.environment.turns
        group.samples = [SimSample(group, i, length, turn_end(length, turns, 1)) for i, length in enumerate(lengths)]
        share = self.uniform_reward_share
        group.uniform = share > 0 and random_of(self.seed, 2, group.data_epoch, group.prompt).random() < share
        return lengths

    def next_turn(self, sample: SimSample) -> float:
        """The sample goes to its environment: what it adds, when the next turn ends. Returns seconds away."""
        e = self.environment
        turn = sample.turn = sample.turn + 1
        sample.turn_end = turn_end(sample.length, e.turns, turn)
        sample.added += e.tokens
        if not e.sigma:
            return e.seconds
        kind = (sample.index * e.turns + turn) * 4 + 3
        rng = random_of(self.seed, kind, sample.group.data_epoch, sample.group.prompt)
        return e.seconds * math.exp(e.sigma * rng.gauss(0.0, 1.0) - e.sigma * e.sigma / 2)


def turn_end(length: int, turns: int, turn: int) -> int:
    """Tokens at which the `turn`-th of `turns` ends; `[turn_end(5, 2, t) for t in (1, 2)] == [2, 5]`. A response shorter
    than its turns has fewer of them."""
    return length if turn >= turns else max(min(turn, length), length * turn // turns)
