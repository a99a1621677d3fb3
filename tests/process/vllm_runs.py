"""Whole runs whose instances decode with vLLM, their engines' processes, and what a plain forward says of every token."""

from __future__ import annotations

import importlib.util
import itertools
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from runs import ONE_INSTANCE, Run, lives, of, sealed_groups

from psrl.coordinator.records import Take
from psrl.export import export
from psrl.models.load import load_engine_model
from psrl.models.resolve import run_model
from psrl.protocol.samples import Group, Sample

REAL_VLLM = [
    pytest.mark.process,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]
VLLM: dict[str, object] = {
    **ONE_INSTANCE,
    "model": "tiny",  # with heads that vLLM's CPU kernels can work with
    "model.tiny.hidden_size": 64,
    "model.tiny.num_heads": 2,
    "model.tiny.num_layers": 2,
    "model.tiny.warm_start_steps": 0,
    "gen_actor_rollout_ref.rollout.name": "vllm",
    "gen_actor_rollout_ref.rollout.enforce_eager": "True",
    "gen_actor_rollout_ref.rollout.ignore_eos": "True",
    "data.max_response_length": 96,
    "gen_actor_rollout_ref.rollout.max_num_seqs": 2,  # decoding takes longer than training: pulls meet samples in the making
    "psrl.staleness": 1,
    "trainer.keep_samples": "True",
}
EVERY_VERSION: dict[str, object] = {"trainer.save_freq": 1, "trainer.keep_last": 1000}
"""Keep the weights of all versions, to compare with what they are said to have made."""

REWARD = """
import zlib

def reward(data_source, solution_str, ground_truth, extra_info):
    return zlib.crc32(solution_str.encode()) % 1000 / 1000
"""


def every_step_learns(directory: Path) -> dict[str, object]:
    """A reward that no two answers of a group share: without an advantage a version would be the one before it again."""
    (directory / "lottery.py").write_text(REWARD)
    return {"reward.function": "lottery:reward"}


# ---- processes -----------------------------------------------------------------------------------------------


def core_of(run: Run, besides: Collection[psutil.Process] = ()) -> psutil.Process:
    """The engine core of instance-0, another one than those that are gone."""
    return run.until(
        lambda: next(iter(_children(run.find("instance-0"), "EngineCore", besides)), None), "there was a core"
    )


def engine_of(run: Run, besides: Collection[psutil.Process] = ()) -> tuple[psutil.Process, psutil.Process]:
    """The engine core and its worker, where that is a process of its own; samples are being made."""
    core = core_of(run, besides)
    worker = run.until(lambda: next(iter(_children(core, "Worker")), None), "there was a worker")
    run.until(lambda: run.open_groups(), "groups were in the making")
    return core, worker


def _children(
    parent: psutil.Process | None, word: str, besides: Collection[psutil.Process] = ()
) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        if parent is not None:
            return [child for child in parent.children() if word in " ".join(child.cmdline()) and child not in besides]
    return []


def hold_samples_until_a_version_is_there(run: Run) -> None:
    """Stop the core while the first buffer is trained: the weights that come of it meet the samples of the next one in the making."""
    core = core_of(run)
    run.until(lambda: of(run.records(), Take) and run.open_groups(), "the first buffer was trained, another one made")
    time.sleep(0.3)  # it has some tokens by then
    core.suspend()
    run.until(lambda: run.version, "version 1 was published")
    core.resume()


def all_gone(processes: Collection[psutil.Process]) -> bool:
    return not any(map(lives, processes))


# ---- tokens --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Made:
    """One sealed sample: the prompt and the response, and for each token of the response who made it and how likely it was then."""

    ids: torch.Tensor
    versions: torch.Tensor
    log_probs: torch.Tensor


def made(run: Run) -> list[Made]:
    return [_made(group, sample) for group in sealed_groups(run).values() for sample in group.samples]


def _made(group: Group, sample: Sample) -> Made:
    ends = [0, *(span.end for span in sample.spans)]
    assert [span.start for span in sample.spans] == ends[:-1], "there is a gap between two spans"
    versions = [span.version for span in sample.spans for _ in range(span.start, span.end)]
    assert all(a < b for a, b in itertools.pairwise(span.version for span in sample.spans))
    log_probs = torch.from_numpy(np.frombuffer(sample.logprobs, "<f4").copy())
    ids = np.frombuffer(group.prompt_ids + sample.response_ids, "<i4").astype(np.int64)
    assert len(versions) * 4 == len(sample.logprobs) == len(sample.response_ids)
    return Made(torch.from_numpy(ids), torch.tensor(versions), log_probs)


def weights_of_versions(run: Run) -> dict[int, Path]:
    """A model directory of each version: what the run began with, and its checkpoints."""
    steps = [int(path.name.removeprefix("step_")) for path in run.dir.checkpoints.glob("step_*")]
    return {0: run_model(run.dir).path} | {step: export(run.dir, step) for step in sorted(steps)}


@torch.no_grad()
def widest_gap(samples: Sequence[Made], version: int, weights: Path) -> float:
    """The largest difference between the log-prob that a token of `version` was sealed with and what one forward over the whole
    sequence, without a cache, gives it with these weights in float32."""
    model, gaps = load_engine_model(weights, "float32"), []
    for sample in samples:
        here = sample.versions == version
        if here.any():
            count = len(sample.versions)
            logits = model(sample.ids[None, :-1], use_cache=False).logits[0, -count:].float()
            plain = logits.log_softmax(-1).gather(1, sample.ids[-count:, None])[:, 0]
            gaps.append(float((plain - sample.log_probs)[here].abs().max()))
    return max(gaps)


def each_version_made_its_tokens(run: Run, closer_than: float = 1e-4) -> list[int]:
    """Every token that a version is said to have made has the log-prob that this version gives it, and another one by the version
    before: no weights were torn, late or mistaken for others. Returns the versions that made any."""
    weights, samples = weights_of_versions(run), made(run)
    versions = torch.cat([sample.versions for sample in samples]).unique().tolist()
    own = {version: widest_gap(samples, version, weights[version]) for version in versions}
    assert max(own.values()) < closer_than, own
    before = {version: widest_gap(samples, version, weights[version - 1]) for version in versions if version}
    assert min(before.values()) > 10 * closer_than, f"two versions are so alike that this shows nothing: {before}"
    return versions
