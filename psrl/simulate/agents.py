"""The agent loops on the virtual clock: they send samples to instances, keep the first that finish, have them rewarded
and say so. They know tokens so far, never a length to come."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from psrl.protocol import control as c
from psrl.protocol.generation import FINISH_REDUNDANT, FINISH_STOP, FINISH_TRUNCATED, TURN
from psrl.protocol.samples import SampleRef
from psrl.rollout.finish import LEAST_TRAINABLE
from psrl.rollout.sample_ends import CONSUMED, FAILED, FILTERED, REDUNDANT, RETURNED, UNUSED
from psrl.simulate.clock import Clock
from psrl.simulate.costs import Costs
from psrl.simulate.instance import SimInstance
from psrl.simulate.prefix_cache import Blocks
from psrl.simulate.samples import SimGroup, SimSample
from psrl.simulate.workload import Workload


@dataclass(slots=True)
class Tally:
    """What was started and what became of it, in response tokens."""

    launched: int = 0
    launched_tokens: int = 0
    """Lengths of all samples that were ever started, whether or not anybody waited for their end."""


class SimAgents:
    """All agent loops; a group belongs to the one that it was assigned to."""

    def __init__(
        self,
        clock: Clock,
        tell: Callable[[str, c.Message], None],
        costs: Costs,
        workload: Workload,
        filtering: bool,
        blocks: Blocks | None = None,
    ) -> None:
        """`blocks`: routing asks for the names of cache blocks."""
        self.clock = clock
        self.tell = tell
        self.costs = costs
        self.workload = workload
        self.filtering = filtering
        self.blocks = blocks
        self.instances: dict[str, SimInstance] = {}
        self.groups: dict[int, SimGroup] = {}
        self.tally = Tally()
        self._lengths: dict[int, list[int]] = {}
        self._left: dict[str, Counter[tuple[int, str]]] = defaultdict(Counter)
        self._routes: dict[tuple[str, str, str], list[SimSample]] = defaultdict(list)
        self._ends: dict[str, list[tuple[str, int]]] = defaultdict(list)
        self._turns: dict[str, c.TurnsEnded] = defaultdict(lambda: c.TurnsEnded(away=[], over=[]))

    # ---- from the coordinator --------------------------------------------------------------------------------

    def hear(self, name: str, message: c.Message) -> None:
        match message:
            case c.Assign():
                for assignment in message.groups:
                    self._take(name, assignment)
            case c.Routed():
                self._routed(message)
            case c.GroupAck():
                for number in message.groups:
                    if (group := self.groups.pop(number, None)) is not None:
                        self._tell_ends(group, CONSUMED)
            case c.GroupAbort():
                outcome = REDUNDANT if message.reason == REDUNDANT else RETURNED
                for number in message.groups:
                    if (group := self.groups.pop(number, None)) is not None:
                        self._end_rest(group, "")
                        self._tell_ends(group, outcome)
            case c.GroupTruncate():
                for number in message.groups:
                    if (group := self.groups.get(number)) is not None and not group.sealed:
                        self._end_rest(group, FINISH_TRUNCATED)
                        self._complete(group)

    def _take(self, name: str, assignment: c.Assignment) -> None:
        group = SimGroup(
            assignment.group,
            name,
            assignment.data_epoch,
            assignment.prompt,
            assignment.version,
            self.workload.prompt_tokens,
            assignment.keep or assignment.n,
        )
        lengths = self.workload.draw(group, assignment.n)
        self.tally.launched += len(lengths)
        self.tally.launched_tokens += sum(lengths)
        self.groups[group.number] = group
        self._send(group, group.samples, assignment.instance)

    def _routed(self, routed: c.Routed) -> None:
        by_target: dict[tuple[int, str], list[SimSample]] = {}
        for number, index, instance in routed.samples:
            if (group := self.groups.get(number)) is not None:
                by_target.setdefault((number, instance), []).append(group.samples[index])
        for (number, instance), samples in by_target.items():
            self._send(self.groups[number], samples, instance)

    def _send(self, group: SimGroup, samples: Sequence[SimSample], instance: str) -> None:
        for sample in samples:
            sample.instance = instance
        if self.costs.dispatch_s:
            self.clock.at(self.clock.now_s + self.costs.dispatch_s, self._request, (group, samples, instance))
        else:
            self._request((group, samples, instance))

    def _request(self, what: tuple[SimGroup, Sequence[SimSample], str]) -> None:
        group, samples, instance = what
        if group.number in self.groups:
            self.instances[instance].request(group, [s for s in samples if not s.done])

    # ---- from instances --------------------------------------------------------------------------------------

    def turn_ended(self, sample: SimSample, instance: str) -> None:
        """The sample's turn is over: it is finished, or goes to its environment and comes back."""
        group = sample.group
        sample.instance, sample.came_from = "", instance
        if group.number not in self.groups or sample.done:
            return
        self._left[group.agent][group.number, instance] += 1
        if sample.made < sample.length:
            self._turns[group.agent].away.append((group.number, sample.index, instance, sample.tokens))
            away_s = self.workload.next_turn(sample)
            self.clock.at(self.clock.now_s + away_s, self._back, sample)
            return
        sample.done, sample.finish = True, FINISH_STOP
        if self.workload.multi_turn:
            self._turns[group.agent].over.append((group.number, sample.index, instance))
        group.finished.append(sample)
        if len(group.finished) == group.keep:
            self._end_rest(group, FINISH_REDUNDANT)
            self._complete(group)

    def handed_back(self, samples: Iterable[SimSample], instance: str, finish: str) -> None:
        """These left their instance unfinished: they go on wherever the coordinator says."""
        for sample in samples:
            group = sample.group
            sample.instance = ""
            if group.number in self.groups and not sample.done:
                self._left[group.agent][group.number, instance] += 1
                self._routes[group.agent, finish, instance].append(sample)

    def _back(self, sample: SimSample) -> None:
        group = sample.group
        if group.number in self.groups and not group.sealed:
            self._routes[group.agent, TURN, sample.came_from].append(sample)

    def _end_rest(self, group: SimGroup, finish: str) -> None:
        """End what is unfinished where it is, and take it away from the instances. Truncated samples count as finished."""
        at: dict[str, list[SimSample]] = {}
        rest = [sample for sample in group.samples if not sample.done]
        for sample in rest:
            sample.done, sample.finish = True, finish
            if sample.instance:
                at.setdefault(sample.instance, []).append(sample)
        for instance, samples in at.items():
            self.instances[instance].abort(samples)
            if group.number in self.groups:
                self._left[group.agent][group.number, instance] += len(samples)
        if finish == FINISH_TRUNCATED:
            longest = sorted((s for s in rest if s.made), key=lambda s: -s.made)
            group.finished += longest[: group.keep - len(group.finished)]

    # ---- reward and report -----------------------------------------------------------------------------------

    def _complete(self, group: SimGroup) -> None:
        group.sealed = True
        if self.costs.reward_s:
            self.clock.at(self.clock.now_s + self.costs.reward_s, self._rewarded, group)
        else:
            self._rewarded(group)

    def _rewarded(self, group: SimGroup) -> None:
        if group.number not in self.groups:
            return
        if len(group.finished) < min(LEAST_TRAINABLE, group.keep):
            self._failed(group, "empty_truncation", FAILED)
        elif self.filtering and group.uniform:
            self._failed(group, FILTERED, FILTERED)
        else:
            lengths = self._lengths[group.number] = [sample.made for sample in group.finished]
            held = [group.prompt_tokens + sample.added + sample.made for sample in group.finished]
            ref = SampleRef(f"{group.agent}-0", 0, 0, 0, held, group.prompt_tokens)
            done = c.GroupDone(group=group.number, ref=ref, reward_mean=0.0, response_tokens=sum(lengths))
            self.tell(group.agent, done)

    def _failed(self, group: SimGroup, reason: str, outcome: str) -> None:
        del self.groups[group.number]
        self.tell(group.agent, c.GroupFailed(group=group.number, reason=reason, detail="simulated", retry=False))
        self._tell_ends(group, outcome)

    def _tell_ends(self, group: SimGroup, outcome: str) -> None:
        kept = set(group.finished)
        self._ends[group.agent] += [(_end_of(s, s in kept, outcome), s.made) for s in group.samples]

    def lengths_of(self, group: int) -> list[int]:
        """Response tokens, without those of the environment, of a group that trains now; it is forgotten here."""
        return self._lengths.pop(group)

    @property
    def has_news(self) -> bool:
        return bool(self._left or self._routes or self._ends or self._turns)

    def flush(self) -> None:
        """What the agent loops have to say of the moment: who left where, and who looks for a place."""
        if self._left:
            for agent, counts in self._left.items():
                self.tell(agent, c.SampleMoves(left=[(group, at, n) for (group, at), n in counts.items()]))
            self._left.clear()
        if self._turns:
            for agent, ended in self._turns.items():
                self.tell(agent, ended)
            self._turns.clear()
        if self._routes:
            for (agent, finish, instance), samples in self._routes.items():
                request = c.RouteRequest(
                    samples=[(s.group.number, s.index) for s in samples],
                    reason=finish,
                    instance=instance,
                    tokens=[s.made + s.added for s in samples],
                    blocks=[self.blocks.of_sample(s, s.tokens) for s in samples] if self.blocks else [],
                )
                self.tell(agent, request)
            self._routes.clear()
        if self._ends:
            for agent, ends in self._ends.items():
                self.tell(agent, c.SampleEnds(ends=ends))
            self._ends.clear()


def _end_of(sample: SimSample, kept: bool, outcome: str) -> str:
    """What became of a sample, in the words of psrl.rollout.sample_ends."""
    if sample.finish == FINISH_TRUNCATED:
        return FINISH_TRUNCATED
    if sample.finish == FINISH_REDUNDANT:
        return REDUNDANT
    if not sample.finish:
        return REDUNDANT if outcome == REDUNDANT else RETURNED
    return outcome if kept and outcome in (CONSUMED, FILTERED, FAILED) else UNUSED
