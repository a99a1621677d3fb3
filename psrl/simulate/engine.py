"""An engine's continuous batching, event by event: between two events the batch is the same, so its tokens follow from
a formula. First come, first served within rows and KV capacity; prefill goes first; the youngest yields. Pure.

The cost of a sample is O(log batch): nothing here happens once a token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from psrl.protocol.generation import EngineStats
from psrl.simulate.costs import Costs, steps_seconds, steps_within
from psrl.simulate.prefix_cache import PrefixCache
from psrl.simulate.samples import SimSample

HEADROOM_TOKENS = 16
"""Growth that is reserved for each running sample at admission, as in the embedded engine."""


class SimEngine:
    """`submit` and `abort` at any time; `wake` at `next_s`. Times never go back."""

    __slots__ = (
        "_fresh_at",
        "_heap",
        "_order",
        "_planned",
        "at_s",
        "busy_s",
        "cache",
        "costs",
        "decode_kv_tokens",
        "decode_steps",
        "generated_tokens",
        "kv_capacity",
        "kv_tokens",
        "max_num_seqs",
        "next_s",
        "paused",
        "preemptions",
        "prefill_s",
        "prefills",
        "prefix_hit_tokens",
        "prompt_tokens",
        "running",
        "spans",
        "version",
        "waiting",
    )

    def __init__(self, costs: Costs, *, max_num_seqs: int, kv_capacity: int, cache: PrefixCache | None = None) -> None:
        self.costs = costs
        self.cache = cache
        """None: nothing is kept of a sample that leaves, and only samples of one group share their prompt's computation."""
        self.max_num_seqs = max_num_seqs
        self.kv_capacity = kv_capacity
        self.running: dict[int, SimSample] = {}
        """By arrival number."""
        self.waiting: deque[SimSample] = deque()
        self.version = -1
        self.paused = False
        """Decoding stands still for new weights."""
        self.at_s = 0.0
        """The end of the last whole decode step or prefill: all counters are those of this moment."""
        self.next_s: float | None = None
        """When `wake` is due; None while there is nothing to do."""
        self.decode_steps = self.generated_tokens = self.prompt_tokens = self.preemptions = 0
        self.decode_kv_tokens = self.prefills = self.prefix_hit_tokens = 0
        self.prefill_s = 0.0
        self.kv_tokens = 0
        """Of all running samples, each with all of its own: what attention reads."""
        self.busy_s = 0.0
        self.spans: list[tuple[float, float, float]] | None = None
        """(start, end, busy seconds) of what was computed, if anybody wants to know."""
        self._order = 0
        self._planned = 0
        """Whole decode steps until `next_s`."""
        self._heap: list[tuple[int, int]] = []
        """(decode step at which it stops, arrival number) of running samples; entries of samples that left stay."""
        self._fresh_at: dict[int, int] = {}
        """Running samples of each group: their prompt needs no second prefill."""

    # ---- time ------------------------------------------------------------------------------------------------

    def _step_s(self) -> tuple[float, float]:
        """Seconds of the next decode step, and how much longer each one after it takes."""
        n = len(self.running)
        first = self.costs.decode.latency_s(n, self.kv_tokens) + self.costs.step_overhead_s
        return first, self.costs.decode.attn_latency_k * n

    def advance(self, now_s: float) -> None:
        """Count the whole steps that ended by `now_s`."""
        if not self.running:
            self.at_s = max(self.at_s, now_s)
            return
        first, growth = self._step_s()
        if self.next_s is not None and now_s >= self.next_s:
            steps = self._planned
        else:
            steps = min(self._planned, steps_within(first, growth, now_s - self.at_s))
        if steps:
            tokens = steps * len(self.running)
            seconds = steps_seconds(first, growth, steps)
            self._spend(seconds, seconds - steps * self.costs.step_overhead_s)
            self.decode_steps += steps
            self._planned -= steps
            self.generated_tokens += tokens
            self.decode_kv_tokens += steps * self.kv_tokens + tokens * (steps - 1) // 2
            self.kv_tokens += tokens

    def _spend(self, seconds: float, busy_s: float) -> None:
        if self.spans is not None:
            self.spans.append((self.at_s, self.at_s + seconds, busy_s))
        self.at_s += seconds
        self.busy_s += busy_s

    def boundary(self, now_s: float) -> float:
        """End of the step or prefill that goes on at `now_s`: nothing changes in the batch before it."""
        self.advance(now_s)
        if not self.running or self.at_s >= now_s:
            return self.at_s
        return self.at_s + self._step_s()[0]

    # ---- what the instance asks ------------------------------------------------------------------------------

    def submit(self, sample: SimSample, now_s: float) -> None:
        self._order += 1
        sample.order, sample.start_step = self._order, -1
        self.waiting.append(sample)
        self.look(now_s)

    def look(self, now_s: float) -> None:
        """Something waits: wake at the next boundary if it may be admitted there."""
        if self.paused or not self.waiting:
            return
        if not self.running:
            self.next_s, self._planned = max(now_s, self.at_s), 0
        elif self._fits(self.waiting[0]):
            boundary = self.boundary(now_s)
            if self.next_s is None or boundary < self.next_s:
                self.next_s, self._planned = boundary, int(boundary > self.at_s)

    def wake(self, now_s: float) -> list[SimSample]:
        """At `next_s`: the samples whose turn has ended. Preempts, admits and plans what comes next."""
        self.advance(now_s)
        ended = self._ended()
        self._preempt()
        if not self.paused:
            self._admit()
        self._plan()
        return ended

    def abort(self, samples: Iterable[SimSample], now_s: float) -> None:
        """Take these away, wherever in the engine they are; they keep the tokens of the steps that are over."""
        self.advance(now_s)
        for sample in samples:
            if sample.start_step >= 0:
                self._leave(sample)
            else:
                self.waiting.remove(sample)
            sample.order = 0
        if self.running or self.waiting:
            self._replan(now_s)
        else:
            self.next_s, self._planned, self.at_s = None, 0, max(self.at_s, now_s)

    def abort_all(self, now_s: float) -> list[SimSample]:
        """Everything that is here, in order of arrival; time does not matter for a caller at a boundary."""
        self.advance(now_s)
        gone = sorted([*self.running.values(), *self.waiting], key=lambda s: s.order)
        for sample in list(self.running.values()):
            self._leave(sample)
        for sample in gone:
            sample.order = 0
        self.waiting.clear()
        self._heap.clear()
        self.next_s, self._planned = None, 0
        return gone

    def take_waiting(self) -> list[SimSample]:
        """Hand back all that wait."""
        gone = list(self.waiting)
        self.waiting.clear()
        for sample in gone:
            sample.order = 0
        return gone

    def made(self, sample: SimSample) -> int:
        """Response tokens of a sample that is here."""
        return sample.made + (self.decode_steps - sample.start_step if sample.start_step >= 0 else 0)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self.running),
            waiting=len(self.waiting),
            kv_usage=min(1.0, self.kv_held / self.kv_capacity),
            preemptions=self.preemptions,
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated_tokens,
            busy_s=self.busy_s,
            kv_tokens=self.kv_held,
            kv_capacity_tokens=self.kv_capacity,
            decode_steps=self.decode_steps,
            decode_kv_tokens=self.decode_kv_tokens,
            prefills=self.prefills,
            prefill_s=self.prefill_s,
            prefix_hit_tokens=self.prefix_hit_tokens,
        )

    @property
    def kv_held(self) -> int:
        """Tokens that the running samples occupy; blocks that several of them hold count once."""
        return self.kv_tokens - (self.cache.shared_blocks * self.cache.blocks.size if self.cache else 0)

    def new_weights(self, version: int, now_s: float) -> None:
        """Nothing is running. What was computed with other weights is of no use."""
        self.version, self.paused, self.at_s = version, False, now_s
        if self.cache:
            self.cache.clear()

    # ---- the batch -------------------------------------------------------------------------------------------

    def _ended(self) -> list[SimSample]:
        ended: list[SimSample] = []
        heap = self._heap
        while heap and heap[0][0] <= self.decode_steps:
            sample = self._valid(heappop(heap))
            if sample is not None:
                self._leave(sample)
                sample.order = 0
                ended.append(sample)
        return ended

    def _valid(self, entry: tuple[int, int]) -> SimSample | None:
        """The sample that this entry of the heap is about; None if it has left, or came back with another end."""
        sample = self.running.get(entry[1])
        return sample if sample is not None and sample.stop_step == entry[0] else None

    def _leave(self, sample: SimSample) -> None:
        """Out of the batch: its tokens are counted, its place is free."""
        self.kv_tokens -= sample.tokens + self.decode_steps - sample.start_step
        sample.made += self.decode_steps - sample.start_step
        sample.start_step = -1
        del self.running[sample.order]
        if self.cache:
            self.cache.release(self.cache.blocks.of_sample(sample, sample.tokens))
            self._evict()
        group = sample.group.number
        left = self._fresh_at[group] - 1
        if left:
            self._fresh_at[group] = left
        else:
            del self._fresh_at[group]

    def _preempt(self) -> None:
        """The youngest goes back to the head of the queue until the batch fits; its tokens are prefilled again later."""
        while self.kv_held > self.kv_capacity and len(self.running) > 1:
            sample = self.running[max(self.running)]
            self._leave(sample)
            self.waiting.appendleft(sample)
            self.preemptions += 1

    def _fits(self, sample: SimSample) -> bool:
        if not self.running:
            return True
        if len(self.running) >= self.max_num_seqs:
            return False
        reserved = HEADROOM_TOKENS * (len(self.running) + 1)
        return self.kv_held + reserved + sample.tokens - self._shares(sample) <= self.kv_capacity

    def _shares(self, sample: SimSample) -> int:
        """Of its tokens, those that running samples hold: all of its prompt or all that prompts have in common, if any."""
        if not self.cache:
            return 0
        blocks = self.cache.blocks
        for tokens in (sample.group.prompt_tokens, blocks.shared_tokens):
            names = blocks.of_prompt(sample.group.prompt, tokens)
            if names and self.cache.holds(names[-1]):
                return len(names) * blocks.size
        return 0

    def _evict(self) -> None:
        """What is kept of samples that left gives way to those that run."""
        if self.cache:
            self.cache.shrink((self.kv_capacity - self.kv_held) // self.cache.blocks.size)

    def _admit(self) -> None:
        prefill = 0
        self._evict()  # for what has grown since the last event
        while self.waiting and self._fits(self.waiting[0]):
            sample = self.waiting.popleft()
            prefill += self._to_prefill(sample)
            self.kv_tokens += sample.tokens
            self._evict()
            sample.start_step = self.decode_steps
            if sample.first_version < 0:
                sample.first_version = self.version
            sample.last_version = self.version
            self.running[sample.order] = sample
            group = sample.group.number
            self._fresh_at[group] = self._fresh_at.get(group, 0) + 1
            sample.stop_step = self.decode_steps + max(1, sample.turn_end - sample.made)
            heappush(self._heap, (sample.stop_step, sample.order))
        if prefill:
            self.prompt_tokens += prefill
            seconds = self.costs.prefill_seconds(prefill)
            self.prefills += 1
            self.prefill_s += seconds
            self._spend(seconds, seconds)

    def _to_prefill(self, sample: SimSample) -> int:
        """Tokens to compute before it decodes: the last one in any case."""
        if self.cache:
            hits = self.cache.hold(self.cache.blocks.of_sample(sample, sample.tokens)) * self.cache.blocks.size
            hits = min(hits, sample.tokens - 1)
            self.prefix_hit_tokens += hits
            return sample.tokens - hits
        if sample.made == 0 and sample.group.number in self._fresh_at:
            return 0  # copied from another sample of its group
        return sample.tokens

    def _plan(self) -> None:
        """The next event: a sample ends, or the cache is full."""
        self._planned = 0
        if not self.running:
            self.next_s = None
            self.look(self.at_s)
            return
        heap = self._heap
        while self._valid(heap[0]) is None:
            heappop(heap)
        if len(heap) > 64 and len(heap) > 4 * len(self.running):
            self._heap = heap = [entry for entry in heap if self._valid(entry)]
            heapify(heap)
        steps = heap[0][0] - self.decode_steps
        n = len(self.running)
        if n > 1:
            steps = min(steps, (self.kv_capacity - self.kv_held) // n + 1)
        self._planned = max(1, steps)
        self.next_s = self.at_s + steps_seconds(*self._step_s(), self._planned)

    def _replan(self, now_s: float) -> None:
        """After samples were taken away in the middle of a step: the step in hand ends as the smaller batch's would."""
        self._plan()
        self.look(now_s)
