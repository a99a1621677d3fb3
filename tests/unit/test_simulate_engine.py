"""The engine model against decode steps counted one by one."""

from __future__ import annotations

import pytest

from psrl.protocol.cost_model import CostModel
from psrl.simulate.costs import Costs, steps_seconds, steps_within
from psrl.simulate.engine import SimEngine
from psrl.simulate.samples import SimGroup, SimSample

pytestmark = pytest.mark.unit


def model(step_s: float = 0.0, per_sequence_s: float = 0.0, per_kv_token_s: float = 0.0) -> CostModel:
    return CostModel(
        other_threshold=0.0,
        other_latency_b=step_s,
        other_latency_k=per_sequence_s,
        attn_latency_b=0.0,
        attn_latency_k=per_kv_token_s,
    )


def engine(costs: Costs | None = None, *, rows: int = 8, kv: int = 10_000) -> SimEngine:
    return SimEngine(costs or Costs(decode=model(step_s=1.0)), max_num_seqs=rows, kv_capacity=kv)


def group(number: int, *lengths: int, prompt: int = 10) -> list[SimSample]:
    g = SimGroup(number, "a", 0, number, 0, prompt, len(lengths))
    g.samples = [SimSample(g, i, length, length) for i, length in enumerate(lengths)]
    return g.samples


def run(e: SimEngine, arrivals: dict[float, list[SimSample]]) -> dict[float, list[int]]:
    """End time -> lengths of the samples that ended then."""
    ends: dict[float, list[int]] = {}
    due = sorted(arrivals.items())
    while due or e.next_s is not None:
        if due and (e.next_s is None or due[0][0] <= e.next_s):
            now_s, samples = due.pop(0)
            for sample in samples:
                e.submit(sample, now_s)
        else:
            now_s = e.next_s or 0.0
            for sample in e.wake(now_s):
                ends.setdefault(round(now_s, 6), []).append(sample.length)
    return ends


@pytest.mark.parametrize(
    ("first_s", "growth_s", "seconds", "steps"),
    [
        (1.0, 0.0, 0.99, 0),
        (1.0, 0.0, 1.0, 1),
        (1.0, 0.5, 2.49, 1),
        (1.0, 0.5, 2.5, 2),
        (1.0, 0.5, 4.5, 3),
        (1, 1, 0, 0),
    ],
)
def test_whole_steps_within_a_time(first_s: float, growth_s: float, seconds: float, steps: int) -> None:
    assert steps_within(first_s, growth_s, seconds) == steps


def test_steps_within_is_the_inverse_of_their_time() -> None:
    for steps in (1, 7, 1000, 123_456):
        seconds = steps_seconds(0.026, 1e-7, steps)
        assert steps_within(0.026, 1e-7, seconds) == steps
        assert steps_within(0.026, 1e-7, seconds - 1e-3) == steps - 1


def test_a_batch_ends_sample_by_sample() -> None:
    # 2 s for the first two samples' steps, 1 s each once one is alone: 3 steps of 2 s, then 2 of 1 s
    e = engine(Costs(decode=model(per_sequence_s=1.0)))
    assert run(e, {0.0: group(0, 3, 5)}) == {6.0: [3], 8.0: [5]}
    assert (e.generated_tokens, e.decode_steps, e.busy_s) == (8, 5, 8.0)
    assert (e.kv_tokens, e.prompt_tokens) == (0, 10)


def test_attention_grows_with_what_is_held() -> None:
    # one sample, prompt 10: steps cost 0.1 x 10, 11, 12 tokens
    e = engine(Costs(decode=model(per_kv_token_s=0.1)))
    assert run(e, {0.0: group(0, 3)}) == {3.3: [3]}


def test_who_comes_in_the_middle_of_a_step_waits_for_its_end() -> None:
    e = engine()
    assert run(e, {0.0: group(0, 4), 1.5: group(1, 1)}) == {3.0: [1], 4.0: [4]}


def test_prefill_stalls_the_batch_and_a_group_is_prefilled_once() -> None:
    # 0.5 + 10 x 0.05 = 1 s of prefill, steps until 2 and 3; there 1 s of prefill for the newcomer, then all end with the next
    e = engine(Costs(decode=model(step_s=1.0), prefill_s=0.5, prefill_s_per_token=0.05))
    assert run(e, {0.0: group(0, 3, 3), 2.5: group(1, 1)}) == {5.0: [3, 3, 1]}
    assert e.busy_s == 5.0
    assert e.prompt_tokens == 20


def test_rows_are_first_come_first_served() -> None:
    e = engine(rows=2)
    assert run(e, {0.0: group(0, 2, 4) + group(1, 1)}) == {2.0: [2], 3.0: [1], 4.0: [4]}


def test_the_youngest_yields_when_the_cache_is_full_and_is_prefilled_again() -> None:
    # prompts 10 + 10, capacity 60, both need 25: after 20 steps 60 tokens are held; one more step is over
    e = engine(Costs(decode=model(step_s=1.0), prefill_s_per_token=0.001), kv=60)
    old, young = group(0, 25)[0], group(1, 25)[0]
    run(e, {0.0: [old, young]})
    assert e.preemptions == 1
    assert (old.made, young.made) == (25, 25)
    assert e.generated_tokens == 50
    assert e.prompt_tokens == 20 + 10 + 21  # it had 21 tokens when it yielded


def test_aborted_samples_keep_whole_steps() -> None:
    e = engine()
    first, second = group(0, 9, 9)
    for sample in (first, second):
        e.submit(sample, 0.0)
    e.wake(0.0)
    e.abort([first], 2.5)
    assert first.made == 2
    assert e.made(second) == 2
    assert [s.made for s in e.abort_all(4.0)] == [4]
    assert not e.has_work


def test_a_sample_that_goes_on_is_prefilled_whole_without_a_cache() -> None:
    e = engine()
    sample = group(0, 9)[0]
    sample.made = 4
    e.submit(sample, 0.0)
    e.wake(0.0)
    assert (e.prompt_tokens, e.prefix_hit_tokens) == (14, 0)
