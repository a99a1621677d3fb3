"""An agent loop process: takes assignments, has their samples generated wherever there is room, scores, seals, reports.

Tokens go straight between this process and the instances; the coordinator hears counts, places and references only.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter, defaultdict
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from psrl.config.algorithm_checks import greedy_samples, least_valid_samples
from psrl.models.resolve import run_model
from psrl.models.tokenizer import load_tokenizer
from psrl.net.client import AsyncClient, Client
from psrl.net.limits import new_context, raise_descriptor_limit
from psrl.net.link import AsyncCoordinatorLink, CoordinatorGoneError
from psrl.protocol import control as c
from psrl.protocol.generation import FINISH_REFUSED, AbortRequest, SamplingParams, TokenChunks
from psrl.protocol.samples import SampleRef
from psrl.role import Role, run_role, start_role
from psrl.rollout.group_work import GroupWork
from psrl.rollout.scoring import RewardTypeError, ScoreResult, ScoringPool
from psrl.rundir.keys import load_keys
from psrl.rundir.segments import SegmentWriter
from psrl.tasks.base import Answer
from psrl.tasks.prepared import PreparedReader

log = logging.getLogger("psrl.agent_loop")

SOCKETS = 60_000
"""For the connections with instances, three each; how many of them may join, the coordinator decides."""


@dataclass(slots=True)
class Held:
    """One group in this agent loop's hands; `done` once it is sealed and waits for the coordinator's acknowledgement."""

    work: GroupWork
    done: c.GroupDone | None = None


@dataclass(slots=True)
class Connection:
    """An instance as seen from here."""

    endpoint: str
    client: AsyncClient
    task: asyncio.Task[None]


class AgentLoop:
    """Single-turn agent loop. One event loop; a group is a few callbacks and one coroutine that scores it."""

    def __init__(self, role: Role) -> None:
        config = role.config
        self.role = role
        self.keys = load_keys(role.run_dir)
        self.prompts = PreparedReader(role.run_dir.data / "prompts.bin")
        model = run_model(role.run_dir)
        self.tokenizer = load_tokenizer(model.path)
        gen = config.gen_actor_rollout_ref.rollout
        self.sampling = SamplingParams(
            temperature=gen.temperature,
            top_p=gen.top_p,
            top_k=gen.top_k,
            stop_token_ids=() if gen.ignore_eos else tuple(model.eos_token_ids),
            ignore_eos=gen.ignore_eos,
        )
        self.link = AsyncCoordinatorLink(
            role.run_dir, "agent_loop", role.name, self._state, config.psrl.fault_tolerance
        )
        self.pool = ScoringPool.from_config(config)
        self.writer = SegmentWriter(role.run_dir.samples, role.name)
        self.segment_version = -1
        self.held: dict[int, Held] = {}
        self.connections: dict[str, Connection] = {}
        raise_descriptor_limit(3 * config.psrl.deployment.n_rollout_instances)
        self.context = new_context(SOCKETS)
        self.to_seal: asyncio.Queue[tuple[GroupWork, list[ScoreResult]]] = asyncio.Queue()
        self.tasks: set[asyncio.Task[None]] = set()
        self.over: asyncio.Future[str] | None = None
        """Becomes the reason why this process ends."""

    def _state(self) -> c.AgentState:
        return c.AgentState(held=[c.HeldGroup(group=g, done=h.done, on=h.work.where()) for g, h in self.held.items()])

    async def run(self) -> str:
        """Work until the run is over, or until this agent loop retires; returns which of them, in words."""
        self.over = asyncio.get_running_loop().create_future()
        await self.pool.start()
        await self.link.open()
        self._spawn(self._hear_coordinator())
        self._spawn(self._seal_loop())
        try:
            return await self.over
        finally:
            for task in self.tasks:
                task.cancel()
            await self.pool.close()
            self.writer.close()
            self.link.close("leaving")

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task whose failure ends this process: nothing fails in silence."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if (
            not task.cancelled()
            and (error := task.exception()) is not None
            and self.over is not None
            and not self.over.done()
        ):
            self.over.set_exception(error)

    # ---- coordinator -----------------------------------------------------------------------------------------

    async def _hear_coordinator(self) -> None:
        while True:
            for message in await self.link.recv(1.0):
                match message:
                    case c.Assign():
                        for assignment in message.groups:
                            self._take(assignment)
                    case c.Routed():
                        self._routed(message)
                    case c.GroupAck():
                        for group in message.groups:
                            self.held.pop(group, None)
                    case c.GroupAbort():
                        self._drop(message.groups)
                    case c.Instances():
                        self._know_instances(message.instances)
                    case c.Welcome():
                        self._ask_again()
                    case c.Retire():
                        self._end(f"retired ({message.reason}): {len(self.held)} groups return to the queue")
                    case c.Shutdown():
                        self._end(f"the run is over: {message.status} {message.cause}")

    def _end(self, why: str) -> None:
        if self.over is not None and not self.over.done():
            self.over.set_result(why)

    def _take(self, assignment: c.Assignment) -> None:
        prompt = self.prompts[assignment.prompt]
        ids = np.frombuffer(prompt.prompt_ids, dtype="<i4").tolist()
        work = GroupWork(
            assignment,
            ids,
            self.sampling,
            self.role.config.data.max_response_length,
            self.role.config.seed,
            greedy_samples(self.role.config.algorithm.adv_estimator),
        )
        self.held[assignment.group] = Held(work)
        self._request(work, assignment.instance, range(assignment.n))

    def _request(self, work: GroupWork, instance: str, samples: Sequence[int]) -> None:
        """Send samples to an instance; if it is gone by now, ask for another."""
        group = work.assignment.group
        connection = self.connections.get(instance)
        if connection is None:
            self.link.send(c.SampleMoves(left=[(group, instance, len(samples))]))
            self.link.send(c.RouteRequest(samples=[(group, sample) for sample in samples]))
        elif request := work.request(instance, samples):
            connection.client.send(request)

    def _routed(self, routed: c.Routed) -> None:
        by_target: dict[tuple[int, str], list[int]] = defaultdict(list)
        for group, sample, instance in routed.samples:
            by_target[group, instance].append(sample)
        for (group, instance), samples in by_target.items():
            if (held := self.held.get(group)) is not None:
                held.work.incarnation = routed.incarnation
                self._request(held.work, instance, samples)

    def _ask_again(self) -> None:
        """After a (re)connection: what was asked may be lost. Hello said where samples are; the rest looks for a place."""
        looking = [
            (group, sample) for group, held in self.held.items() if held.done is None for sample in held.work.looking()
        ]
        if looking:
            self.link.send(c.RouteRequest(samples=looking))

    def _drop(self, groups: Sequence[int]) -> None:
        for group in groups:
            held = self.held.pop(group, None)
            if held is not None:
                for instance in held.work.where():
                    if connection := self.connections.get(instance):
                        connection.client.send(AbortRequest((group,)))

    # ---- instances -------------------------------------------------------------------------------------------

    def _know_instances(self, instances: Sequence[c.InstanceInfo]) -> None:
        """Connect with the living. One that is not listed left while this agent loop had no coordinator, or has not said
        hello to a new one yet: the connection tells which."""
        for name in self.connections.keys() - {info.name for info in instances}:
            if not self.connections[name].client.client.established:
                self._lose(name)
        for info in instances:
            known = self.connections.get(info.name)
            if known is not None and (not info.alive or known.endpoint != info.endpoint):
                self._lose(info.name)
                known = None
            if known is None and info.alive:
                self._connect(info)

    def _connect(self, info: c.InstanceInfo) -> None:
        limits = self.role.config.psrl.fault_tolerance
        client = AsyncClient(
            Client(
                self.keys,
                TokenChunks,
                name=self.role.name,
                heartbeat_interval_s=limits.heartbeat_interval_s,
                heartbeat_timeout_s=limits.heartbeat_timeout_s,
                context=self.context,
            )
        )
        client.connect(info.endpoint)
        self.connections[info.name] = Connection(info.endpoint, client, self._spawn(self._hear_instance(info, client)))

    async def _hear_instance(self, info: c.InstanceInfo, client: AsyncClient) -> None:
        """Until the connection is lost. Whether the instance itself is gone only the coordinator says; until then a new
        connection is tried, so that what is routed there meanwhile finds either it or, with that word, another place."""
        longest_silence_s = self.role.config.psrl.fault_tolerance.heartbeat_timeout_s
        while client.client.broken is None and client.client.server_silent_s() <= longest_silence_s:
            for message in await client.recv(1.0):
                self._chunks(info.name, message)
        log.info(
            "connection to %s: %s", info.name, client.client.broken or client.client.trouble or "it does not answer"
        )
        self._lose(info.name)
        self._connect(info)

    def _lose(self, name: str) -> None:
        """An instance is gone: keep what it streamed, make the rest elsewhere."""
        connection = self.connections.pop(name, None)
        if connection is None:
            return
        connection.client.close(0.0)
        if connection.task is not asyncio.current_task():
            connection.task.cancel()
        moves: list[tuple[int, str, int]] = []
        routes: list[tuple[int, int]] = []
        tokens = 0
        for group, held in self.held.items():
            if lost := held.work.lost(name):
                moves.append((group, name, len(lost)))
                routes += [(group, sample) for sample in lost]
                tokens += sum(len(held.work.samples[sample].token_ids) for sample in lost)
        if routes:
            log.warning(
                "%d samples of %d groups were at %s: they go on elsewhere with their %d tokens",
                len(routes),
                len(moves),
                name,
                tokens,
            )
            self.link.send(c.SampleMoves(left=moves))
            self.link.send(c.RouteRequest(samples=routes))

    def _chunks(self, instance: str, message: TokenChunks) -> None:
        left: Counter[int] = Counter()
        routes: list[tuple[int, int]] = []
        refused: list[int] = []
        for chunk in message.chunks:
            held = self.held.get(chunk.group)
            if held is None:
                continue
            has_left, route = held.work.add(chunk, instance)
            if has_left:
                left[chunk.group] += 1
                if route:
                    routes.append((chunk.group, chunk.sample))
                    if chunk.finish == FINISH_REFUSED:
                        refused.append(len(held.work.samples[chunk.sample].token_ids))
                elif held.work.unfinished == 0:
                    self._spawn(self._score(held.work))
        if left:
            self.link.send(c.SampleMoves(left=[(group, instance, count) for group, count in left.items()]))
        if routes:
            self.link.send(c.RouteRequest(samples=routes))
        if refused:
            log.info(
                "%s refused %d samples: they go on elsewhere with their %d tokens", instance, len(refused), sum(refused)
            )

    # ---- reward and seal -------------------------------------------------------------------------------------

    async def _score(self, work: GroupWork) -> None:
        """Reward the finished group; a failure is reported, never trained as reward 0."""
        prompt = self.prompts[work.assignment.prompt]
        texts = [self.tokenizer.decode(s.token_ids) for s in work.samples]
        answers = [
            Answer(
                solution_str=text,
                data_source=prompt.data_source,
                ground_truth=prompt.ground_truth,
                extra_info=prompt.extra_info,
            )
            for text in texts
        ]
        try:
            results = await self.pool.score(answers)
        except RewardTypeError as error:
            self.link.send(c.Fatal(cause=str(error)))
            raise
        failures = [r for r in results if r.kind in ("error", "timeout")]
        valid = sum(tokens > 0 for tokens in work.trainable_tokens(results))
        lacks_baseline = any(r.reward is None for r, s in zip(results, work.samples, strict=True) if s.greedy)
        if failures:
            self._failed(work, failures[0].kind, failures[0].error or "", retry=True)
        elif valid < least_valid_samples(self.role.config.algorithm.adv_estimator) or lacks_baseline:
            detail = f"{valid} of {len(results)} samples have a reward and a response"
            self._failed(work, "invalid_rewards", detail + ", the greedy one has none" * lacks_baseline, retry=False)
        else:
            self.to_seal.put_nowait((work, results))

    def _failed(self, work: GroupWork, reason: str, detail: str, *, retry: bool) -> None:
        group = work.assignment.group
        if self.held.pop(group, None) is not None:
            self.link.send(c.GroupFailed(group=group, reason=reason, detail=detail, retry=retry))

    async def _seal_loop(self) -> None:
        """Append what is ready, one fsync for all of it, then tell the coordinator."""
        encoder = msgspec.msgpack.Encoder()
        while True:
            batch = [await self.to_seal.get()]
            while not self.to_seal.empty():
                batch.append(self.to_seal.get_nowait())
            newest = max(work.assignment.version for work, _ in batch)
            if newest > self.segment_version:  # one segment a step, so that old ones can be deleted whole
                self.segment_version = newest
                self.writer.rotate()
            sealed: list[c.GroupDone] = []
            for work, results in batch:
                segment, offset, length, crc = self.writer.append(encoder.encode(work.group(results)))
                rewards = [
                    r.reward
                    for r, s in zip(results, work.samples, strict=True)
                    if r.reward is not None and not s.greedy
                ]
                done = c.GroupDone(
                    group=work.assignment.group,
                    ref=SampleRef(segment, offset, length, crc, work.trainable_tokens(results), len(work.prompt_ids)),
                    reward_mean=sum(rewards) / len(rewards),
                    response_tokens=sum(len(s.token_ids) for s in work.samples),
                )
                sealed.append(done)
            await asyncio.to_thread(self.writer.sync)
            for done in sealed:
                if (held := self.held.get(done.group)) is not None:
                    held.done = done
                    self.link.send(done)


def main() -> int:
    role = start_role()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    loop = AgentLoop(role)
    try:
        why = asyncio.run(loop.run())
    except CoordinatorGoneError as error:
        log.error("%s", error)
        return 1
    except RewardTypeError as error:
        log.error("%s", error)
        return 1
    log.info("%s", why)
    return 0


if __name__ == "__main__":
    run_role(main)
