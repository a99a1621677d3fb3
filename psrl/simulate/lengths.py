"""How long each response will be, and how prompts and environments differ. Drawn from the seed, never shown to a policy.

The same prompt in the same pass over the data has the same lengths in every simulation with this seed, whatever the
settings are: two settings are compared on the same work.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from psrl.config.errors import ConfigError
from psrl.config.simulation import LengthConfig


class Lengths(Protocol):
    def draw(self, data_epoch: int, prompt: int, n: int) -> list[int]:
        """Response tokens of `n` samples of this prompt, each at least 1."""
        ...


def random_of(seed: int, kind: int, data_epoch: int, prompt: int) -> random.Random:
    """A generator of its own for each purpose (`kind`), pass over the data and prompt."""
    return random.Random((((seed * 1_000_003 + kind) * 1_000_003 + data_epoch) << 40) + prompt)


class Fixed:
    """Every response has the same length."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def draw(self, data_epoch: int, prompt: int, n: int) -> list[int]:
        return [self.tokens] * n


class LogNormal:
    """exp(mu + sigma z), z shared by the prompt's samples to `prompt_share` of its variance, cut at `most`.

    `mean` is that before the cut: mu = log(mean) - sigma^2 / 2.
    """

    def __init__(self, mean: float, sigma: float, prompt_share: float, most: int, seed: int) -> None:
        self.mu = math.log(mean) - sigma * sigma / 2
        self.common = sigma * math.sqrt(prompt_share)
        self.own = sigma * math.sqrt(1 - prompt_share)
        self.most = most
        self.seed = seed

    def draw(self, data_epoch: int, prompt: int, n: int) -> list[int]:
        rng = random_of(self.seed, 1, data_epoch, prompt)
        gauss, exp, most = rng.gauss, math.exp, self.most
        mu = self.mu + self.common * gauss(0.0, 1.0)
        return [min(most, max(1, round(exp(mu + self.own * gauss(0.0, 1.0))))) for _ in range(n)]


class Trace:
    """Each prompt is one of the groups of a trace; its samples are drawn from that group's lengths."""

    def __init__(self, groups: Sequence[Sequence[int]], most: int, seed: int) -> None:
        self.groups = [[min(most, max(1, length)) for length in group] for group in groups if group]
        self.seed = seed

    def draw(self, data_epoch: int, prompt: int, n: int) -> list[int]:
        rng = random_of(self.seed, 1, data_epoch, prompt)
        group = rng.choice(self.groups)
        return rng.sample(group, n) if n <= len(group) else rng.choices(group, k=n)


def make_lengths(config: LengthConfig, most: int, seed: int, calibrated: Sequence[Sequence[int]] = ()) -> Lengths:
    """What `simulation.lengths` says. `calibrated`: lengths of a calibration, used where nothing else is named."""
    mean = config.mean_tokens or most / 4
    distribution = config.distribution or ("trace" if calibrated else "lognormal")
    if distribution == "fixed":
        return Fixed(min(most, max(1, round(mean))))
    if distribution == "trace":
        groups = read_trace(Path(config.trace).expanduser()) if config.trace else calibrated
        if not any(groups):
            raise ConfigError(
                "simulation.lengths.distribution=trace but there are no lengths: give simulation.lengths.trace or "
                "simulation.calibration."
            )
        return Trace(groups, most, seed)
    return LogNormal(mean, config.sigma, config.prompt_share, most, seed)


def read_trace(path: Path) -> list[list[int]]:
    """Lengths by group: of the groups in a run directory's ledger, or of a JSON file with a list of lists."""
    if path.is_dir():
        from psrl.simulate.calibrate import trained_lengths

        return trained_lengths(path)[0]
    try:
        groups = json.loads(path.read_text())
        return [[int(length) for length in group] for group in groups]
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"simulation.lengths.trace={path} cannot be read as a run directory or a JSON list of groups of lengths: {error}."
        ) from error
