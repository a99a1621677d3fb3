"""A rollout instance: one engine, the agent loops that it serves, and the weights that it pulls. One loop, never blocked.

Each round: read messages, switch to new weights if they have arrived, decode one step, hand the tokens out.
"""

from __future__ import annotations

import logging
import os
import time
from collections import defaultdict

from psrl.colocate.gpu_lock import TurnError
from psrl.colocate.turn import InstanceTurn, instance_turn
from psrl.config.cache_blocks import cache_block_size
from psrl.models.resolve import run_model
from psrl.net.link import CoordinatorGoneError, CoordinatorLink
from psrl.net.server import Server
from psrl.net.waiting import wait
from psrl.protocol import control as c
from psrl.protocol.generation import (
    FINISH_ABORT,
    FINISH_MIGRATED,
    FINISH_PREEMPTED,
    FINISH_REFUSED,
    AbortRequest,
    EngineStats,
    GenerateRequest,
    TokenChunk,
    TokenChunks,
)
from psrl.role import Role, run_role, start_role
from psrl.rollout.engines.base import Engine
from psrl.rollout.held_blocks import HeldBlocks
from psrl.rollout.make_engine import make_engine
from psrl.rollout.make_puller import make_engine_puller
from psrl.rollout.preemption import PreemptionWatch
from psrl.rollout.status_reports import StatusReports
from psrl.rollout.stream import join_chunks
from psrl.rundir.keys import load_keys
from psrl.telemetry.timeline import BUSY, PULL, SLEEP, SWITCH, WAKE, WORK, Timeline
from psrl.weights.channel.background import BackgroundPull
from psrl.weights.channel.base import PullError, Staged

log = logging.getLogger("psrl.instance")

STREAM_INTERVAL_S = 0.05
"""Tokens of unfinished samples reach the agent loop at least this often: all that a SIGKILL can cost."""
PULL_POLL_S = 0.002
"""While idle, how soon weights that have arrived, or a GPU that is free, are seen."""
MOST_BLOCK_NAMES = 4096
"""In one report of what the prefix cache holds: some 36 KB. The rest comes with the next."""
RETIRE_GRACE_S = 10.0
"""A retiring instance leaves after this even if it is not dismissed: then an agent loop or the coordinator is gone."""


class Instance:
    """The shell around an engine. Tokens of unfinished samples are streamed, so nothing is lost with this process."""

    def __init__(self, role: Role, engine: Engine, turn: InstanceTurn | None = None) -> None:
        """`turn`: where the GPU is shared with the trainer; `engine` sleeps then."""
        limits = role.config.psrl.fault_tolerance
        keys = load_keys(role.run_dir)
        self.role = role
        self.engine = engine
        self.turn = turn or InstanceTurn(None, limits.turn_timeout_s)
        self.server = Server(
            keys,
            role.address,
            GenerateRequest | AbortRequest,
            name=role.name,
            heartbeat_interval_s=limits.heartbeat_interval_s,
            heartbeat_timeout_s=limits.heartbeat_timeout_s,
        )
        self.link = CoordinatorLink(role.run_dir, "instance", role.name, self._state, limits)
        self.pull = BackgroundPull(make_engine_puller(role, engine), role.config.psrl.weights.pull_timeout_s)
        self.timeline = Timeline(role.run_dir.timeline / f"{role.name}.{os.getpid()}.jsonl", "instance", name=role.name)
        self.incarnation = 0
        self.order: c.Pull | None = None
        self.staged: Staged | None = None
        self.pull_forgotten = False
        """The pull that goes on was ordered before a sleep: its outcome is of no use."""
        self.owner: dict[int, bytes] = {}
        self.outstanding: dict[int, int] = defaultdict(int)
        self.pending: dict[bytes, list[TokenChunk]] = defaultdict(list)
        self.next_stream = 0.0
        status = role.config.psrl.status_collection
        self.reports = StatusReports(status.engine_sync_interval_in_ms / 1000 if status.enable else 0.0)
        self.cached = HeldBlocks()
        """What the engine's prefix cache holds, and what of it the coordinator does not know yet."""
        self.tells_cached = cache_block_size(role.config) > 0
        self.preemption = PreemptionWatch(
            role.config.psrl.rollout_coordination.routing_strategy.max_num_waiting_reqs_after_preemption
        )
        self.at_switch = EngineStats()
        """Counters at the last switch."""
        self.retire_by: float | None = None
        """Monotonic time; set once this instance retires: it generates no more and refuses what comes."""
        self.over = ""
        """Why this process ends, once it does."""

    def _state(self) -> c.InstanceState:
        return c.InstanceState(
            endpoint=self.server.endpoint,
            version=self.engine.version,
            incarnation=self.incarnation,
            max_concurrent=self.role.config.gen_actor_rollout_ref.rollout.max_num_seqs,
            retiring=self.retire_by is not None,
            asleep=self.turn.asleep and not self.turn.waiting,
        )

    def run(self) -> None:
        """Serve until the run is over, or until this instance has retired."""
        self.link.open()
        self.timeline.set_offset(self.link.clock_offset_s)
        while not self.over:
            self._wait()
            self._hear_coordinator()
            self._wake()
            self._hear_agents()
            self._follow_pull()
            self._decode()
            self._stream()
            self._report()
        self._stream(now=True)
        log.info("%s", self.over)

    def close(self) -> None:
        self.pull.close()
        self.timeline.close()
        self.link.close("leaving")
        self.server.close()
        self.engine.close()

    def _wait(self) -> None:
        """Until there is something to do. An engine that decodes in this process always has, while it has work."""
        if self.engine.due_in_s() <= 0:
            return
        begun, working = time.monotonic(), self.engine.has_work()
        quiet_s = min(1.0, self.reports.due_in_s(self.engine.stats(), begun, self.cached.has_news))
        if self.pending:
            quiet_s = min(quiet_s, max(0.0, self.next_stream - begun))
        wait([self.server, self.link, self.engine], PULL_POLL_S if self.pull.busy or self.turn.waiting else quiet_s)
        if working:
            self.timeline.add(BUSY, begun, time.monotonic())

    def _decode(self) -> None:
        begun, working = time.monotonic(), self.engine.has_work()
        self._keep(self.engine.step())
        if working:
            self.timeline.add(BUSY, begun, time.monotonic())
            if self.preemption.hands_back(self.engine.stats()):
                self._return(self.engine.abort_waiting(), FINISH_PREEMPTED)

    # ---- messages --------------------------------------------------------------------------------------------

    def _hear_coordinator(self) -> None:
        for message in self.link.poll(0.0):
            match message:
                case c.Pull():
                    self.order = message
                case c.HandBack():
                    self._hand_back(FINISH_MIGRATED)
                case c.Retire():
                    self._retire(message.reason)
                case c.Sleep():
                    self._sleep()
                case c.Wake():
                    self.turn.ask()
                case c.Dismissed():
                    self.over = "dismissed: all that was here has been taken over"
                case c.Shutdown():
                    self.over = f"the run is over: {message.status} {message.cause}"
                case c.Welcome():
                    self.timeline.set_offset(self.link.clock_offset_s)
                    self.reports.forget()
                    if self.tells_cached:
                        self.cached.forget_listener()
        if self.retire_by is not None and time.monotonic() >= self.retire_by:
            self.over = self.over or f"not dismissed within {RETIRE_GRACE_S:g} s: leaving all the same"

    def _retire(self, reason: str) -> None:
        """Hand every sample back with the tokens that it has. What is on its way here is refused until Dismissed, which
        comes when the agent loops have said that nothing is here any more."""
        if self.retire_by is None:
            self.retire_by = time.monotonic() + RETIRE_GRACE_S
            returned = self._hand_back(FINISH_REFUSED)
            log.info("retiring (%s): %d samples are handed back", reason, returned)

    def _hand_back(self, finish: str) -> int:
        """Return every sample with the tokens that it has; how many."""
        return self._return(self.engine.abort(), finish)

    def _return(self, aborted: list[TokenChunk], finish: str) -> int:
        for chunk in aborted:
            if chunk.finish == FINISH_ABORT:
                chunk.finish = finish
        self._keep(aborted)
        return len(aborted)

    def _hear_agents(self) -> None:
        for peer, message in self.server.poll(0.0):
            if isinstance(message, AbortRequest):
                self._keep(self.engine.abort(message.groups) if message.groups else [])
                self._keep(self.engine.abort_samples(message.samples) if message.samples else [])
            elif not self._may_generate(message):
                for sample in message.samples:
                    refused = TokenChunk(
                        group=message.group,
                        sample=sample.sample,
                        token_ids=[],
                        logprobs=[],
                        spans=[],
                        finish=FINISH_REFUSED,
                    )
                    self.pending[peer].append(refused)
            else:
                if (
                    self.owner.get(message.group, peer) != peer
                ):  # on an earlier connection, whose loss is not noticed yet
                    self.engine.abort([message.group])
                    self.outstanding.pop(message.group)
                self.owner[message.group] = peer
                self.outstanding[message.group] += len(message.samples)
                self.engine.submit(message)
        for peer in self.server.lost_peers():
            groups = [group for group, owner in self.owner.items() if owner == peer]
            log.warning("an agent loop is gone: its %d groups are aborted", len(groups))
            self.engine.abort(groups)
            for group in groups:
                del self.owner[group], self.outstanding[group]
            self.pending.pop(peer, None)

    def _may_generate(self, request: GenerateRequest) -> bool:
        return (
            self.retire_by is None
            and request.incarnation == self.incarnation
            and request.min_version <= self.engine.version
        )

    # ---- turns on shared GPUs --------------------------------------------------------------------------------

    def _sleep(self) -> None:
        """Hand every sample back, release the memory, then the GPU."""
        begun = time.monotonic()
        self._hand_back(FINISH_ABORT)
        self.order, self.staged, self.pull_forgotten = None, None, self.pull.busy
        if not self.turn.asleep:
            self.engine.sleep()
        self.turn.leave()
        self.timeline.add(SLEEP, begun, time.monotonic())

    def _wake(self) -> None:
        begun = time.monotonic()
        if self.turn.entered():
            self.engine.wake()
            self.timeline.add(WAKE, begun, time.monotonic())

    # ---- weights ---------------------------------------------------------------------------------------------

    def _follow_pull(self) -> None:
        """Prefetch while decoding goes on; then hand partial samples back (or finish them) and switch."""
        if self.retire_by is not None or self.turn.asleep:
            return
        if self.order is not None and not self.pull.busy and self.staged is None:
            self.pull.start(self.order.version, self.order.incarnation)
            self.link.send(c.PullStarted(version=self.order.version))
        outcome = self.pull.poll()
        if outcome is not None and self.pull_forgotten:
            outcome, self.pull_forgotten = None, False
        if isinstance(outcome, PullError):
            self._pull_failed(outcome)
        elif outcome is not None:
            end = time.monotonic()
            self.timeline.add(
                PULL,
                end - outcome.pull_s,
                end,
                version=outcome.version,
                nbytes=outcome.nbytes,
                transport=outcome.transport,
            )
            self.staged = outcome
        if (
            self.staged is not None
            and self.order is not None
            and (self.order.abort_running or not self.engine.has_work())
        ):
            self._switch(self.staged, self.order)

    def _switch(self, staged: Staged, order: c.Pull) -> None:
        begun = time.monotonic()
        self.link.send(c.Switching(version=staged.version))
        self._keep(self.engine.abort())
        self.engine.update_weights(staged.version, staged.tensors())
        end = time.monotonic()
        self.incarnation, self.order, self.staged = staged.incarnation, None, None
        self.timeline.add(SWITCH, begun, end, version=staged.version, **self._work())
        done = c.PullDone(
            version=staged.version,
            incarnation=staged.incarnation,
            pull_s=staged.pull_s,
            pause_s=end - begun,
            nbytes=staged.nbytes,
        )
        self.link.send(done)
        self._stream(now=True)

    def _work(self) -> dict[str, float]:
        """What the engine has done since the last switch: a simulation is fitted to it."""
        before, self.at_switch = self.at_switch, self.engine.stats()
        return {name: round(getattr(self.at_switch, name) - getattr(before, name), 6) for name in WORK}

    def _pull_failed(self, error: PullError) -> None:
        order, self.order = self.order, None
        version = order.version if order else -1
        if not error.retryable:
            self.link.send(c.Fatal(cause=error.cause))
        self.link.send(c.PullFailed(version=version, cause=error.cause))

    # ---- tokens and status -----------------------------------------------------------------------------------

    def _keep(self, chunks: list[TokenChunk]) -> None:
        """Collect chunks for their agent loops; a finished one is due at once."""
        for chunk in chunks:
            if (peer := self.owner.get(chunk.group)) is not None:
                self.pending[peer].append(chunk)
                if chunk.finish:
                    self.next_stream = 0.0
                    self.outstanding[chunk.group] -= 1
                    if not self.outstanding[chunk.group]:
                        del self.owner[chunk.group], self.outstanding[chunk.group]

    def _stream(self, now: bool = False) -> None:
        clock = time.monotonic()
        if not self.pending or (clock < self.next_stream and not now):
            return
        self.next_stream = clock + STREAM_INTERVAL_S
        for peer, chunks in self.pending.items():
            self.server.send(peer, TokenChunks(join_chunks(chunks)))
        self.pending.clear()

    def _report(self) -> None:
        clock = time.monotonic()
        if (events := self.engine.cache_events()) is not None:
            self.cached.apply(events)
        if not self.reports.may_report(clock):
            return
        stats = self.engine.stats()
        if not self.reports.due(stats, clock, self.cached.has_news):
            return
        # News that cannot be sent are told anew after the Welcome that follows.
        if self.link.send(c.InstanceStatus(stats=stats, at_s=clock, cache=self.cached.news(MOST_BLOCK_NAMES))):
            self.reports.sent(stats, clock)


def main() -> int:
    role = start_role()
    turn = instance_turn(role)
    block_size = cache_block_size(role.config)
    engine = turn.build(lambda: make_engine(role, run_model(role.run_dir), block_size), lambda made: made.sleep())
    instance = Instance(role, engine, turn)
    try:
        instance.run()
        return 0
    except TurnError as error:
        instance.link.send(c.Fatal(cause=str(error)))
        log.error("%s", error)
        return 1
    except CoordinatorGoneError as error:
        log.error("%s", error)
        return 1
    finally:
        instance.close()


if __name__ == "__main__":
    run_role(main)
