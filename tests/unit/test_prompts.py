from __future__ import annotations

import numpy as np
import pytest

from psrl.coordinator.prompts import PromptSource, order, steps_in_data
from psrl.coordinator.records import AnyRecord, Occupy, Position, Release, Reserve
from psrl.coordinator.staleness import Staleness
from psrl.protocol.samples import SampleRef

pytestmark = pytest.mark.unit
REF = SampleRef("s", 0, 1, 0, [1])


def hand_out(source: PromptSource, group: int) -> Reserve:
    position = source.peek()
    assert position is not None
    record = Reserve(group, position.data_epoch, position.prompt, 0, "i", position.attempt, position.protected)
    source.apply(record)
    return record


def test_the_order_is_a_permutation_that_never_changes() -> None:
    """A resumed run must see the same order: the values are written down here."""
    assert order(0, 0, 8).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]
    assert order(0, 1, 8).tolist() != order(0, 0, 8).tolist() != order(1, 0, 8).tolist()
    assert np.array_equal(np.sort(order(5, 3, 1000)), np.arange(1000))


def test_each_epoch_hands_out_every_prompt_once_in_its_own_order() -> None:
    source = PromptSource(num_prompts=5, seed=1)
    seen = [hand_out(source, group) for group in range(15)]
    for data_epoch in range(3):
        prompts = [r.prompt for r in seen if r.data_epoch == data_epoch]
        assert prompts == order(1, data_epoch, 5).tolist()


def test_a_prompt_that_came_back_is_next_once() -> None:
    source = PromptSource(num_prompts=4, seed=0, shuffle=False, total_epochs=1)
    for group in range(3):
        hand_out(source, group)
    source.apply(Release(1, "timeout", "requeued"))
    source.apply(Release(0, "redundant", "requeued"))
    source.apply(Release(0, "redundant", "requeued"))
    assert source.returned == 2
    assert [hand_out(source, group).prompt for group in (3, 4, 5)] == [1, 0, 3]
    assert source.peek() is None and not source.exhausted
    source.apply(Occupy(2, 0, REF, 0.0, 1))
    source.apply(Release(2, "unreadable", "dropped"))
    for group in (3, 4, 5):
        source.apply(Release(group, "error", "dropped"))
    assert source.exhausted


@pytest.mark.parametrize(
    ("reason", "attempt", "protected"),
    [
        ("error", 1, False),
        ("timeout", 1, False),
        ("redundant", 0, True),
        ("straggler", 0, True),
        ("restart", 0, False),
    ],
)
def test_only_failures_count_as_attempts_and_who_gave_way_is_protected(
    reason: str, attempt: int, protected: bool
) -> None:
    source = PromptSource(num_prompts=2, seed=0, shuffle=False)
    hand_out(source, 0)
    source.apply(Release(0, reason, "requeued"))
    assert source.peek() == Position(0, 0, attempt, protected)


@pytest.mark.parametrize(
    ("drop_last", "batches", "dropped"), [(False, [[0, 1], [2]], 0), (True, [[0, 1]], 1)], ids=["short", "dropped"]
)
def test_the_tail_of_the_data_is_drained_once(drop_last: bool, batches: list[list[int]], dropped: int) -> None:
    """Three prompts, two a step, one epoch, places for four."""
    state = Staleness(buffer_entries=2, staleness=1)
    source = PromptSource(num_prompts=3, seed=0, shuffle=False, total_epochs=1)

    def do(records: list) -> None:
        for record in records:
            state.apply(record)
            source.apply(record)

    do(state.start(0, "a"))
    while (position := source.peek()) is not None:
        do([state.reserve(version=0, instance="i", **position._asdict())])
    for group in range(3):
        do(state.occupy(group, REF, 0.0, 1))
    trained = []
    while not state.data_ended(state.version):
        if source.exhausted and not state.ready(state.version):
            do(state.end_of_data(drop_last))
            continue
        take = state.take(state.version)
        assert take is not None
        do([take])
        trained.append([e.prompt for e in state.taken_groups(state.version)])
        do([state.publish(state.version + 1)])
    assert trained == batches
    assert state.released["end_of_data"] == dropped


def test_the_journal_of_other_data_is_refused() -> None:
    source = PromptSource(num_prompts=6, seed=0)
    records: list[AnyRecord] = [hand_out(source, group) for group in range(6)]
    other = PromptSource(num_prompts=6, seed=1)
    with pytest.raises(ValueError, match=r"the data gives .* data\.seed"):
        for record in records:
            other.apply(record)


@pytest.mark.parametrize(
    ("num_prompts", "total_epochs", "buffer_entries", "drop_last", "steps"),
    [(3, 1, 2, False, 2), (3, 1, 2, True, 1), (3, 2, 2, True, 3), (3, None, 8, True, None), (3, 1, 8, False, 1)],
)
def test_steps_in_data(
    num_prompts: int, total_epochs: int | None, buffer_entries: int, drop_last: bool, steps: int | None
) -> None:
    assert steps_in_data(num_prompts, total_epochs, buffer_entries, drop_last) == steps


def test_data_too_small_for_one_step_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="3 prompts < batch 8"):
        steps_in_data(3, 1, 8, drop_last=True)
    with pytest.raises(ValueError, match="holds no prompt"):
        steps_in_data(0, None, 8, drop_last=True)


@pytest.mark.parametrize(
    ("sizes", "text"),
    [({"num_prompts": 0, "seed": 0}, "holds no prompt"), ({"num_prompts": 1, "seed": 0, "total_epochs": 0}, "give 1")],
)
def test_sizes_are_checked(sizes: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        PromptSource(**sizes)  # type: ignore[arg-type]
