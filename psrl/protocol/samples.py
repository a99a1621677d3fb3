"""The sealed sample: what an agent loop writes once and every trainer rank reads."""

from __future__ import annotations

import msgspec


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [start, end) of one response were sampled by weights `version`; `VersionSpan(0, 2, 1)` covers tokens 0, 1."""

    start: int
    end: int
    version: int


class Sample(msgspec.Struct, array_like=True, kw_only=True):
    """One response to a prompt.

    `response_ids` is little-endian int32, `logprobs` little-endian float32, `mask` uint8 (1 = written by the model);
    all three have the same number of elements. `mask` may be empty, meaning all ones.
    `reward` is None when it could not be computed or was not finite: such a sample is never trained.
    `finish` is "stop" or "length" (an aborted sample is continued, never sealed).
    `greedy`: made without randomness, as the baseline that its group is compared with; never trained.
    """

    response_ids: bytes
    logprobs: bytes
    reward: float | None
    finish: str
    spans: list[VersionSpan]
    mask: bytes = b""
    metrics: dict[str, float] = {}
    greedy: bool = False


class Group(msgspec.Struct, array_like=True, kw_only=True):
    """All samples of one prompt; `version` is the V fixed when its place was reserved."""

    group: int
    data_epoch: int
    prompt: int
    version: int
    prompt_ids: bytes
    samples: list[Sample]


class SampleRef(msgspec.Struct, frozen=True, array_like=True):
    """Where a sealed group lies: bytes [offset, offset + length) of a segment under `samples/`, with their crc32.

    `tokens` holds prompt + response length of each sample, so that every rank can plan its micro-batches
    without reading any sample; a sample that may not be trained (no reward, empty response, greedy) counts 0.
    `prompt_tokens` of these are the prompt's.
    """

    segment: str
    offset: int
    length: int
    crc: int
    tokens: list[int]
    prompt_tokens: int = 0
