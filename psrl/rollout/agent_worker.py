"""An agent loop process: takes assignments, has their samples generated wherever there is room, scores, seals, reports.

Tokens go straight between this process and the instances; the coordinator hears counts, places and references only.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter, defaultdict
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from psrl.config.algorithm_checks import greedy_samples
from psrl.config.cache_blocks import cache_block_size
from psrl.models.resolve import run_model
from psrl.models.tokenizer import load_tokenizer
from psrl.net.link import AsyncCoordinatorLink, CoordinatorGoneError
from psrl.protocol import control as c
from psrl.protocol.blocks import block_names
from psrl.protocol.generation import (
    FINISH_REDUNDANT,
    FINISH_REFUSED,
    FINISH_TRUNCATED,
    AbortRequest,
    SamplingParams,
    TokenChunks,
)
from psrl.role import Role, run_role, start_role
from psrl.rollout.agents import make_agents
from psrl.rollout.connections import Connections
from psrl.rollout.finish import Finisher
from psrl.rollout.group_filters import MissingMetricError
from psrl.rollout.group_work import GroupWork
from psrl.rollout.sample_ends import CONSUMED, FAILED, FILTERED, REDUNDANT, RETURNED, group_ends
from psrl.rollout.score_result import ScoreResult
from psrl.rollout.scoring import RewardTypeError
from psrl.tasks.prepared import PreparedReader
from psrl.tasks.synthetic_lengths import response_budget

log = logging.getLogger("psrl.agent_loop")


@dataclass(slots=True)
class Held:
    """One group in this agent loop's hands; `done` once it is sealed and waits for the coordinator's acknowledgement."""

    work: GroupWork
    done: c.GroupDone | None = None
    scoring: bool = False
    """All samples are there: their rewards are being computed, or are."""


class AgentLoop:
    """One event loop; a group is a few callbacks and one coroutine that scores it, and where agents play its samples turn
    by turn (psrl.rollout.session_host) one coroutine for each."""

    def __init__(self, role: Role) -> None:
        config = role.config
        self.role = role
        self.prompts = PreparedReader(role.run_dir.data / "prompts.bin")
        model = run_model(role.run_dir)
        tokenizer = load_tokenizer(model.path)
        self.finisher = Finisher(config, role.run_dir, role.name, self.prompts, tokenizer)
        gen = config.gen_actor_rollout_ref.rollout
        self.sampling = SamplingParams(
            temperature=gen.temperature,
            top_p=gen.top_p,
            top_k=gen.top_k,
            stop_token_ids=() if gen.ignore_eos else tuple(model.eos_token_ids),
            ignore_eos=gen.ignore_eos,
        )
        self.budget = response_budget(config)
        self.block_size = cache_block_size(config)
        self.link = AsyncCoordinatorLink(
            role.run_dir, "agent_loop", role.name, self._state, config.psrl.fault_tolerance
        )
        self.held: dict[int, Held] = {}
        self.connections = Connections(role, self.spawn, self._chunks, self._lose)
        self.agents = make_agents(role, self, tokenizer, self.sampling, self.connections)
        self.to_seal: asyncio.Queue[tuple[GroupWork, list[ScoreResult]]] = asyncio.Queue()
        self.tasks: set[asyncio.Task[None]] = set()
        self.over: asyncio.Future[str] | None = None
        """Becomes the reason why this process ends."""

    def _state(self) -> c.AgentState:
        return c.AgentState(held=[c.HeldGroup(group=g, done=h.done, on=h.work.where()) for g, h in self.held.items()])

    async def run(self) -> str:
        """Work until the run is over, or until this agent loop retires; returns which of them, in words."""
        self.over = asyncio.get_running_loop().create_future()
        await self.finisher.pool.start()
        await self.agents.start()
        await self.link.open()
        self.spawn(self._hear_coordinator())
        self.spawn(self._seal_loop())
        try:
            return await self.over
        finally:
            for task in self.tasks:
                task.cancel()
            await self.agents.close()
            await self.finisher.pool.close()
            self.finisher.writer.close()
            self.link.close("leaving")

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
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
                            if (held := self._forget(group)) is not None:
                                self._tell_ends(held.work, CONSUMED)
                    case c.GroupAbort():
                        self._drop(message.groups, REDUNDANT if message.reason == REDUNDANT else RETURNED)
                    case c.GroupTruncate():
                        self._truncate(message.groups)
                    case c.Instances():
                        self.connections.know(message.instances)
                    case c.Welcome():
                        self.agents.serve(message.incarnation)
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
        if (played := self.agents.play(assignment, ids, prompt)) is not None:
            self.held[assignment.group] = Held(played)
            return
        config = self.role.config
        single = GroupWork(
            assignment,
            ids,
            self.sampling,
            self.budget,
            config.seed,
            interrupt_as_prompt=config.psrl.rollout_coordination.partial_rollout.interrupt_as_prompt,
            greedy=greedy_samples(config.algorithm.adv_estimator),
        )
        self.held[assignment.group] = Held(single)
        self.request(single, assignment.instance, range(assignment.n))

    def request(self, work: GroupWork, instance: str, samples: Sequence[int]) -> None:
        """Send samples to an instance; if it is gone by now, ask for another."""
        group = work.assignment.group
        if not self.connections.has(instance):
            self.link.send(c.SampleMoves(left=[(group, instance, len(samples))]))
            for sample in samples:
                work.samples[sample].lost()
            if unfinished := [(group, sample) for sample in samples if not work.samples[sample].finish]:
                self.ask(unfinished)
        else:
            requests = work.requests(instance, samples)
            for request in requests:
                self.connections.send(instance, request)
            if unwanted := len(samples) - sum(len(request.samples) for request in requests):
                self.link.send(c.SampleMoves(left=[(group, instance, unwanted)]))
                self.advance(work)

    def ask(self, samples: list[tuple[int, int]], reason: str = "", instance: str = "") -> None:
        """Where shall these (group, sample) pairs go on, all of which were at `instance`?"""
        asked = [(self.held[group].work, sample) for group, sample in samples]
        size = self.block_size
        self.link.send(
            c.RouteRequest(
                samples=samples,
                reason=reason,
                instance=instance,
                tokens=[work.response_tokens(sample) for work, sample in asked],
                blocks=[block_names(work.context(sample), size) for work, sample in asked] if size else [],
            )
        )

    def _routed(self, routed: c.Routed) -> None:
        by_target: dict[tuple[int, str], list[int]] = defaultdict(list)
        for group, sample, instance in routed.samples:
            by_target[group, instance].append(sample)
        for (group, instance), samples in by_target.items():
            if (held := self.held.get(group)) is not None:
                held.work.incarnation = routed.incarnation
                self.request(held.work, instance, samples)

    def _ask_again(self) -> None:
        """After a (re)connection: what was asked may be lost. Hello said where samples are; the rest looks for a place."""
        looking = [
            (group, sample) for group, held in self.held.items() if held.done is None for sample in held.work.looking()
        ]
        if looking:
            self.ask(looking)
        self.agents.tell_again()

    def _drop(self, groups: Sequence[int], outcome: str) -> None:
        for group in groups:
            if (held := self._forget(group)) is not None:
                self._stop_at(group, held.work.where())
                self._tell_ends(held.work, outcome)

    def _forget(self, group: int) -> Held | None:
        self.agents.end(group)
        return self.held.pop(group, None)

    def _truncate(self, groups: Sequence[int]) -> None:
        """End these groups with the tokens that have arrived here."""
        for group in groups:
            held = self.held.get(group)
            if held is not None and not held.scoring:
                self._end_rest(held.work, FINISH_TRUNCATED)
                self.advance(held.work)

    def _end_rest(self, work: GroupWork, finish: str) -> None:
        """End the unfinished samples of a group, here and where they are being made."""
        group, were = work.assignment.group, work.end_rest(finish)
        self.agents.stop(group)
        self._stop_at(group, were)
        if were:
            self.link.send(c.SampleMoves(left=[(group, instance, count) for instance, count in were.items()]))

    def _stop_at(self, group: int, instances: Iterable[str]) -> None:
        for instance in instances:
            self.connections.send(instance, AbortRequest((group,)))

    def advance(self, work: GroupWork) -> None:
        """Score a group as soon as enough of its samples have finished; the others are not waited for."""
        held = self.held.get(work.assignment.group)
        if held is not None and not held.scoring and work.complete:
            held.scoring = True
            if work.unfinished:
                self._end_rest(work, FINISH_REDUNDANT)
            self.spawn(self._score(work))

    def _tell_ends(self, work: GroupWork, outcome: str) -> None:
        self.link.send(c.SampleEnds(ends=group_ends(work, outcome)))

    def say(self, message: c.Message) -> None:
        self.link.send(message)

    def abort(self, instance: str, request: AbortRequest) -> None:
        self.connections.send(instance, request)

    # ---- instances -------------------------------------------------------------------------------------------

    def _lose(self, name: str) -> None:
        """An instance is gone: keep what it streamed, make the rest elsewhere."""
        self.agents.lose(name)
        moves: list[tuple[int, str, int]] = []
        routes: list[tuple[int, int]] = []
        tokens = 0
        for group, held in self.held.items():
            if lost := held.work.lost(name):
                moves.append((group, name, len(lost)))
                routes += [(group, sample) for sample in lost if held.work.samples[sample].looking]
                tokens += sum(len(held.work.samples[sample].token_ids) for sample in lost)
        if moves:
            log.warning(
                "%d samples of %d groups were at %s: they go on elsewhere with their %d tokens",
                sum(count for _, _, count in moves),
                len(moves),
                name,
                tokens,
            )
            self.link.send(c.SampleMoves(left=moves))
        if routes:
            self.ask(routes)

    def _chunks(self, instance: str, message: TokenChunks) -> None:
        left: Counter[int] = Counter()
        finished: dict[int, GroupWork] = {}
        routes: dict[str, list[tuple[int, int]]] = defaultdict(list)
        refused: list[int] = []
        for chunk in message.chunks:
            held = self.held.get(chunk.group)
            if held is None:
                self.agents.add(chunk, instance)
                continue
            has_left, route = held.work.add(chunk, instance)
            if has_left:
                left[chunk.group] += 1
                if route:
                    sample = held.work.sample_of(chunk)
                    routes[chunk.finish].append((chunk.group, sample))
                    if chunk.finish == FINISH_REFUSED:
                        refused.append(len(held.work.samples[sample].token_ids))
                else:
                    finished[chunk.group] = held.work
        if left:
            self.link.send(c.SampleMoves(left=[(group, instance, count) for group, count in left.items()]))
        self.agents.tell_ended_turns(finished.values())
        for work in finished.values():
            self.advance(work)
        for reason, samples in routes.items():
            self.ask(samples, reason, instance)
        if refused:
            log.info(
                "%s refused %d samples: they go on elsewhere with their %d tokens", instance, len(refused), sum(refused)
            )

    # ---- reward and seal -------------------------------------------------------------------------------------

    async def _score(self, work: GroupWork) -> None:
        """Reward a complete group, then have it sealed or give it up."""
        try:
            outcome = await self.finisher.score(work)
        except (RewardTypeError, MissingMetricError) as error:
            self.link.send(c.Fatal(cause=str(error)))
            raise
        if not isinstance(outcome, c.GroupFailed):
            self.to_seal.put_nowait((work, outcome))
        elif self._forget(outcome.group) is not None:
            self.link.send(outcome)
            self._tell_ends(work, FILTERED if outcome.reason == FILTERED else FAILED)

    async def _seal_loop(self) -> None:
        """Seal what is ready, then tell the coordinator."""
        while True:
            batch = [await self.to_seal.get()]
            while not self.to_seal.empty():
                batch.append(self.to_seal.get_nowait())
            for done in await self.finisher.seal(batch):
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
    except (RewardTypeError, MissingMetricError) as error:
        log.error("%s", error)
        return 1
    log.info("%s", why)
    return 0


if __name__ == "__main__":
    run_role(main)
