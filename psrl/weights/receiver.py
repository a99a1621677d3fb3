"""Weights for an engine whose tensors live in another process than the instance: used inside the one that owns the GPU.

    receiver = WeightReceiver(run_dir, parameters, device="cuda:0", fused=True, ways=2, num_kv_heads=8, rank=0)
    receiver.start(version=3, incarnation=0, timeout_s=120)   # returns at once; decoding goes on
    receiver.poll()                                           # None, then a Pulled or a PullFailed
    receiver.switch()                                         # between two decode steps: new weights in place

It imports no engine. The version arrives beside the engine's tensors; the switch alone touches them.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import msgspec
import torch

from psrl.rundir.layout import RunDir
from psrl.weights.channel.background import BackgroundPull
from psrl.weights.channel.base import PullError, StagedWeights
from psrl.weights.channel.nixl_puller import NixlPuller
from psrl.weights.copies import Copies
from psrl.weights.engine_layout import fused_place, stage_place
from psrl.weights.plan import Specs, same_place
from psrl.weights.split import Split


class Pulled(msgspec.Struct, frozen=True, kw_only=True):
    """A version has arrived, whole and checked."""

    version: int
    incarnation: int
    nbytes: int
    pull_s: float
    transfer_s: float
    """Of `pull_s`: seconds in which bytes were moved."""
    transport: str


class PullFailed(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing has arrived. Not `retryable`: it never will."""

    cause: str
    retryable: bool


class WeightReceiver:
    """One engine rank's side.

    `tensors`: the engine's own, by name. With `fused` they are those of an engine that fuses and cuts (`engine_layout`):
    `switch` writes into them. Without, they are whole tensors under Hugging Face's names and may also be given as specs
    (name -> shape, dtype): then `staged_tensors` yields them for the engine's own loader. `rank` of `ways` tensor-parallel
    ranks; `elsewhere`: published tensors that other pipeline stages of the engine have and this one has not; the rest as in
    `channel.select.receiver_settings`. Not thread-safe.
    """

    def __init__(
        self,
        run_dir: Path | str,
        tensors: Mapping[str, torch.Tensor] | Specs,
        *,
        device: torch.device | str,
        address: str = "127.0.0.1",
        route: str = "auto",
        fanout: int = 0,
        fused: bool = False,
        ways: int = 1,
        num_kv_heads: int = 1,
        rank: int = 0,
        elsewhere: Collection[str] = (),
    ) -> None:
        self._tensors = {name: each for name, each in tensors.items() if isinstance(each, torch.Tensor)}
        specs = {
            name: (tuple(each.shape), each.dtype) if isinstance(each, torch.Tensor) else each
            for name, each in tensors.items()
        }
        place = fused_place(Split(ways, num_kv_heads), rank) if fused else same_place
        self._puller = NixlPuller(
            RunDir(Path(run_dir)),
            specs,
            stage_place(place, elsewhere),
            device=device,
            address=address,
            route=route,
            fanout=fanout,
        )
        self._pull: BackgroundPull | None = None
        self._staged: StagedWeights | None = None
        self._copies: Copies | None = None
        self.version = -1
        """Of the weights that the engine's tensors hold."""

    def start(self, version: int, incarnation: int, timeout_s: float) -> None:
        """Begin to pull. RuntimeError while another pull is going on."""
        if self._pull is not None and self._pull.busy:
            raise RuntimeError(f"a pull of version {version} was started while another one is going on")
        self._staged = None
        self._pull = BackgroundPull(self._puller, timeout_s)
        self._pull.start(version, incarnation)

    def poll(self) -> Pulled | PullFailed | None:
        """The outcome of the pull, once; None while it goes on or when none was started."""
        outcome = self._pull.poll() if self._pull is not None else None
        if outcome is None:
            return None
        if isinstance(outcome, PullError):
            return PullFailed(cause=outcome.cause, retryable=outcome.retryable)
        assert isinstance(outcome, StagedWeights)
        self._staged = outcome
        if self._tensors:
            self._copies = outcome.copies(self._tensors, self._copies)  # not in the switch: the engine waits there
        return Pulled(
            version=outcome.version,
            incarnation=outcome.incarnation,
            nbytes=outcome.nbytes,
            pull_s=outcome.pull_s,
            transfer_s=outcome.transfer_s,
            transport=outcome.transport,
        )

    def staged_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What has arrived, for an engine that loads its weights itself. RuntimeError if nothing has."""
        return self._arrived().tensors()

    def switch(self) -> float:
        """Put what has arrived into the engine's tensors; returns the seconds that it took, the device's work included.
        RuntimeError if nothing has arrived or the tensors were given as specs."""
        staged = self._arrived()
        if not self._tensors:
            raise RuntimeError("the engine's tensors were given as specs: load `staged_tensors` and say `switched`")
        begun_s = time.monotonic()
        self._copies = staged.copies(self._tensors, self._copies)
        self._copies.run()
        if staged.buffer.is_cuda:
            torch.cuda.current_stream(staged.buffer.device).synchronize()
        self.switched()
        return time.monotonic() - begun_s

    def switched(self) -> None:
        """The engine has the weights that have arrived."""
        self.version = self._arrived().version

    def close(self) -> None:
        """Cancel a pull that is going on and let go of all memory."""
        if self._pull is not None:
            self._pull.close()
        else:
            self._puller.close()

    def _arrived(self) -> StagedWeights:
        if self._staged is None:
            raise RuntimeError("no weights have arrived: start a pull and poll until it is done")
        return self._staged
