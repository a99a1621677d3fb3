"""What psrl adds to a vLLM worker (`worker_extension_cls`): new weights, loaded between two decode steps.

Its methods are called through vLLM's `collective_rpc`, in every worker of an engine; names begin with psrl_ because they become
methods of vLLM's own worker class.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from psrl.host_memory import register_host
from psrl.rollout.engines.shared_tensors import Layout, map_tensors
from psrl.rollout.engines.weight_set import as_in_files
from psrl.rollout.lmcache_worker import attend_offload_tier, empty_offload_tier, pull_prefixes, share_prefixes


class PsrlWorker:
    """Mixed into vLLM's worker."""

    if TYPE_CHECKING:
        model_runner: Any
        model_config: Any
        device: torch.device
        rank: int
        parallel_config: Any
        execute_dummy_batch: Callable[[], None]
    psrl_memory: torch.Tensor
    psrl_tensors: dict[str, torch.Tensor]
    psrl_registered: bool = False
    psrl_architecture: PreTrainedModel | None = None
    psrl_receiver: Any
    psrl_fused: bool
    psrl_exchange: Any

    def psrl_prepare(self, path: str, layout: Layout) -> None:
        """Map the memory through which whole weights arrive. Once."""
        self.psrl_memory, tensors = map_tensors(path, layout)
        self.psrl_tensors = dict(tensors)
        if self.device.type == "cpu" and self.parallel_config.pipeline_parallel_size > 1:
            self.execute_dummy_batch()  # vLLM makes what a stage receives into when it warms up, and leaves that out on a CPU

    def psrl_attach(self, receiver: str, settings: dict[str, Any]) -> None:
        """Make the receiver "module:Class" that pulls weights here (psrl.rollout.worker_puller). It gets the model's own
        tensors to write into (`fused`) where that is all that loading is, else the shapes and dtypes of the whole ones; and
        the names of those that other pipeline stages have (`elsewhere`)."""
        module, _, name = receiver.partition(":")
        model = self.model_runner.get_model()
        fused = loads_in_place(model, self.device, self.model_config.quantization)
        elsewhere = held_elsewhere(model, self.psrl_tensors)
        specs = {
            name: (tuple(tensor.shape), tensor.dtype)
            for name, tensor in self.psrl_tensors.items()
            if name not in elsewhere
        }
        self.psrl_receiver = getattr(importlib.import_module(module), name)(
            tensors=dict(model.named_parameters()) if fused else specs,
            fused=fused,
            rank=self.rank % self.parallel_config.tensor_parallel_size,
            elsewhere=elsewhere,
            device=self.device,
            **settings,
        )
        self.psrl_fused = fused

    def psrl_pull(self, version: int, incarnation: int, timeout_s: float) -> None:
        """Begin to pull beside decoding."""
        self.psrl_receiver.start(version, incarnation, timeout_s)

    def psrl_pulled(self) -> dict[str, Any] | None:
        """How the pull ended, once; None while it goes on."""
        end = self.psrl_receiver.poll()
        return None if end is None else msgspec.to_builtins(end)

    def psrl_switch(self, pulled: bool) -> float:
        """Load what has been pulled here, or what lies in the shared memory; seconds that it took. Nothing may be decoding
        meanwhile."""
        begun = time.perf_counter()
        with torch.no_grad():
            if pulled and self.psrl_fused:
                self.psrl_receiver.switch()
            elif pulled:
                self._psrl_load(self.psrl_receiver.staged_tensors())
                self.psrl_receiver.switched()
            else:
                self._psrl_register()
                self._psrl_load(iter(self.psrl_tensors.items()))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - begun

    def psrl_attend_offload(self) -> None:
        """Look after LMCache, or raise if it did not start here."""
        attend_offload_tier(self.parallel_config.pipeline_parallel_size)

    def psrl_empty_offload(self) -> int:
        """Drop all that LMCache holds."""
        return empty_offload_tier()

    def psrl_share_prefixes(self, settings: dict[str, Any]) -> None:
        """Let instances exchange what LMCache holds."""
        self.psrl_exchange = share_prefixes(settings)

    def psrl_pull_prefixes(self, orders: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Fetch these from other instances, beside decoding; what has been fetched, or given up, since the last call."""
        return pull_prefixes(self.psrl_exchange, orders)

    def _psrl_register(self) -> None:
        """Before the first weights that come this way: where workers pull them themselves, no page of that memory is ever touched."""
        if self.device.type == "cuda" and not self.psrl_registered:
            register_host(self.psrl_memory)
            self.psrl_registered = True

    def _psrl_load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        model = self.model_runner.get_model()
        if self.psrl_architecture is None:
            with torch.device("meta"):
                of_files = AutoConfig.from_pretrained(self.model_config.model, local_files_only=True)
                self.psrl_architecture = AutoModelForCausalLM.from_config(of_files)
        tensors = as_in_files(self.psrl_architecture, tensors)
        if loads_in_place(model, self.device, self.model_config.quantization):
            model.load_weights(tensors)
        else:
            self.model_runner.reload_weights(weights_iterator=tensors)
            process_tied_layers(model)
            if self.device.type == "cpu":
                pack_experts(model)


def held_elsewhere(model: torch.nn.Module, names: Iterable[str]) -> frozenset[str]:
    """Those of the whole model's tensors (Hugging Face's `names`) that other pipeline stages have and this one has not: they lie in
    modules that vLLM left empty here (PPMissingLayer) and filled in another stage, layers under their number in the whole model."""
    empty = tuple(f"{name}." for name, module in model.named_modules() if type(module).__name__ == "PPMissingLayer")
    return frozenset(name for name in names if name.startswith(empty))


def loads_in_place(model: torch.nn.Module, device: torch.device, quantization: str | None) -> bool:
    """Whether the model's tensors are still as its loader left them, so that loading again overwrites them. Elsewhere (quantized
    weights, fused experts, any CPU) vLLM has repacked them and they must be loaded layer by layer, which is slower."""
    fused_experts = any(name.rpartition(".")[2].startswith("w13_") for name, _ in model.named_parameters())
    return device.type == "cuda" and quantization is None and not fused_experts


def pack_experts(model: torch.nn.Module) -> None:
    """On a CPU, vLLM packs experts for its kernel when it loads them first (`moe_kernel` is made then), and leaves them as they are in
    files when it reloads them: the kernel would take them for packed ones and compute something else."""
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(layer)


def process_tied_layers(model: torch.nn.Module) -> None:
    """A layer-by-layer reload repacks a shared tensor for the first layer that has it (the embedding); do so for the others
    (the output head), which would go on with a packed copy of the old one."""
    seen: set[int] = set()
    for layer in model.modules():
        weight, method = getattr(layer, "weight", None), getattr(layer, "quant_method", None)
        if weight is None or method is None:
            continue
        if id(weight) in seen:
            method.process_weights_after_loading(layer)
        seen.add(id(weight))
