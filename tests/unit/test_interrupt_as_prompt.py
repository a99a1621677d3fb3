"""What the trainer makes of samples of which a part counts as prompt."""

from __future__ import annotations

import numpy as np
import pytest

from psrl.protocol.samples import Group, Sample, VersionSpan
from psrl.trainer.batch import build_micro_batches, count_loss_tokens, index_samples, rewards_of
from psrl.trainer.rows import separate_rows, shared_rows

pytestmark = pytest.mark.unit


def sample(mask: list[int], reward: float) -> Sample:
    n = len(mask)
    return Sample(
        response_ids=np.arange(10, 10 + n, dtype="<i4").tobytes(),
        logprobs=np.full(n, -0.5, dtype="<f4").tobytes(),
        reward=reward,
        finish="stop",
        spans=[VersionSpan(0, n, 1)],
        mask=bytes(mask),
    )


@pytest.mark.parametrize("shared", [False, True])
def test_tokens_that_count_as_prompt_have_no_part_in_the_loss(shared: bool) -> None:
    """Two prompt tokens; the first response was interrupted after three of five tokens, the second never, the third has
    nothing that trains: it is as if it had no reward."""
    prompt = np.array([1, 2], dtype="<i4").tobytes()
    samples = [sample([0, 0, 0, 1, 1], 1.0), sample([1, 1], 0.0), sample([0, 0], 1.0)]
    group = Group(group=0, data_epoch=0, prompt=0, version=0, prompt_ids=prompt, samples=samples)
    tokens = [7, 4, 0]
    index = index_samples([tokens])
    rows = shared_rows(tokens, index.group, [2], 64, 100) if shared else separate_rows(tokens)
    assert len(rows) == (1 if shared else 2)
    rewards = rewards_of(group, tokens, least_valid=2)
    assert rewards.valid.tolist() == [True, True, False] and rewards.rewards.tolist() == [1.0, 0.0, 0.0]
    (batch,) = build_micro_batches([[*rows]], index, {0: group}, {0: rewards})
    assert count_loss_tokens([batch]) == 4
    trained = sorted(
        (int(batch.input_ids[r, t]), int(batch.sequences.ids[r, t])) for r, t in batch.loss_mask.nonzero().tolist()
    )
    assert trained == [(10, 1), (11, 1), (13, 0), (14, 0)]
    assert not batch.rollout_log_probs[~batch.loss_mask].any()
