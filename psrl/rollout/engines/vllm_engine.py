"""vLLM as a rollout engine: tokens in, tokens out, weights switched between two decode steps."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import zmq
from vllm import SamplingParams as VllmSampling
from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason

from psrl.protocol.generation import (
    FINISH_ABORT,
    FINISH_LENGTH,
    FINISH_STOP,
    CacheEvents,
    EngineStats,
    GenerateRequest,
    SampleRequest,
    TokenChunk,
)
from psrl.protocol.samples import VersionSpan
from psrl.rollout.cache_identity import CacheIdentity, cache_identity
from psrl.rollout.engines.base import InWorkers
from psrl.rollout.engines.requests import budget, last_chunk, refusals, request_fault
from psrl.rollout.engines.shared_tensors import SharedTensors
from psrl.rollout.engines.vllm_arguments import draw_seed, weight_bytes
from psrl.rollout.engines.vllm_blocks import names_blocks_of
from psrl.rollout.engines.vllm_config import engine_config
from psrl.rollout.engines.vllm_core import EngineCore
from psrl.rollout.engines.vllm_events import PrefixCacheNews
from psrl.rollout.engines.vllm_figures import EngineFigures
from psrl.rollout.engines.weight_set import weight_faults
from psrl.rollout.stream import join_chunks

log = logging.getLogger(__name__)

PAUSE_TIMEOUT_S = 120.0
"""The step in hand ends within this: a long prefill on a CPU takes seconds."""
SWITCH_TIMEOUT_S = 300.0
PREPARE_TIMEOUT_S = 60.0
_FINISH = {FinishReason.STOP: FINISH_STOP, FinishReason.LENGTH: FINISH_LENGTH}


@dataclass(slots=True, eq=False)
class _Sample:
    group: int
    sample: int
    order: int
    """Arrival number."""
    num_new: int = 0
    last_step: int = -1
    """Number of the step that gave it its last token."""


class VllmEngine:
    """Implements `psrl.rollout.engines.base.Engine`. The core decodes by itself; `step` hands out what has come."""

    def __init__(
        self,
        directory: Path,
        *,
        dtype: str,
        specs: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        eos_token_ids: Iterable[int],
        max_num_seqs: int,
        max_model_len: int,
        kv_cache_tokens: int,
        options: Mapping[str, Any] | None = None,
        run: str = "",
        kv_transfer_config: Mapping[str, Any] | None = None,
        tag_versions: bool = False,
        empty_offload: bool = False,
        block_size: int = 0,
        seed_samples: bool | None = None,
        arrivals: bool = True,
    ) -> None:
        """Start vLLM on the model in `directory` (tens of seconds), with random weights until `update_weights`.

        `specs`: the model's tensors (`psrl.models.load.checkpoint_specs`). `kv_cache_tokens` is for CPUs; on a GPU
        `options["gpu_memory_utilization"]` decides, which with `arrivals` also holds weights that workers pull there. `options`: more of vLLM's EngineArgs. Raises ValueError for limits and options that vLLM refuses.

        `run` tells this run's keys and values from another's. With `kv_transfer_config` (LMCache's) they are tagged with
        their version (`tag_versions`), or what lies outside of vLLM is dropped at each switch (`empty_offload`).
        `block_size`: tokens of a block in which `cache_events` tells what the prefix cache holds, a divisor of vLLM's own; 0:
        it tells nothing. `seed_samples`: False draws for all samples together but the `exact` ones, None does so on a GPU.
        """
        options = dict(options or {})
        if kv_transfer_config is not None:
            options["kv_transfer_config"] = KVTransferConfig(**kv_transfer_config)
        self._cache = PrefixCacheNews(block_size) if block_size else None
        if self._cache is not None:
            options["kv_events_config"] = KVEventsConfig(**self._cache.feed.options)
        self._run, self._tag_versions = run, tag_versions
        self._empty_offload = empty_offload and kv_transfer_config is not None
        config = engine_config(
            directory,
            dtype=dtype,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            kv_cache_tokens=kv_cache_tokens,
            weights=weight_bytes(specs, options) if arrivals else None,
            options=options,
        )
        self.version = -1
        self.on_gpu = config.device_config.device_type == "cuda"
        self.seed_samples = not self.on_gpu if seed_samples is None else seed_samples
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_model_len = max_model_len
        self._vocab_size = config.model_config.get_vocab_size()
        self._specs = dict(specs)
        self._core = EngineCore(config)
        self._shared = SharedTensors("psrl-weights", self._specs)
        try:
            self._core.call_workers("psrl_prepare", self._shared.path, self._shared.layout, timeout_s=PREPARE_TIMEOUT_S)
            if kv_transfer_config is not None:
                self._core.call_workers("psrl_attend_offload", timeout_s=PREPARE_TIMEOUT_S)
        except BaseException:
            self.close()
            raise
        cache = config.cache_config
        if self._cache is not None and not (
            cache.enable_prefix_caching and names_blocks_of(cache.block_size, block_size)
        ):
            self._cache.feed.close()
            self._cache = None
        self._figures = EngineFigures(
            kv_capacity_tokens=((cache.num_gpu_blocks or 1) - 1) * cache.block_size,  # vLLM keeps one block for itself
            turns=config.parallel_config.pipeline_parallel_size,
        )
        self._samples: dict[str, _Sample] = {}
        self._ready: list[TokenChunk] = []
        self._arrivals = 0
        self._steps = 0
        self.last_switch: dict[str, float] = {}
        """What the last `update_weights` was made of; decoding goes on during the first part."""

    # ---- requests --------------------------------------------------------------------------------------------

    def submit(self, request: GenerateRequest) -> None:
        if refused := refusals(request, self.version):
            self._ready += refused
            return
        fault = request_fault(request, self._vocab_size)
        if fault:
            log.warning("group %d cannot be generated: %s; its samples end without tokens", request.group, fault)
        for item in request.samples:
            room = budget(request, item, self._max_model_len)
            if fault or room <= 0:
                self._ready.append(last_chunk(request.group, item.sample))
            else:
                self._add(request, item, room)
        self._figures.busy(self.has_work(), time.monotonic())

    def _add(self, request: GenerateRequest, item: SampleRequest, room: int) -> None:
        self._arrivals += 1
        request_id = str(self._arrivals)
        identity = cache_identity(self._run, request.incarnation, self.version, multi_version=self._tag_versions)
        self._samples[request_id] = _Sample(request.group, item.sample, self._arrivals)
        self._figures.submitted(1)
        self._core.add(
            EngineCoreRequest(
                request_id=request_id,
                prompt_token_ids=[*request.prompt_ids, *item.prefix_ids],
                mm_features=None,
                sampling_params=self._sampling(request, item, room, identity),
                pooling_params=None,
                arrival_time=time.time(),
                lora_request=None,
                cache_salt=identity.cache_salt,
                data_parallel_rank=None,
            )
        )

    def _sampling(
        self, request: GenerateRequest, item: SampleRequest, room: int, identity: CacheIdentity
    ) -> VllmSampling:
        wanted = request.sampling
        eos = frozenset() if wanted.ignore_eos else self._eos_token_ids
        return VllmSampling(
            temperature=0.0 if item.greedy else wanted.temperature,
            top_p=wanted.top_p,
            top_k=max(wanted.top_k, 0),
            seed=draw_seed(item.seed, len(item.prefix_ids)) if self.seed_samples or item.exact else None,
            max_tokens=room,
            stop_token_ids=sorted(eos | frozenset(wanted.stop_token_ids)),
            ignore_eos=True,  # the ids above say it all
            logprobs=0,
            detokenize=False,
            extra_args={"kv_transfer_params": identity.kv_transfer_params} if identity.kv_transfer_params else None,
        )

    def abort(self, groups: Iterable[int] | None = None) -> list[TokenChunk]:
        wanted = None if groups is None else frozenset(groups)
        return self._abort(lambda of: wanted is None or of.group in wanted)

    def abort_samples(self, samples: Collection[tuple[int, int]]) -> list[TokenChunk]:
        return self._abort(lambda of: (of.group, of.sample) in samples)

    def _abort(self, wanted: Callable[[_Sample | TokenChunk], bool]) -> list[TokenChunk]:
        self._take(self._core.drain())
        ended = [chunk for chunk in self._ready if wanted(chunk)]
        self._ready = [chunk for chunk in self._ready if not wanted(chunk)]
        return join_chunks([*ended, *self._drop([i for i, sample in self._samples.items() if wanted(sample)])])

    def abort_waiting(self) -> list[TokenChunk]:
        """vLLM says how many wait but not which: those are the ones whose last token is the longest ago."""
        self._take(self._core.drain())
        by_rest = sorted(self._samples, key=lambda i: (self._samples[i].last_step, -self._samples[i].order))
        ids = by_rest[: self.stats().waiting]
        keys = {(self._samples[i].group, self._samples[i].sample) for i in ids}
        made = [chunk for chunk in self._ready if (chunk.group, chunk.sample) in keys]
        self._ready = [chunk for chunk in self._ready if (chunk.group, chunk.sample) not in keys]
        self._figures.left(waiting=len(ids))
        return join_chunks([*made, *self._drop(ids)])

    def _drop(self, ids: list[str]) -> list[TokenChunk]:
        if ids:
            self._core.abort(ids)
            self._figures.forget(ids)
        dropped = [self._samples.pop(request_id) for request_id in ids]
        self._figures.busy(self.has_work(), time.monotonic())
        return [last_chunk(sample.group, sample.sample, FINISH_ABORT) for sample in dropped]

    def has_work(self) -> bool:
        return bool(self._ready or self._samples)

    # ---- tokens ----------------------------------------------------------------------------------------------

    def waitables(self) -> list[zmq.Socket[bytes] | int]:
        return [*self._core.waitables(), *(self._cache.feed.waitables() if self._cache else ())]

    def due_in_s(self) -> float:
        return 0.0 if self._ready else math.inf

    def step(self) -> list[TokenChunk]:
        """What has come since the last call; never blocks. CoreDiedError once the core is gone."""
        self._take(self._core.drain())
        chunks, self._ready = self._ready, []
        self._figures.busy(self.has_work(), time.monotonic())
        if self._cache is not None:
            self._cache.hear()
        return chunks

    def _take(self, steps: list[EngineCoreOutputs]) -> None:
        """Turn the core's steps into chunks of the version in use."""
        for step in steps:
            made: set[str] = set()
            ended: list[str] = []
            for output in step.outputs:
                if (sample := self._samples.get(output.request_id)) is not None:
                    self._ready.append(self._chunk(sample, output))
                    made.add(output.request_id)
                    if output.finished:
                        ended.append(output.request_id)
                        del self._samples[output.request_id]
            if made and (stats := step.scheduler_stats) is not None:
                waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
                self._figures.step(made=made, ended=ended, waiting=waiting, kv_usage=stats.kv_cache_usage)  # type: ignore[arg-type]
            self._steps += 1

    def _chunk(self, sample: _Sample, output: EngineCoreOutput) -> TokenChunk:
        tokens = output.new_token_ids
        logprobs = [] if output.new_logprobs is None else output.new_logprobs.logprobs[:, 0].tolist()
        if not math.isfinite(sum(logprobs)):
            raise RuntimeError(f"weights of version {self.version} give logits that are not finite: training diverged")
        if (prefill := output.prefill_stats) is not None:
            self._figures.prefilled(prefill.num_computed_tokens, prefill.num_cached_tokens)
        start = sample.num_new
        sample.num_new = end = start + len(tokens)
        sample.last_step = self._steps
        return TokenChunk(
            group=sample.group,
            sample=sample.sample,
            token_ids=list(tokens),
            logprobs=logprobs,
            spans=[VersionSpan(start, end, self.version)] if tokens else [],
            finish=_finish(output),
        )

    def cache_events(self) -> CacheEvents | None:
        return self._cache.news() if self._cache else None

    # ---- weights ---------------------------------------------------------------------------------------------

    def weight_specs(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        return self._specs

    def call_workers(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """A method of PsrlWorker in every worker, between two decode steps. From any thread."""
        return self._core.call_workers(method, *args, timeout_s=timeout_s)

    def update_weights(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]] | InWorkers) -> None:
        at = [time.perf_counter()]
        if pulled := isinstance(tensors, InWorkers):
            if tensors.version != version:
                raise ValueError(f"weights of version {version} refused: the workers have pulled {tensors.version}")
        else:
            self._share(version, list(tensors))
        at.append(time.perf_counter())
        # "keep" lets the step in hand end; the rest then waits with void keys and values, and the prefix cache is emptied.
        self._core.call("pause_scheduler", "keep", True, timeout_s=PAUSE_TIMEOUT_S)
        self._take(self._core.drain())
        self._cache_void()
        at.append(time.perf_counter())
        self._core.call_workers("psrl_switch", pulled, timeout_s=SWITCH_TIMEOUT_S)
        if self._empty_offload:
            self._core.call_workers("psrl_empty_offload", timeout_s=SWITCH_TIMEOUT_S)
        self.version = version
        self._figures.all_start_again()
        at.append(time.perf_counter())
        self._core.call("resume_scheduler", timeout_s=PAUSE_TIMEOUT_S)
        at.append(time.perf_counter())
        parts = ("copy_s", "pause_s", "load_s", "resume_s")
        self.last_switch = {name: end - begin for name, begin, end in zip(parts, at, at[1:], strict=False)}

    def _share(self, version: int, given: list[tuple[str, torch.Tensor]]) -> None:
        if faults := weight_faults(self._specs, given):
            raise ValueError(f"weights of version {version} refused, version {self.version} stays: {faults}")
        self._shared.fill(given)

    # ---- memory ----------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """See Engine. vLLM's own sleep mode (`enable_sleep_mode`): addresses stay, so captured CUDA graphs stay valid."""
        if self.has_work():
            raise RuntimeError("an engine with samples cannot sleep: abort them first")
        self._core.call("sleep", 2, timeout_s=SWITCH_TIMEOUT_S)
        self._take(self._core.drain())
        self._cache_void()
        self.version = -1

    def _cache_void(self) -> None:
        if self._cache is not None:
            self._cache.all_void()

    def wake(self) -> None:
        self._core.call("wake_up", timeout_s=SWITCH_TIMEOUT_S)

    # ---- the rest --------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """`kv_tokens` includes what the prefix cache holds; prefill and decoding share vLLM's steps, so `prefills` stays 0."""
        return self._figures.stats(len(self._samples))

    def close(self) -> None:
        self._core.close()
        self._shared.close()
        if self._cache is not None:
            self._cache.feed.close()


def _finish(output: EngineCoreOutput) -> str:
    if output.finish_reason is None:
        return ""
    if output.finish_reason not in _FINISH:
        log.warning("vLLM ended a sample by itself (%s): it goes on elsewhere", output.finish_reason)
    return _FINISH.get(output.finish_reason, FINISH_ABORT)
