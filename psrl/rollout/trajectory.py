"""One multi-turn sample of a group: its turns, one after the other, each made wherever there is room. Bookkeeping and futures.

A turn is a request of its own to an engine: everything said before it is the prompt, and what it has made so far goes along
when it moves (psrl.rollout.partial). Between two turns the sample is at its environment and at no instance.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from psrl.protocol.generation import FINISH_LENGTH, GenerateRequest, SamplingParams, TokenChunk
from psrl.protocol.samples import VersionSpan
from psrl.rollout.partial import PartialSample
from psrl.sessions.turns import SessionOverError, TurnRequest, TurnTokens


class Places(Protocol):
    """What a trajectory asks of the agent loop that holds its group."""

    def begin(self, trajectory: Trajectory) -> None:
        """A turn is there: it needs an instance, or may begin at the one whose place it keeps."""

    def stop(self, trajectory: Trajectory, instance: str, sample: int) -> None:
        """The turn that was made at `instance` under the number `sample` is not wanted any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLimits:
    context: int
    """Most tokens of a conversation."""
    response: int
    """Most tokens after the first turn's prompt, those of the environment included."""


@dataclass(slots=True)
class _Turn:
    part: PartialSample
    request: TurnRequest
    done: asyncio.Future[TurnTokens]
    on_tokens: Callable[[TurnTokens], None] | None


@dataclass(slots=True)
class Trajectory:
    """Implements psrl.sessions.turns.TurnMaker, and what a group asks of its samples (see PartialSample).

    `instance` is where a turn is being made, or where a place is kept for the first one. Engines know a turn by
    `number * group_size + sample`: what is left of an earlier turn is then told from the present one.
    """

    sample: int
    seed: int
    group_size: int
    limits: TokenLimits
    places: Places
    greedy: bool = False
    trains: bool = True
    """Its turns are sampled as the run says, whatever they ask for: what trains is drawn from the policy that trains, and
    independently of the other samples of its group."""
    finish: str = ""
    instance: str = ""
    last_instance: str = ""
    """Where its last turn was made."""
    holder: str = ""
    """As PartialSample.holder, between turns."""
    token_ids: list[int] = field(default_factory=list)
    """What the model has written, in order of its turns."""
    last_finish: str = ""
    """How its last turn ended."""
    longest: int = 0
    """Tokens of the longest conversation so far: prompt and turn."""
    _number: int = 0
    _first_prompt: int = -1
    _turn: _Turn | None = None

    # ---- for the session ---------------------------------------------------------------------------------------

    def room(self, prompt_tokens: int) -> int:
        """See TurnMaker.

        >>> t = Trajectory(0, 1, 4, TokenLimits(context=100, response=50), places=None)
        >>> t.room(20), t.room(70)
        (50, 30)
        """
        first = self._first_prompt if self._first_prompt >= 0 else prompt_tokens
        return min(self.limits.context, first + self.limits.response) - prompt_tokens

    async def turn(self, request: TurnRequest, on_tokens: Callable[[TurnTokens], None] | None = None) -> TurnTokens:
        """See TurnMaker."""
        if self.finish:
            raise SessionOverError(f"the trajectory is over ({self.finish})")
        if self._turn is not None:
            raise RuntimeError("a trajectory makes one turn at a time")
        if self._first_prompt < 0:
            self._first_prompt = len(request.prompt_ids)
        self._number += 1
        part = PartialSample(
            sample=self._number * self.group_size + self.sample,
            seed=self._seed(request),
            max_response=min(request.max_new_tokens, self.room(len(request.prompt_ids))),
            greedy=self.greedy,
            exact=request.seed is not None,
            holder=self.holder,
        )
        done = asyncio.get_running_loop().create_future()
        self._turn = _Turn(part, request, done, on_tokens)
        self.places.begin(self)
        try:
            return await done
        except asyncio.CancelledError:
            self._withdraw()
            raise

    def _seed(self, request: TurnRequest) -> int:
        own = turn_seed(self.seed, request.num_before)
        if request.seed is None:
            return own
        return mixed_seed(own, request.seed) if self.trains else request.seed

    def _withdraw(self) -> None:
        if (turn := self._turn) is not None:
            at = turn.part.instance
            self._turn, self.instance, self.holder = None, "", turn.part.holder
            self.longest = max(self.longest, len(turn.request.prompt_ids) + len(turn.part.token_ids))
            if at:
                self.places.stop(self, at, turn.part.sample)

    # ---- for its group -----------------------------------------------------------------------------------------

    def keep_place(self, instance: str) -> None:
        """The first turn is to be made at `instance`: it counts as being there from now on."""
        self.instance = instance

    def give_up_place(self) -> str:
        """The place that is kept for a turn that has not begun, which is free from now on; "" if there is none."""
        if self._turn is not None and self._turn.part.instance:
            return ""
        kept, self.instance = self.instance, ""
        return kept

    @property
    def looking(self) -> bool:
        """A turn waits for an instance."""
        return self._turn is not None and not self.instance and not self.finish

    @property
    def away(self) -> bool:
        """It has had a turn and is at its environment."""
        return self._turn is None and not self.instance and not self.finish and bool(self.last_instance)

    @property
    def turn_tokens(self) -> int:
        """How many `turn_ids` are."""
        return len(self._turn.request.prompt_ids) + len(self._turn.part.token_ids) if self._turn is not None else 0

    @property
    def turn_ids(self) -> tuple[int, ...]:
        """All tokens of the turn in hand, its prompt's first; empty between turns."""
        return (*self._turn.request.prompt_ids, *self._turn.part.token_ids) if self._turn is not None else ()

    def next_request(
        self, instance: str, *, group: int, version: int, incarnation: int, sampling: SamplingParams
    ) -> GenerateRequest | None:
        """What to ask of `instance`: the rest of the turn in hand. None: there is none that looks for a place, or nothing of it
        remains (it then ends as "length")."""
        turn = self._turn
        if turn is None or turn.part.instance or self.finish:
            return None
        if (item := turn.part.next_request(instance)) is None:
            self._end_turn(turn)
            return None
        self.instance = self.last_instance = instance
        return GenerateRequest(
            group=group,
            min_version=version,
            incarnation=incarnation,
            prompt_ids=turn.request.prompt_ids,
            sampling=_sampling(sampling, turn.request, obeys=not self.trains),
            samples=(item,),
        )

    def add(self, chunk: TokenChunk, instance: str) -> tuple[bool, bool]:
        """(left, route), as GroupWork.add. What belongs to an earlier turn, or comes from elsewhere, is ignored."""
        turn = self._turn
        if turn is None or chunk.sample != turn.part.sample or instance != turn.part.instance or self.finish:
            return False, False
        left = turn.part.add(chunk)
        if turn.on_tokens is not None and chunk.token_ids:
            start = turn.part.request_start
            spans = [VersionSpan(s.start + start, s.end + start, s.version) for s in chunk.spans]
            turn.on_tokens(TurnTokens(list(chunk.token_ids), list(chunk.logprobs), spans))
        if not left:
            return False, False
        self.instance = ""
        if turn.part.finish:
            self._end_turn(turn)
        return True, not turn.part.finish

    def _end_turn(self, turn: _Turn) -> None:
        part = turn.part
        made = TurnTokens(part.token_ids, part.logprobs, part.spans, part.finish or FINISH_LENGTH)
        self._turn, self.instance, self.last_finish, self.holder = None, "", made.finish, part.holder
        self.token_ids += part.token_ids
        self.longest = max(self.longest, len(turn.request.prompt_ids) + len(part.token_ids))
        if not turn.done.done():
            turn.done.set_result(made)

    def forget(self, instance: str) -> None:
        """`instance` is gone, and all that it held."""
        if self.holder == instance:
            self.holder = ""
        if self._turn is not None:
            self._turn.part.forget(instance)

    def lost(self) -> None:
        """Its instance is gone: what was streamed of the turn is kept, the rest is made elsewhere."""
        self.instance = ""
        if self._turn is not None:
            self._turn.part.lost()

    def end(self, finish: str) -> None:
        """No further turn; one in the making is given up, its tokens with it."""
        if not self.finish:
            self.finish, self.instance = finish, ""
            turn, self._turn = self._turn, None
            if turn is not None and not turn.done.done():
                turn.done.set_exception(SessionOverError(f"the trajectory has ended ({finish})"))
                turn.done.exception()  # whoever waited may have been cancelled already


def turn_seed(seed: int, turn: int) -> int:
    """A 62-bit seed of one turn: no two turns of a trajectory draw the same numbers, a repeated one the same again."""
    return (seed ^ (turn * 0x9E3779B97F4A7C15)) & ((1 << 62) - 1)


def mixed_seed(own: int, asked: int) -> int:
    """The seed of a turn that trains and whose client asked for one. Agents ask for the same number in all samples of a group, which
    would then be one sample many times, without an advantage: so whatever is asked, turns whose `own` 62-bit seeds differ still draw
    other numbers, and another number asked gives others too.

    >>> mixed_seed(5, 42) == mixed_seed(5, 42), mixed_seed(5, 42) == mixed_seed(6, 42), mixed_seed(5, 42) == mixed_seed(5, 43)
    (True, False, False)
    """
    return (own ^ (asked * 0xBF58476D1CE4E5B9)) & ((1 << 62) - 1)


def _sampling(run: SamplingParams, turn: TurnRequest, *, obeys: bool) -> SamplingParams:
    """The run's sampling with the turn's own stop tokens and, if it `obeys`, temperature and top_p."""
    changes: dict[str, object] = {}
    if turn.stop_token_ids:
        changes["stop_token_ids"] = (*run.stop_token_ids, *turn.stop_token_ids)
    if obeys:
        asked = {"temperature": turn.temperature, "top_p": turn.top_p}
        changes |= {name: value for name, value in asked.items() if value is not None}
    return msgspec.structs.replace(run, **changes) if changes else run
