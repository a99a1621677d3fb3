"""Token capture: a conversation as a tree of turns whose tokens are exactly what the engine saw and made.

The model's tokens are kept as sampled and never made from text again; what the template puts between two turns is inserted
once (glue.py). A request continues the longest beginning of its history that ends with one of our turns; whatever differs
from then on (an edited history, a second answer to the same question) is a new branch beside the old one.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from psrl.config.errors import ConfigError
from psrl.models.tokenizer import ChatTokenizer
from psrl.protocol.generation import FINISH_STOP
from psrl.protocol.samples import VersionSpan
from psrl.sessions.arrays import CapturedTurn, training_arrays
from psrl.sessions.errors import RefusedRequestError
from psrl.sessions.glue import glue_ids
from psrl.sessions.messages import Message, extended, history_digests, normal_messages
from psrl.sessions.tool_calls import split_tool_calls
from psrl.sessions.turns import TrainingArrays, TurnTokens

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One finished turn. Arrays, not lists: an integer object costs seven times as much, and thousands of turns are held."""

    parent: Turn | None
    added_ids: array[int]
    """What was put between the parent's tokens and these: template glue, or (no parent) the prompt."""
    token_ids: array[int]
    logprobs: array[float]
    spans: tuple[VersionSpan, ...]
    finish: str

    def line(self) -> list[Turn]:
        """The branch that ends here, its first turn first."""
        line, turn = [self], self.parent
        while turn is not None:
            line.append(turn)
            turn = turn.parent
        return line[::-1]

    def ids(self) -> Iterator[int]:
        """All tokens of the branch up to the end of this turn."""
        for turn in self.line():
            yield from turn.added_ids
            yield from turn.token_ids


@dataclass(frozen=True, slots=True, eq=False)
class TurnStart:
    """A turn that may be made: nothing is kept of it until it ends."""

    parent: Turn | None
    added_ids: Sequence[int]
    prompt_ids: tuple[int, ...]
    """The whole conversation as the model sees it."""
    history: bytes
    """Digest of what was asked; the same for the same request."""
    with_tools: bool


@dataclass(frozen=True, slots=True)
class EndedTurn:
    """`message` is the assistant's message in OpenAI's shape; `finish_reason` is "stop", "length" or "tool_calls"."""

    turn: Turn
    message: Message
    finish_reason: str


class SessionCapture:
    """The turns of one session. Pure bookkeeping: no clock, no I/O."""

    def __init__(self, tokenizer: ChatTokenizer):
        self.tokenizer = tokenizer
        self.num_turns = 0
        self._by_history: dict[bytes, Turn] = {}
        """The newest turn that ends each history, its own message included."""
        self._leaves: dict[int, Turn] = {}
        """By id() of the turn; in the order in which they ended."""
        self._newest: Turn | None = None

    def begin_turn(self, messages: Sequence[Any], tools: Sequence[Message] = ()) -> TurnStart:
        """Where the answer to `messages` would go. Changes nothing, so a turn that fails or is cancelled leaves no trace and
        the same request may come again.

        Raises RefusedRequestError if a message is malformed or the chat template refuses the conversation.
        """
        normal = normal_messages(messages)
        digests = history_digests(normal, tools)
        parent, added = self._continued(normal, tools, digests)
        if added is None:
            parent, added = None, self._prompt(normal, tools)
        before = parent.ids() if parent is not None else ()
        return TurnStart(parent, added, (*before, *added), digests[-1], bool(tools))

    def _continued(
        self, messages: list[Message], tools: Sequence[Message], digests: list[bytes]
    ) -> tuple[Turn | None, list[int] | None]:
        """The turn that the request goes on from and the glue behind it; None, None if it begins anew."""
        for length in range(len(messages), 0, -1):
            if (turn := self._by_history.get(digests[length])) is None:
                continue
            try:
                last = turn.token_ids[-1] if turn.token_ids else -1
                glue = glue_ids(self.tokenizer, messages, tools, length - 1, (last, turn.finish))
            except ConfigError as error:
                glue = None
                log.warning("a conversation begins anew, since the template cannot go on from its last turn: %s", error)
            return turn, glue
        return None, None

    def _prompt(self, messages: list[Message], tools: Sequence[Message]) -> list[int]:
        try:
            if not tools:
                return self.tokenizer.encode_chat(messages)
            return self.tokenizer.encode(self.tokenizer.render_chat(messages, tools))
        except ConfigError as error:
            raise RefusedRequestError(str(error), "messages") from error

    def end_turn(self, start: TurnStart, tokens: TurnTokens, text: str | None = None) -> EndedTurn:
        """Keep what the model wrote and read its message. `text` is what the client is told, if that is not all of the tokens
        (it ends before a stop string). Raises ValueError if log-probs or spans do not fit the tokens."""
        check_turn(tokens)
        turn = Turn(
            parent=start.parent,
            added_ids=array("i", start.added_ids),
            token_ids=array("i", tokens.token_ids),
            logprobs=array("d", tokens.logprobs),
            spans=tuple(tokens.spans),
            finish=tokens.finish,
        )
        written = self.tokenizer.decode(tokens.token_ids) if text is None else text
        message, reason = assistant_message(written, tokens.finish, start.with_tools, start.history.hex()[:20])
        if start.parent is not None:
            self._leaves.pop(id(start.parent), None)
        self._leaves[id(turn)] = self._newest = turn
        self._by_history[extended(start.history, *normal_messages([message]))] = turn
        self.num_turns += 1
        return EndedTurn(turn, message, reason)

    def branches(self) -> list[Turn]:
        """The last turn of each branch, in the order in which they ended."""
        return list(self._leaves.values())

    def trained_branch(self) -> Turn | None:
        """The branch that trains: the one with the newest turn. None before the first."""
        return self._newest

    def arrays(self, branch: Turn) -> TrainingArrays:
        """The branch as a training sample."""
        return training_arrays([CapturedTurn(t.added_ids, t.token_ids, t.logprobs, t.spans) for t in branch.line()])


def assistant_message(text: str, finish: str, with_tools: bool, call_id: str) -> tuple[Message, str]:
    """(message, finish reason). Tool calls are looked for only if the request had tools; ids begin with `call_{call_id}`."""
    content, calls = split_tool_calls(text, f"call_{call_id}") if with_tools else (text, [])
    message: Message = {"role": "assistant", "content": content}
    if calls:
        message = {"role": "assistant", "content": content if content.strip() else None, "tool_calls": calls}
    if finish != FINISH_STOP:
        return message, "length"
    return message, "tool_calls" if calls else "stop"


def check_turn(tokens: TurnTokens) -> None:
    """A ValueError unless there is a log-prob for each token, and spans cover the tokens without gap or overlap."""
    at = 0
    for span in tokens.spans:
        if span.start != at or span.end < at:
            raise ValueError(f"spans {tokens.spans} do not follow one another")
        at = span.end
    if not len(tokens.token_ids) == len(tokens.logprobs) == at or not tokens.finish:
        raise ValueError(
            f"a turn of {len(tokens.token_ids)} tokens has {len(tokens.logprobs)} log-probs, spans up to {at} and "
            f"finish {tokens.finish!r}"
        )
