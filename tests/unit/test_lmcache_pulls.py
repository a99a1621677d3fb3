"""Fetching a prefix, step by step: turns, deadlines, reads that end too late, pins that end. LMCache and NIXL are fakes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from psrl.rollout.lmcache_messages import LONGEST_LEASE_S, Done, Have, PullEnd, PullOrder, Want
from psrl.rollout.lmcache_pulls import PrefixPulls
from psrl.rollout.lmcache_source import PrefixSource
from psrl.weights.channel.nixl_agent import TransferError

pytestmark = pytest.mark.unit

SIZE = 16


class FakeTier:
    """Chunks are named by their first token; memory of chunk 7 is "7"."""

    chunk_size, layout = SIZE, "chunks"

    def __init__(self, largest_pull: int = 4, room: int = 100, here: tuple[int, ...] = ()) -> None:
        self.largest_pull, self.free, self.here = largest_pull, room, dict.fromkeys(here, "old")
        self.kept: list[Any] = []

    def hashes(self, token_ids: list[int]) -> list[int]:
        return token_ids[: len(token_ids) // SIZE * SIZE : SIZE]

    def keys(self, hashes: list[int], tags: dict[str, str]) -> list[int]:
        return list(hashes)

    def count(self, keys: list[int]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self.here), len(keys))

    def room(self, count: int) -> list[Any]:
        count = min(count, self.free)
        self.free -= count
        return [SimpleNamespace(raw_data=b"", get_size=lambda: 0) for _ in range(count)]

    def put(self, keys: list[int], chunks: list[Any]) -> None:
        self.here |= dict(zip(keys, chunks, strict=True))

    def drop(self, chunks: list[Any]) -> None:
        self.free += len(chunks)

    def keep(self, keys: list[int]) -> list[Any]:
        kept = [SimpleNamespace(data_ptr=key) for key in keys[: self.count(keys)]]
        self.kept += kept
        return kept

    def let_go(self, chunks: list[Any]) -> None:
        self.kept = [chunk for chunk in self.kept if chunk not in chunks]


class FakeRead:
    def __init__(self) -> None:
        self.state, self.released = "PROC", False
        self.looked: Callable[[], None] = lambda: None

    def done(self) -> bool:
        self.looked()
        if self.state == "ERR":
            raise TransferError("the transfer ended with an error")
        return self.state == "DONE"

    def end(self) -> None:
        assert self.state != "PROC"
        self.released = True


class FakeAgent:
    name = "agent-here"

    def __init__(self) -> None:
        self.reads: list[FakeRead] = []
        self.met: list[bytes] = []

    def metadata(self) -> bytes:
        return b"how to reach it"

    def add_peer(self, metadata: bytes) -> str:
        self.met.append(metadata)
        return "agent-there"

    def read(self, *_: Any) -> FakeRead:
        self.reads.append(FakeRead())
        return self.reads[-1]

    def progress(self) -> None:
        pass


class FakeClient:
    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.arrived: list[Any] = []
        self.broken: str | None = None
        self.trouble: str | None = None
        self.established = True

    def send(self, message: Any) -> bool:
        self.sent.append(message)
        return True

    def poll(self, timeout_s: float) -> list[Any]:
        arrived, self.arrived = self.arrived, []
        return arrived

    def close(self) -> None:
        pass


class Target:
    """A PrefixPulls and all that it knows of."""

    def __init__(self, *, pin_at_once: bool = False, **tier: Any) -> None:
        self.now = 0.0
        self.tier, self.agent = FakeTier(**tier), FakeAgent()
        self.clients: dict[str, FakeClient] = {"a": FakeClient(), "b": FakeClient()}
        self.pulls = PrefixPulls(
            self.tier,
            self.agent,
            self.clients.get,
            pin_at_once=pin_at_once,
            clock=lambda: self.now,
        )

    def start(self, pull: int, chunks: int, source: str = "a", timeout_s: float = 5.0) -> None:
        ids = list(range(100 * pull, 100 * pull + chunks * SIZE + 3))
        self.pulls.start(PullOrder(pull=pull, source=source, token_ids=ids, tags={}, timeout_s=timeout_s))
        self.pulls.poll()

    def wanted(self, source: str = "a") -> list[int]:
        return [message.pull for message in self.clients[source].sent if isinstance(message, Want)]

    def let_go(self, source: str = "a") -> list[int]:
        return [message.pull for message in self.clients[source].sent if isinstance(message, Done)]

    def answer(self, pull: int, chunks: int, source: str = "a", cause: str = "") -> None:
        have = Have(pull=pull, addresses=list(range(chunks)), agent="agent-there", metadata=b"m", cause=cause)
        self.clients[source].arrived.append(have)
        self.pulls.poll()

    def arrive(self, state: str = "DONE") -> list[PullEnd]:
        for read in self.agent.reads:
            if read.state == "PROC":
                read.state = state
        self.pulls.poll()
        return self.pulls.ended()

    def later(self, seconds: float) -> list[PullEnd]:
        self.now += seconds
        self.pulls.poll()
        return self.pulls.ended()


def test_a_prefix_is_asked_for_read_filed_and_let_go_of() -> None:
    target = Target()
    target.start(1, chunks=3)
    want = target.clients["a"].sent[0]
    assert (want.hashes, want.lease_s, want.layout) == ([100, 116, 132], 5.0, "chunks")
    target.answer(1, chunks=2)
    assert len(target.agent.reads) == 2 and target.pulls.reading and target.pulls.ended() == []
    assert target.arrive() == [PullEnd(pull=1, tokens=2 * SIZE, moved=2 * SIZE)]
    assert list(target.tier.here) == [100, 116] and target.let_go() == [1] and not target.pulls.reading
    assert all(read.released for read in target.agent.reads)


def test_what_is_here_is_not_asked_for() -> None:
    target = Target(here=(100, 116))
    target.start(1, chunks=2)
    assert target.pulls.ended() == [PullEnd(pull=1, tokens=2 * SIZE)] and target.wanted() == []
    target.start(1, chunks=3)
    assert target.clients["a"].sent[0].hashes == [132]
    target.answer(1, chunks=1)
    assert target.arrive() == [PullEnd(pull=1, tokens=3 * SIZE, moved=SIZE)]


@pytest.mark.parametrize("cause", ["", "as much as may be is kept for others already"])
def test_a_source_without_it_ends_the_pull(cause: str) -> None:
    target = Target()
    target.start(1, chunks=2)
    target.answer(1, chunks=0, cause=cause)
    assert target.pulls.ended() == [PullEnd(pull=1, cause=cause)] and target.agent.reads == []


def test_one_agent_is_met_once() -> None:
    target = Target()
    for pull in (1, 2):
        target.start(pull, chunks=1)
        target.answer(pull, chunks=1)
        target.arrive()
    assert target.agent.met == [b"m"]
    assert [message.known_agent for message in target.clients["a"].sent if isinstance(message, Want)] == [
        "",
        "agent-there",
    ]


def test_no_answer_is_given_up_and_a_late_one_let_go_of() -> None:
    target = Target()
    target.start(1, chunks=2, timeout_s=2.0)
    assert target.later(1.9) == []
    assert target.later(0.2) == [PullEnd(pull=1, cause="it took too long")]
    target.answer(1, chunks=2)
    assert target.agent.reads == [] and target.let_go() == [1, 1]


def test_bytes_that_arrive_after_the_lease_are_not_used() -> None:
    target = Target()
    target.start(1, chunks=2, timeout_s=2.0)
    target.answer(1, chunks=2)
    target.now = 2.5  # this process stood still: the read is done but nobody looked
    assert target.arrive() == [PullEnd(pull=1, cause="it took too long")]
    assert target.tier.here == {}


def test_the_lease_is_looked_at_after_the_read() -> None:
    target = Target()
    target.start(1, chunks=1, timeout_s=2.0)
    target.answer(1, chunks=1)
    target.agent.reads[0].looked = lambda: setattr(target, "now", 2.5)  # stood still just then
    assert target.arrive() == [PullEnd(pull=1, cause="it took too long")]
    assert target.tier.here == {}


def test_memory_of_a_read_that_was_given_up_is_free_only_once_it_has_ended() -> None:
    target = Target(room=2)
    target.start(1, chunks=2, timeout_s=2.0)
    target.answer(1, chunks=2)
    assert target.later(3.0)[0].cause == "it took too long"
    assert target.tier.free == 0 and target.pulls.reading and not target.pulls.close()
    target.arrive()
    assert target.tier.free == 2 and not target.pulls.reading and target.pulls.close()


def test_a_read_that_fails_ends_the_pull_and_frees_its_memory() -> None:
    target = Target(room=2)
    target.start(1, chunks=2)
    target.answer(1, chunks=2)
    target.agent.reads[0].state = "DONE"
    assert target.arrive("ERR") == [PullEnd(pull=1, cause="the transfer ended with an error")]
    target.pulls.poll()
    assert target.tier.free == 2 and target.tier.here == {}


def test_no_lease_is_longer_than_a_source_grants() -> None:
    target = Target()
    target.start(1, chunks=1, timeout_s=10 * LONGEST_LEASE_S)
    assert target.clients["a"].sent[0].lease_s == LONGEST_LEASE_S
    assert target.later(LONGEST_LEASE_S)[0].cause == "it took too long"


def test_what_finds_no_room_is_cut_or_left() -> None:
    target = Target(room=1)
    target.start(1, chunks=2)
    target.answer(1, chunks=2)
    end = target.arrive()[0]
    assert (end.moved, end.cause) == (SIZE, "there is no room for all of it here")
    target.start(2, chunks=1)
    target.answer(2, chunks=1)
    assert target.pulls.ended() == [PullEnd(pull=2, cause="there is no room for it here")]


def test_turns_bound_what_is_filled_and_one_slow_source_holds_up_nobody_for_long() -> None:
    target = Target(largest_pull=4)
    target.start(1, chunks=3, source="b")
    target.start(2, chunks=2)
    target.start(3, chunks=1)
    assert target.wanted("b") == [1] and target.wanted() == [3]  # 2 would be too much beside 1
    assert [end.pull for end in target.later(5.0)] == [1, 2, 3]
    target.start(4, chunks=9)
    assert target.clients["a"].sent[-1].hashes == [400 + SIZE * i for i in range(4)]


def test_pinned_at_once_means_asked_at_once_and_read_in_turn() -> None:
    target = Target(largest_pull=4, pin_at_once=True)
    target.start(1, chunks=3)
    target.start(2, chunks=3)
    assert target.wanted() == [1, 2]
    target.answer(1, chunks=3)
    target.answer(2, chunks=3)
    assert len(target.agent.reads) == 3
    assert [end.pull for end in target.arrive()] == [1]
    assert len(target.agent.reads) == 6
    assert [end.pull for end in target.arrive()] == [2] and target.let_go() == [1, 2]


@pytest.mark.parametrize("established", [True, False])
def test_a_lost_source_ends_its_pulls_and_is_looked_for_anew(established: bool) -> None:
    target = Target()
    target.start(1, chunks=1)
    target.start(2, chunks=1, source="b")
    lost = target.clients["a"]
    lost.established = established
    lost.broken, lost.trouble = ("the connection was lost", None) if established else (None, "nobody answers")
    target.pulls.poll()
    assert target.pulls.ended() == [PullEnd(pull=1, cause=lost.broken or lost.trouble)]
    target.clients["a"] = FakeClient()
    target.start(3, chunks=1)
    assert target.wanted() == [3] and target.wanted("b") == [2]


def test_an_unknown_source_ends_the_pull_at_once() -> None:
    target = Target()
    target.start(1, chunks=1, source="nobody")
    assert target.pulls.ended() == [PullEnd(pull=1, cause="nobody knows where it is")]


# ---- the source's side ---------------------------------------------------------------------------------------


class FakeServer:
    def __init__(self) -> None:
        self.arrived: list[tuple[bytes, Any]] = []
        self.sent: list[Any] = []
        self.lost: list[bytes] = []

    def poll(self, timeout_s: float) -> list[tuple[bytes, Any]]:
        arrived, self.arrived = self.arrived, []
        return arrived

    def send(self, peer: bytes, message: Any) -> bool:
        self.sent.append(message)
        return True

    def lost_peers(self) -> list[bytes]:
        lost, self.lost = self.lost, []
        return lost


class Source:
    def __init__(self, largest_pull: int = 4) -> None:
        self.now = 0.0
        self.tier, self.server = FakeTier(largest_pull, here=tuple(range(10))), FakeServer()
        self.side = PrefixSource(self.tier, FakeAgent(), self.server, clock=lambda: self.now)

    def hear(self, message: Any, peer: bytes = b"t") -> Any:
        self.server.arrived.append((peer, message))
        self.side.poll()
        return self.server.sent[-1] if self.server.sent else None

    def want(self, pull: int, hashes: list[int], peer: bytes = b"t", lease_s: float = 5.0, **given: Any) -> Have:
        want = Want(pull=pull, hashes=hashes, tags={}, lease_s=lease_s, **{"layout": "chunks"} | given)
        return self.hear(want, peer)


def test_chunks_are_kept_until_done_late_or_lost() -> None:
    source = Source(largest_pull=10)
    have = source.want(1, [0, 1, 2, 99, 3])
    assert have.addresses == [0, 1, 2] and (have.agent, have.metadata) == ("agent-here", b"how to reach it")
    assert source.want(1, [4], peer=b"u", known_agent="agent-here").metadata == b""
    source.want(2, [5, 6], lease_s=2.0)
    assert source.side.kept == len(source.tier.kept) == 6 and source.side.due_in_s() == 2.0
    source.now = 2.0
    source.side.poll()
    assert source.side.kept == 4 and source.side.expired == 1
    source.server.lost.append(b"u")
    source.side.poll()
    assert source.side.kept == 3
    source.hear(Done(pull=1))
    assert source.side.kept == len(source.tier.kept) == 0
    source.hear(Done(pull=1))


def test_chunks_of_another_shape_are_not_given() -> None:
    have = Source().want(1, [0], layout="others")
    assert have.addresses == [] and have.cause == "chunks there are chunks, not others"


def test_no_more_than_a_share_is_kept() -> None:
    source = Source(largest_pull=4)
    assert source.want(1, [0, 1, 2]).cause == ""
    have = source.want(2, [3, 4, 5])
    assert have.addresses == [3] and have.cause == "as much as may be is kept for others already"
    assert source.want(3, [6]).addresses == []
    source.hear(Done(pull=1))
    assert source.want(3, [6]).addresses == [6]


def test_an_end_lets_go_of_all() -> None:
    source = Source()
    source.want(1, [0, 1])
    source.side.close()
    assert source.tier.kept == []
