"""How much of a step's training work was done while rollout still filled the step's own buffer. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def overlap_metrics(work: Sequence[tuple[float, float]], filled_s: float | None) -> dict[str, float]:
    """`overlap/*` of one step. `work`: when the trainer worked on the buffer, as (start, end) on one clock; `filled_s`: when
    the buffer's last group was finished on that clock, None if nobody knows.

    overlap/work_s: all of it; overlap/hidden_s: what came before `filled_s`; overlap/hidden_fraction: their ratio.
    `overlap_metrics([(0, 2), (5, 7)], 6)["overlap/hidden_fraction"] == 0.75`.
    """
    work_s = sum(end - start for start, end in work)
    metrics = {"overlap/parts": float(len(work)), "overlap/work_s": work_s}
    if filled_s is None or work_s <= 0:
        return metrics
    hidden_s = sum(max(0.0, min(end, filled_s) - start) for start, end in work)
    return metrics | {"overlap/hidden_s": hidden_s, "overlap/hidden_fraction": hidden_s / work_s}
