"""The metrics of one training step that follow from its samples. Pure: groups, lags and times in, one row out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from psrl.protocol.samples import Group, Sample
from psrl.telemetry.metrics import STEP_KEY

INT32_BYTES = 4


def step_metrics(
    groups: Sequence[Group],
    lags: Sequence[int],
    timings: Mapping[str, float],
    *,
    step: int,
    advantages: Sequence[float] | np.ndarray | None = None,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Metrics of the step that trained `groups`, under verl's names where verl has one.

    Args:
        groups: the groups of the buffer in batch order.
        lags: for each group, version trained on - `group.version`.
        timings: seconds by name; each becomes `timing_s/<name>` ("step", "wait_buffer", "read", "update_actor",
            "push_weights", "save_checkpoint"). "step" is the whole step and is needed.
        step: steps finished, this one included: the first step is 1 and publishes version 1.
        advantages: of the trained tokens (or samples), any shape flattened; left out if None.
        extra: rows from elsewhere (actor/*, rollout_corr/*); they win over a name made here.

    Returns: one row for `MetricsWriter.write`. Reward, length and token figures count the trained samples only: those
    with a reward and at least one response token; the others are counted in `training/num_masked_samples`.
    `perf/throughput` is prompt and response tokens of trained samples a second, of the whole run (not a GPU).

    Raises: ValueError if `groups` and `lags` differ in length or "step" is missing from `timings`.
    """
    if len(groups) != len(lags):
        raise ValueError(f"{len(groups)} groups but {len(lags)} lags: give one lag a group")
    if "step" not in timings:
        raise ValueError(f"timings has no 'step', only {sorted(timings)}; give the seconds of the whole step")
    trained = [(group, sample) for group in groups for sample in group.samples if _is_trained(sample)]
    num_samples = sum(not sample.greedy for group in groups for sample in group.samples)
    rewards = np.array([sample.reward for _, sample in trained], dtype=np.float64)
    responses = np.array([len(sample.response_ids) // INT32_BYTES for _, sample in trained], dtype=np.int64)
    prompts = np.array([len(group.prompt_ids) // INT32_BYTES for group, _ in trained], dtype=np.int64)
    step_s = timings["step"]
    tokens = int(prompts.sum() + responses.sum())

    row: dict[str, Any] = {STEP_KEY: step, "training/version": step}
    if groups:
        row["training/epoch"] = max(group.data_epoch for group in groups)
    row |= {
        "training/num_groups": len(groups),
        "training/num_samples": len(trained),
        "training/num_masked_samples": num_samples - len(trained),
    }
    # Both are what the samples earned; what a KL penalty takes off is actor/reward_kl_penalty x its coefficient.
    row |= _spread("critic/score", rewards) | _spread("critic/rewards", rewards)
    if advantages is not None:
        row |= _spread("critic/advantages", np.asarray(advantages, dtype=np.float64).reshape(-1))
    row |= _spread("response_length", responses) | _spread("prompt_length", prompts)
    if trained:
        row["response_length/clip_ratio"] = float(np.mean([sample.finish == "length" for _, sample in trained]))
        row["response_length/truncated_ratio"] = float(np.mean([sample.finish == "truncated" for _, sample in trained]))
        row["rollout/multi_version_ratio"] = float(np.mean([_versions(sample) > 1 for _, sample in trained]))
        turns = [sample.metrics["num_turns"] for _, sample in trained if "num_turns" in sample.metrics]
        row |= _spread("num_turns", np.array(turns, dtype=np.float64))
    row["response_length/hist"] = _histogram(length_bucket(int(length)) for length in responses)
    if lags:
        row["staleness/mean"] = float(np.mean(lags))
        row["staleness/max"] = int(max(lags))
    row["staleness/hist"] = _histogram(lags)
    row["perf/total_num_tokens"] = tokens
    row["perf/time_per_step"] = step_s
    row["perf/throughput"] = tokens / step_s if step_s > 0 else None
    row["rollout/consumed_tokens_per_s"] = float(responses.sum() / step_s) if step_s > 0 else None
    row |= {f"timing_s/{name}": seconds for name, seconds in timings.items()}
    return row | dict(extra or {})


def length_bucket(length: int) -> int:
    """Lower edge of the histogram bucket of `length`: exact below 16, then eight buckets an octave.

    The edges do not depend on the data, so histograms of different steps add up.
    `length_bucket(7) == 7`, `length_bucket(17) == 16`, `length_bucket(1000) == 960`.
    """
    shift = max(length.bit_length() - 4, 0)
    return (length >> shift) << shift


def bucket_width(lower: int) -> int:
    """Lengths that fall into the bucket with this lower edge: [lower, lower + width). `bucket_width(960) == 64`."""
    return 1 << max(lower.bit_length() - 4, 0)


def _is_trained(sample: Sample) -> bool:
    return sample.reward is not None and len(sample.response_ids) > 0 and not sample.greedy


def _versions(sample: Sample) -> int:
    return len({span.version for span in sample.spans})


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
    if values.size == 0:
        return {}
    figures = {"mean": values.mean(), "max": values.max(), "min": values.min()}
    return {f"{name}/{figure}": float(value) for figure, value in figures.items()}


def _histogram(values: Any) -> dict[str, int]:
    return {str(value): count for value, count in sorted(Counter(int(v) for v in values).items())}
