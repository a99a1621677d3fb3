"""What a session asks for and gets, a turn at a time, whoever makes it: the seam between token capture and generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from psrl.protocol.samples import VersionSpan


@dataclass(slots=True)
class TurnTokens:
    """What the model wrote in one turn, or (streamed) a further part of it; token ids as sampled, never re-tokenised.
    `finish` is "" while the turn goes on, then "stop", "length" or "truncated" (psrl.protocol.generation)."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    """Positions count from the first token of the turn."""
    finish: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """One turn to generate. `prompt_ids` is everything before it: the whole conversation as the model sees it."""

    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    temperature: float | None = None
    """None: as the run samples. The same for the next two."""
    top_p: float | None = None
    seed: int | None = None
    num_before: int = 0
    """Turns that the session has kept: one that failed and is made again draws the same numbers again, a further one others."""
    stop_token_ids: tuple[int, ...] = ()
    """In addition to the model's own."""


class SessionOverError(Exception):
    """The trajectory takes no further turn: its group was taken away, or it is over. Says why."""


class TurnMaker(Protocol):
    """Makes the turns of one trajectory, one at a time, wherever there is room and across pulls, migrations and deaths."""

    def room(self, prompt_tokens: int) -> int:
        """Most new tokens that a turn after so many may have, out of the response budget and the context; 0 or less: none.
        The response budget counts everything after the first turn's prompt."""
        ...

    async def turn(self, request: TurnRequest, on_tokens: Callable[[TurnTokens], None] | None = None) -> TurnTokens:
        """The whole turn; `on_tokens` hears parts of it as they arrive. Raises SessionOverError. Cancelling it aborts the
        generation."""
        ...


@dataclass(slots=True)
class TrainingArrays:
    """One branch of a conversation as a training sample; all but `prompt_ids` have one entry a response token.

    `response_mask` is 1 where the model wrote the token, 0 for what its environment and the chat template added; those have
    log-prob 0. `spans` say which weights wrote which tokens (positions in `response_ids`; masked tokens have none).
    """

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    rollout_log_probs: list[float]
    spans: list[VersionSpan]


def shared_prompt(branches: Sequence[TrainingArrays]) -> list[TrainingArrays]:
    """The same trajectories with one common prompt: what their prompts begin with alike; the rest of each prompt counts as
    response tokens that do not train.

    >>> a, b = TrainingArrays([1, 2], [3], [1], [0.5], []), TrainingArrays([1, 9], [4], [1], [0.5], [])
    >>> [(s.prompt_ids, s.response_ids, s.response_mask) for s in shared_prompt([a, b])]
    [([1], [2, 3], [0, 1]), ([1], [9, 4], [0, 1])]
    """
    common = 0
    while all(len(b.prompt_ids) > common for b in branches) and len({b.prompt_ids[common] for b in branches}) == 1:
        common += 1
    shared = []
    for branch in branches:
        rest = branch.prompt_ids[common:]
        shared.append(
            TrainingArrays(
                prompt_ids=branch.prompt_ids[:common],
                response_ids=rest + branch.response_ids,
                response_mask=[0] * len(rest) + branch.response_mask,
                rollout_log_probs=[0.0] * len(rest) + branch.rollout_log_probs,
                spans=[VersionSpan(s.start + len(rest), s.end + len(rest), s.version) for s in branch.spans],
            )
        )
    return shared
