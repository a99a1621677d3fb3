"""The coordinator process: sockets, journal and clock around `core.Coordinator`. The only file that does I/O here.

One loop: read everything that has arrived, decide, journal (one write for all), then answer. A crash loses nothing
that another role was told.
"""

from __future__ import annotations

import logging
import os
import resource
import time

from psrl.config.agents import plays_turns
from psrl.config.redundancy import redundant_sizes
from psrl.config.schema import Config
from psrl.configured_routing import make_placing, make_router, prompt_facts
from psrl.configured_sessions import session_settings
from psrl.configured_sync import migration_settings, sync_settings
from psrl.configured_validation import append_validations, validation_settings
from psrl.coordinator.core import Coordinator, Settings
from psrl.coordinator.ledger import Ledger
from psrl.coordinator.prompts import PromptSource, steps_in_data
from psrl.coordinator.records import AnyRecord, Checkpoint, End, Occupy, Start, Take
from psrl.coordinator.staleness import Staleness
from psrl.deployment import total_agent_loops
from psrl.net.limits import RESERVE
from psrl.net.link import COORDINATOR
from psrl.net.server import Server
from psrl.outcome import Outcome, publish_outcome
from psrl.protocol.control import Hello, Leaving, ToCoordinator
from psrl.role import Role, run_role, start_role
from psrl.rundir.endpoints import Endpoint, latest_endpoint, publish_next_endpoint
from psrl.rundir.keys import load_keys
from psrl.rundir.segments import delete_segments, list_segments
from psrl.tasks.prepared import PreparedReader

log = logging.getLogger("psrl.coordinator")

DURABLE = (Occupy, Take, Checkpoint, Start, End)
"""Records that must be on disk before anybody hears of them. A reservation or publication that is lost with the whole
machine is made again; a process that dies loses neither, since every record is written before it is spoken of."""
FENCE_CHECK_S = 5.0
DESCRIPTORS_PER_INSTANCE = 5
"""Of an agent loop, for its connection with one instance."""
LARGEST_FLEET = 20_000
"""Instances; the socket library allows an agent loop hardly more connections."""
FAREWELL_S = 2.0
"""After the verdict the loop goes on this long at most, so that a role which is just connecting hears it too."""


class Service:
    """One coordinator start: from the ledger to a verdict."""

    def __init__(self, role: Role) -> None:
        self.role = role
        config = role.config
        self.core_config = config
        self.ledger = Ledger.open(role.run_dir.ledger)
        data = PreparedReader(role.run_dir.data / "prompts.bin")
        staleness, prompts = replay_state(config, len(data), self.ledger)
        limits = config.psrl.fault_tolerance
        self.epoch = self.ledger.epoch + 1  # 0 means "no epoch yet" on the wire
        self.core = Coordinator(
            settings(role),
            staleness,
            prompts,
            make_router(config),
            self.epoch,
            time.monotonic(),
            prompt_facts(data, config),
        )
        self.core.counters["skipped_prompts"] = data.stats.skipped
        if config.psrl.group_post_process.enable:
            for record in self.ledger.history():
                self.core.filter_budget.apply(record)
        self.server = Server(
            load_keys(role.run_dir),
            role.address,
            ToCoordinator,
            name=COORDINATOR,
            epoch=self.epoch,
            greeting=Hello,
            heartbeat_interval_s=limits.heartbeat_interval_s,
            heartbeat_timeout_s=limits.heartbeat_timeout_s,
            peers=expected_peers(config),
            preferred_port=previous_port(role),
        )
        self.names: dict[bytes, str] = {}
        self.peers: dict[str, bytes] = {}
        self.writing: dict[str, str] = {}
        self.next_fence_check = time.monotonic() + FENCE_CHECK_S
        endpoint = Endpoint(address=self.server.endpoint, node=role.node, pid=os.getpid(), epoch=self.epoch)
        publish_next_endpoint(role.run_dir, COORDINATOR, endpoint)
        log.info("epoch %d listens at %s: %s", self.epoch, self.server.endpoint, staleness.describe())

    def run(self) -> None:
        """Serve until the verdict."""
        tick_s = self.core_config.psrl.status_collection.coordinator_sync_interval_in_ms / 1000
        next_tick = time.monotonic()
        while self.core.ended is None:
            now = time.monotonic()
            self._receive(max(0.0, min(next_tick, self.core.next_look_s) - now))
            now = time.monotonic()
            if now >= next_tick:
                next_tick = now + tick_s
                self.core.tick(now)
                self._check_fence(now)
            self.core.advance(now)
            if self.core.ended is None:
                self._commit()
        self._conclude()

    def _receive(self, timeout_s: float) -> None:
        messages = self.server.poll(timeout_s)
        now = time.monotonic()
        for peer, message in messages:
            if isinstance(message, Hello):
                self.names[peer] = message.name
                self.peers[message.name] = peer
            if (name := self.names.get(peer)) is not None:
                self.core.handle(name, message, now)
                if isinstance(message, Leaving):
                    self.peers.pop(name, None)
        for peer in self.server.lost_peers():
            name = self.names.pop(peer, "")
            if name and self.peers.get(name) == peer:
                del self.peers[name]
                self.core.lost(name, "its connection is gone", now)

    def _commit(self) -> None:
        """Journal first, then speak."""
        records = self._journal()
        self._speak()
        self._clean_up(records)

    def _journal(self) -> list[AnyRecord]:
        records, self.core.records = self.core.records, []
        if records:
            self.ledger.append(records)
            self.ledger.flush(sync=any(isinstance(r, DURABLE) for r in records))
        if rows := self.core.validation.rows:
            append_validations(self.role.run_dir, rows)
            rows.clear()
        return records

    def _speak(self) -> None:
        outbox, self.core.outbox = self.core.outbox, []
        for name, message in outbox:
            if (peer := self.peers.get(name)) is not None:
                self.server.send(peer, message)

    def _clean_up(self, records: list[AnyRecord]) -> None:
        """Sealed samples that a complete checkpoint covers are deleted, unless the user keeps them."""
        for record in records:
            if isinstance(record, Occupy):
                self.writing[record.ref.segment.rpartition("-")[0]] = record.ref.segment
        if self.core_config.trainer.keep_samples or not any(isinstance(r, Checkpoint) for r in records):
            return
        samples, staleness = self.role.run_dir.samples, self.core.staleness
        # A segment beyond the newest that is in the ledger may still be written to or hold groups not yet placed.
        done = [s for s in list_segments(samples) if s < self.writing.get(s.rpartition("-")[0], "")]
        delete_segments(samples, staleness.forgettable_segments(done))

    def _check_fence(self, now: float) -> None:
        if now >= self.next_fence_check:
            self.next_fence_check = now + FENCE_CHECK_S
            self.ledger.check_newest()

    def _conclude(self) -> None:
        """The verdict is in the run directory before anybody hears it: whoever sees supervisors end looks for it there."""
        verdict = self.core.ended
        assert verdict is not None  # the loop above ended because of it
        self.core.records.append(End(verdict.status, verdict.cause))
        records = self._journal()
        outcome = Outcome(
            status=verdict.status,
            cause=verdict.cause,
            version=self.core.staleness.version,
            counters=dict(self.core.counters),
        )
        publish_outcome(self.role.run_dir, outcome)
        log.info("the run is over: %s %s", verdict.status, verdict.cause)
        self._speak()
        self._clean_up(records)
        until = time.monotonic() + FAREWELL_S
        # Supervisors stay until this process has ended.
        while (
            self.peers.keys() - self.core.supervisors - self.core.joined.keys()
            and (left := until - time.monotonic()) > 0
        ):
            self._receive(left)
            self._commit()
        self.server.close()
        self.ledger.close()


def previous_port(role: Role) -> int | None:
    """The port of the coordinator before this one, if it ran on this node: roles find it again without looking."""
    found = latest_endpoint(role.run_dir, COORDINATOR)
    return int(found[1].address.rpartition(":")[2]) if found and found[1].node == role.node else None


def expected_peers(config: Config) -> int:
    """Connections to expect, with room for as many again that join later."""
    d = config.psrl.deployment
    instances = 2 * d.n_rollout_instances + d.n_validate_instances
    return 2 * (instances + total_agent_loops(d) + d.train_nnodes) + 64


def fleet_limit(open_files: int) -> int:
    """Most instances at a time where a process may have so many open files (RLIM_INFINITY: as many as it likes)."""
    if open_files == resource.RLIM_INFINITY:
        return LARGEST_FLEET
    return min(LARGEST_FLEET, (open_files - RESERVE) // DESCRIPTORS_PER_INSTANCE)


def settings(role: Role) -> Settings:
    """The coordinator's part of the configuration."""
    config, p, sizes = role.config, role.config.psrl, redundant_sizes(role.config)
    return Settings(
        samples_per_group=sizes.launched_samples,
        kept_samples=sizes.samples,
        filter_metric=config.algorithm.filter_groups.metric,
        max_filtered_buffers=config.algorithm.filter_groups.max_num_gen_batches,
        straggler_method=p.rollout_coordination.proactive_filter_strategy.method,
        straggler_threshold=p.rollout_coordination.proactive_filter_strategy.threshold,
        partial_rollout=p.rollout_coordination.partial_rollout.enable,
        max_concurrent=p.rollout_coordination.routing_strategy.max_concurrent_seqs_per_instance,
        reject_on_waiting=p.rollout_coordination.routing_strategy.admission_reject_on_waiting
        and p.status_collection.enable,
        max_group_retries=p.max_group_retries,
        drop_last=config.data.drop_last,
        num_instances=p.deployment.n_rollout_instances,
        num_agents=total_agent_loops(p.deployment),
        max_instances=fleet_limit(resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
        startup_timeout_s=p.fault_tolerance.startup_timeout_s,
        missing_timeout_s=p.fault_tolerance.heartbeat_timeout_s,
        drain_grace_s=p.fault_tolerance.drain_grace_s,
        goes_on=not role.local,
        attempt=role.attempt,
        sync=sync_settings(config),
        placing=make_placing(config),
        migration=migration_settings(config),
        sessions=session_settings(config) if plays_turns(config.gen_actor_rollout_ref.rollout.agent) else None,
        validation=validation_settings(config, role.run_dir),
        colocate=p.colocate,
    )


def total_steps(config: Config, num_prompts: int) -> int | None:
    """Training steps of this run: what is asked for, or what the data gives."""
    in_data = steps_in_data(
        num_prompts, config.trainer.total_epochs, config.psrl.staleness_buffer_entries, config.data.drop_last
    )
    wanted = config.trainer.total_training_steps
    return min((s for s in (in_data, wanted) if s is not None), default=None)


def replay_state(config: Config, num_prompts: int, ledger: Ledger) -> tuple[Staleness, PromptSource]:
    """State and prompt source after everything that the ledger holds."""
    staleness = Staleness(
        buffer_entries=config.psrl.staleness_buffer_entries,
        redundant_entries=redundant_sizes(config).launched_groups,
        staleness=config.psrl.staleness,
        total_steps=total_steps(config, num_prompts),
        keep_checkpoints=config.trainer.keep_last,
    )
    prompts = PromptSource(
        num_prompts=num_prompts,
        seed=config.data.seed,
        shuffle=config.data.shuffle,
        total_epochs=config.trainer.total_epochs,
    )
    for record in ledger.history():
        staleness.apply(record)
        prompts.apply(record)
    return staleness, prompts


def main() -> int:
    """0 once there is a verdict, whatever it says: this process has done its work, and no other one is to take over."""
    Service(start_role()).run()
    return 0


if __name__ == "__main__":
    run_role(main)
