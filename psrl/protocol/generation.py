"""Messages between an agent loop and a rollout instance, and the vocabulary of the Engine protocol."""

from __future__ import annotations

import msgspec

from psrl.protocol.samples import VersionSpan

FINISH_STOP = "stop"  # a stop token was sampled (it is the last token of the response)
FINISH_LENGTH = "length"  # the response budget or the context is used up
FINISH_ABORT = "abort"  # interrupted; never scored: continue it or discard it
FINISH_MIGRATED = "migrated"  # as abort: handed back so that another, less busy instance may go on with it
FINISH_PREEMPTED = "preempted"  # as abort: the engine has more than its KV cache holds, another instance may have room
FINISH_REFUSED = "refused"  # not made here: the instance's version is older than the group's, or it is leaving
FINISH_TRUNCATED = "truncated"  # ended unfinished because the trainer waited for its group; scored and trained as it is
FINISH_REDUNDANT = "redundant"  # ended because enough others of its group had finished; never scored
TURN = "turn"  # no finish: why a sample that was at its environment asks for a place again
HANDED_BACK = (FINISH_ABORT, FINISH_MIGRATED, FINISH_PREEMPTED, FINISH_REFUSED)
"""Not ends: the sample goes on elsewhere with the tokens that it has, unless its budget is used up."""


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """How to sample. `top_k` <= 0 and `top_p` >= 1 switch the filter off; `temperature` 0 is greedy.

    Log-probs are always log_softmax(logits / temperature) at the sampled token, before top-k and top-p
    (temperature 0: log_softmax(logits)).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


class SampleRequest(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One response to make or to go on with. `prefix_ids` are response tokens that exist already (partial rollout);
    `max_new_tokens` is what remains of the budget *after* the prefix. Same (seed, prefix length) gives the same draw, unless the engine
    draws for all of its samples together and the request is not `exact`. `greedy`: temperature 0, whatever the group's sampling says."""

    sample: int
    """Comes back with each chunk. Any number that no other sample of the group has at that instance."""
    max_new_tokens: int
    seed: int
    prefix_ids: tuple[int, ...] = ()
    greedy: bool = False
    source: str = ""
    """The instance that has made its last tokens and may still hold its keys and values, if it is another; "" for none."""
    exact: bool = False
    """Somebody counts on the draws of this seed."""


class GenerateRequest(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="gen"):
    """Samples of one group for one instance; the prompt is prefilled once for all of them."""

    group: int
    min_version: int
    incarnation: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    samples: tuple[SampleRequest, ...]


class AbortRequest(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """Stop these groups, and these (group, sample) alone; they come back with finish "abort" and the tokens so far."""

    groups: tuple[int, ...] = ()
    samples: tuple[tuple[int, int], ...] = ()


class TokenChunk(msgspec.Struct, array_like=True, kw_only=True):
    """New tokens of one sample since its last chunk. `finish` is "" while it goes on."""

    group: int
    sample: int
    token_ids: list[int]
    logprobs: list[float]
    spans: list[VersionSpan]
    """Positions count from the first token of *this request* (0 = the first token after `prefix_ids`)."""
    finish: str = ""


class TokenChunks(msgspec.Struct, array_like=True, tag="tok"):
    """Everything an instance has for one agent loop at this moment."""

    chunks: list[TokenChunk]


class EngineStats(msgspec.Struct, array_like=True, kw_only=True):
    """Counters since the engine started, and gauges now. `kv_usage` is in [0, 1]; times in seconds."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    preemptions: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    busy_s: float = 0.0
    kv_tokens: int = 0
    """Gauge: tokens whose keys and values the running samples hold."""
    kv_capacity_tokens: int = 0
    """Tokens that the KV cache has room for; 0 if the engine does not say."""
    decode_steps: int = 0
    decode_kv_tokens: int = 0
    """Counter: tokens held, summed over all decode steps. With `generated_tokens` it says what the steps were made of."""
    prefills: int = 0
    prefill_s: float = 0.0
    """Of `busy_s`, what was spent in the `prefills`."""
    prefix_hit_tokens: int = 0
    """Prompt tokens that were not computed because a prefix cache held them."""


class CacheEvents(msgspec.Struct, array_like=True, kw_only=True):
    """What entered and left an engine's prefix cache since the last such report, as names of psrl.protocol.blocks. In this
    order: first all is gone if `cleared`, then `removed`, then `stored` (of each sequence the earlier blocks first)."""

    cleared: bool = False
    removed: list[int] = []
    stored: list[int] = []
