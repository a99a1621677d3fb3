import json
from itertools import pairwise

import msgspec
import numpy as np
import pytest

from psrl.protocol.samples import Group, Sample, VersionSpan
from psrl.telemetry.metrics import MetricsTail, MetricsWriter, read_metrics
from psrl.telemetry.step_metrics import bucket_width, length_bucket, step_metrics

pytestmark = pytest.mark.unit


def row(step, **more):
    return {"training/global_step": step, **more}


def steps(path):
    return [r["training/global_step"] for r in read_metrics(path)]


def sample(length, reward, finish="stop", versions=(0,)):
    return Sample(
        response_ids=np.arange(length, dtype="<i4").tobytes(),
        logprobs=np.zeros(length, dtype="<f4").tobytes(),
        reward=reward,
        finish=finish,
        spans=[VersionSpan(i, i + 1, v) for i, v in enumerate(versions)],
    )


def group(samples, prompt_length=3, version=0, number=0, epoch=0):
    prompt = np.zeros(prompt_length, dtype="<i4").tobytes()
    return Group(group=number, data_epoch=epoch, prompt=0, version=version, prompt_ids=prompt, samples=samples)


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ([1, 2, 3], [1, 2, 3]),
        ([1, 2, 3, 4, 3], [1, 2, 3]),  # resumed at 2: the old 4 is of another past
        ([1, 2, 3, 4, 3, 4, 5], [1, 2, 3, 4, 5]),
        ([1, 2, 1], [1]),
        ([7, 8], [7, 8]),
        ([], []),
    ],
)
def test_each_step_once(tmp_path, written, kept):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        for index, step in enumerate(written):
            writer.write(row(step, index=index))
    assert steps(path) == kept
    last = {step: index for index, step in enumerate(written)}
    assert [r["index"] for r in read_metrics(path)] == [last[step] for step in kept]


def test_torn_last_line_is_skipped_and_the_next_writer_starts_a_new_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(row(1))
        writer.write(row(2))
    path.write_bytes(path.read_bytes()[:-9])
    assert steps(path) == [1]
    with MetricsWriter(path) as writer:
        writer.write(row(2))
        writer.write(row(3))
    assert steps(path) == [1, 2, 3]


def test_missing_file_has_no_rows(tmp_path):
    assert read_metrics(tmp_path / "none.jsonl") == []


def test_not_finite_becomes_null_and_the_file_stays_json(tmp_path):
    path = tmp_path / "metrics.jsonl"
    bad = {"a": float("nan"), "b": float("inf"), "c": np.float32("-inf"), "d": {"x": float("nan"), "y": 1}}
    with MetricsWriter(path) as writer:
        writer.write(row(1, e=np.float32(0.5), f=np.int64(3), **bad))
    text = path.read_text()
    assert "NaN" not in text and "Infinity" not in text
    read = json.loads(text)
    assert [read[k] for k in "abc"] == [None] * 3
    assert read["d"] == {"x": None, "y": 1} and read["e"] == 0.5 and read["f"] == 3


@pytest.mark.parametrize("bad", [{}, {"training/global_step": None}, {"training/global_step": 1.5}, row(True)])
def test_a_row_without_a_step_is_refused(tmp_path, bad):
    with MetricsWriter(tmp_path / "m.jsonl") as writer, pytest.raises(ValueError, match="training/global_step"):
        writer.write(bad)


def test_an_unknown_type_is_refused_by_name(tmp_path):
    with MetricsWriter(tmp_path / "m.jsonl") as writer, pytest.raises(TypeError, match=r"actor/x.*bytes"):
        writer.write(row(1, **{"actor/x": b"1"}))


def test_a_row_is_in_the_file_as_soon_as_write_returns(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer, tail = MetricsWriter(path), MetricsTail(path)
    for step in (1, 2):
        writer.write(row(step))
        assert [r["training/global_step"] for r in tail.poll()] == [step]
    assert tail.poll() == []


def test_tail_waits_for_the_rest_of_a_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.poll() == []
    line = json.dumps(row(1)).encode() + b"\n"
    path.write_bytes(line + line[:7])
    assert len(tail.poll()) == 1
    path.write_bytes(line + line)
    assert len(tail.poll()) == 1


def test_step_metrics_of_a_hand_computed_batch():
    groups = [
        group([sample(4, 1.0, versions=(0, 1)), sample(2, 0.0, "length")], prompt_length=3, epoch=0),
        group([sample(6, 0.5), sample(5, None), sample(0, 1.0)], prompt_length=10, epoch=1),
    ]
    got = step_metrics(groups, [1, 0], {"step": 2.0, "wait_buffer": 0.5}, step=7, extra={"actor/lr": 1e-6})
    expected = {
        "training/global_step": 7,
        "training/epoch": 1,
        "training/num_groups": 2,
        "training/num_samples": 3,
        "training/num_masked_samples": 2,
        "critic/rewards/mean": 0.5,
        "critic/rewards/max": 1.0,
        "critic/rewards/min": 0.0,
        "critic/score/mean": 0.5,
        "response_length/mean": 4.0,
        "response_length/max": 6.0,
        "response_length/min": 2.0,
        "response_length/clip_ratio": 1 / 3,
        "response_length/hist": {"2": 1, "4": 1, "6": 1},
        "prompt_length/mean": 16 / 3,
        "rollout/multi_version_ratio": 1 / 3,
        "staleness/mean": 0.5,
        "staleness/max": 1,
        "staleness/hist": {"0": 1, "1": 1},
        "perf/total_num_tokens": 28,
        "perf/throughput": 14.0,
        "perf/time_per_step": 2.0,
        "timing_s/wait_buffer": 0.5,
        "actor/lr": 1e-6,
    }
    for key, value in expected.items():
        assert got[key] == (value if isinstance(value, dict) else pytest.approx(value)), key
    assert json.loads(msgspec.json.encode(got)) == got  # nothing but plain JSON values


def test_step_metrics_without_any_trained_sample_has_no_means():
    got = step_metrics([group([sample(3, None)])], [0], {"step": 1.0}, step=1)
    assert "critic/rewards/mean" not in got and "response_length/mean" not in got
    assert got["training/num_masked_samples"] == 1 and got["perf/throughput"] == 0
    assert step_metrics([], [], {"step": 1.0}, step=1)["staleness/hist"] == {}


@pytest.mark.parametrize(
    ("lags", "timings", "message"), [([0, 0], {"step": 1.0}, "1 groups but 2 lags"), ([0], {"read": 1.0}, "step")]
)
def test_step_metrics_refuses(lags, timings, message):
    with pytest.raises(ValueError, match=message):
        step_metrics([group([sample(1, 1.0)])], lags, timings, step=1)


def test_buckets_tile_the_lengths():
    edges = sorted({length_bucket(n) for n in range(5000)})
    assert edges[:18] == [*range(16), 16, 18]
    for lower, following in pairwise(edges):
        assert lower + bucket_width(lower) == following
    assert (length_bucket(1000), bucket_width(960), length_bucket(1023), length_bucket(1024)) == (960, 64, 960, 1024)


def test_turns_are_counted_where_samples_have_any():
    played = [sample(4, 1.0), sample(4, 0.0)]
    played[0].metrics, played[1].metrics = {"num_turns": 3.0}, {"num_turns": 1.0}
    turns = step_metrics([group(played)], [0], {"step": 1.0}, step=1)
    assert [turns[f"num_turns/{figure}"] for figure in ("mean", "max", "min")] == [2.0, 3.0, 1.0]
    assert "num_turns/mean" not in step_metrics([group([sample(4, 1.0)])], [0], {"step": 1.0}, step=1)
