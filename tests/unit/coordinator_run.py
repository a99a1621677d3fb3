"""A coordinator with the other roles' words, on a clock of the test's own."""

from __future__ import annotations

import dataclasses

from psrl.coordinator.core import Coordinator, Settings
from psrl.coordinator.placement import check_consistent
from psrl.coordinator.prompts import PromptSource
from psrl.coordinator.routing.request_num_balance import RequestNumBalance
from psrl.coordinator.staleness import Staleness
from psrl.protocol import control as c
from psrl.protocol.samples import SampleRef

SETTINGS = Settings(
    samples_per_group=4,
    partial_rollout=True,
    max_concurrent=1024,
    reject_on_waiting=True,
    max_group_retries=1,
    drop_last=True,
    num_instances=1,
    num_agents=1,
    max_instances=100,
    startup_timeout_s=100.0,
    missing_timeout_s=10.0,
    drain_grace_s=30.0,
    goes_on=False,
    attempt="",
)


class Run:
    """A coordinator and the other roles' words; `said` are the messages since the last look."""

    def __init__(
        self, *, buffer_entries: int = 2, staleness: int = 1, steps: int = 4, prompts: int = 100, **changes
    ) -> None:
        self.now = 0.0
        self.records: list = []
        state = Staleness(buffer_entries=buffer_entries, staleness=staleness, total_steps=steps)
        source = PromptSource(num_prompts=prompts, seed=0, shuffle=False)
        settings = dataclasses.replace(SETTINGS, **changes)
        self.core = Coordinator(settings, state, source, RequestNumBalance(), epoch=1, now_s=0.0)

    def tell(self, sender: str, *messages: c.Message) -> list[tuple[str, c.Message]]:
        for message in messages:
            self.core.handle(sender, message, self.now)
        return self.settle()

    def settle(self) -> list[tuple[str, c.Message]]:
        self.core.advance(self.now)
        check_consistent(self.core.placement, (r.group for r in self.core.staleness.open_groups()))
        self.records += self.core.records
        said, self.core.outbox, self.core.records = self.core.outbox, [], []
        return said

    def hello(self, role: str, name: str, state=None) -> list[tuple[str, c.Message]]:
        return self.tell(name, c.Hello(role=role, name=name, node="n", pid=1, sent_s=self.now, state=state))

    def instance(
        self, name: str, version: int = -1, incarnation: int = 0, endpoint: str = ""
    ) -> list[tuple[str, c.Message]]:
        state = c.InstanceState(
            endpoint=endpoint or f"tcp://{name}", version=version, incarnation=incarnation, max_concurrent=64
        )
        return self.hello("instance", name, state)

    def trainer(
        self, published: int = 0, resumed_from: int = 0, nonce: str = "a", wants: int = -1
    ) -> list[tuple[str, c.Message]]:
        return self.hello(
            "trainer",
            "trainer-0",
            c.TrainerState(published=published, resumed_from=resumed_from, start_nonce=nonce, wants=wants),
        )

    def pulled(self, name: str, version: int, incarnation: int = 0) -> list[tuple[str, c.Message]]:
        return self.tell(name, c.PullDone(version=version, incarnation=incarnation, pull_s=0.1, pause_s=0.01, nbytes=1))

    def finish(self, group: int) -> list[tuple[str, c.Message]]:
        return self.tell("agent-loop-0", done(group))


def done(group: int) -> c.GroupDone:
    return c.GroupDone(group=group, ref=SampleRef("s", 0, 1, 0, [4] * 4), reward_mean=0.5, response_tokens=8)


def of(said: list[tuple[str, c.Message]], kind: type) -> list:
    return [message for _, message in said if isinstance(message, kind)]


def assigned(said: list[tuple[str, c.Message]]) -> list[c.Assignment]:
    return [a for m in of(said, c.Assign) for a in m.groups]


def started(**kwargs) -> tuple[Run, list[c.Assignment]]:
    """Trainer at version 0, two instances that hold it, one agent loop: the first assignments."""
    run = Run(**kwargs)
    run.trainer()
    for name in ("instance-0", "instance-1"):
        run.instance(name)
        run.pulled(name, 0)
    return run, assigned(run.hello("agent_loop", "agent-loop-0", c.AgentState()))


def restarted(run: Run, **kwargs) -> Run:
    """The coordinator's next start, with the same `kwargs` as the first: only what the journal holds is left."""
    again = Run(**kwargs)
    for record in run.records:
        again.core.staleness.apply(record)
        again.core.prompts.apply(record)
    again.core = Coordinator(
        again.core.settings, again.core.staleness, again.core.prompts, RequestNumBalance(), epoch=2, now_s=0.0
    )
    again.records = list(run.records)
    return again
