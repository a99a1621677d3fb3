"""Little batches for tests of advantages and losses, and several ranks in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch

from psrl.algorithms.sequences import Sequences


def tensor(rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def make_batch(mask: torch.Tensor, sequences: Sequences | None = None, **fields) -> SimpleNamespace:
    """Everything that a loss or an estimator reads; what is not given is None, or 0 for advantages and rollout log-probs.
    Without `sequences` each row is a sample."""
    zeros = torch.zeros(mask.shape, dtype=torch.float64)
    names = ("old_log_probs", "ref_log_probs", "kl_penalty", "values", "returns", "accepted", "is_weights")
    given = {"advantages": zeros, "rollout_log_probs": zeros, **fields}
    sequences = sequences or Sequences.of_rows(torch.ones_like(mask))
    return SimpleNamespace(loss_mask=mask, sequences=sequences, **(dict.fromkeys(names) | given))


def random_batch(rows=5, length=7, seed=0, old=True, dtype=torch.float64, **fields):
    """(log-probs, batch): random values, ragged random masks, the first row without a trainable token."""
    generator = torch.Generator().manual_seed(seed)

    def draw(scale):
        return torch.randn(rows, length, generator=generator, dtype=torch.float64).mul(scale).to(dtype)

    log_probs = -draw(1.0).abs()
    mask = torch.rand(rows, length, generator=generator) > 0.4
    mask[0] = False
    batch = make_batch(
        mask,
        advantages=draw(1.0),
        rollout_log_probs=log_probs + draw(0.8),
        old_log_probs=log_probs + draw(0.4) if old else None,
        ref_log_probs=log_probs + draw(0.5),
        **fields,
    )
    return log_probs, batch


def select(batch, rows):
    """Some rows as a micro-batch of its own; sample numbers stay those of the whole batch."""
    cut = {k: v[rows] if isinstance(v, torch.Tensor) else v for k, v in vars(batch).items()}
    return SimpleNamespace(**cut | {"sequences": Sequences(batch.sequences.ids[rows], batch.sequences.count)})


def run_ranks(work: Sequence[Callable], deadline_s: float = 60.0) -> list:
    """Call each function with an `all_sum` that adds over all of them, in threads; their results in order."""
    barrier, parts, results = threading.Barrier(len(work), timeout=deadline_s), {}, [None] * len(work)
    failures: list[BaseException] = []

    def all_sum_of(rank):
        def all_sum(values):
            parts[rank] = list(values)
            barrier.wait()
            total = [sum(column) for column in zip(*(parts[r] for r in range(len(work))), strict=True)]
            barrier.wait()
            return total

        return all_sum

    def run(rank):
        try:
            results[rank] = work[rank](all_sum_of(rank))
        except BaseException as error:
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(deadline_s)
    if failures:
        raise failures[0]
    return results
