"""ThunderAgent's arithmetic and decisions, worked out by hand."""

from __future__ import annotations

import math

import pytest

from psrl.coordinator.sessions.account import Account
from psrl.coordinator.sessions.session import AWAY, GENERATING, Session
from psrl.coordinator.sessions.settings import SessionSettings
from psrl.coordinator.sessions.thunder import Holder, Room, next_bucketed, next_global, to_hang

pytestmark = pytest.mark.unit


def session(group: int, tokens: int, state: str = GENERATING, sample: int = 0, prompt: int = 0) -> Session:
    return Session(group, sample, 0, prompt, tokens, state, "i")


def account(*sessions: Session, capacity: int = 1000, **settings) -> Account:
    made = Account(SessionSettings(**{"buffer_per_session": 0, **settings}), capacity)
    for one in sessions:
        made.add(one)
    return made


@pytest.mark.parametrize(
    ("sessions", "settings", "remaining"),
    [
        ([], {}, 1000),
        ([session(0, 300), session(1, 200, AWAY)], {}, 500),  # 1000 - (300 + 200)
        ([session(0, 300), session(1, 200, AWAY)], {"env_token_weight": 0.5}, 600),  # 1000 - (300 + 100)
        ([session(0, 300), session(1, 200, AWAY)], {"env_token_weight": 0.0}, 700),
        ([session(0, 300), session(1, 200, AWAY)], {"buffer_per_session": 100}, 300),  # 2 x 100 more
        # two samples of one group share 100 tokens of prompt, a third one is of another group
        ([session(0, 300, sample=0, prompt=100), session(0, 250, sample=1, prompt=100), session(1, 120, prompt=100)], {}, 430),
        # the prompt counts once, as of the one that counts most: 300 + 0.5 x 250 - 0.5 x 100
        ([session(0, 300, prompt=100), session(0, 250, AWAY, sample=1, prompt=100)], {"env_token_weight": 0.5}, 625),
        # both are away: 0.5 x (300 + 250) - 0.5 x 100
        ([session(0, 300, AWAY, prompt=100), session(0, 250, AWAY, sample=1, prompt=100)], {"env_token_weight": 0.5}, 775),
        ([session(0, 900), session(1, 400)], {}, -300),
        ([session(0, 900)], {"capacity": 0}, math.inf),  # nobody has said how much there is
    ],
)  # fmt: skip
def test_what_remains(sessions, settings, remaining) -> None:
    assert account(*sessions, **settings).remaining == remaining


def test_what_is_reported_beyond_the_beginnings_of_turns_counts_until_the_turn_ends() -> None:
    one, other = session(0, 300), session(1, 200)
    a = account(one, other)
    a.report(1000, 580)
    assert a.remaining == 420
    a.settle(50)  # one of them ended its turn with 50 tokens more, which its own tokens say from now on
    assert a.remaining == 470
    a.report(1000, 400)  # older than the sessions are
    assert a.remaining == 500
    a.remove(one)
    a.remove(other)
    assert a.remaining == 1000 and a.idle


@pytest.mark.parametrize("copies", [True, False])
def test_a_prompt_counts_as_often_as_the_engine_holds_it(copies) -> None:
    a = account(session(0, 300, sample=0, prompt=100), session(0, 300, sample=1, prompt=100))
    assert a.remaining == 500
    a.report(1000, 600 if copies else 500)
    assert a.remaining == (400 if copies else 500)


def test_what_a_session_needs_and_frees() -> None:
    first, second = session(0, 300, prompt=100), session(0, 250, AWAY, sample=1, prompt=100)
    a = account(first, buffer_per_session=10, env_token_weight=0.5)
    assert a.needs(second) == 160  # its prompt is there: 250 - 100 + 10
    assert a.needs(session(1, 250, prompt=100)) == 260
    a.add(second)  # 0.5 x 250 + 10 - 0.5 x 100
    assert a.frees(second) == 85
    assert a.frees(first) == 260  # 300 + 10, but the prompt counts half as that of the second: + 50 - 100
    assert a.after(second) == 1000 - 310 - 160
    before = a.remaining
    a.remove(second)
    assert a.remaining - before == 85


@pytest.mark.parametrize(
    ("sessions", "usual", "admitted"),
    [
        ([], 5000, True),  # nobody is there
        ([session(0, 850)], 0, True),  # 850 + 10 are held, 100 + 4 x 10 come
        ([session(0, 851)], 0, False),
        ([session(0, 100), session(1, 100)], 430, True),  # they are small now, 430 each later
        ([session(0, 100), session(1, 100)], 431, False),
        ([session(0, 800), session(1, 40)], 100, True),  # they hold more than is usual
        ([session(0, 800), session(1, 41)], 100, False),
    ],
)
def test_where_a_group_may_begin(sessions, usual, admitted) -> None:
    assert account(*sessions, buffer_per_session=10).admits_group(100, 4, usual) is admitted


def holders(*given: tuple[str, int]) -> list[Holder]:
    return [Holder((number, 0), state, tokens, float(tokens)) for number, (state, tokens) in enumerate(given)]


@pytest.mark.parametrize(
    ("remaining", "given", "chosen"),
    [
        (0, [(AWAY, 10)], []),  # nothing is missing
        (-1, [(GENERATING, 100), (AWAY, 500)], [1]),  # who is away goes first, however large
        (-1, [(AWAY, 500), (AWAY, 100)], [1]),  # the smallest of them
        (-150, [(AWAY, 500), (AWAY, 100)], [1, 0]),  # as many as needed
        (-100, [(AWAY, 500), (AWAY, 100)], [1]),  # and no more
        (-1, [(GENERATING, 300), (GENERATING, 100), (GENERATING, 200)], [1]),  # then the smallest that generate
        (-350, [(GENERATING, 300), (AWAY, 100), (GENERATING, 200)], [1, 2, 0]),
        (-9999, [(GENERATING, 300), (AWAY, 100)], [1, 0]),  # all of them, if that is not enough either
        (-1, [(AWAY, 100), (AWAY, 100)], [0]),  # equals: the older group
    ],
)
def test_who_hangs(remaining, given, chosen) -> None:
    assert [key[0] for key in to_hang(remaining, holders(*given))] == chosen


@pytest.mark.parametrize(
    ("remaining", "idle", "waiting", "chosen"),
    [
        (100, False, [], None),
        (100, False, [300, 90], 1),  # the smallest
        (100, False, [300, 100], 1),  # it just fits
        (100, False, [300, 101], None),
        (100, True, [300, 101], 1),  # nobody is there: it goes on though it does not fit
        (500, False, [200, 200], 0),  # equals: the older group
    ],
)
def test_who_goes_on_where_it_was(remaining, idle, waiting, chosen) -> None:
    asked = [(tokens, (number, 0)) for number, tokens in enumerate(waiting)]
    key = next_bucketed(Room("i", remaining, idle), asked, lambda k: waiting[k[0]])
    assert key == (None if chosen is None else (chosen, 0))


@pytest.mark.parametrize(
    ("rooms", "waiting", "chosen"),
    [
        ({"a": 500, "b": 350}, [90, 300], (1, "b")),  # the largest first, where it leaves least
        ({"a": 500, "b": 250}, [90, 300], (1, "a")),  # it fits into one only
        ({"a": 200, "b": 100}, [90, 300], (0, "b")),  # the largest that fits anywhere
        ({"a": 300, "b": 300}, [300], (0, "a")),
        ({"a": 80, "b": 10}, [90, 300], None),
        ({"a": 80, "b-idle": 10}, [90, 300], (1, "b-idle")),  # nobody is there
        ({"a": 80, "b-old": 900}, [90, 300], None),  # its weights are too old
        ({}, [90], None),
    ],
)
def test_who_goes_on_where_it_fits_best(rooms, waiting, chosen) -> None:
    found = next_global(
        [Room(name, float(remaining), "idle" in name) for name, remaining in rooms.items()],
        [(tokens, (number, 0)) for number, tokens in enumerate(waiting)],
        lambda key, name: waiting[key[0]],
        lambda key, name: "old" not in name,
    )
    assert found == (None if chosen is None else ((chosen[0], 0), chosen[1]))
