"""What every engine decides about a request before it decodes it. Pure."""

from __future__ import annotations

import math

from psrl.protocol.generation import FINISH_LENGTH, FINISH_REFUSED, GenerateRequest, SampleRequest, TokenChunk


def request_fault(request: GenerateRequest, vocab_size: int) -> str:
    """Why this request cannot be decoded at all, "" if it can."""
    if not request.prompt_ids:
        return "the prompt is empty"
    for ids in (request.prompt_ids, *(s.prefix_ids for s in request.samples)):
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            return f"token ids {min(ids)} .. {max(ids)} are outside the vocabulary [0, {vocab_size})"
    if not (request.sampling.temperature >= 0 and math.isfinite(request.sampling.temperature)):
        return f"temperature {request.sampling.temperature} must be a finite number >= 0"
    return ""


def budget(request: GenerateRequest, sample: SampleRequest, max_model_len: int) -> int:
    """Tokens that this sample may get here; none are left if it is not positive."""
    return min(sample.max_new_tokens, max_model_len - len(request.prompt_ids) - len(sample.prefix_ids))


def refusals(request: GenerateRequest, version: int) -> list[TokenChunk]:
    """An end for each sample if the engine's `version` is older than the request may have; else nothing."""
    if request.min_version <= version:
        return []
    return [last_chunk(request.group, sample.sample, FINISH_REFUSED) for sample in request.samples]


def last_chunk(group: int, sample: int, finish: str = FINISH_LENGTH) -> TokenChunk:
    """An end without tokens."""
    return TokenChunk(group=group, sample=sample, token_ids=[], logprobs=[], spans=[], finish=finish)
