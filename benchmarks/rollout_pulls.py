"""What weights cost an engine that decodes: tokens a second while they are pulled beside it, and how long a switch stands still.
Used by `gpu_rollout.py`.

A process of its own publishes random weights of the engine's shapes from the same device, as a trainer does; the engine's workers
pull them, as in a run. Rates, and what a switch costs in all, go by when tokens arrive here; decoding stands still from the moment at which
the core had made the last tokens before a switch until it may make more (what it then makes first are the keys and values anew).
"""

from __future__ import annotations

import itertools
import multiprocessing as mp
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from gpu_weights import LIMIT_S, heard, timed

from psrl.net.waiting import wait
from psrl.rollout.engines.vllm_engine import VllmEngine
from psrl.rollout.worker_puller import StagedInWorkers, WorkerPuller
from psrl.rundir.keys import create_keys
from psrl.rundir.layout import RunDir
from psrl.trainer.backends.base import WeightShard
from psrl.weights.channel.background import BackgroundPull
from psrl.weights.channel.base import PullError
from psrl.weights.channel.nixl_publisher import NixlPublisher
from psrl.weights.channel.select import RECEIVER

VERSIONS = 2
"""As many as a publisher holds."""
Specs = dict[str, tuple[tuple[int, ...], torch.dtype]]
Row = dict[str, Any]


@contextmanager
def publishing(specs: Specs, device: str) -> Iterator[Path]:
    """The run directory in which a process publishes versions 0 and 1."""
    context = mp.get_context("spawn")
    ready, stop = context.Queue(), context.Event()
    with tempfile.TemporaryDirectory() as place:
        run_dir = RunDir(Path(place) / "run")
        run_dir.create()
        create_keys(run_dir)
        process = context.Process(target=_publish, args=(str(run_dir.path), specs, device, ready, stop), daemon=True)
        process.start()
        try:
            heard(ready, process)
            yield run_dir.path
        finally:
            stop.set()
            process.join(10.0)
            process.kill()


def _publish(path: str, specs: Specs, device: str, ready: Any, stop: Any) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shards = [
        WeightShard(name, shape, 0, 0.02 * torch.randn(shape, device=device).to(dtype))
        for name, (shape, dtype) in specs.items()
    ]
    publisher = NixlPublisher(RunDir(Path(path)), 0, 1, next(iter(specs.values()))[1])
    publisher.serve()
    for version in range(VERSIONS):
        publisher.publish(version, 0, shards)
    ready.put(True)
    stop.wait(20 * LIMIT_S)
    publisher.close()


class Watch:
    """Steps of an engine that decodes: when each brought tokens, and how many."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self.steps: list[tuple[float, int]] = []
        self.made_s = 0.0
        """When the core had made the newest tokens that have been heard of: on the clock that `time.monotonic` is in every process."""
        self._drain, engine._core.drain = engine._core.drain, self._note  # type: ignore[method-assign]

    def _note(self) -> list[Any]:
        found = self._drain()
        self.made_s = max((each.timestamp for each in found if each.outputs), default=self.made_s)
        return found

    def step(self, at_most_s: float = LIMIT_S) -> None:
        """Wait for tokens, no longer than that."""
        assert self._engine.has_work(), "the work has ended too soon: more new tokens a sample are needed"
        wait([self._engine], at_most_s)
        if tokens := sum(len(chunk.token_ids) for chunk in self._engine.step()):
            self.steps.append((time.perf_counter(), tokens))

    def until(self, over: Callable[[], object]) -> list[tuple[float, int]]:
        """The steps until then."""
        begun, end = len(self.steps), time.monotonic() + LIMIT_S
        while not over():
            if time.monotonic() > end:
                raise SystemExit("the engine has not come so far in time")
            self.step(0.001)
        return self.steps[begun:]

    def go(self, steps: int) -> list[tuple[float, int]]:
        first = len(self.steps)
        return self.until(lambda: len(self.steps) >= first + steps)


def rate(steps: list[tuple[float, int]]) -> float:
    """Tokens a second between the first of these steps and the last."""
    return sum(tokens for _, tokens in steps[1:]) / (steps[-1][0] - steps[0][0])


def measure(engine: VllmEngine, run_dir: Path, route: str, busy: Callable[[], None], steps: int, rounds: int) -> Row:
    """`busy` gives the engine work anew, for several times the 10 x `steps` steps that it is watched at a time."""
    puller = WorkerPuller(engine, RECEIVER, {"run_dir": str(run_dir), "route": route})
    pull, watch = BackgroundPull(puller, LIMIT_S), Watch(engine)

    def pulled(version: int) -> StagedInWorkers:
        """Beside decoding."""
        pull.start(version, 0)
        outcome: Any = None
        while outcome is None:
            watch.step(0.001)
            outcome = pull.poll()
        if isinstance(outcome, PullError):
            raise SystemExit(f"route {route}: {outcome.cause}")
        return outcome

    busy()
    watch.go(steps)
    first = pulled(0)
    engine.abort()
    busy()
    watch.go(steps)
    plain = watch.go(4 * steps)
    begun, pulls = len(watch.steps), list[float]()
    while len(watch.steps) < begun + 4 * steps:
        pulls.append(pulled(len(pulls) % VERSIONS).pull_s)
    beside = watch.steps[begun:]
    usual = statistics.median(b[0] - a[0] for a, b in itertools.pairwise(plain))
    parts, stalls, lost = [], list[float](), []
    for number in range(rounds):
        engine.abort()
        busy()
        before = rate(watch.go(2 * steps)[steps:])
        staged = pulled(number % VERSIONS)
        watch.go(1)
        last = watch.steps[-1][0]
        engine.update_weights(staged.version, staged.tensors())
        stalls.append(time.monotonic() - watch.made_s)
        parts.append(engine.last_switch)
        after = watch.go(steps)
        lost.append((after[-1][0] - last) - sum(tokens for _, tokens in after) / before)
    engine.abort()
    pull.close()
    return {
        "route": first.transport, "GB": first.nbytes / 1e9, "step_ms": 1e3 * usual,
        "pull_ms": 1e3 * statistics.median(pulls), "tokens_s": rate(plain), "pulling": rate(beside) / rate(plain),
        "pulls_s": len(pulls) / (beside[-1][0] - beside[0][0]),
        "stall_ms": 1e3 * statistics.median(stalls), "stall_max_ms": 1e3 * max(stalls),
        "lost_ms": 1e3 * statistics.median(lost),
        "parts_ms": {name: round(1e3 * statistics.median(part[name] for part in parts), 2) for name in parts[0]},
    }  # fmt: skip


def copy_ms(nbytes: int, device: str) -> float:
    """Of as many bytes on the device."""
    a, b = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    return 1e3 * timed(lambda: b.copy_(a), torch.device(device), rounds=7)


def say(row: Row) -> None:
    print(
        f"{row['route']}: {row['GB']:.2f} GB, a copy on the device takes {row['copy_ms']:.2f} ms\n"
        f"  pull      {row['pull_ms']:.1f} ms; {row['pulls_s']:.0f} of them a second, one after the other: "
        f"{row['pulling']:.3f} of the {row['tokens_s']:,.0f} tokens/s without\n"
        f"  switch    nothing decodes for {row['stall_ms']:.1f} ms (worst {row['stall_max_ms']:.1f}; a step takes "
        f"{row['step_ms']:.1f}); {row['parts_ms']}\n"
        f"  recompute with the keys and values made again, a switch costs what is decoded in {row['lost_ms']:.0f} ms",
        flush=True,
    )
