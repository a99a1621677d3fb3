"""The staleness rules, example by example. Every interleaving is in test_staleness_walk.py."""

from __future__ import annotations

import pytest

from psrl.coordinator.records import Occupy, Publish, Release, Reserve, ShortBuffer, Start, Take
from psrl.coordinator.staleness import Staleness, StalenessViolation
from psrl.coordinator.staleness_view import window_status
from psrl.coordinator.window import fits, latest_places, slack, surplus
from psrl.protocol.samples import SampleRef

pytestmark = pytest.mark.unit


def ref(group: int, segment: str = "s") -> SampleRef:
    return SampleRef(segment, group * 10, 10, 0, [3, 4])


def started(version: int = 0, **sizes: int) -> Staleness:
    """A run at `version`, all buffers below it trained by groups without lag."""
    state = Staleness(**sizes)
    do(state, *state.start(0, "first"))
    while state.version < version:
        fill(state, state.buffer_entries, state.version)
        train(state)
    return state


def do(state: Staleness, *records: object) -> None:
    for record in records:
        assert record is not None
        state.apply(record)  # type: ignore[arg-type]


def reserve(state: Staleness, version: int) -> int:
    record = state.reserve(version=version, data_epoch=0, prompt=state.next_group, instance="i")
    assert record is not None, state.describe()
    state.apply(record)
    return record.group


def finish(state: Staleness, group: int, segment: str = "s") -> int:
    """Occupy; returns the buffer."""
    records = state.occupy(group, ref(group, segment), 0.5, 7)
    do(state, *records)
    assert isinstance(records[-1], Occupy)
    return records[-1].buffer


def fill(state: Staleness, groups: int, version: int) -> list[int]:
    """Buffers that this many new groups of `version` land in."""
    return [finish(state, reserve(state, version)) for _ in range(groups)]


def train(state: Staleness) -> list[int]:
    take = state.take(state.version)
    assert take is not None
    do(state, take)
    do(state, state.publish(state.version + 1))
    return take.groups


# ---- room and admission --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "resumed", "in_flight", "room"),
    [(0, False, 0, 12), (0, True, 0, 12), (50, False, 0, 12), (50, True, 0, 12), (50, True, 3, 9)],
)
def test_room_after_a_resume_is_that_of_a_fresh_run(version: int, resumed: bool, in_flight: int, room: int) -> None:
    state = started(version, buffer_entries=4, staleness=2)
    if version:
        do(state, state.checkpoint(version))
    if resumed:
        do(state, *state.start(version, "second"))
    for _ in range(in_flight):
        reserve(state, version)
    assert state.room() == room
    for _ in range(room):
        reserve(state, version)
    assert not state.can_reserve(version) and state.room() == 0
    assert state.reserve(version=version, data_epoch=0, prompt=0, instance="i") is None


@pytest.mark.parametrize("lag", [0, 1, 2, 3, 4])
def test_an_instance_that_lags_more_than_the_bound_gets_nothing(lag: int) -> None:
    state = started(5, buffer_entries=2, staleness=2)
    assert state.can_reserve(5 - lag) == (lag <= 2)
    assert state.room(5 - lag) == {0: 6, 1: 4, 2: 2}.get(lag, 0)


def test_a_version_that_is_not_published_gets_nothing() -> None:
    state = started(1, buffer_entries=2, staleness=2)
    assert not state.can_reserve(2) and not state.can_reserve(-1)
    assert state.room(2) == 0


def test_reservations_of_older_versions_keep_their_place() -> None:
    state = started(1, buffer_entries=1, staleness=1)
    old = reserve(state, 0)  # buffer 1 is its last chance
    new = reserve(state, 1)
    assert not state.can_reserve(1)
    assert finish(state, new) == 2, "the younger group, done first, leaves buffer 1 to the older"
    assert finish(state, old) == 1


def test_nothing_is_reserved_beyond_the_last_step() -> None:
    state = started(buffer_entries=2, staleness=3, total_steps=2)
    assert state.room() == 4
    fill(state, 4, 0)
    assert state.room() == 0
    assert [train(state) for _ in range(2)] == [[0, 1], [2, 3]]
    assert state.data_ended(2) and not state.can_reserve(2)


def test_staleness_0_is_synchronous() -> None:
    state = started(buffer_entries=2, staleness=0)
    for version in range(3):
        assert state.room() == 2
        groups = [reserve(state, version), reserve(state, version)]
        assert not state.can_reserve(version)
        assert [finish(state, group) for group in reversed(groups)] == [version, version]
        assert not state.can_reserve(version)
        assert train(state) == groups[::-1], "batch order is the order of occupation"
        assert state.lags(version) == [0, 0]


# ---- the bound -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("staleness", "started_at", "trained_at", "kept"),
    [(1, 3, 3, True), (1, 3, 4, True), (1, 3, 5, False), (0, 3, 3, True), (0, 3, 4, False)],
)
def test_age_counts_from_the_start_of_generation_to_shipping(
    staleness: int, started_at: int, trained_at: int, kept: bool
) -> None:
    state = started(started_at, buffer_entries=1, staleness=staleness)
    group = reserve(state, started_at)
    waits = Occupy(group, trained_at, ref(group), 0.0, 1)  # however long it waits in the queue
    if not kept:
        with pytest.raises(StalenessViolation, match=f"group {group} of version 3 may not enter buffer {trained_at}"):
            state.apply(waits)
        return
    state.apply(waits)
    while state.version < trained_at:
        fill(state, 1, state.version)
        train(state)
    assert train(state) == [group]
    assert state.lags(trained_at) == [trained_at - started_at]


def test_the_bound_is_checked_again_when_a_group_ships() -> None:
    state = started(2, buffer_entries=1, staleness=1)
    fill(state, 1, 2)
    state._entries[2][0] = state._entries[2][0].__class__(9, 0, 0, 0, ref(9), 0.0, 1)
    with pytest.raises(StalenessViolation, match=r"group 9 of version 0 is older than .* allows"):
        state.apply(Take(2, [9]))


def test_nothing_enters_a_buffer_that_trains() -> None:
    state = started(buffer_entries=1, staleness=1)
    late = reserve(state, 0)
    fill(state, 1, 0)
    do(state, state.take(0))
    assert state.lo == 1
    assert finish(state, late) == 1


# ---- placing, filtering, redundancy --------------------------------------------------------------------------


def test_filtered_groups_are_refilled_before_the_batch_is_cut() -> None:
    """Groups 1, 3 and 5 have equal rewards; the batch is exactly the next four, and their places are free at once."""
    state = started(buffer_entries=4, staleness=0)
    reserve(state, 0)  # number 0, so that the others are 1..7
    do(state, state.release(0, "error", requeue=False))
    rewards = {1: [1, 1], 2: [0, 1], 3: [0, 0], 4: [0, 1], 5: [1, 1], 6: [0, 1], 7: [0, 1]}
    for group, values in rewards.items():
        assert reserve(state, 0) == group
        room = state.room()
        if min(values) == max(values):
            do(state, state.release(group, "filtered", requeue=False))
            assert state.room() == room + 1
        else:
            finish(state, group)
    assert train(state) == [2, 4, 6, 7]
    assert state.released == {"error": 1, "filtered": 3}


def test_redundancy_keeps_the_first_that_finish() -> None:
    state = started(buffer_entries=2, redundant_entries=4, staleness=0)
    groups = [reserve(state, 0) for _ in range(4)]
    assert not state.can_reserve(0)
    assert state.occupy(groups[2], ref(2), 0.0, 1) == [Occupy(2, 0, ref(2), 0.0, 1)]
    finish(state, groups[2])
    records = state.occupy(groups[1], ref(1), 0.0, 1)
    assert records == [
        Release(3, "redundant", "requeued"),
        Release(0, "redundant", "requeued"),
        Occupy(1, 0, ref(1), 0.0, 1),
    ]
    do(state, *records)
    assert train(state) == [2, 1]
    assert state.released["redundant"] == 2 and state.num_open == 0


def test_redundancy_fills_the_next_buffer_to_train_first() -> None:
    state = started(1, buffer_entries=1, redundant_entries=2, staleness=1)
    slow = reserve(state, 0)
    fast = reserve(state, 1)
    records = state.occupy(fast, ref(fast), 0.0, 1)
    assert records == [Release(slow, "redundant", "requeued"), Occupy(fast, 1, ref(fast), 0.0, 1)]


def test_redundancy_aborts_no_more_than_it_must() -> None:
    state = started(buffer_entries=1, redundant_entries=2, staleness=1)
    groups = [reserve(state, 0) for _ in range(4)]
    records = state.occupy(groups[0], ref(0), 0.0, 1)
    assert records == [Release(3, "redundant", "requeued"), Occupy(0, 0, ref(0), 0.0, 1)]
    do(state, *records)
    assert [r.group for r in state.open_groups()] == [1, 2]


def test_a_repeated_message_changes_nothing() -> None:
    state = started(buffer_entries=1, staleness=1)
    group = reserve(state, 0)
    finish(state, group)
    train(state)
    do(state, state.checkpoint(1))
    assert state.occupy(group, ref(group), 0.0, 1) == []
    assert state.take(0) is None
    assert state.publish(1) is None
    assert state.checkpoint(1) is None
    assert state.start(0, "first") == []


def test_a_sealed_group_whose_sample_is_unreadable_is_replaced() -> None:
    state = started(buffer_entries=2, staleness=0)
    bad, good = reserve(state, 0), reserve(state, 0)
    finish(state, bad)
    finish(state, good)
    with pytest.raises(StalenessViolation, match="cannot be released"):
        state.release(bad, "unreadable", requeue=True)
    do(state, state.release(bad, "unreadable", requeue=False))
    assert not state.ready(0) and state.room() == 1
    fill(state, 1, 0)
    assert train(state) == [good, 2]


# ---- taking --------------------------------------------------------------------------------------------------


def test_chunks_come_in_order_and_the_last_is_what_remains() -> None:
    state = started(buffer_entries=3, staleness=1)
    groups = [reserve(state, 0) for _ in range(4)]
    assert state.take(0, 2) is None
    finish(state, groups[1])
    assert state.take(0, 2) is None and state.take(0) is None
    finish(state, groups[3])
    chunk = state.take(0, 2)
    assert chunk == Take(0, [1, 3])
    do(state, chunk)
    assert state.take(0, 2) is None and state.lo == 0
    assert finish(state, groups[0]) == 0, "a buffer whose chunks train is open until all of it is taken"
    rest = state.take(0, 2)
    assert rest == Take(0, [0])
    do(state, rest)
    assert state.lo == 1 and finish(state, groups[2]) == 1
    assert [e.group for e in state.taken_groups(0)] == [1, 3, 0]
    with pytest.raises(ValueError, match="a chunk has at least one"):
        state.take(1, 0)


def test_only_the_buffer_of_the_trained_version_is_taken() -> None:
    state = started(buffer_entries=1, staleness=2)
    fill(state, 3, 0)
    assert state.take(1) is None
    do(state, state.take(0))
    assert state.take(1) is None, "buffer 1 trains with weights 1"
    do(state, state.publish(1))
    assert state.take(1) == Take(1, [1])


def test_readers_see_the_window() -> None:
    def seen(state: Staleness) -> list[tuple]:
        return [(s.buffer, s.state.value, s.reserved, s.occupied, s.taken) for s in window_status(state)]

    state = started(1, buffer_entries=2, redundant_entries=3, staleness=1)
    assert seen(state) == [(1, "pending", 0, 0, 0), (2, "pending", 0, 0, 0)]
    for _ in range(3):
        reserve(state, 0)
    assert seen(state) == [(1, "stuck", 3, 0, 0), (2, "pending", 0, 0, 0)]
    assert state.oldest_version() == 0
    later = [reserve(state, 1) for _ in range(2)]
    assert seen(state) == [(1, "stuck", 3, 0, 0), (2, "pending", 2, 0, 0)]
    do(state, *[Occupy(group, 2, ref(group), 0.0, 1) for group in later])
    assert seen(state) == [(1, "stuck", 3, 0, 0), (2, "ready", 0, 2, 0)]
    for group in range(2, 4):
        finish(state, group)
    assert seen(state) == [(1, "ready", 0, 2, 0), (2, "ready", 0, 2, 0)]
    do(state, state.take(1))
    assert seen(state) == [(1, "ready", 0, 0, 2), (2, "ready", 0, 2, 0)]


def test_a_full_buffer_with_reservations_open_is_ready_with_capacity() -> None:
    state = started(1, buffer_entries=1, redundant_entries=2, staleness=1)
    first, second = reserve(state, 1), reserve(state, 1)
    do(state, Occupy(first, 2, ref(first), 0.0, 1))
    assert [s.state.value for s in window_status(state)] == ["pending", "ready_with_capacity"]
    assert finish(state, second) == 1


# ---- crash and resume ----------------------------------------------------------------------------------------


def test_a_resume_trains_the_same_groups_again_in_the_same_order() -> None:
    state = started(1, buffer_entries=2, staleness=1)
    do(state, state.checkpoint(1))
    groups = [reserve(state, 1) for _ in range(4)]
    for group in (groups[2], groups[0], groups[3]):
        finish(state, group)
    trained = train(state)
    assert trained == [groups[2], groups[0]]
    records = state.start(1, "second")
    assert records == [Release(groups[1], "restart", "requeued"), Start(1, 1, "second")]
    do(state, *records)
    assert (state.version, state.incarnation, state.num_open) == (1, 1, 0)
    assert train(state) == trained
    assert [e.group for e in state.entries(2)] == [groups[3]]


def test_a_resume_lowers_versions_as_far_as_the_bound_lets_it() -> None:
    """Buffer 2 holds a group of version 1 with staleness 1. At checkpoint 0 version 1 does not exist any more, but
    min(1, 0) + 1 < 2 would throw a finished group away: it stays at 2 - 1."""
    state = started(buffer_entries=1, staleness=1)
    fill(state, 2, 0)
    train(state)
    assert fill(state, 1, 1) == [2]
    do(state, *state.start(0, "second"))
    assert [(b, [e.version for e in state.entries(b)]) for b in range(3)] == [(0, [0]), (1, [0]), (2, [1])]
    assert state.room() == 0
    assert [train(state) for _ in range(3)] == [[0], [1], [2]]


def test_a_coordinator_restart_keeps_what_is_in_flight() -> None:
    records: list = []
    state = Staleness(buffer_entries=2, staleness=1)

    def log(*more: object) -> None:
        do(state, *more)
        records.extend(more)

    log(*state.start(0, "a"))
    for prompt in range(4):
        log(state.reserve(version=0, data_epoch=0, prompt=prompt, instance="i"))
    log(*state.occupy(1, ref(1), 0.0, 1))
    again = Staleness(buffer_entries=2, staleness=1)
    do(again, *records)
    assert again.snapshot() == state.snapshot()
    assert again.start(0, "a") == [] and [r.group for r in again.open_groups()] == [0, 2, 3]


def test_a_checkpoint_makes_consumption_final() -> None:
    state = started(buffer_entries=1, staleness=1)
    for segment in ("a", "b", "c"):
        finish(state, reserve(state, state.version), segment)
        train(state)
    assert state.live_segments() == {"a", "b", "c"}
    do(state, state.checkpoint(2))
    assert state.forgettable_segments(["a", "b", "c", "d"]) == ["a", "b", "d"]
    with pytest.raises(StalenessViolation, match="starts at version 1, but the ledger can resume from 2 to 3"):
        state.start(1, "second")
    do(state, *state.start(2, "second"))
    assert train(state) == [2]


def test_older_checkpoints_stay_resumable_if_asked() -> None:
    state = started(buffer_entries=1, staleness=0, keep_checkpoints=2)
    for _ in range(3):
        fill(state, 1, state.version)
        train(state)
        do(state, state.checkpoint(state.version))
    do(state, *state.start(2, "second"))
    assert (state.version, state.final) == (2, 2)
    assert train(state) == [2]
    do(state, state.checkpoint(3))
    assert (state.final, state.entries(1)) == (2, [])


def test_a_checkpoint_may_outlive_the_record_of_its_publication() -> None:
    state = started(buffer_entries=1, staleness=1)
    fill(state, 2, 0)
    do(state, state.take(0))  # the trainer publishes and checkpoints version 1, then the machine dies
    do(state, *state.start(1, "second"))
    assert (state.version, state.final) == (1, 1)
    assert train(state) == [1]


def test_a_long_run_forgets() -> None:
    state = started(buffer_entries=2, staleness=1)
    for _ in range(50):
        fill(state, 2, state.version)
        train(state)
        do(state, state.checkpoint(state.version))
    assert state._entries == {} and state._open == {} and state._due == {} and len(state._checkpoints) == 1


# ---- end of data ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sealed", "drop_last", "batches", "dropped"),
    [
        (3, False, [[0, 1], [2]], 0),
        (3, True, [[0, 1]], 1),
        (4, False, [[0, 1], [2, 3]], 0),
        (4, True, [[0, 1], [2, 3]], 0),
        (1, False, [[0]], 0),
        (1, True, [], 1),
        (0, False, [], 0),
    ],
)
def test_the_rest_of_the_data(sealed: int, drop_last: bool, batches: list[list[int]], dropped: int) -> None:
    state = started(buffer_entries=2, staleness=2)
    fill(state, sealed, 0)
    do(state, *state.end_of_data(drop_last))
    assert state.end_of_data(drop_last) == []
    trained = []
    while not state.data_ended(state.version):
        trained.append(train(state))
    assert trained == batches
    assert state.released["end_of_data"] == dropped
    assert not state.can_reserve(state.version)


def test_the_end_of_the_data_closes_gaps() -> None:
    """A group fails for good in buffer 1 while buffer 2 has one already: it moves forward, only the last is short."""
    state = started(1, buffer_entries=2, staleness=1)
    fails = reserve(state, 0)
    fill(state, 1, 0)
    last = reserve(state, 1)
    assert finish(state, last) == 2
    assert state.end_of_data(drop_last=False) == []
    do(state, state.release(fails, "error", requeue=False))
    records = state.end_of_data(drop_last=False)
    assert records == [ShortBuffer(1, 2)]
    do(state, *records)
    assert train(state) == [3, last]
    assert state.data_ended(2)


def test_a_short_buffer_that_trains_already_is_not_dropped() -> None:
    state = started(buffer_entries=3, staleness=0)
    fill(state, 2, 0)
    do(state, state.take(0, 1))
    records = state.end_of_data(drop_last=True)
    assert records == [ShortBuffer(0, 2)]
    do(state, *records)
    do(state, state.take(0, 1))
    do(state, state.publish(1))
    assert state.data_ended(1)
    do(state, *state.start(0, "second"))
    assert state.end_of_data(drop_last=True) == []
    assert train(state) == [0, 1]


# ---- refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (Reserve(5, 0, 0, 0, "i", 0), "cannot be admitted"),
        (Reserve(2, 0, 0, 1, "i", 0), "cannot be admitted"),
        (Occupy(7, 0, ref(7), 0.0, 1), "is not open"),
        (Occupy(1, 2, ref(1), 0.0, 1), "may not enter buffer 2"),
        (Release(7, "error", "dropped"), "neither in flight nor sealed"),
        (Release(0, "error", "requeued"), "neither in flight nor sealed"),
        (Take(0, [1]), "are not the next of buffer 0"),
        (Take(1, [0]), "are not the next of buffer 1"),
        (Take(0, []), "are not the next of buffer 0"),
        (Publish(1), "published before its buffer was taken"),
        (Publish(2), "published before its buffer was taken"),
        (Start(1, 0, "b"), "in flight or out of order"),
        (Start(1, 1, "b"), "can resume from 0 to 0"),
        (ShortBuffer(0, 1), "in flight or of another size"),
    ],
)
def test_records_that_no_coordinator_wrote_are_refused(record: object, text: str) -> None:
    state = started(buffer_entries=2, staleness=1)
    finish(state, reserve(state, 0))
    reserve(state, 0)
    before = state.snapshot()
    with pytest.raises(StalenessViolation, match=text):
        state.apply(record)  # type: ignore[arg-type]
    assert state.snapshot() == before


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"buffer_entries": 0, "staleness": 0}, "buffer_entries=0"),
        ({"buffer_entries": 1, "staleness": -1}, "staleness=-1"),
        ({"buffer_entries": 4, "staleness": 0, "redundant_entries": 3}, "redundant_entries=3"),
        ({"buffer_entries": 4, "staleness": 0, "keep_checkpoints": 0}, "keep_checkpoints=0"),
    ],
)
def test_sizes_are_checked(sizes: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Staleness(**sizes)  # type: ignore[arg-type]


# ---- the arithmetic ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("room", "due", "slacks", "fit", "gone", "places"),
    [
        ([], [], [], True, [], []),
        ([1, 2], [0, 2], [1, 1], True, [0, 0], [0, 2]),
        ([1, 1], [2, 0], [-1, 0], False, [1, 0], [1, 0]),
        ([2, 1], [0, 3], [2, 0], True, [0, 0], [2, 1]),
        ([1, 1], [2, 2], [-1, -2], False, [1, 1], [1, 1]),
        ([0, 3, 0], [0, 1, 3], [0, 2, -1], False, [0, 0, 1], [0, 3, 0]),
    ],
)
def test_window_arithmetic(
    room: list[int], due: list[int], slacks: list[int], fit: bool, gone: list[int], places: list[int]
) -> None:
    assert slack(room, due) == slacks
    assert fits(room, due) == fit
    assert surplus(room, due) == gone
    assert latest_places(room, due) == places
