"""A trainer rank: resume, publish the weights, then buffer after buffer until the end, a drain or the data's end."""

from __future__ import annotations

import logging
import os
import time

import msgspec
import torch
import torch.distributed as dist

from psrl.config.schema import Config
from psrl.models.load import load_causal_lm
from psrl.models.resolve import run_model
from psrl.net.link import CoordinatorGoneError
from psrl.protocol import control as c
from psrl.protocol.samples import Group
from psrl.role import Role, run_role, start_role
from psrl.rundir.segments import read_sample
from psrl.telemetry.metrics import MetricsWriter
from psrl.telemetry.step_metrics import step_metrics
from psrl.telemetry.timeline import CHECKPOINT, PUSH, READ, UPDATE, WAIT, Timeline
from psrl.trainer import checkpoints
from psrl.trainer.backends.make import make_backend
from psrl.trainer.feed import Feed, Order, broadcast_order
from psrl.trainer.rendezvous import init_process_group
from psrl.trainer.saving import Saved, Saver
from psrl.trainer.step import train_step
from psrl.weights.channel.select import make_publisher

log = logging.getLogger("psrl.trainer")

_decode_group = msgspec.msgpack.Decoder(Group).decode


class Trainer:
    """One rank. Rank 0 also talks to the coordinator and writes the metrics."""

    def __init__(self, role: Role, rank: int, world_size: int) -> None:
        config = role.config
        self.role, self.rank, self.world_size = role, rank, world_size
        source = run_model(role.run_dir)
        self.actor = make_backend(
            load_causal_lm(source.path, config.model.dtype),
            config.train_actor_rollout_ref.actor,
            temperature=config.gen_actor_rollout_ref.rollout.temperature or 1.0,
            total_steps=optimizer_steps(config),
        )
        self.version = self._resume()
        self.publisher = make_publisher(role, rank, world_size)
        self.feed = Feed(role, resumed_from=self.version) if rank == 0 else None
        self.metrics = MetricsWriter(role.run_dir.metrics) if rank == 0 else None
        self.timeline = Timeline(role.run_dir.timeline / f"{role.name}.{os.getpid()}.jsonl", "trainer", name=role.name)
        self.total_steps = config.trainer.total_training_steps
        background = config.train_actor_rollout_ref.actor.checkpoint.async_save
        self.saver = Saver(self.actor, role.run_dir.checkpoints, self.version, self._barrier, background=background)
        self.timings: dict[str, float] = {}
        self.save_s = 0.0

    def _resume(self) -> int:
        """Load the newest complete checkpoint; returns its version, 0 for a fresh start."""
        found, _ = checkpoints.newest_complete(self.role.run_dir.checkpoints)
        if found is None:
            return 0
        version = int(checkpoints.read_metadata(found)["version"])
        self.actor.load(found)
        log.info("resumed from %s at version %d", found.name, version)
        return version

    def run(self) -> None:
        """The whole run, from the first publication to the verdict."""
        incarnation = self._meet()
        self.publisher.serve()
        self._publish(incarnation)
        drained, may_save = False, True
        while self.total_steps is None or self.version < self.total_steps:
            begun = time.monotonic()
            order = self._next_order()
            self._timed("wait_buffer", WAIT, begun)
            if isinstance(order, c.Shutdown):
                return
            if isinstance(order, c.DrainNow):
                drained, may_save = True, order.grace_s > 0
                break
            if not order.groups:
                log.info("the data is used up after %d steps", self.version)
                break
            self._train(order, incarnation, begun)
        if may_save:
            if self.saver.version != self.version:
                self._save()
            self._conclude(self.saver.wait())
        if self.feed is not None:
            self.feed.finish(self.version, drained=drained)

    def _train(self, buffer: c.Buffer, incarnation: int, begun: float) -> None:
        """One step: update on the buffer, publish the new version, checkpoint if it is due, write the metrics."""
        start = time.monotonic()
        self.read_s = 0.0
        result = train_step(self.actor, self.role.config, buffer.groups, self._read)
        self.timeline.add(READ, start, start + self.read_s)
        self.timeline.add(UPDATE, start + self.read_s, time.monotonic())
        self.timings |= {"read": self.read_s, "update_actor": time.monotonic() - start - self.read_s}
        self.version += 1
        self._publish(incarnation)
        freq = self.role.config.trainer.save_freq
        due = self.version == self.total_steps or (freq > 0 and self.version % freq == 0)
        if due:
            self._save()
        if self.metrics is not None:
            groups = [result.groups.get(i) or self._read(taken) for i, taken in enumerate(buffer.groups)]
            lags = [buffer.buffer - taken.version for taken in buffer.groups]
            self.timings["step"] = time.monotonic() - begun
            extra = result.metrics | {
                f"rollout/{name}": count for name, count in buffer.counters.items() if "/prompt_" not in name
            }
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

    def _next_order(self) -> Order:
        if self.feed is not None:
            order = self.feed.next(
                self.version,
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
        begun = time.monotonic()
        ref = taken.ref
        group = _decode_group(read_sample(self.role.run_dir.samples, ref.segment, ref.offset, ref.length, ref.crc))
        self.read_s += time.monotonic() - begun
        return group

    def _publish(self, incarnation: int) -> None:
        """All ranks' shards first, then one word to the coordinator: a version is visible only when it is whole."""
        begun = time.monotonic()
        self.publisher.publish(self.version, incarnation, self.actor.weight_shards())
        if self.world_size > 1:
            dist.barrier()
        if self.feed is not None:
            self.feed.published(self.version)
        self._timed("push_weights", PUSH, begun, version=self.version)

    def _save(self) -> None:
        """Begin a checkpoint; what is timed is the wait for the one before and the copy."""
        begun = time.monotonic()
        self._conclude(self.saver.wait())
        self.saver.begin(self.version)
        self._timed("save_checkpoint", CHECKPOINT, begun)

    def _conclude(self, saved: Saved | None) -> None:
        """Every rank has written: rank 0 marks the checkpoint complete and only then says so."""
        if saved is None or self.feed is None:
            return
        self.save_s = saved.seconds
        root = self.role.run_dir.checkpoints
        metadata = {"version": saved.version, "incarnation": self.feed.incarnation, "seconds": round(self.save_s, 3)}
        checkpoints.finish(checkpoints.step_directory(root, saved.version), metadata)
        self.feed.checkpointed(saved.version, self.save_s)
        checkpoints.prune(root, self.role.config.trainer.keep_last)

    def _barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()

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


def optimizer_steps(config: Config) -> int | None:
    """Optimizer steps of the whole run, None while its length is open."""
    buffers, actor = config.trainer.total_training_steps, config.train_actor_rollout_ref.actor
    if buffers is None:
        return None
    minis = config.psrl.staleness_buffer_entries // (actor.ppo_mini_batch_size or config.psrl.staleness_buffer_entries)
    return buffers * minis * actor.ppo_epochs


def main() -> int:
    role = start_role()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(role.config.psrl.deployment.train_cpu_threads)
    torch.manual_seed(role.config.seed)
    init_process_group(role, rank, world_size)
    trainer = Trainer(role, rank, world_size)
    try:
        trainer.run()
        return 0
    except CoordinatorGoneError as error:
        log.error("%s", error)
        return 1
    finally:
        trainer.close()


if __name__ == "__main__":
    run_role(main)
