"""One response in the making, across aborts, instances and versions: pure bookkeeping of partial rollout."""

from __future__ import annotations

from dataclasses import dataclass, field

from psrl.protocol.generation import FINISH_ABORT, FINISH_LENGTH, FINISH_STOP, HANDED_BACK, SampleRequest, TokenChunk
from psrl.protocol.samples import VersionSpan


@dataclass(slots=True)
class PartialSample:
    """Tokens, log-probs and version spans so far. `instance` is where it is being decoded, "" while it looks for one."""

    sample: int
    seed: int
    max_response: int
    greedy: bool = False
    exact: bool = False
    """See SampleRequest."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    finish: str = ""
    instance: str = ""
    holder: str = ""
    """The instance that made its last tokens: it may still hold their keys and values. "" if that is gone."""
    request_start: int = 0
    """Tokens that existed when the current request was sent: chunk spans count from there."""
    interrupted_at: int = 0
    """Tokens that existed when a pull of new weights last interrupted it."""

    @property
    def looking(self) -> bool:
        """It waits for an instance."""
        return not self.instance and not self.finish

    @property
    def newest_start(self) -> int:
        """The first token after the last interruption: a pull that handed it back, or other weights that took over.

        >>> PartialSample(0, 1, 9, token_ids=[7] * 5, spans=[VersionSpan(0, 3, 1), VersionSpan(3, 5, 2)]).newest_start
        3
        """
        return max(self.interrupted_at, self.spans[-1].start if self.spans else 0)

    def next_request(self, instance: str) -> SampleRequest | None:
        """What to ask of `instance`: the *remaining* budget after the tokens that exist. None when nothing remains
        (the sample is then finished as "length").

        >>> s = PartialSample(0, 1, max_response=24576, token_ids=[1] * 18202, logprobs=[0.0] * 18202)
        >>> s.next_request("r0").max_new_tokens
        6374
        """
        remaining = self.max_response - len(self.token_ids)
        if remaining <= 0:
            self.finish = FINISH_LENGTH
            self.instance = ""
            return None
        self.instance = instance
        self.request_start = len(self.token_ids)
        return SampleRequest(
            sample=self.sample,
            max_new_tokens=remaining,
            seed=self.seed,
            prefix_ids=tuple(self.token_ids),
            greedy=self.greedy,
            source=self.holder if self.holder != instance else "",
            exact=self.exact,
        )

    def add(self, chunk: TokenChunk) -> bool:
        """Take a chunk in; True when the sample is finished or must be routed again (see `finish` and `instance`)."""
        if len(chunk.token_ids) != len(chunk.logprobs):
            raise ValueError(
                f"chunk of group {chunk.group} sample {chunk.sample}: {len(chunk.token_ids)} tokens but {len(chunk.logprobs)} log-probs"
            )
        if chunk.token_ids:
            self.holder = self.instance
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        for span in chunk.spans:
            start, end = span.start + self.request_start, span.end + self.request_start
            if self.spans and self.spans[-1].version == span.version and self.spans[-1].end == start:
                self.spans[-1] = VersionSpan(self.spans[-1].start, end, span.version)
            elif end > start:
                self.spans.append(VersionSpan(start, end, span.version))
        if chunk.finish in (FINISH_STOP, FINISH_LENGTH):
            self.finish = chunk.finish
            self.instance = ""
            return True
        if chunk.finish in HANDED_BACK:
            if chunk.finish == FINISH_ABORT:
                self.interrupted_at = len(self.token_ids)
            self.finish = FINISH_LENGTH if len(self.token_ids) >= self.max_response else ""
            self.instance = ""
            return True
        return False

    def end(self, finish: str) -> None:
        """It ends as it is."""
        self.finish, self.instance = finish, ""

    def forget(self, instance: str) -> None:
        """`instance` is gone, and all that it held."""
        if self.holder == instance:
            self.holder = ""

    def lost(self) -> None:
        """The instance is gone: what was streamed so far is kept, the rest is made elsewhere."""
        self.instance = ""
