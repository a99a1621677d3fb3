"""Train on the buffers that a run recorded (trainer.keep_samples=True), without rollout: `python -m psrl.trainer.replay RUN_DIR`.

The same samples in the same order give the same loss curve, on any number of ranks and with any backend. Ranks are told by
RANK and WORLD_SIZE and meet at STORE (a file that all can reach, needed for more than one). KEY=VALUE changes a key of the
run's configuration, for example train_actor_rollout_ref.actor.strategy=megatron.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from psrl.config.algorithm_checks import needs_reference
from psrl.config.critic_checks import needs_critic, policy_settings
from psrl.config.schema import Config
from psrl.coordinator.ledger import replay
from psrl.coordinator.records import Start, Take
from psrl.coordinator.staleness import Staleness
from psrl.models.load import load_causal_lm
from psrl.models.resolve import run_model
from psrl.protocol.control import TakenGroup
from psrl.protocol.samples import Group
from psrl.role import load_config
from psrl.rundir.layout import RunDir
from psrl.rundir.segments import read_sample
from psrl.trainer.backends.make import make_backend
from psrl.trainer.checkpoints import read_metadata
from psrl.trainer.chunks import Part, chunk_plan, recorded_parts
from psrl.trainer.main import make_critic, make_reference, optimizer_steps
from psrl.trainer.objective import kl_control
from psrl.trainer.saving import load_checkpoint
from psrl.trainer.step import train_step

CURVE = (
    "actor/pg_loss",
    "actor/grad_norm",
    "actor/loss_tokens",
    "rollout_corr/kl",
    "critic/vf_loss",
    "critic/grad_norm",
    "critic/values/mean",
)

_decode = msgspec.msgpack.Decoder(Group).decode


def recorded_buffers(run_dir: RunDir, config: Config) -> Iterator[list[TakenGroup]]:
    """The buffers of the surviving history in training order, from the ledger."""
    p = config.psrl
    state = Staleness(buffer_entries=p.staleness_buffer_entries, staleness=p.staleness, keep_checkpoints=10**9)
    taken: dict[int, list[TakenGroup]] = {}
    for record in replay(run_dir.ledger):
        state.apply(record)
        if isinstance(record, Start):
            taken = {buffer: groups for buffer, groups in taken.items() if buffer < record.version}
        elif isinstance(record, Take) and state.is_taken(record.buffer):
            taken[record.buffer] = [
                TakenGroup(group=e.group, prompt=e.prompt, data_epoch=e.data_epoch, version=e.version, ref=e.ref)
                for e in state.taken_groups(record.buffer)
            ]
    yield from (taken[buffer] for buffer in sorted(taken))


class Replay:
    """An actor with the run's initial weights, and the recorded buffers to train it on. `config`: other settings than the
    run's, which must not change what a buffer is. Collective: every rank makes one and calls it alike."""

    def __init__(self, run_dir: RunDir, config: Config | None = None) -> None:
        self.run_dir = run_dir
        self.config = config or load_config(run_dir)
        torch.set_num_threads(self.config.psrl.deployment.train_cpu_threads)
        self.actor = make_backend(
            load_causal_lm(run_model(run_dir).path, self.config.model.dtype),
            policy_settings(self.config),
            temperature=self.config.gen_actor_rollout_ref.rollout.temperature or 1.0,
            total_steps=optimizer_steps(self.config),
        )
        needed = needs_reference(self.config)
        self.reference = make_reference(self.config, run_model(run_dir).path) if needed else None
        self.critic = make_critic(self.config, run_model(run_dir).path) if needs_critic(self.config) else None
        self.kl = kl_control(self.config)
        self.version = 0
        """Buffers trained so far."""

    def load(self, checkpoint: Path) -> None:
        """Go on after a checkpoint of the run."""
        metadata = read_metadata(checkpoint)
        load_checkpoint(checkpoint, self.actor, self.critic)
        self.kl = kl_control(self.config, metadata.get("kl_coef"))
        self.version = int(metadata["version"])

    def rows(self, steps: int | None = None) -> Iterator[dict[str, float]]:
        """Train one buffer after the other; one row a buffer, of what it has of `CURVE`."""
        chunks = chunk_plan(self.config)
        for buffer in islice(recorded_buffers(self.run_dir, self.config), self.version, steps):
            metrics = self.train_buffer(recorded_parts(buffer, chunks))
            yield {name: metrics[name] for name in CURVE if name in metrics}

    def train_buffer(self, parts: Iterable[Part]) -> dict[str, float]:
        """Train one buffer; its metrics."""
        result = train_step(
            self.actor,
            self.config,
            parts,
            self._read,
            reference=self.reference,
            kl=self.kl,
            critic=self.critic,
            only_critic=self.version < self.config.trainer.critic_warmup,
        )
        self.kl, self.version = result.kl, self.version + 1
        return result.metrics

    def _read(self, taken: TakenGroup) -> Group:
        ref = taken.ref
        return _decode(read_sample(self.run_dir.samples, ref.segment, ref.offset, ref.length, ref.crc, deadline_s=0.0))


def _changed(config: Config, overrides: Sequence[str]) -> Config:
    merged = OmegaConf.merge(OmegaConf.structured(config), OmegaConf.from_dotlist(list(overrides)))
    return OmegaConf.to_object(merged)  # type: ignore[return-value]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--steps", type=int)
    args = parser.parse_args()
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        store = dist.FileStore(os.environ["STORE"], world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    run_dir = RunDir(args.run_dir.resolve())
    rows = list(Replay(run_dir, _changed(load_config(run_dir), args.overrides)).rows(args.steps))
    if rank == 0:
        print("\n".join(json.dumps(row) for row in rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
