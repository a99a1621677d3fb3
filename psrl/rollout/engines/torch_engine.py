"""The embedded engine: continuous batching of any transformers causal LM in plain PyTorch, on a CPU or a GPU."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from psrl.protocol.generation import (
    FINISH_ABORT,
    FINISH_LENGTH,
    FINISH_STOP,
    CacheEvents,
    EngineStats,
    GenerateRequest,
    SamplingParams,
    TokenChunk,
)
from psrl.protocol.samples import VersionSpan
from psrl.rollout.engines.causal_lm import CachedCausalLM
from psrl.rollout.engines.prefix_cache import BlockRun
from psrl.rollout.engines.requests import budget, last_chunk, refusals, request_fault
from psrl.rollout.engines.sampling import sample
from psrl.rollout.engines.scheduler import Admission, Departures, Scheduler, Sequence
from psrl.rollout.engines.weight_set import weight_faults, weight_tensors

logger = logging.getLogger(__name__)

PREFILL_TOKENS = 2048
"""Tokens of one prefill forward, padding included: enough to fill the cores, short enough to stay responsive."""
BLOCK_SIZE = 16
"""Tokens of a prefix cache's block where nobody asks for another size."""
_MAX_INTERNED = 1024


class TorchEngine:
    """Implements `psrl.rollout.engines.base.Engine`.

    Prefill goes first: as long as waiting sequences fit but need another forward, a step only prefills.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_token_ids: Iterable[int],
        max_num_seqs: int,
        max_model_len: int,
        kv_cache_tokens: int,
        device: torch.device | str = "cpu",
        enable_prefix_caching: bool = True,
        block_size: int = 0,
    ) -> None:
        """`model` belongs to the engine from now on: it is moved, frozen and overwritten by `update_weights`.

        `block_size`: tokens of a block in which `cache_events` tells what the prefix cache holds; 0: it tells nothing.

        Raises ValueError for limits that cannot work and for a model that cannot be decoded here.
        """
        if max_num_seqs < 1 or max_model_len < 2:
            raise ValueError(f"max_num_seqs={max_num_seqs} must be >= 1 and max_model_len={max_model_len} must be >= 2")
        if kv_cache_tokens < max_model_len:
            raise ValueError(
                f"kv_cache_tokens={kv_cache_tokens} is below max_model_len={max_model_len}: a full sequence must fit; "
                "raise kv_cache_tokens or lower max_model_len"
            )
        self.version = -1
        self.on_gpu = False
        self._device = torch.device(device)
        torch.nn.Module.to(model, device)
        self._model = model.eval().requires_grad_(False)
        self._specs = {name: (tuple(t.shape), t.dtype) for name, t in weight_tensors(self._model).items()}
        self._max_model_len = max_model_len
        self._eos_token_ids = frozenset(eos_token_ids)
        block = (block_size or BLOCK_SIZE) if enable_prefix_caching else 0
        self._tells = bool(block_size) and enable_prefix_caching
        self._lm = CachedCausalLM(
            self._model, max_rows=max_num_seqs, max_length=max_model_len, block_size=block, device=device
        )
        self._scheduler = Scheduler(max_num_seqs=max_num_seqs, kv_cache_tokens=kv_cache_tokens, block_size=block)
        self._stores = self._tells
        """Blocks are copied; before that, only their names are kept. A run that asks for each prompt once never needs more."""
        self._left: list[tuple[int, Sequence]] = []
        """Who left a row that is still as it was: its blocks are cached before that changes, but not if weights change first."""
        self._ready: list[TokenChunk] = []
        self._params: dict[SamplingParams, tuple[SamplingParams, frozenset[int]]] = {}
        self._arrivals = 0
        self._prompt_tokens = self._prefix_hit_tokens = 0
        self._generated_tokens = 0
        self._decode_steps = self._decode_kv_tokens = 0
        self._prefills = 0
        self._prefill_s = 0.0
        self._busy_s = 0.0

    @classmethod
    def from_pretrained(cls, directory: str | Path, *, dtype: torch.dtype, **kwargs: Any) -> TorchEngine:
        """Load configuration and weights of a local Hugging Face model directory; `kwargs` are the constructor's.

        `version` stays -1 until `update_weights`, whatever the directory holds.
        """
        model = AutoModelForCausalLM.from_pretrained(
            str(directory), dtype=dtype, attn_implementation="sdpa", local_files_only=True
        )
        return cls(model, **kwargs)

    # ---- requests --------------------------------------------------------------------------------------------

    def submit(self, request: GenerateRequest) -> None:
        if refused := refusals(request, self.version):
            self._ready += refused
            return
        fault = request_fault(request, self._lm.vocab_size)
        if fault:
            logger.warning("group %d cannot be generated: %s; its samples end without tokens", request.group, fault)
        for item in request.samples:
            sampling, stop_ids = self._intern(
                msgspec.structs.replace(request.sampling, temperature=0.0) if item.greedy else request.sampling
            )
            room = budget(request, item, self._max_model_len)
            if fault or room <= 0:
                self._ready.append(last_chunk(request.group, item.sample))
                continue
            self._arrivals += 1
            self._scheduler.add(
                Sequence(
                    order=self._arrivals,
                    group=request.group,
                    sample=item.sample,
                    prompt_ids=request.prompt_ids,
                    token_ids=[*request.prompt_ids, *item.prefix_ids],
                    budget=room,
                    seed=item.seed,
                    sampling=sampling,
                    stop_ids=stop_ids,
                )
            )

    def _intern(self, params: SamplingParams) -> tuple[SamplingParams, frozenset[int]]:
        """One object for equal parameters, so that a batch can tell by identity that all its rows sample alike."""
        known = self._params.get(params)
        if known is None:
            if len(self._params) >= _MAX_INTERNED:
                self._params.clear()
            eos = frozenset() if params.ignore_eos else self._eos_token_ids
            known = self._params[params] = (params, eos | frozenset(params.stop_token_ids))
        return known

    @torch.inference_mode()
    def abort(self, groups: Iterable[int] | None = None) -> list[TokenChunk]:
        return self._dropped(*self._scheduler.abort(groups))

    @torch.inference_mode()
    def abort_samples(self, samples: Collection[tuple[int, int]]) -> list[TokenChunk]:
        return self._dropped(*self._scheduler.abort_samples(samples))

    def _dropped(self, dropped: list[Sequence], departures: Departures) -> list[TokenChunk]:
        self._depart(departures)
        return [last_chunk(s.group, s.sample, FINISH_ABORT) for s in dropped]

    def abort_waiting(self) -> list[TokenChunk]:
        return [last_chunk(s.group, s.sample, FINISH_ABORT) for s in self._scheduler.abort_waiting()]

    def has_work(self) -> bool:
        return bool(self._ready or self._scheduler.running or self._scheduler.waiting)

    def waitables(self) -> list[int]:
        return []

    def due_in_s(self) -> float:
        return 0.0 if self.has_work() else math.inf

    # ---- one step --------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[TokenChunk]:
        started = time.perf_counter()
        chunks, self._ready = self._ready, []
        self._depart(self._scheduler.preempt())
        self._keep_blocks()
        admissions, more_to_prefill = self._scheduler.admit(PREFILL_TOKENS)
        if not self._stores and any(a.cached for a in admissions):
            admissions = self._begin_to_store(admissions)
        if admissions:
            begun = time.perf_counter()
            self._prefill(admissions)
            self._prefills += 1
            self._prefill_s += time.perf_counter() - begun
        # Decoding a part of the batch costs nearly as much as decoding all of it: fill the rows first.
        if self._scheduler.running and not more_to_prefill:
            self._decode(chunks)
        self._busy_s += time.perf_counter() - started
        return chunks

    def _prefill(self, admissions: list[Admission]) -> None:
        own = [a for a in admissions if a.donor_row is None]
        self._prompt_tokens += sum(len(a.sequence.token_ids) - a.num_cached for a in own)
        self._prefix_hit_tokens += sum(a.num_cached for a in own)
        self._lm.restore_blocks([BlockRun(a.row, 0, a.cached) for a in own if a.cached])
        to_compute = [a for a in own if a.num_to_prefill]
        for batch in pack_by_length([a for a in to_compute if not a.num_cached], PREFILL_TOKENS):
            self._lm.prefill([a.row for a in batch], [a.sequence.token_ids[:-1] for a in batch])
        for batch in pack_by_length([a for a in to_compute if a.num_cached], PREFILL_TOKENS):
            tails = [a.sequence.token_ids[a.num_cached : -1] for a in batch]
            self._lm.extend([a.row for a in batch], [a.num_cached for a in batch], tails)
        copies = [(a.donor_row, a.row) for a in admissions if a.donor_row is not None]
        self._lm.copy_rows(copies, max((len(a.sequence.prompt_ids) - 1 for a in admissions), default=0))

    def _decode(self, chunks: list[TokenChunk]) -> None:
        running = self._scheduler.running
        positions = [len(s.token_ids) - 1 for s in running]
        logits = self._lm.decode([s.token_ids[-1] for s in running], positions)
        tokens, logprobs = sample(
            logits,
            [s.sampling for s in running],
            [s.seed for s in running],
            [at + 1 - len(s.prompt_ids) for s, at in zip(running, positions, strict=True)],
        )
        sampled, scored = tokens.tolist(), logprobs.tolist()
        if not math.isfinite(sum(scored)):
            raise RuntimeError(f"weights of version {self.version} give logits that are not finite: training diverged")
        version = self.version
        finished = set()
        for row, (sequence, token, logprob) in enumerate(zip(running, sampled, scored, strict=True)):
            sequence.token_ids.append(token)
            start = sequence.num_new
            sequence.num_new = end = start + 1
            finish = ""
            if token in sequence.stop_ids:
                finish = FINISH_STOP
            elif end >= sequence.budget:
                finish = FINISH_LENGTH
            if finish:
                finished.add(row)
            chunks.append(
                TokenChunk(
                    group=sequence.group,
                    sample=sequence.sample,
                    token_ids=[token],
                    logprobs=[logprob],
                    spans=[VersionSpan(start, end, version)],
                    finish=finish,
                )
            )
        self._generated_tokens += len(running)
        self._decode_steps += 1
        self._decode_kv_tokens += self._scheduler.kv_tokens
        self._scheduler.grow()
        self._depart(self._scheduler.release(finished))

    def _depart(self, departures: Departures) -> None:
        self._left += departures.left
        if moves := departures.moves:
            self._keep_blocks()
            self._lm.copy_rows(moves, max(len(self._scheduler.running[row].token_ids) for _, row in moves) - 1)

    def _keep_blocks(self) -> None:
        """Cache what has left, before its rows are used again."""
        if self._left:
            runs = self._scheduler.keep(self._left)
            if self._stores:
                self._lm.store_blocks(runs)
            self._left.clear()

    def _begin_to_store(self, admissions: list[Admission]) -> list[Admission]:
        """These would have hit what has left before: from now on it is worth its copies."""
        self._stores = True
        assert self._scheduler.cache is not None
        self._scheduler.cache.clear()
        return [Admission(a.sequence, a.row, a.donor_row) for a in admissions]

    @torch.inference_mode()
    def cache_events(self) -> CacheEvents | None:
        if not self._tells or self._scheduler.cache is None:
            return None
        self._keep_blocks()
        return self._scheduler.cache.held.news()

    # ---- weights ---------------------------------------------------------------------------------------------

    def weight_specs(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        return self._specs

    def update_weights(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        given = list(tensors)
        own = weight_tensors(self._model)
        faults = weight_faults(self.weight_specs(), given)
        if faults:
            raise ValueError(f"weights of version {version} refused, version {self.version} stays: {faults}")
        with torch.no_grad():
            for name, tensor in given:
                own[name].copy_(tensor)
        self.version = version
        self._left.clear()
        self._scheduler.forget_kv()

    # ---- memory ----------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        if self.has_work():
            raise RuntimeError("an engine with samples cannot sleep: abort them first")
        self.version = -1
        self._left.clear()
        self._scheduler.forget_kv()
        self._lm.release()
        for tensor in weight_tensors(self._model).values():
            tensor.data = tensor.data.new_empty(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        for name, tensor in weight_tensors(self._model).items():
            tensor.data = tensor.data.new_empty(self._specs[name][0])

    # ---- the rest --------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """`prompt_tokens` counts tokens that were prefilled: a group's prompt once, recomputed sequences again, what the
        prefix cache held not."""
        scheduler = self._scheduler
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv_usage=min(1.0, scheduler.kv_tokens / scheduler.kv_cache_tokens),
            preemptions=scheduler.preemptions,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            busy_s=self._busy_s,
            kv_tokens=scheduler.kv_tokens,
            kv_capacity_tokens=scheduler.kv_cache_tokens,
            decode_steps=self._decode_steps,
            decode_kv_tokens=self._decode_kv_tokens,
            prefills=self._prefills,
            prefill_s=self._prefill_s,
            prefix_hit_tokens=self._prefix_hit_tokens,
        )

    def close(self) -> None:
        """Drop all requests and the memory of model and cache; the engine cannot be used afterwards."""
        self._scheduler.abort(None)
        self._left.clear()
        self._ready.clear()
        del self._lm, self._model


def pack_by_length(admissions: list[Admission], max_tokens: int) -> list[list[Admission]]:
    """Batches of similar length, each of at most `max_tokens` with padding (a single longer sequence goes alone)."""
    batches: list[list[Admission]] = []
    width = 0
    for admission in sorted(admissions, key=lambda a: -a.num_to_prefill):
        if batches and (len(batches[-1]) + 1) * width <= max_tokens:
            batches[-1].append(admission)
        else:
            width = admission.num_to_prefill
            batches.append([admission])
    return batches
