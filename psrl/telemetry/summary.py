"""The figures of a whole run in one flat dict: what `summary.json` holds and the head of the report shows. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from psrl.telemetry.metrics import STEP_KEY, TIME_KEY, Row, number
from psrl.telemetry.population import CENSORED, COMPLETE, run_population
from psrl.telemetry.timeline import BUSY, CHECKPOINT, PULL, PUSH, READ, SWITCH, UPDATE, Span, busy_fraction
from psrl.telemetry.timeline_read import Track, by_name, training_windows

ENDS = 5
"""Steps at either end of the run over which `reward_first` and `reward_last` are means."""
TRAIN_BUSY = (READ, UPDATE, PUSH, CHECKPOINT)


def summarise(
    rows: Sequence[Row],
    tracks: Sequence[Track],
    counts: Mapping[str, int] | None = None,
    outcome: Mapping[str, Any] | None = None,
    *,
    transport: str | None = None,
    wall_s: float | None = None,
) -> dict[str, Any]:
    """Summary of a run, finished or not. A figure that nothing tells is None, never 0.

    Args:
        rows: of `read_metrics`, each step once.
        tracks: of `read_timeline`.
        counts: from the ledger or its audit: groups_trained, groups_dropped, groups_requeued, restarts,
            max_staleness, version. What is missing is taken from `rows` where they know it.
        outcome: content of `outcome.json` (status, cause); None while there is none: status "unfinished".
        transport: how weights really moved, for example "nixl posix,cma".
        wall_s: the run's time; None: from the first span or row to the last one.

    `rollout_busy_fraction` is the mean over instances of the time spent decoding within the windows in which the
    trainer ran its steps; `train_busy_fraction` the same of trainer ranks for everything but waiting.
    """
    counts, outcome = counts or {}, outcome or {}
    windows = training_windows(tracks)
    step_s = _column(rows, "timing_s/step") or _column(rows, "perf/time_per_step")
    tokens, samples = _column(rows, "perf/total_num_tokens"), _column(rows, "training/num_samples")
    rewards = _column(rows, "critic/rewards/mean")
    steps = int(rows[-1][STEP_KEY]) if rows else 0
    instances = by_name(tracks, "instance")
    return {
        "status": outcome.get("status", "unfinished"),
        "cause": outcome.get("cause") or "",
        "steps": steps,
        "version": counts.get("version", outcome.get("version", steps)),
        "groups_trained": counts.get("groups_trained", int(sum(_column(rows, "training/num_groups")))),
        "groups_dropped": counts.get("groups_dropped"),
        "groups_requeued": counts.get("groups_requeued"),
        "restarts": counts.get("restarts"),
        "max_staleness": counts.get("max_staleness", _max_int(_column(rows, "staleness/max"))),
        "reward_first": _mean(rewards[:ENDS]),
        "reward_last": _mean(rewards[-ENDS:]),
        "wall_s": wall_s if wall_s is not None else _wall_s(rows, tracks),
        "step_s_mean": _mean(step_s),
        "tokens_per_s": _rate(tokens, step_s),
        "samples_per_s": _rate(samples, step_s),
        **_population(rows, step_s),
        "rollout_busy_fraction": _mean_busy(instances, windows, (BUSY,)),
        "train_busy_fraction": _mean_busy(by_name(tracks, "trainer"), windows, TRAIN_BUSY),
        "pull_s_mean": _mean_seconds(instances, PULL),
        "pause_s_mean": _mean_seconds(instances, SWITCH),
        "transport": transport,
    }


def _population(rows: Sequence[Row], step_s: Sequence[float]) -> dict[str, float | None]:
    """Response tokens consumed a second, and mean lengths of what was consumed and of what was launched."""
    population = run_population(rows)
    figures = population.figures()
    consumed, ended = population.of("consumed"), population.of(*COMPLETE, *CENSORED)
    return {
        "consumed_tokens_per_s": _rate([consumed.tokens], step_s) if consumed.count else None,
        "length_consumed": figures.get("consumed"),
        "length_complete": figures.get("complete"),
        "length_at_least": figures.get("at_least"),
        "censored_ratio": population.of(*CENSORED).count / ended.count if ended.count else None,
    }


def busy_over(spans: Sequence[Span], windows: Sequence[tuple[float, float]], names: Sequence[str]) -> float:
    """`busy_fraction` over several windows together, each weighted by its length."""
    total = sum(end - start for start, end in windows)
    return sum(busy_fraction(spans, window, names) * (window[1] - window[0]) for window in windows) / total


def _mean_busy(
    processes: Mapping[str, Sequence[Span]], windows: Sequence[tuple[float, float]], names: Sequence[str]
) -> float | None:
    if not processes or sum(end - start for start, end in windows) <= 0:
        return None
    return _mean([busy_over(spans, windows, names) for spans in processes.values()])


def _mean_seconds(processes: Mapping[str, Sequence[Span]], name: str) -> float | None:
    return _mean([span.seconds for spans in processes.values() for span in spans if span.name == name])


def _wall_s(rows: Sequence[Row], tracks: Sequence[Track]) -> float | None:
    times = [time for row in rows if (time := number(row, TIME_KEY)) is not None]
    times += [time for track in tracks for span in track.spans for time in (span.start_s, span.end_s)]
    return max(times) - min(times) if len(times) > 1 else None


def _column(rows: Iterable[Row], key: str) -> list[float]:
    return [value for row in rows if (value := number(row, key)) is not None]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _max_int(values: Sequence[float]) -> int | None:
    return int(max(values)) if values else None


def _rate(amounts: Sequence[float], seconds: Sequence[float]) -> float | None:
    return sum(amounts) / sum(seconds) if amounts and sum(seconds) > 0 else None
