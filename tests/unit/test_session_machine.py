"""Whatever happens to sessions of several turns, nobody is hung for ever, nothing in flight is touched, and what is let in fits."""

from __future__ import annotations

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
    @rule(data=st.data())
    def finish(self, data) -> None:
        self.model.finish(self.one(data, self.model.in_flight()))

    @precondition(lambda self: self.model.alive)
    @rule(data=st.data(), reason=st.sampled_from(("abort", "migrated", "preempted", "refused")))
    def hand_back(self, data, reason) -> None:
        self.model.hand_back(self.one(data, self.model.alive), reason)

    @precondition(lambda self: self.model.alive)
    @rule(data=st.data())
    def report(self, data) -> None:
        self.model.report(self.one(data, self.model.alive))

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

    @rule()
    def reconnect(self) -> None:
        self.model.hello()

    @rule()
    def lose_agent(self) -> None:
        self.model.lose_agent()

    @rule()
    def restart_coordinator(self) -> None:
        self.model.restart_coordinator()

    def teardown(self) -> None:
        if hasattr(self, "model"):
            self.model.calm(ROUNDS)


def test_nobody_is_hung_for_ever_and_what_is_let_in_fits() -> None:
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
