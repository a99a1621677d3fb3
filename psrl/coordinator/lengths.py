"""How long responses were: the only thing that an expectation of a length may rest on. Fed when a group is complete, never
before; a new coordinator starts with none."""

from __future__ import annotations


class LengthHistory:
    """Mean response length by prompt, else by data source, else a fixed budget.

    >>> lengths = LengthHistory(budget=1000)
    >>> lengths.remaining(prompt=7, data_source="math", so_far=100)
    900.0
    >>> lengths.note(prompt=3, data_source="math", tokens=600, samples=2)
    >>> lengths.remaining(prompt=7, data_source="math", so_far=100)
    200.0
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._by_prompt: dict[int, tuple[int, int]] = {}
        self._by_source: dict[str, tuple[int, int]] = {}

    def note(self, *, prompt: int, data_source: str, tokens: int, samples: int) -> None:
        """`samples` responses of this prompt have `tokens` tokens together."""
        self._by_prompt[prompt] = _added(self._by_prompt.get(prompt), tokens, samples)
        self._by_source[data_source] = _added(self._by_source.get(data_source), tokens, samples)

    def remaining(self, *, prompt: int, data_source: str, so_far: int) -> float:
        """Response tokens still expected after `so_far`; 0 once it is longer than the mean."""
        tokens, samples = self._by_prompt.get(prompt) or self._by_source.get(data_source) or (self.budget, 1)
        return max(0.0, tokens / samples - so_far)


def _added(before: tuple[int, int] | None, tokens: int, samples: int) -> tuple[int, int]:
    """Tokens and samples seen, these among them."""
    return (before[0] + tokens, before[1] + samples) if before else (tokens, samples)
