"""An engine's figures from what vLLM reports after each of its steps. Pure: time is passed in."""

from __future__ import annotations

from collections.abc import Collection, Hashable

from psrl.protocol.generation import EngineStats


class EngineFigures:
    """Counts and gauges; ids are those of the samples at the engine.

    >>> figures = EngineFigures(kv_capacity_tokens=64)
    >>> for made, waiting in (("ab", 0), ("a", 1), ("ab", 0)):
    ...     figures.step(made=set(made), ended=(), waiting=waiting, kv_usage=0.5)
    >>> figures.stats(samples=2).preemptions  # b made a token, then was left out
    1
    """

    def __init__(self, kv_capacity_tokens: int, turns: int = 1) -> None:
        """`turns`: the stages of a pipeline, which works at so many steps at a time. A sample is in one of them, so each that
        decodes gets a token every `turns` steps at the latest."""
        self._capacity = kv_capacity_tokens
        self._turns = turns
        self._left_out: dict[Hashable, int] = {}
        """Those that decode: in how many steps since their last token they were left out."""
        self._total = EngineStats(kv_capacity_tokens=kv_capacity_tokens)
        self._since: float | None = None

    def submitted(self, samples: int) -> None:
        self._total.waiting += samples

    def left(self, waiting: int) -> None:
        """This many of those that waited were taken away."""
        self._total.waiting = max(0, self._total.waiting - waiting)

    def prefilled(self, tokens: int, cached: int) -> None:
        """A sample's prompt: tokens that were computed, tokens that the prefix cache had."""
        self._total.prompt_tokens += tokens
        self._total.prefix_hit_tokens += cached

    def step(self, made: set[Hashable], ended: Collection[Hashable], waiting: int, kv_usage: float) -> None:
        """One step gave each of `made` a token, `ended` ended with it."""
        left_out = {each: steps + 1 for each, steps in self._left_out.items() if each not in made}
        waiting_turn = {each: steps for each, steps in left_out.items() if steps < self._turns}
        self._total.preemptions += len(left_out) - len(waiting_turn)
        self._left_out = waiting_turn | dict.fromkeys(made.difference(ended), 0)
        self._total.waiting, self._total.kv_usage = waiting, kv_usage
        self._total.decode_steps += 1
        self._total.generated_tokens += len(made)
        self._total.decode_kv_tokens += round(kv_usage * self._capacity)

    def forget(self, ids: Collection[Hashable]) -> None:
        """These were taken away: that they are missing from now on says nothing."""
        for each in ids:
            self._left_out.pop(each, None)

    def all_start_again(self) -> None:
        """All keys and values became void: who is missing from now on was not preempted."""
        self._left_out.clear()

    def busy(self, working: bool, now_s: float) -> None:
        """Whether the engine has work from now on; time since the last call counts if it had."""
        if self._since is not None:
            self._total.busy_s += now_s - self._since
        self._since = now_s if working else None

    def stats(self, samples: int) -> EngineStats:
        """The figures, with `samples` at the engine."""
        total = self._total
        total.waiting = min(total.waiting, samples)
        total.running = samples - total.waiting
        total.kv_usage = total.kv_usage if samples else 0.0
        total.kv_tokens = round(total.kv_usage * self._capacity)
        return EngineStats(**{name: getattr(total, name) for name in total.__struct_fields__})
