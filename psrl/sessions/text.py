"""Text of a turn while its tokens arrive: what may be shown already, and where a stop string ends it."""

from __future__ import annotations

from collections.abc import Sequence

from psrl.models.tokenizer import ChatTokenizer


class TextStream:
    """Tokens to text, a token at a time. What ends in the middle of a character waits for the rest of it.

    Each step decodes the last few tokens only: those of the step before give the context that some tokenizers need (a leading
    space), their text is taken off again.
    """

    def __init__(self, tokenizer: ChatTokenizer):
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._new: list[int] = []

    def add(self, token_id: int) -> str:
        """The text that this token completes, often a word, sometimes nothing."""
        self._new.append(token_id)
        text = self._pending()
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._context, self._new = self._new, []
        return text

    def end(self) -> str:
        """The text of what still waits: a character that was never finished."""
        text, self._new = self._pending(), []
        return text

    def _pending(self) -> str:
        before = self._tokenizer.decode(self._context)
        return self._tokenizer.decode(self._context + self._new)[len(before) :]


class TurnText:
    """The text of one turn up to a stop string, and how much of it is certain to stay.

    `hide_from`: a mark that begins what is not shown while it is being written (a tool call may turn out to be none).
    """

    def __init__(self, tokenizer: ChatTokenizer, stop: Sequence[str] = (), hide_from: str = ""):
        self._stream = TextStream(tokenizer)
        self._stop = [text for text in stop if text]
        self._reach = max(map(len, self._stop), default=1) - 1
        self._hide_from = hide_from
        self._shown = 0
        self.text = ""
        self.stopped = False

    def add(self, token_id: int) -> bool:
        """Whether this token completes a stop string, which ends the text in front of it."""
        return self._extend(self._stream.add(token_id))

    def end(self) -> bool:
        """No token follows. As `add`."""
        return self._extend(self._stream.end())

    def _extend(self, new: str) -> bool:
        begin = max(0, len(self.text) - self._reach)
        self.text += new
        found = [at for stop in self._stop if (at := self.text.find(stop, begin)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.stopped = True
        return self.stopped

    def fresh(self) -> str:
        """What may be shown since the last call: not the beginning of what may become a stop string or the mark."""
        certain = len(self.text)
        if not self.stopped:
            certain -= unfinished(self.text, self._stop)
        if self._hide_from:
            at = self.text.find(self._hide_from, max(0, self._shown - len(self._hide_from)))
            certain = min(certain, at if at >= 0 else len(self.text) - unfinished(self.text, [self._hide_from]))
        fresh = self.text[self._shown : certain]
        self._shown += len(fresh)
        return fresh


def unfinished(text: str, marks: Sequence[str]) -> int:
    """Characters at the end of `text` that may be the beginning of one of `marks`.

    >>> unfinished("so <to", ["<tool_call>"]), unfinished("a", ["b"])
    (3, 0)
    """
    return max((n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0)
