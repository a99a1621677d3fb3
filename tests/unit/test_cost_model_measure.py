"""The measuring loop against an engine whose steps take known time by a fake clock."""

import time

import pytest

from psrl.cost_model.measure import GridPoint, MeasureError, grid, measure, visiting_orders
from psrl.protocol.generation import TokenChunk

pytestmark = pytest.mark.unit


class FakeEngine:
    """Prefills one sequence a step, then decodes all; a step takes 1 ms a sequence and 1 us a KV token. At most `rows`."""

    def __init__(self, monkeypatch, rows=64):
        self.now, self.rows, self.slow = 0.0, rows, 1.0
        self.waiting, self.running, self.visits = [], [], []
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(time, "process_time", lambda: self.now / 2)

    def submit(self, request):
        assert len(request.samples) <= 8
        for sample in request.samples:
            self.waiting.append([request.group + sample.sample, len(request.prompt_ids), sample.max_new_tokens])

    def has_work(self):
        return bool(self.waiting or self.running)

    def step(self):
        if self.waiting and len(self.running) < self.rows:
            self.running.append(self.waiting.pop(0))
            self.now += 10.0  # a prefill must never be timed
            if self.waiting and len(self.running) < self.rows:
                return []
        self.now += self.slow * (1e-3 * len(self.running) + 1e-6 * sum(held for _, held, _ in self.running))
        chunks = []
        for row in self.running:
            row[1], row[2] = row[1] + 1, row[2] - 1
            finish = "" if row[2] else "length"
            chunks.append(TokenChunk(group=row[0], sample=0, token_ids=[1], logprobs=[0.0], spans=[], finish=finish))
        self.running = [row for row in self.running if row[2]]
        return chunks

    def abort(self, groups=None):
        self.visits.append(len(self.running))
        self.waiting, self.running = [], []
        return []


def test_a_point_has_the_tokens_and_the_time_of_its_middle_step(monkeypatch):
    (found,) = measure(FakeEngine(monkeypatch), [GridPoint(4, 100)], repeats=3, steps=5)
    # Two steps warm up at 100 and 101 tokens each; the timed ones hold 102 .. 106, the middle one 4 x 104.
    assert found.kv_tokens == 416
    assert found.wall_s == pytest.approx(4e-3 + 416e-6)
    assert found.cpu_s == pytest.approx(found.wall_s / 2)


def test_a_slow_visit_does_not_change_the_value(monkeypatch):
    engine = FakeEngine(monkeypatch)
    point = GridPoint(4, 100)

    def progress(done, total):
        engine.slow = 50.0 if done == 1 else 1.0  # the second of three visits

    (found,) = measure(engine, [point], repeats=3, steps=5, progress=progress)
    assert found.wall_s == pytest.approx(4e-3 + 416e-6)


def test_every_round_visits_every_point_in_another_order(monkeypatch):
    points = grid([20, 1, 2, 2], [8, 16])
    assert points == [GridPoint(n, t) for n in (1, 2, 20) for t in (8, 16)]
    orders = list(visiting_orders(points, 4, seed=0))
    assert all(sorted(order, key=points.index) == points for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    engine = FakeEngine(monkeypatch)
    measure(engine, points, repeats=2, steps=1)
    assert sorted(engine.visits[1:]) == sorted([p.num_seqs for p in points] * 2)


def test_an_engine_without_room_is_refused_and_left_empty(monkeypatch):
    engine = FakeEngine(monkeypatch, rows=2)
    with pytest.raises(MeasureError, match="4 sequences of 8 tokens"):
        measure(engine, [GridPoint(4, 8)], repeats=1, steps=2)
    assert not engine.has_work()
