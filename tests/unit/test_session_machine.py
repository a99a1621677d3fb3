"""Whatever happens to sessions of several turns, nobody is hung for ever, nothing in flight is touched, and what is let in fits."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from session_model import ENV, Sessions

pytestmark = pytest.mark.unit

ROUNDS = 400
"""Of the calm end; each sample that is there takes three of them when nothing holds it back."""


class Machine(RuleBasedStateMachine):
    @initialize(
        capacity=st.sampled_from((60, 120, 300, 1000)),
        sticky=st.booleans(),
        scope=st.sampled_from(("bucketed", "global")),
        weight=st.sampled_from((0.0, 0.5, 1.0)),
        pin=st.booleans(),
        places=st.sampled_from((2, 4, 64)),
    )
    def begin(self, capacity, sticky, scope, weight, pin, places) -> None:
        sticky = sticky and scope == "bucketed"
        self.model = Sessions(
            capacity=capacity, sticky=sticky, scope=scope, env_token_weight=weight, force_pin=pin, max_concurrent=places
        )

    def one(self, data, keys):
        return data.draw(st.sampled_from(sorted(keys)))

    @precondition(lambda self: self.model.in_flight())
    @rule(data=st.data(), grown=st.integers(1, 40))
    def end_turn(self, data, grown) -> None:
        self.model.end_turn(self.one(data, self.model.in_flight()), grown)

    @precondition(lambda self: self.model.at(ENV))
    @rule(data=st.data(), added=st.integers(0, 30))
    def come_back(self, data, added) -> None:
        self.model.come_back(self.one(data, self.model.at(ENV)), added)

    @precondition(lambda self: self.model.in_flight())
    @rule(grown=st.integers(1, 40))
    def end_all_turns(self, grown) -> None:
        for key in self.model.in_flight():
            self.model.end_turn(key, grown)

    @precondition(lambda self: self.model.at(ENV))
    @rule(added=st.integers(0, 30))
    def all_come_back(self, added) -> None:
        for key in self.model.at(ENV):
            self.model.come_back(key, added)

    @precondition(lambda self: self.model.in_flight())
    @rule(data=st.data())
    def finish(self, data) -> None:
        self.model.finish(self.one(data, self.model.in_flight()))

    @precondition(lambda self: self.model.alive)
    @rule(data=st.data(), reason=st.sampled_from(("abort", "migrated", "preempted", "refused")))
    def hand_back(self, data, reason) -> None:
        self.model.hand_back(self.one(data, self.model.alive), reason)

    @precondition(lambda self: self.model.alive)
    @rule(data=st.data(), grown=st.integers(0, 20))
    def report(self, data, grown) -> None:
        self.model.report(self.one(data, self.model.alive), grown)

    @precondition(lambda self: self.model.orders)
    @rule(data=st.data())
    def pull(self, data) -> None:
        self.model.pull(self.one(data, self.model.orders))

    @precondition(lambda self: len(self.model.alive) > 1)
    @rule(data=st.data())
    def kill(self, data) -> None:
        self.model.kill(self.one(data, self.model.alive))

    @precondition(lambda self: len(self.model.alive) < len(self.model.names))
    @rule(data=st.data())
    def start(self, data) -> None:
        self.model.start(self.one(data, set(self.model.names) - self.model.alive.keys()))

    @precondition(lambda self: len(self.model.alive) > 1 and len(self.model.names) == 3)
    @rule(data=st.data())
    def leave(self, data) -> None:
        self.model.leave(self.one(data, self.model.alive))

    @rule()
    def train(self) -> None:
        self.model.train()

    @rule(seconds=st.sampled_from((0.1, 2.0)))
    def pass_time(self, seconds) -> None:
        self.model.pass_time(seconds)

    @rule(what=st.sampled_from(("hello", "lose_agent", "restart_coordinator")))
    def begin_anew(self, what) -> None:
        """One rule for all: each makes the coordinator forget what little has come together since the last one."""
        getattr(self.model, what)()

    def teardown(self) -> None:
        if hasattr(self, "model"):
            self.model.calm(ROUNDS)


def test_nobody_is_hung_for_ever_and_what_is_let_in_fits() -> None:
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_one_token_too_many_hangs_the_smallest_until_somebody_is_over() -> None:
    model = Sessions(capacity=120, instances=1, staleness=0)
    everybody = [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert model.in_flight() == everybody
    for key in everybody:
        model.end_turn(key, 10)
    assert model.promised("i0") == 2 * 20 + 4 * (10 + 10) == model.capacity and not model.ever_hung
    model.come_back((1, 1), 1)
    assert model.ever_hung == {(0, 0)} and model.in_flight() == [(1, 1)]
    for key in everybody[:3]:
        model.come_back(key, 0)
    assert model.at("") == [(0, 0)]
    model.finish((0, 1))
    assert model.in_flight() == [(0, 0), (1, 0), (1, 1)]


def moves(seed: int, **settings) -> tuple[Sessions, int]:
    """Turns alone: no instance ends, no weights are new, every place is free. So whoever comes back and is not let in at once
    was hung; returns how many were."""
    choice = random.Random(seed)
    model, held_back = Sessions(**settings), 0
    for _ in range(80):
        away, turns = model.at(ENV), model.in_flight()
        if away and (not turns or choice.random() < 0.5):
            key = choice.choice(away)
            model.come_back(key, choice.randrange(10))
            held_back += model.samples[key].where == ""
        elif model.samples[key := choice.choice(turns)].turns < 3:
            model.end_turn(key, choice.randrange(1, 20))
        else:
            model.finish(key)
    return model, held_back


@pytest.mark.parametrize("scope", ["bucketed", "global"])
@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(2))
def test_sessions_hang_where_kv_is_short_and_only_there(seed, weight, scope) -> None:
    sizes = {"sticky": scope == "bucketed", "scope": scope, "env_token_weight": weight}
    short, held_back = moves(seed, capacity=100, **sizes)
    assert held_back and len(short.ever_hung) > 1
    short.calm(ROUNDS)
    ample, held_back = moves(seed, capacity=100_000, **sizes)
    assert not held_back and not ample.ever_hung
