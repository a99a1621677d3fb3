"""A trainer rank: resume, publish the weights, then buffer after buffer until the end, a drain or the data's end."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from psrl.colocate.gpu_lock import TurnError
from psrl.colocate.memory import trainer_memory
from psrl.colocate.turn import trainer_turn
from psrl.config.algorithm_checks import needs_reference
from psrl.config.critic_checks import needs_critic, policy_settings
from psrl.config.schema import Config
from psrl.models.load import load_causal_lm
from psrl.models.resolve import run_model
from psrl.net.link import CoordinatorGoneError
from psrl.protocol import control as c
from psrl.protocol.samples import Group
from psrl.role import Role, run_role, start_role
from psrl.rundir.segments import read_sample
from psrl.telemetry.metrics import MetricsWriter
from psrl.telemetry.overlap import overlap_metrics
from psrl.telemetry.population import population_metrics
from psrl.telemetry.step_metrics import step_metrics
from psrl.telemetry.timeline import CHECKPOINT, PUSH, READ, SLEEP, UPDATE, WAIT, WAKE, Timeline
from psrl.trainer import checkpoints
from psrl.trainer.arrivals import Arrivals, InterruptedStepError
from psrl.trainer.backends.core import BackendCore
from psrl.trainer.backends.critic import FSDP2Critic
from psrl.trainer.backends.make import make_backend
from psrl.trainer.chunks import chunk_plan
from psrl.trainer.device import take_device, warn_of_float32
from psrl.trainer.feed import Feed, Order, broadcast_order
from psrl.trainer.objective import kl_control
from psrl.trainer.rendezvous import barrier, init_process_group
from psrl.trainer.saving import Saved, Saver, load_checkpoint
from psrl.trainer.step import train_step
from psrl.weights.channel.select import make_publisher

log = logging.getLogger("psrl.trainer")

_decode_group = msgspec.msgpack.Decoder(Group).decode


class Trainer:
    """One rank. Rank 0 also talks to the coordinator and writes the metrics."""

    def __init__(self, role: Role, rank: int, world_size: int, device: torch.device) -> None:
        config = role.config
        self.role, self.rank, self.world_size = role, rank, world_size
        source = run_model(role.run_dir)
        self.turn = trainer_turn(role, lambda: trainer_memory(config.psrl.tms.range, device, self._resident_tensors))
        with self.turn.region():
            self.actor = make_backend(
                load_causal_lm(source.path, config.model.dtype),
                policy_settings(config),
                temperature=config.gen_actor_rollout_ref.rollout.temperature or 1.0,
                total_steps=optimizer_steps(config),
                device=device,
            )
            self.reference = make_reference(config, source.path, device) if needs_reference(config) else None
            self.critic = make_critic(config, source.path, device) if needs_critic(config) else None
        self.kl = kl_control(config)
        self.version = self._resume()
        self.publisher = make_publisher(role, rank, world_size)
        self.feed = Feed(role, resumed_from=self.version) if rank == 0 else None
        self.metrics = MetricsWriter(role.run_dir.metrics) if rank == 0 else None
        self.timeline = Timeline(role.run_dir.timeline / f"{role.name}.{os.getpid()}.jsonl", "trainer", name=role.name)
        self.total_steps = config.trainer.total_training_steps
        self.saver = Saver(
            self.actor,
            role.run_dir.checkpoints,
            self.version,
            partial(barrier, world_size),
            background=config.train_actor_rollout_ref.actor.checkpoint.async_save,
            critic=self.critic,
        )
        self.chunks = chunk_plan(config)
        self.timings: dict[str, float] = {}
        self.counters: dict[str, int] = {}
        """The coordinator's, with the last buffer."""
        self.save_s = 0.0

    def _resume(self) -> int:
        """Load the newest complete checkpoint; returns its version, 0 for a fresh start."""
        found, _ = checkpoints.newest_complete(self.role.run_dir.checkpoints)
        if found is None:
            return 0
        metadata = checkpoints.read_metadata(found)
        version = int(metadata["version"])
        self.kl = kl_control(self.role.config, metadata.get("kl_coef"))
        load_checkpoint(found, self.actor, self.critic)
        log.info("resumed from %s at version %d", found.name, version)
        return version

    def run(self) -> None:
        """The whole run, from the first publication to the verdict."""
        incarnation = self._meet()
        self.publisher.serve()
        self._publish(incarnation)
        drained, may_save = False, True
        while self.total_steps is None or self.version < self.total_steps:
            order = self._next_step(incarnation)
            if order is None:
                continue
            if isinstance(order, c.Shutdown):
                return
            if isinstance(order, c.DrainNow):
                drained, may_save = True, order.grace_s > 0
            else:
                log.info("the data is used up after %d steps", self.version)
            break
        if may_save:
            if self.saver.version != self.version:
                self._enter_turn()
                self._save()
            self._conclude(self.saver.wait())
        if self.feed is not None:
            self.feed.finish(self.version, drained=drained)

    def _next_step(self, incarnation: int) -> Order | None:
        """Wait for the next buffer and train it; None when that is done, else what to do instead. A step that is interrupted
        between two parts of its buffer leaves the weights as they were before it."""
        begun = time.monotonic()
        self._leave_turn()
        asked = time.monotonic()
        order = self._next_order(0, self.chunks[0].groups if len(self.chunks) > 1 else 0)
        self._timed("wait_buffer", WAIT, asked)
        if not isinstance(order, c.Buffer) or not order.groups:
            return order
        self._enter_turn()
        try:
            self._train(Arrivals(order, self.chunks, self._next_order), incarnation, begun)
            return None
        except InterruptedStepError as interrupted:
            self.actor.go_back()
            return interrupted.order

    def _train(self, arrivals: Arrivals, incarnation: int, begun: float) -> None:
        """One step: update on the buffer, publish the new version, checkpoint if it is due, write the metrics."""
        read = arrivals.timed_read(self._read)
        result = train_step(
            self.actor,
            self.role.config,
            arrivals,
            read,
            reference=self.reference,
            kl=self.kl,
            critic=self.critic,
            only_critic=self.version < self.role.config.trainer.critic_warmup,
        )
        self.kl = result.kl
        overlap = self._note(arrivals)
        self.version += 1
        self._publish(incarnation)
        freq = self.role.config.trainer.save_freq
        due = self.version == self.total_steps or (freq > 0 and self.version % freq == 0)
        if due:
            self._save()
        if self.metrics is not None:
            groups = [result.groups.get(i) or self._read(taken) for i, taken in enumerate(arrivals.groups)]
            lags = [arrivals.buffer - taken.version for taken in arrivals.groups]
            self.timings["step"] = time.monotonic() - begun
            counters = arrivals.newest.counters
            extra = result.metrics | overlap | {f"rollout/{k}": n for k, n in counters.items() if "/prompt_" not in k}
            extra |= population_metrics(self.counters, counters, self.timings["step"])
            self.counters = counters
            self.metrics.write(step_metrics(groups, lags, self.timings, step=self.version, extra=extra))
        self.timings = {}
        self._conclude(self.saver.finished())  # last: a complete checkpoint promises the rows of all its steps

    # ---- parts -----------------------------------------------------------------------------------------------

    def _meet(self) -> int:
        """Rank 0 says hello; every rank learns the incarnation."""
        if self.feed is not None:
            self.feed.open()
            self.timeline.set_offset(self.feed.link.clock_offset_s)
        number = torch.tensor([self.feed.incarnation if self.feed else -1])
        if self.world_size > 1:
            dist.broadcast(number, 0)
        return int(number)

    def _note(self, arrivals: Arrivals) -> dict[str, float]:
        """Timeline, timings and overlap metrics of a step's work."""
        arrivals.end()
        for start_s, end_s in arrivals.waits:
            self.timeline.add(WAIT, start_s, end_s)
        for work in arrivals.work:
            self.timeline.add(READ, work.start_s, work.start_s + work.read_s)
            self.timeline.add(UPDATE, work.start_s + work.read_s, work.end_s)
        self.timings["wait_buffer"] += arrivals.wait_s
        self.timings |= {"read": arrivals.read_s, "update_actor": arrivals.work_s - arrivals.read_s}
        if self.feed is None or len(self.chunks) == 1:
            return {}
        filled_s = arrivals.newest.filled_s
        return overlap_metrics(
            [(work.start_s, work.end_s) for work in arrivals.work],
            filled_s - self.feed.link.clock_offset_s if filled_s >= 0 else None,
        )

    def _next_order(self, taken: int, count: int) -> Order:
        """See `Feed.next`; every rank asks and hears the same."""
        if self.feed is not None:
            order = self.feed.next(
                self.version,
                taken,
                count,
                alive=lambda: broadcast_order(None, 0, self.world_size),
                idle=lambda: self._conclude(self.saver.finished()),
            )
            if isinstance(order, c.DrainNow) and self.save_s > order.grace_s / 2:
                log.warning("no checkpoint: the last one took %.1f s, %.1f s are left", self.save_s, order.grace_s)
                order = c.DrainNow(reason=order.reason, grace_s=0.0)  # every rank hears the same
            broadcast_order(order, 0, self.world_size)
            return order
        while (heard := broadcast_order(None, self.rank, self.world_size)) is None:
            pass
        return heard

    def _read(self, taken: c.TakenGroup) -> Group:
        ref = taken.ref
        return _decode_group(read_sample(self.role.run_dir.samples, ref.segment, ref.offset, ref.length, ref.crc))

    def _publish(self, incarnation: int) -> None:
        """All ranks' shards first, then one word to the coordinator: a version is visible only when it is whole."""
        begun = time.monotonic()
        self.publisher.publish(self.version, incarnation, self.actor.weight_shards())
        barrier(self.world_size)
        if self.feed is not None:
            self.feed.published(self.version)
        self._timed("push_weights", PUSH, begun, version=self.version)

    def _save(self) -> None:
        """Begin a checkpoint; what is timed is the wait for the one before and the copy."""
        begun = time.monotonic()
        self._conclude(self.saver.wait())
        self.saver.begin(self.version, {} if self.kl is None else {"kl_coef": self.kl.coefficient})
        self._timed("save_checkpoint", CHECKPOINT, begun)

    def _conclude(self, saved: Saved | None) -> None:
        """Every rank has written: rank 0 marks the checkpoint complete and only then says so."""
        if saved is None or self.feed is None:
            return
        self.save_s = saved.seconds
        root = self.role.run_dir.checkpoints
        metadata = {"version": saved.version, "incarnation": self.feed.incarnation, "seconds": round(self.save_s, 3)}
        checkpoints.finish(checkpoints.step_directory(root, saved.version), metadata | saved.extra)
        self.feed.checkpointed(saved.version, self.save_s)
        checkpoints.prune(root, self.role.config.trainer.keep_last)

    def _leave_turn(self) -> None:
        """Release the GPU's memory for the rollout, where it is shared: asking for a buffer gives the rollout its turn."""
        if self.turn.shared:
            begun = time.monotonic()
            self.turn.leave()
            self._timed("release_gpu", SLEEP, begun)

    def _enter_turn(self) -> None:
        if self.turn.shared:
            begun = time.monotonic()
            self.turn.enter()
            self._timed("take_gpu", WAKE, begun)

    def _resident_tensors(self) -> Iterator[torch.Tensor]:
        for model in filter(None, (self.actor, self.reference, self.critic)):
            yield from model.resident_tensors()

    def _timed(self, name: str, span: str, begun: float, **attributes: int) -> None:
        end = time.monotonic()
        self.timeline.add(span, begun, end, **attributes)
        self.timings[name] = end - begun

    def close(self) -> None:
        self.publisher.close()
        if self.feed is not None:
            self.feed.close()
        self.timeline.close()
        if self.metrics is not None:
            self.metrics.close()


def make_reference(config: Config, path: Path, device: torch.device | str = "cpu") -> BackendCore:
    """The initial weights, frozen: a resumed run starts from a checkpoint, its reference does not."""
    return make_backend(
        load_causal_lm(path, config.model.dtype),
        policy_settings(config),
        temperature=config.gen_actor_rollout_ref.rollout.temperature or 1.0,
        trainable=False,
        device=device,
    )


def make_critic(config: Config, path: Path, device: torch.device | str = "cpu") -> FSDP2Critic:
    """The value model before it has learned anything, from the initial weights of the policy."""
    buffers, minis = config.trainer.total_training_steps, mini_batches_of(config)
    return FSDP2Critic(
        load_causal_lm(path, config.model.dtype),
        config.train_actor_rollout_ref.actor,
        config.critic,
        total_steps=None if buffers is None else buffers * minis * config.critic.ppo_epochs,
        device=device,
    )


def optimizer_steps(config: Config) -> int | None:
    """Optimizer steps of the policy in the whole run, None while its length is open."""
    buffers = config.trainer.total_training_steps
    if buffers is None:
        return None
    learning = buffers - config.trainer.critic_warmup
    return learning * mini_batches_of(config) * config.train_actor_rollout_ref.actor.ppo_epochs


def mini_batches_of(config: Config) -> int:
    """Mini-batches of a buffer."""
    entries = config.psrl.staleness_buffer_entries
    return entries // (config.train_actor_rollout_ref.actor.ppo_mini_batch_size or entries)


def main() -> int:
    role = start_role()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(role.config.psrl.deployment.train_cpu_threads)
    torch.manual_seed(role.config.seed)
    device = take_device(role.config.trainer.device, role.config.trainer.gpu_memory_fraction)
    if rank == 0:
        warn_of_float32(device, role.config.train_actor_rollout_ref.actor.mixed_precision)
    init_process_group(role, rank, world_size, device)
    trainer = Trainer(role, rank, world_size, device)
    try:
        trainer.run()
        return 0
    except TurnError as error:
        if trainer.feed is not None:
            trainer.feed.link.send(c.Fatal(cause=str(error)))
        log.error("%s", error)
        return 1
    except CoordinatorGoneError as error:
        log.error("%s", error)
        return 1
    finally:
        trainer.close()


if __name__ == "__main__":
    run_role(main)
