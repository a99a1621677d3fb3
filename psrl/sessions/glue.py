"""What the chat template writes between one turn of the model and the next, without the model's own tokens being touched."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from psrl.models.tokenizer import ChatTokenizer
from psrl.protocol.generation import FINISH_STOP
from psrl.sessions.messages import Message


def glue_ids(
    tokenizer: ChatTokenizer,
    messages: Sequence[Message],
    tools: Sequence[Message],
    at: int,
    ended_with: tuple[int, str],
) -> list[int] | None:
    """Ids from the end of what the model wrote as `messages[at]` to where its next turn begins; `ended_with` are the last
    token and the finish of that turn.

    The conversation is rendered with a mark in place of that message's text, and what follows the mark is tokenised. So the
    template may show earlier turns as it likes (without their thinking, say): nothing in front of the mark is read. The
    end-of-turn token is in the glue unless the model has written it itself. None if the template does not show the
    message. Raises ConfigError if the template refuses the conversation.
    """
    mark = _unused_mark([*messages, *tools])
    marked = [*messages[:at], {"role": "assistant", "content": mark}, *messages[at + 1 :]]
    _, shown, after = tokenizer.render_chat(marked, tools).rpartition(mark)
    if not shown:
        return None
    ids = tokenizer.encode(after)
    last, finish = ended_with
    return _behind(tokenizer, ids, last) if finish == FINISH_STOP else ids


def _unused_mark(shown: Sequence[Message]) -> str:
    text = str(shown)
    return next(mark for i in count() if (mark := f"TURN{i}HERE") not in text)


def _behind(tokenizer: ChatTokenizer, ids: list[int], last: int) -> list[int]:
    """`ids` without a leading `last`; some templates put a space before it."""
    if last not in ids:
        return ids
    at = ids.index(last)
    before = tokenizer.decode_batch([ids[:at]], skip_special_tokens=False)[0]
    return ids if before.strip() else ids[at + 1 :]
