"""The parts of a buffer as they come to a trainer, the weights that it remembers, and how much of its work was hidden."""

from __future__ import annotations

import pytest
import torch

from psrl.protocol import control as c
from psrl.protocol.samples import SampleRef
from psrl.telemetry.overlap import overlap_metrics
from psrl.trainer.arrivals import Arrivals, InterruptedStepError
from psrl.trainer.backends.remembered import Remembered
from psrl.trainer.chunks import plan_chunks

pytestmark = pytest.mark.unit


def message(first: int, count: int, last: bool, samples: int = 2) -> c.Buffer:
    groups = [
        c.TakenGroup(group=i, prompt=i, data_epoch=0, version=0, ref=SampleRef("s", 0, 1, 0, [3] * samples, 1))
        for i in range(first, first + count)
    ]
    return c.Buffer(buffer=5, groups=groups, counters={}, first=first, last=last)


class Coordinator:
    """Answers in turn; `asked` holds every question."""

    def __init__(self, *answers: c.Buffer | c.DrainNow) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[int, int]] = []

    def __call__(self, taken: int, count: int) -> c.Buffer | c.DrainNow:
        self.asked.append((taken, count))
        return self.answers.pop(0)


def shapes(arrivals: Arrivals) -> list[tuple[list[int], int, bool]]:
    return [([group.group for group in part.groups], part.samples, part.last) for part in arrivals]


def test_chunks_are_asked_for_one_after_the_other() -> None:
    ask = Coordinator(message(2, 1, False), message(3, 1, True))
    arrivals = Arrivals(message(0, 2, False), plan_chunks(4, 2, 3), ask)
    assert shapes(arrivals) == [([0, 1], 3, False), ([2], 6, False), ([3], 8, True)]
    assert ask.asked == [(2, 1), (3, 1)]
    assert [group.group for group in arrivals.groups] == [0, 1, 2, 3]
    assert (len(arrivals.work), len(arrivals.waits)) == (3, 2)


def test_chunks_inside_one_group_ask_for_nothing() -> None:
    ask = Coordinator(message(1, 1, True))
    assert shapes(Arrivals(message(0, 1, False), plan_chunks(2, 2, 1), ask)) == [
        ([0], 1, False),
        ([], 2, False),
        ([1], 3, False),
        ([], 4, True),
    ]
    assert ask.asked == [(1, 1)]


def test_a_whole_buffer_is_one_part() -> None:
    ask = Coordinator()
    assert shapes(Arrivals(message(0, 4, True), plan_chunks(4, 2, 8), ask)) == [([0, 1, 2, 3], 8, True)]
    assert ask.asked == []


@pytest.mark.parametrize(
    ("first", "answers", "expected"),
    [
        (message(0, 3, True), [], [([0, 1, 2], 6, True)]),
        (message(0, 3, False), [message(3, 1, True)], [([0, 1, 2], 6, False), ([3], 8, True)]),
        (message(0, 3, False), [message(3, 0, True)], [([0, 1, 2], 6, False), ([], 6, True)]),
    ],
)
def test_a_buffer_may_end_before_its_plan(first: c.Buffer, answers: list, expected: list) -> None:
    ask = Coordinator(*answers)
    assert shapes(Arrivals(first, plan_chunks(8, 2, 6), ask)) == expected
    assert len(ask.asked) == len(answers)


def test_the_rest_of_a_short_buffer_is_dealt_without_a_question() -> None:
    ask = Coordinator()
    assert shapes(Arrivals(message(0, 2, True), plan_chunks(8, 2, 3), ask)) == [([0, 1], 3, False), ([], 4, True)]
    assert ask.asked == []


def test_a_drain_between_two_parts_interrupts_the_step() -> None:
    drain = c.DrainNow(reason="SIGTERM", grace_s=3.0)
    arrivals = iter(Arrivals(message(0, 2, False), plan_chunks(4, 2, 4), Coordinator(drain)))
    next(arrivals)
    with pytest.raises(InterruptedStepError) as caught:
        next(arrivals)
    assert caught.value.order is drain


@pytest.mark.parametrize(
    ("work", "filled_s", "hidden_s"),
    [
        ([(0.0, 2.0), (5.0, 7.0)], 6.0, 3.0),
        ([(0.0, 2.0), (5.0, 7.0)], -1.0, 0.0),
        ([(0.0, 2.0), (5.0, 7.0)], 4.0, 2.0),
        ([(0.0, 2.0), (5.0, 7.0)], 9.0, 4.0),
    ],
)
def test_hidden_work_is_what_came_before_the_buffer_was_full(work: list, filled_s: float, hidden_s: float) -> None:
    metrics = overlap_metrics(work, filled_s)
    assert metrics["overlap/hidden_s"] == hidden_s and metrics["overlap/hidden_fraction"] == hidden_s / 4
    assert metrics["overlap/work_s"] == 4 and metrics["overlap/parts"] == 2


def test_nobody_knows_when_the_buffer_was_full() -> None:
    assert overlap_metrics([(0.0, 2.0)], None) == {"overlap/parts": 1, "overlap/work_s": 2.0}


def test_remembered_weights_come_and_go_bit_by_bit() -> None:
    weight, moment = torch.randn(3, 4), torch.randn(3, 4)
    before = weight.clone()
    replaced = []
    remembered = Remembered([weight], [moment], changed=lambda: replaced.append(weight.clone()))
    remembered.take()
    weight += 1e-3 * torch.randn(3, 4)
    moment_then, stepped = moment.clone(), weight.clone()
    moment += 1
    with pytest.raises(RuntimeError, match="inside"), remembered.weights():
        assert torch.equal(weight, before)
        raise RuntimeError("inside")
    assert torch.equal(weight, stepped) and len(replaced) == 2
    remembered.go_back()
    assert torch.equal(weight, before) and torch.equal(moment, moment_then)
    weight += 1
    remembered.take()
    weight += 1
    remembered.go_back()
    assert torch.equal(weight, before + 1)
