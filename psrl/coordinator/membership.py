"""Who is there: hellos, losses, deaths, the drain, and the deadlines for all of them."""

from __future__ import annotations

import logging

from psrl.coordinator.joiners import CLAIM_GRACE_S, Joiners
from psrl.coordinator.staleness import StalenessViolation
from psrl.coordinator.views import InstanceView
from psrl.protocol import control as c

log = logging.getLogger("psrl.coordinator")


class Membership(Joiners):
    """Handlers of everything that roles and supervisors say about being there."""

    def lost(self, name: str, cause: str, now_s: float) -> None:
        """The connection of a role is gone."""
        if self.ended is not None:  # everybody leaves now
            return
        if name in self.joined:
            self._joiner_gone(name, cause)
        elif name in self.placement.instances:
            self._instance_down(name, cause)
        elif name in self.placement.agents:
            held = self.placement.held_by(name)
            for group in held:
                self._release(group, "agent_loop_lost", f"{name}: {cause}", requeue=True)
            del self.placement.agents[name]
            log.warning(
                "agent loop %s is gone (%s); its %d groups return to the queue",
                name,
                cause,
                len(held),
            )
        elif name in self.validation.validators:
            self.validation.lost(name, cause)
        elif name == self.trainer or name in self.supervisors:
            self.missing.setdefault(name, now_s + self.settings.missing_timeout_s)

    def tick(self, now_s: float) -> None:
        """Deadlines; call it at least every `coordinator_sync_interval_in_ms`. An open reservation that no agent loop
        has claimed `CLAIM_GRACE_S` after a coordinator restart returns to the queue."""
        if now_s - self.started_s >= CLAIM_GRACE_S:
            for group in self.placement.unclaimed():
                self._release(group, "unclaimed", requeue=True)
        for name in [name for name, deadline_s in self.missing.items() if now_s >= deadline_s]:
            self._unreachable(name, now_s)
        if self.draining is not None and now_s >= self.drained_by_s:
            self.end(
                "interrupted",
                f"{self.draining.reason}; the step in hand was given up after {self.draining.grace_s:g} s",
            )
        self._check_last(now_s)
        self.router.tidy(now_s)
        limit_s = self.settings.startup_timeout_s
        if not (lacking := self._lacking()):
            self.last_ready_s = now_s
        elif now_s - self.last_ready_s > limit_s:
            self.end(
                "failed",
                f"{lacking} was not there for psrl.fault_tolerance.startup_timeout_s={limit_s:g} s",
            )

    def _unreachable(self, name: str, now_s: float) -> None:
        """A supervisor or the trainer has not come back in time. Where the run goes on by itself this drains it, so that
        it can go on without that node."""
        cause = f"{name} has been unreachable for {self.settings.missing_timeout_s:g} s"
        if not self.settings.goes_on:
            self.end("failed", cause)
        elif self.trainer in self.missing:
            self.end("interrupted", cause)
        else:
            del self.missing[name]
            self._drain(name, c.Drain(reason=cause, grace_s=self.settings.drain_grace_s), now_s)

    def _lacking(self) -> str:
        """What the run cannot go on without at this moment; "" if nothing."""
        if not any(i.version >= 0 for i in self.placement.instances.values()):
            if self.pullable_version < 0:
                return "the trainer"
            if self.rollouts_turn:
                return "a rollout instance with weights"
        return "" if self.placement.agents else "an agent loop"

    # ---- hello -----------------------------------------------------------------------------------------------

    def _hello(self, sender: str, hello: c.Hello, now_s: float) -> None:
        if hello.attempt != self.settings.attempt and not hello.attempt.startswith(c.JOINER):
            self._turn_away(sender, hello, now_s)
            return
        before = len(self.outbox)
        self.missing.pop(sender, None)
        self.pids[sender] = hello.pid
        match hello.state:
            case c.InstanceState() as state:
                self._instance_hello(sender, state)
            case c.AgentState() as state:
                self._agent_hello(sender, state, now_s)
            case c.TrainerState() as state:
                self._trainer_hello(sender, state)
            case c.ValidatorState():
                self.validation.here(sender)
            case c.SupervisorState(joined=True) as state:
                self._joiner_hello(sender, state)
            case c.SupervisorState() as state:
                self.supervisors.add(sender)
                for down in state.gone:
                    self._gone_for_good(down)
        self.outbox.insert(before, (sender, self._welcome(hello, now_s)))
        if sender in self.leaving:
            self._retire(sender, "its supervisor leaves")

    def _welcome(self, hello: c.Hello, now_s: float) -> c.Welcome:
        return c.Welcome(
            epoch=self.epoch, incarnation=self.staleness.incarnation, hello_sent_s=hello.sent_s, now_s=now_s
        )

    def _turn_away(self, sender: str, hello: c.Hello, now_s: float) -> None:
        """A role of an earlier start: an orphan of a node that was lost, and no part of this run any more."""
        log.warning(
            "%s belongs to attempt %s, not to %s: it is sent away", sender, hello.attempt, self.settings.attempt
        )
        self._say(sender, self._welcome(hello, now_s))
        self._say(sender, c.Shutdown(status="failed", cause=f"attempt {hello.attempt} of this run is over"))

    def _instance_hello(self, name: str, state: c.InstanceState) -> None:
        known = self.placement.instances.get(name)
        if known is not None and known.endpoint != state.endpoint:
            self._instance_down(name, "a new start of it said hello")
            known = None
        if known is None:
            known = InstanceView(name, state.endpoint, state.max_concurrent)
            self.placement.add_instance(known)
            self.most_instances = max(self.most_instances, len(self.placement.instances))
            log.info("instance %s is here", name)
        known.version, known.incarnation, known.pulling, known.draining = (
            state.version,
            state.incarnation,
            -1,
            False,
        )
        known.leaving, known.asleep = known.leaving or state.retiring, state.asleep
        if known.leaving:
            self.retiring.add(name)
        self.lagging.consider(known)
        self.migrations.forget(name)
        self.placement.changed.add(name)
        self._announce_instances()

    def _agent_hello(self, name: str, state: c.AgentState, now_s: float) -> None:
        agent = self.placement.add_agent(name)
        held = {h.group: h for h in state.held}
        self.waiting_routes.forget(name)  # it asks again for all that look for a place
        if self.gate is not None:
            self.gate.forget_agent([group for group, held_by in self.placement.groups.items() if held_by.agent == name])
        for group, open_group in list(self.placement.groups.items()):
            if group in held:
                self.placement.claim(group, name, held[group].on)
            elif open_group.agent == name:
                self._release(
                    group,
                    "agent_loop_lost",
                    "it came back without the group",
                    requeue=True,
                )
        for h in state.held:
            if h.group not in agent.groups:  # sealed in the ledger already, or released: nothing is left to do for it
                self._say(name, c.GroupAbort(groups=[h.group], reason="closed"))
            elif h.done is not None:
                self._group_done(name, h.done, now_s)
        self._say(
            name,
            c.Instances(instances=[i.info() for i in self.placement.instances.values()]),
        )

    def _trainer_hello(self, name: str, state: c.TrainerState) -> None:
        self.trainer = name
        try:
            starts = self.staleness.start(state.resumed_from, state.start_nonce)
        except StalenessViolation as error:  # of its checkpoint, not of ours: a restart would meet it again
            self.end("failed", f"{name} cannot go on: {error}")
            return
        if starts:
            # A new trainer: what its checkpoint does not cover is open again, every instance must pull again.
            for group in list(self.placement.groups):
                self._abort(group, "restart")
            self.waiting_routes.clear()
            self._apply_all(starts)
            self.validation.restart(self.staleness.version)
            log.info(
                "incarnation %d starts at version %d",
                self.staleness.incarnation,
                self.staleness.version,
            )
        self.pullable_version = -1
        self._weights_published(state.published)
        if record := self.staleness.checkpoint(state.checkpoint):
            self._apply(record)
        self.wanted = None
        if state.wants >= 0:
            self.wanted = c.WantBuffer(
                buffer=state.wants, incarnation=self.staleness.incarnation, taken=state.taken, count=state.count
            )

    # ---- deaths, drain, end ----------------------------------------------------------------------------------

    def _leaving(self, sender: str, message: c.Leaving, now_s: float) -> None:
        self.lost(sender, message.reason or "left", now_s)

    def _child_down(self, sender: str, down: c.ChildDown, now_s: float) -> None:
        log.warning(
            "%s %s ended by %s%s",
            down.role,
            down.name,
            down.cause,
            "; it is started again" if down.restarting else "",
        )
        self.counters[f"deaths/{down.role}"] += 1
        if self.pids.get(down.name) == down.pid:
            self.lost(down.name, down.cause, now_s)
        if not down.restarting:
            if sender in self.joined:
                self._joined_child_gone(sender, down.name)
            else:
                self._gone_for_good(down)
            self._check_last(now_s)

    def _gone_for_good(self, down: c.ChildDown) -> None:
        """A role that the run counts on has no restart left: without a trainer rank the run ends."""
        if down.role == "trainer":
            self.end("failed", f"{down.name} ended by {down.cause}")
        elif down.role == "validator":
            self.validation.gone_for_good(down.name)
        elif down.role in self.gone_for_good:
            self.gone_for_good[down.role][down.name] = down.cause

    def _fatal(self, sender: str, fatal: c.Fatal, now_s: float) -> None:
        """The run ends, unless the sender joined: then its node may be at fault, and all that joined with it go."""
        if joiner := self._joiner_of(sender):
            self._refuse(joiner, f"{sender}: {fatal.cause}")
        else:
            self.end("failed", f"{sender}: {fatal.cause}")

    def _drain(self, sender: str, drain: c.Drain, now_s: float) -> None:
        if self.draining is not None:
            return
        if self.training_done:  # it only waits for the last validation
            self.end("completed", "")
            return
        log.warning("draining: %s", drain.reason)
        self.draining, self.drained_by_s = drain, now_s + drain.grace_s
        if self.trainer:
            self._say(self.trainer, c.DrainNow(reason=drain.reason, grace_s=drain.grace_s))
        else:
            self.end("interrupted", drain.reason)

    def _trainer_done(self, sender: str, done: c.TrainerDone, now_s: float) -> None:
        if done.drained:
            self.end("interrupted", self.draining.reason if self.draining else "drained")
        else:
            self.training_done = True
            self.validation.finish(done.version, now_s)

    # ---- validation ------------------------------------------------------------------------------------------

    def _validation_done(self, sender: str, done: c.ValidationDone, now_s: float) -> None:
        self.validation.done(sender, done, now_s)

    def _validation_failed(self, sender: str, failed: c.ValidationFailed, now_s: float) -> None:
        self.validation.failed(sender, failed)

    def _validate(self, now_s: float) -> None:
        """Begin a validation that is due; end the run once training and its last validation are done."""
        newest = self.staleness.version if self.pullable_version >= self.staleness.version else -1
        self.outbox += self.validation.look(newest, self.staleness.incarnation, now_s)
        if self.training_done and self.validation.finished(now_s):
            self.end("completed", "")
