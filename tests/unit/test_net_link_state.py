"""When a role believes in a coordinator, looks for another, or gives up: with a clock of our own."""

from __future__ import annotations

import pytest

from psrl.config.schema import FaultToleranceConfig
from psrl.net.link_state import CoordinatorGoneError, LinkState, Phase
from psrl.protocol.control import Welcome

pytestmark = pytest.mark.unit

LIMITS = FaultToleranceConfig(
    hello_timeout_s=60.0, heartbeat_interval_s=1.0, heartbeat_timeout_s=20.0, fence_s=30.0
)  # fmt: skip


def welcome(epoch: int = 1, sent: float = 0.0, now: float = 0.0) -> Welcome:
    return Welcome(epoch=epoch, incarnation=1, hello_sent_s=sent, now_s=now)


def welcomed_state(now: float = 0.0, generation: int = 0, epoch: int = 1) -> LinkState:
    state = LinkState(LIMITS, now)
    assert state.tick(now)
    assert state.found(now, generation)
    state.said_hello()
    assert state.welcomed(now, welcome(epoch))
    return state


def test_the_directory_is_looked_at_once_a_second_until_an_endpoint_is_there() -> None:
    state = LinkState(LIMITS, 0.0)
    assert [state.tick(now) for now in (0.0, 0.5, 0.99, 1.0, 1.5, 2.0)] == [True, False, False, True, False, True]


def test_no_file_is_looked_at_while_the_coordinator_answers() -> None:
    state = welcomed_state()
    assert not any(state.tick(float(now), silent_s=2.0) for now in range(1, 1000))
    assert state.tick(1000.0, silent_s=2.1)
    assert not state.tick(1000.5, silent_s=2.6)
    assert state.tick(1001.0, silent_s=3.1)


@pytest.mark.parametrize(("welcomed_first", "limit", "key"), [(False, 60, "hello_timeout_s"), (True, 30, "fence_s")])
def test_a_role_gives_up_after_its_limit_and_names_it(welcomed_first: bool, limit: float, key: str) -> None:
    state = welcomed_state() if welcomed_first else LinkState(LIMITS, 0.0)
    broken = "the connection was lost" if welcomed_first else None
    state.tick(0.0, broken=broken)
    state.tick(float(limit), broken=broken)
    with pytest.raises(CoordinatorGoneError, match=rf"{key}={limit}\): (no endpoint|the connection was lost)"):
        state.tick(limit + 0.1, broken=broken)


def test_silence_counts_towards_the_fence_from_its_beginning() -> None:
    state = welcomed_state()
    assert state.tick(25.0, silent_s=20.5)  # silent since 4.5
    assert state.phase is Phase.SEEKING
    state.tick(34.4)
    with pytest.raises(CoordinatorGoneError, match=r"silent for 20\.5 s"):
        state.tick(34.6)


def test_a_lost_connection_is_followed_by_a_look_at_once_and_the_same_endpoint_may_be_tried_again() -> None:
    state = welcomed_state(generation=3)
    assert state.tick(100.0, broken="the connection was lost")
    assert state.found(100.0, 3)
    assert state.phase is Phase.GREETING
    state.said_hello()
    assert state.welcomed(100.1, welcome(epoch=2))
    assert (state.phase, state.epoch) == (Phase.WELCOMED, 2)


@pytest.mark.parametrize(
    ("phase", "offered", "connect"),
    [
        (Phase.WELCOMED, 5, False),
        (Phase.WELCOMED, 4, False),
        (Phase.WELCOMED, 6, True),
        (Phase.GREETING, 5, False),
        (Phase.GREETING, 6, True),
        (Phase.SEEKING, 4, False),
        (Phase.SEEKING, 5, True),
        (Phase.SEEKING, 6, True),
    ],
)
def test_a_newer_generation_is_preferred_and_an_older_one_never_believed(
    phase: Phase, offered: int, connect: bool
) -> None:
    state = welcomed_state(generation=5)
    if phase is not Phase.WELCOMED:
        state.tick(1.0, broken="the connection was lost")
    if phase is Phase.GREETING:
        state.found(1.0, 5)
    assert state.phase is phase
    assert state.found(2.0, offered) is connect


def test_a_coordinator_of_an_older_epoch_is_not_believed() -> None:
    state = welcomed_state(epoch=7)
    state.tick(1.0, broken="the connection was lost")
    state.found(1.0, 0)
    state.said_hello()
    assert not state.welcomed(1.1, welcome(epoch=6))
    assert (state.phase, state.epoch) == (Phase.SEEKING, 7)
    assert "coordinator of the past (epoch 6, known: 7)" in state.cause


def test_a_welcome_without_hello_is_ignored() -> None:
    state = LinkState(LIMITS, 0.0)
    state.tick(0.0)
    state.found(0.0, 0)
    assert not state.welcomed(0.1, welcome())
    assert state.phase is Phase.GREETING


def test_a_coordinator_that_never_answers_the_hello_is_tried_anew() -> None:
    state = LinkState(LIMITS, 0.0)
    state.tick(0.0)
    state.found(0.0, 0)
    state.said_hello()
    state.tick(20.0)
    assert state.phase is Phase.GREETING
    assert state.tick(20.1) or state.tick(21.1)
    assert state.phase is Phase.SEEKING
    assert state.found(21.1, 0) and not state.hello_said


def test_the_reason_why_no_connection_comes_about_is_told() -> None:
    state = LinkState(LIMITS, 0.0)
    state.tick(0.0)
    state.found(0.0, 0)
    state.tick(10.0, trouble="nobody answers at the endpoint")
    with pytest.raises(CoordinatorGoneError, match="nobody answers at the endpoint"):
        state.tick(61.0)


def test_the_clock_offset_is_taken_at_the_middle_of_the_round_trip() -> None:
    state = LinkState(LIMITS, 100.0)
    state.tick(100.0)
    state.found(100.0, 0)
    state.said_hello()
    assert state.welcomed(100.4, welcome(sent=100.2, now=5000.3))
    assert state.clock_offset_s == pytest.approx(4900.0)
    assert state.clock_error_s == pytest.approx(0.1)
