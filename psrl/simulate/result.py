"""What a simulation has found, in figures: after the warm-up, on the virtual clock. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from psrl.simulate.trainer import SimStep
from psrl.simulate.world import World
from psrl.telemetry.metrics import STEP_KEY
from psrl.telemetry.population import population_metrics
from psrl.telemetry.step_metrics import length_bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Times in virtual seconds; rates a second. `None`: nothing tells."""

    steps: int
    """That the figures cover."""
    step_s: float
    train_busy: float
    rollout_busy: float
    """Mean over all instances."""
    generated_tokens_per_s: float
    """Response tokens decoded, those that nobody trained on among them."""
    consumed_tokens_per_s: float
    """Response tokens that trained."""
    mean_length_consumed: float
    mean_length_population: float
    """Of all samples that were ever started, finished or not."""
    staleness: dict[int, int]
    """Trained groups by lag in versions."""
    prefilled_tokens_per_s: float
    prefix_hit_share: float
    """Of the tokens that samples began their turns with, those that a prefix cache held."""
    samples_per_hour: float
    """That trained."""
    preemptions: int
    pulls: int
    released: dict[str, int]
    """Groups that did not train, by reason."""
    counters: dict[str, int]
    virtual_s: float
    samples_generated: int
    """Samples started in the whole simulation."""
    events: int
    messages: int

    @property
    def wasted_share(self) -> float:
        """Of the decoded tokens, those that did not train within the window."""
        return (
            max(0.0, 1 - self.consumed_tokens_per_s / self.generated_tokens_per_s)
            if self.generated_tokens_per_s
            else 0.0
        )


@dataclass(frozen=True, slots=True)
class Mark:
    """Counters of all engines at one moment."""

    at_s: float
    busy_s: float
    generated: int
    prefilled: int
    preemptions: int
    switches: int
    hits: int = 0


class Observer:
    """Marks the world when the warm-up ends and at the last step. `on_step` belongs into the world."""

    def __init__(self, warmup: int, steps: int) -> None:
        self.warmup = min(warmup, steps - 1)
        self.total = steps
        self.world: World | None = None
        self.first = Mark(0.0, 0.0, 0, 0, 0, 0)
        self.last = self.first
        self._seen = 0

    def on_step(self, step: SimStep) -> None:
        self._seen += 1
        if self._seen == self.warmup:
            self.first = self._mark()
        if self._seen == self.total:
            self.last = self._mark()

    def begin(self) -> None:
        if self.warmup == 0:
            self.first = self._mark()

    def _mark(self) -> Mark:
        assert self.world is not None  # set before it runs
        now_s = self.world.clock.now_s
        engines = [instance.engine for instance in self.world.instances]
        for engine in engines:
            engine.advance(now_s)
        return Mark(
            now_s,
            sum(e.busy_s for e in engines),
            sum(e.generated_tokens for e in engines),
            sum(e.prompt_tokens for e in engines),
            sum(e.preemptions for e in engines),
            sum(i.switches for i in self.world.instances),
            sum(e.prefix_hit_tokens for e in engines),
        )

    def result(self) -> Result:
        """After the run. Raises ValueError if no step came after the warm-up."""
        world = self.world
        assert world is not None
        steps = world.trainer.steps[self.warmup : self._seen]
        window_s = self.last.at_s - self.first.at_s
        if not steps or window_s <= 0:
            raise ValueError(f"{self._seen} steps ended, which leaves none after a warm-up of {self.warmup}")
        tally = world.agents.tally
        responses = [length for step in steps for length in step.responses]
        trained_s = sum(step.ended_s - step.got_s for step in steps)
        generated = self.last.generated - self.first.generated
        prefilled, hits = self.last.prefilled - self.first.prefilled, self.last.hits - self.first.hits
        return Result(
            steps=len(steps),
            step_s=window_s / len(steps),
            train_busy=trained_s / window_s,
            rollout_busy=(self.last.busy_s - self.first.busy_s) / (window_s * len(world.instances)),
            generated_tokens_per_s=generated / window_s,
            consumed_tokens_per_s=sum(responses) / window_s,
            mean_length_consumed=sum(responses) / len(responses),
            mean_length_population=tally.launched_tokens / tally.launched,
            staleness=dict(sorted(Counter(lag for step in steps for lag in step.lags).items())),
            prefilled_tokens_per_s=prefilled / window_s,
            prefix_hit_share=hits / (hits + prefilled) if hits else 0.0,
            samples_per_hour=3600 * len(responses) / window_s,
            preemptions=self.last.preemptions - self.first.preemptions,
            pulls=self.last.switches - self.first.switches,
            released=dict(world.core.staleness.released),
            counters=dict(world.core.counters),
            virtual_s=world.clock.now_s,
            samples_generated=tally.launched,
            events=world.events,
            messages=world.messages,
        )


def metrics_row(step: SimStep, number: int, counters_before: Mapping[str, int]) -> dict[str, Any]:
    """The row of one step under the names of a real run's `metrics.jsonl`; `number` is 1 for the first."""
    step_s = step.ended_s - step.begun_s
    timings = {
        "step": step_s,
        "wait_buffer": step.got_s - step.begun_s,
        "update_actor": step.trained_s - step.got_s,
        "push_weights": step.pushed_s - step.trained_s,
        "save_checkpoint": step.ended_s - step.pushed_s,
    }
    row: dict[str, Any] = {
        STEP_KEY: number,
        "training/version": number,
        "training/epoch": step.data_epoch,
        "training/num_groups": len(step.lags),
        "training/num_samples": len(step.responses),
        "response_length/mean": sum(step.responses) / len(step.responses),
        "response_length/max": max(step.responses),
        "response_length/min": min(step.responses),
        "response_length/hist": _histogram(length_bucket(length) for length in step.responses),
        "staleness/mean": sum(step.lags) / len(step.lags),
        "staleness/max": max(step.lags),
        "staleness/hist": _histogram(step.lags),
        "perf/total_num_tokens": step.tokens,
        "perf/time_per_step": step_s,
        "perf/throughput": step.tokens / step_s if step_s > 0 else None,
        "rollout/consumed_tokens_per_s": sum(step.responses) / step_s if step_s > 0 else None,
        "_timestamp": round(step.ended_s, 3),
    }
    row |= {f"timing_s/{name}": seconds for name, seconds in timings.items()}
    row |= population_metrics(counters_before, step.counters, step_s)
    return row | {f"rollout/{name}": count for name, count in step.counters.items() if "/prompt_" not in name}


def _histogram(values: Any) -> dict[str, int]:
    return {str(value): count for value, count in sorted(Counter(values).items())}


def table(result: Result, synchronous: Result | None = None) -> list[str]:
    """The figures as lines of text, beside those of the synchronous partner."""
    rows: list[tuple[str, str, str]] = []

    def add(name: str, shown: Any) -> None:
        rows.append((name, shown(result), shown(synchronous) if synchronous else ""))

    add("step time, s", lambda r: f"{r.step_s:.2f}")
    add("tokens/s generated", lambda r: f"{r.generated_tokens_per_s:,.0f}")
    add("tokens/s consumed", lambda r: f"{r.consumed_tokens_per_s:,.0f}")
    add("trainer busy", lambda r: f"{r.train_busy:.0%}")
    add("instances busy", lambda r: f"{r.rollout_busy:.0%}")
    add("staleness of groups", lambda r: _shares(r.staleness))
    add("mean length consumed", lambda r: f"{r.mean_length_consumed:,.0f}")
    add("mean length of all started", lambda r: f"{r.mean_length_population:,.0f}")
    add("tokens/s prefilled", lambda r: f"{r.prefilled_tokens_per_s:,.0f}")
    add("prefix cache hits", lambda r: f"{r.prefix_hit_share:.0%}")
    add("samples trained an hour", lambda r: f"{r.samples_per_hour:,.0f}")
    add("preemptions", lambda r: f"{r.preemptions:,}")
    add("groups not trained", lambda r: ", ".join(f"{n} {k}" for k, n in sorted(r.released.items())) or "0")
    if synchronous:
        rows.append(("speed-up over synchronous", f"{synchronous.step_s / result.step_s:.2f}x", ""))
    width = max(len(shown) for _, shown, _ in rows) + 2
    head = [f"{'':28}{'this':>{width}}{'synchronous':>{max(width, 13)}}"] if synchronous else []
    return head + [f"{name:28}{own:>{width}}{other:>{max(width, 13)}}".rstrip() for name, own, other in rows]


def _shares(histogram: dict[int, int]) -> str:
    total = sum(histogram.values())
    return " ".join(f"{lag}:{count / total:.0%}" for lag, count in histogram.items())
