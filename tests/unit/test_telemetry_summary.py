import pytest

from psrl.telemetry.summary import summarise
from psrl.telemetry.timeline import BUSY, CHECKPOINT, IDLE, PULL, SWITCH, UPDATE, WAIT, Span
from psrl.telemetry.timeline_read import Track

pytestmark = pytest.mark.unit


def rows(count):
    return [
        {
            "training/global_step": step,
            "critic/rewards/mean": step / 10,
            "staleness/max": step % 2,
            "timing_s/step": 2.0,
            "perf/total_num_tokens": 100,
            "training/num_samples": 8,
            "training/num_groups": 4,
            "_timestamp": 1000.0 + 2 * step,
        }
        for step in range(1, count + 1)
    ]


def tracks():
    trainer = [Span(WAIT, 1000, 1004), Span(UPDATE, 1004, 1009), Span(CHECKPOINT, 1009, 1010)]
    # Busy before the trainer's window (start-up) must not count.
    first = [Span(BUSY, 990, 1005), Span(IDLE, 1005, 1010), Span(PULL, 1001, 1003, -1, {"version": 1})]
    second = [Span(BUSY, 1000, 1010), Span(PULL, 1001, 1002, -1, {"version": 1}), Span(SWITCH, 1002, 1002.5)]
    return [
        Track("trainer", "trainer-0", 0.0, trainer),
        Track("instance", "instance-0", 0.0, first),
        Track("instance", "instance-1", 0.0, second),
    ]


def test_hand_computed():
    got = summarise(
        rows(10),
        tracks(),
        {"groups_dropped": 3, "groups_requeued": 1, "restarts": 2},
        {"status": "completed"},
        transport="nixl",
    )
    expected = {
        "status": "completed",
        "cause": "",
        "steps": 10,
        "version": 10,
        "groups_trained": 40,
        "groups_dropped": 3,
        "groups_requeued": 1,
        "restarts": 2,
        "max_staleness": 1,
        "reward_first": 0.3,
        "reward_last": 0.8,
        "wall_s": 30.0,
        "step_s_mean": 2.0,
        "tokens_per_s": 50.0,
        "samples_per_s": 4.0,
        "consumed_tokens_per_s": None,
        "length_consumed": None,
        "length_complete": None,
        "length_at_least": None,
        "censored_ratio": None,
        "rollout_busy_fraction": 0.75,
        "train_busy_fraction": 0.6,
        "pull_s_mean": 1.5,
        "pause_s_mean": 0.5,
        "transport": "nixl",
    }
    assert got == pytest.approx(expected)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_unfinished_and_short_runs(count):
    got = summarise(rows(count), [])
    assert (got["status"], got["steps"]) == ("unfinished", count)
    assert got["reward_last"] == (pytest.approx((count + 1) / 20) if count else None)
    assert got["rollout_busy_fraction"] is None and got["pull_s_mean"] is None


def test_failed_run_tells_the_cause_and_counts_win_over_rows():
    got = summarise(
        rows(2), [], {"groups_trained": 5, "max_staleness": 3}, {"status": "failed", "cause": "trainer-0: x"}
    )
    assert (got["status"], got["cause"], got["groups_trained"], got["max_staleness"]) == (
        "failed",
        "trainer-0: x",
        5,
        3,
    )


def test_a_gap_between_two_starts_of_the_trainer_is_no_idle_time():
    later = [
        Track(t.role, t.name, 0.0, [Span(s.name, s.start_s + 5000, s.end_s + 5000) for s in t.spans]) for t in tracks()
    ]
    assert summarise([], tracks() + later)["rollout_busy_fraction"] == pytest.approx(0.75)
