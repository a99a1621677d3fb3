import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrl.telemetry.timeline import BUSY, IDLE, PULL, Span, Timeline, busy_fraction, coarsen, merge
from psrl.telemetry.timeline_read import by_name, natural, read_timeline, read_tracks, training_windows

pytestmark = pytest.mark.unit


class Clock:
    def __init__(self, now=0.0):
        self.now = now

    def __call__(self):
        return self.now


def timeline(path, role="instance", offset_s=0.0, mono=0.0, unix=1000.0, **more):
    return Timeline(path, role, offset_s, clock=Clock(mono), wall=lambda: unix, **more)


@pytest.mark.parametrize(
    ("spans", "gap", "expected"),
    [
        ([], 1, []),
        ([Span("busy", 0, 1), Span("busy", 1.5, 2)], 0.5, [Span("busy", 0, 2, 1.5)]),
        ([Span("busy", 0, 1), Span("busy", 1.6, 2)], 0.5, [Span("busy", 0, 1), Span("busy", 1.6, 2)]),
        ([Span("busy", 1, 2), Span("busy", 0, 1)], 0, [Span("busy", 0, 2)]),
        ([Span("busy", 0, 1), Span("idle", 1, 2), Span("busy", 2, 3)], 0.5, None),
        ([Span("pull", 0, 1, -1, {"version": 1}), Span("pull", 1, 2, -1, {"version": 2})], 9, None),
    ],
)
def test_merge(spans, gap, expected):
    assert merge(spans, gap) == (spans if expected is None else expected)


@pytest.mark.parametrize(
    ("window", "expected"),
    [((0, 10), 0.3), ((0, 2), 1.0), ((2, 4), 0.0), ((1, 5), 0.375), ((9, 9), 0.0), ((20, 30), 0.0), ((4, 6), 0.5)],
)
def test_busy_fraction(window, expected):
    spans = [Span("busy", 0, 2), Span("idle", 2, 4), Span("busy", 4, 6, seconds=1.0)]
    assert busy_fraction(spans, window) == pytest.approx(expected)


@given(st.lists(st.tuples(st.floats(0.001, 0.05), st.floats(0.0, 0.05)), min_size=1, max_size=60), st.integers(1, 20))
def test_coalescing_keeps_the_covered_time(pieces, most):
    now, spans = 0.0, []
    for busy, gap in pieces:
        spans.append(Span(BUSY, now, now + busy))
        now += busy + gap
    total = sum(busy for busy, _ in pieces)
    fewer = coarsen(spans, most)
    assert len(fewer) <= most or len(fewer) == len(spans)
    assert sum(span.seconds for span in fewer) == pytest.approx(total)
    assert busy_fraction(fewer, (0.0, now)) == pytest.approx(busy_fraction(spans, (0.0, now)))


def test_many_decode_steps_make_a_small_file(tmp_path):
    path = tmp_path / "instance-0.jsonl"
    line = timeline(path)
    for step in range(5000):  # 5 ms decode, 1 ms between
        line.add(BUSY, step * 0.006, step * 0.006 + 0.005)
    line.close()
    assert path.stat().st_size < 1000
    (track,) = read_timeline(tmp_path)
    (span,) = track.spans
    assert span.seconds == pytest.approx(25, abs=1e-3) and span.end_s - span.start_s == pytest.approx(30, abs=0.01)


def test_a_flush_is_bounded_even_when_nothing_lies_close_together(tmp_path):
    path = tmp_path / "instance-0.jsonl"
    line = timeline(path)
    for step in range(15_000):
        line.add(BUSY, step * 1.0, step + 0.1)
    line.close()
    (track,) = read_timeline(tmp_path)
    assert len(track.spans) <= 600
    assert sum(span.seconds for span in track.spans) == pytest.approx(1500, rel=1e-3)


def test_written_only_at_the_interval_and_at_close(tmp_path):
    path = tmp_path / "trainer-0.jsonl"
    clock = Clock(100.0)
    line = Timeline(path, "trainer", 0.0, clock=clock, wall=lambda: 0.0)
    line.add("read", 100, 101)
    clock.now = 129.0
    line.add("update", 101, 129)
    assert not path.exists()
    clock.now = 130.0
    line.add("push", 129.5, 130)
    assert len(path.read_text().splitlines()) == 2  # who it is, one batch
    with line.span("wait"):
        clock.now = 131.0
    line.close()
    line.close()
    assert len(path.read_text().splitlines()) == 3
    (track,) = read_tracks(path)
    assert [(s.name, s.start_s, s.end_s) for s in track.spans][-1] == ("wait", 130.0, 131.0)


def test_span_is_recorded_when_its_body_raises(tmp_path):
    line = timeline(tmp_path / "t.jsonl", "trainer")
    with pytest.raises(KeyError), line.span("update"):
        raise KeyError
    line.close()
    assert [s.name for s in read_timeline(tmp_path)[0].spans] == ["update"]


def test_nodes_with_different_clocks_line_up_by_the_offset(tmp_path):
    trainer = timeline(tmp_path / "trainer-0.jsonl", "trainer", 0.0, mono=500.0, unix=10_000.0)
    trainer.add("update", 501, 502)
    # The other node's monotonic clock is 400 s behind, and its wall clock 1.5 s wrong: only the offset may count.
    instance = timeline(tmp_path / "instance-0.jsonl", offset_s=None, mono=100.0, unix=10_001.5)
    instance.add(BUSY, 101, 102)
    instance.flush()  # before Welcome
    instance.set_offset(400.0)
    instance.add(PULL, 102, 103, version=1, nbytes=7)
    for line in (trainer, instance):
        line.close()
    tracks = read_timeline(tmp_path)
    assert [track.role for track in tracks] == ["trainer", "instance"]
    update, (busy, pull) = tracks[0].spans[0], tracks[1].spans
    assert busy.start_s == pytest.approx(update.start_s) and pull.start_s == pytest.approx(update.end_s)
    assert pull.attributes == {"version": 1, "nbytes": 7}
    assert 10_000 < update.start_s < 10_003


def test_a_run_that_went_on_elsewhere_keeps_its_order(tmp_path):
    for mono, unix in ((50_000.0, 1000.0), (20.0, 5000.0)):  # requeued to a node that booted just now
        line = timeline(tmp_path / "trainer-0.jsonl", "trainer", 0.0, mono=mono, unix=unix)
        line.add("update", mono + 1, mono + 2)
        line.close()
    tracks = read_timeline(tmp_path)
    assert [t for window in training_windows(tracks) for t in window] == pytest.approx([1001, 1002, 5001, 5002])
    assert len(by_name(tracks, "trainer")["trainer-0"]) == 2


def test_torn_lines_are_skipped_and_the_next_start_begins_a_new_line(tmp_path):
    path = tmp_path / "instance-0.jsonl"
    for start in (0.0, 10.0):
        line = timeline(path)
        line.add(BUSY, start, start + 1)
        line.close()
        if start == 0.0:
            with path.open("ab") as file:
                file.write(b'{"offset_s":0.0,"spans":[["bu')
    tracks = read_tracks(path)
    assert [[s.start_s for s in t.spans] for t in tracks] == [[0.0], [10.0]]


def test_a_file_that_cannot_be_written_is_told_once_and_costs_nothing_else(tmp_path, caplog):
    (tmp_path / "timeline").write_text("a file where the directory should be")
    line = timeline(tmp_path / "timeline" / "instance-0.jsonl")
    with caplog.at_level(logging.WARNING):
        for start in (0.0, 1.0):
            line.add(IDLE, start, start + 0.5)
            line.flush()
    assert len(caplog.records) == 1 and "instance-0.jsonl" in caplog.text


def test_spans_beyond_the_memory_bound_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr("psrl.telemetry.timeline.MAX_BUFFERED", 3)
    path = tmp_path / "i.jsonl"
    line = timeline(path)
    for number in range(5):
        line.add(PULL, number, number + 0.5, version=number)
    line.close()
    batch = json.loads(path.read_text().splitlines()[-1])
    assert (len(batch["spans"]), batch["dropped"]) == (3, 2)


def test_natural_order():
    assert sorted(["i-10", "i-9", "a", "i-9b2"], key=natural) == ["a", "i-9", "i-9b2", "i-10"]
