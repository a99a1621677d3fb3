"""The coordinator's decisions: messages in, messages and journal records out. No I/O, no clock, no threads.

The service around it journals `records` before it sends `outbox`, so that whatever another role learns is already
durable. A simulator can drive the same class on a virtual clock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, ClassVar

from psrl.coordinator.dispatch import Dispatch
from psrl.coordinator.joiners import CLAIM_GRACE_S
from psrl.coordinator.membership import Membership
from psrl.coordinator.records import REASON_FILTERED, REASON_STRAGGLER
from psrl.coordinator.staleness import Entry
from psrl.coordinator.state import Settings
from psrl.coordinator.stragglers import RETRY
from psrl.coordinator.turns import Turns
from psrl.coordinator.upkeep import QUARANTINE_S, Upkeep
from psrl.protocol import control as c

__all__ = ["CLAIM_GRACE_S", "QUARANTINE_S", "Coordinator", "Settings"]

log = logging.getLogger("psrl.coordinator")


class Coordinator(Dispatch, Upkeep, Turns):
    """One run's coordinator. Feed it with `handle`, `lost`, `tick`; take `records` and `outbox` after each.

    `RunState` holds what is known, `Joiners` who comes and goes, `Membership` who is there, `Dispatch` who makes what,
    `Upkeep` who pulls, `Turns` who has shared GPUs; here is what happens to groups and buffers.
    """

    # ---- what the service calls ------------------------------------------------------------------------------

    def handle(self, sender: str, message: c.Message, now_s: float) -> None:
        """One message of the role named `sender`. `advance` follows once for many."""
        if self.ended is not None:
            self._say(sender, self.ended)
            return
        self.HANDLERS[type(message)](self, sender, message, now_s)

    def advance(self, now_s: float) -> None:
        """Everything that can go on now does: pulls, waiting samples, new groups, the next buffer."""
        if self.ended is None:
            self._validate(now_s)
        if self.ended is not None:
            return
        whole = self._look(now_s)
        self._route_waiting(now_s)
        self._dismiss()
        if self.draining is None:
            self._dispatch(now_s)
            self._ship()
            self._hurry()
        self._give_turn()
        self._pull_idle(now_s, whole)

    # ---- groups ----------------------------------------------------------------------------------------------

    def _group_failed(self, sender: str, failed: c.GroupFailed, now_s: float) -> None:
        open_group = self.placement.groups.get(failed.group)
        if open_group is None:
            return
        position = open_group.position
        self.counters[failed.reason] += 1
        if failed.reason == REASON_FILTERED:
            self._release(failed.group, failed.reason, failed.detail, requeue=False)
            if cause := self.filter_budget.verdict():
                self.end("failed", cause)
            return
        self.counters[f"{failed.reason}/prompt_{position.prompt}"] += 1
        retry = failed.retry and position.attempt < self.settings.max_group_retries
        verdict = "it is tried again" if retry else "it is dropped and replaced"
        log.warning(
            "group %d (prompt %d): %s: %s; %s",
            failed.group,
            position.prompt,
            failed.reason,
            failed.detail,
            verdict,
        )
        self._release(failed.group, failed.reason, failed.detail, requeue=retry)

    def _sample_ends(self, sender: str, message: c.SampleEnds, now_s: float) -> None:
        for kind, tokens in message.ends:
            self.counters[f"samples/{kind}"] += 1
            self.counters[f"response_tokens/{kind}"] += tokens

    def _hurry(self) -> None:
        """Do something about the groups that hold up the trainer."""
        for group in self.stragglers.choose(self.staleness, self.wanted.buffer if self.wanted else -1):
            if self.settings.straggler_method == RETRY:
                self.counters["retried"] += 1
                self._abort(group, REASON_STRAGGLER)
                self._release(group, REASON_STRAGGLER, requeue=True)
            elif agent := self.placement.groups[group].agent:
                self.counters["truncated"] += 1
                self._say(agent, c.GroupTruncate(groups=[group]))

    # ---- trainer ---------------------------------------------------------------------------------------------

    def _want_buffer(self, sender: str, want: c.WantBuffer, now_s: float) -> None:
        if want.incarnation == self.staleness.incarnation:
            self.wanted = want

    def _ship(self) -> None:
        """Give the trainer what it wants of its buffer as soon as that is there, or tell it that there is none left."""
        want = self.wanted
        if want is None:
            return
        buffer, state = want.buffer, self.staleness
        if self.prompts.exhausted and not state.num_open and not state.ready(buffer):
            self._apply_all(state.end_of_data(self.settings.drop_last))
        if state.data_ended(buffer):
            self._send_buffer(want, [], last=True)
            return
        # What was cut before and is asked for again: the answer was lost with a coordinator.
        if len(state.taken_groups(buffer)) == want.taken and (take := state.take(buffer, want.count or None)):
            self._apply(take)
        cut = state.taken_groups(buffer)
        if len(cut) < want.taken:
            self.end("failed", f"the trainer has {want.taken} groups of buffer {buffer}, the ledger cut {len(cut)}")
        elif len(cut) > want.taken or state.is_taken(buffer):
            part = cut[want.taken : want.taken + want.count if want.count else None]
            self._send_buffer(want, part, last=state.is_taken(buffer) and want.taken + len(part) == len(cut))

    def _send_buffer(self, want: c.WantBuffer, entries: list[Entry], *, last: bool) -> None:
        self.wanted = None
        groups = [
            c.TakenGroup(
                group=e.group,
                prompt=e.prompt,
                data_epoch=e.data_epoch,
                version=e.version,
                ref=e.ref,
            )
            for e in entries
        ]
        message = c.Buffer(
            buffer=want.buffer,
            groups=groups,
            counters=dict(self.counters),
            first=want.taken,
            last=last,
            filled_s=self.filled_s.get(want.buffer, -1.0),
        )
        self._say(self.trainer, message)

    def _published(self, sender: str, published: c.Published, now_s: float) -> None:
        if published.incarnation == self.staleness.incarnation:
            self._weights_published(published.version)

    def _checkpoint_done(self, sender: str, done: c.CheckpointDone, now_s: float) -> None:
        if record := self.staleness.checkpoint(done.version):
            self._apply(record)

    HANDLERS: ClassVar[dict[type, Callable[[Any, str, Any, float], None]]] = {
        c.Hello: Membership._hello,
        c.Leaving: Membership._leaving,
        c.Fatal: Membership._fatal,
        c.ChildDown: Membership._child_down,
        c.Drain: Membership._drain,
        c.Leave: Membership._leave,
        c.InstanceStatus: Upkeep._instance_status,
        c.PullStarted: Upkeep._pull_started,
        c.Switching: Upkeep._switching,
        c.PullDone: Upkeep._pull_done,
        c.PullFailed: Upkeep._pull_failed,
        c.SampleMoves: Upkeep._sample_moves,
        c.RouteRequest: Dispatch._route_request,
        c.TurnsEnded: Dispatch._turns_ended,
        c.GroupDone: Membership._group_done,
        c.GroupFailed: _group_failed,
        c.SampleEnds: _sample_ends,
        c.WantBuffer: _want_buffer,
        c.Published: _published,
        c.CheckpointDone: _checkpoint_done,
        c.TrainerDone: Membership._trainer_done,
        c.ValidationDone: Membership._validation_done,
        c.ValidationFailed: Membership._validation_failed,
    }
