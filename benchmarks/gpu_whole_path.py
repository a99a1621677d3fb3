"""Tokens a second through psrl's whole path (coordinator, agent loop, instance, vLLM) over bare AsyncLLM on the same prompts.

    python benchmarks/gpu_whole_path.py [--size 0.6b] [--groups 32] [--new-tokens 512] [--steps 4] [--out runs/whole_path]

One GPU, shared by a synchronous run's trainer and its engine: while a buffer is generated the trainer waits. Every response has
`--new-tokens` tokens. psrl's figure is a buffer's tokens over the time from its first request at the instance to its last token there;
AsyncLLM then gets the prompts of the same buffers, one buffer at a time, with the same settings. The first buffer counts in neither.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

import numpy as np
import torch
from gpu_headline import random_model
from gpu_rollout import bare
from headline_runs import launch
from report_machine import describe_machine

from psrl.prepare import PROMPTS
from psrl.role import load_config
from psrl.rollout.engines.vllm_arguments import engine_arguments, user_options
from psrl.rundir.layout import RunDir
from psrl.tasks.prepare import context_length
from psrl.tasks.prepared import PreparedReader
from psrl.telemetry.timeline import BUSY, SWITCH
from psrl.telemetry.timeline_read import by_name, read_timeline
from psrl.trainer.replay import recorded_buffers

SAMPLES = 8
PROMPT_TOKENS = 64
ACTOR, ROLLOUT = "train_actor_rollout_ref.actor", "gen_actor_rollout_ref.rollout"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="0.6b", help="of trainer_models.SIZES")
    parser.add_argument("--groups", type=int, default=32, help="of a buffer; 8 samples each")
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--memory", type=float, default=0.45, help="share of the GPU for each side")
    parser.add_argument("--out", type=Path, default=Path("runs/whole_path"))
    parser.add_argument("--extra", nargs="*", default=[], help="more KEY=VALUE for the run")
    args = parser.parse_args()
    args.out = args.out.resolve()
    cuda = torch.cuda.is_available()
    model, run = args.out / f"model-{args.size}", RunDir(args.out / "run")
    if not model.exists():
        random_model(args.size, PROMPT_TOKENS + args.new_tokens, model, "cuda" if cuda else "cpu")
    launch(run.path, overrides(args, model, cuda))
    ours = rates(run, args.groups * SAMPLES * args.new_tokens)
    print(describe_machine())
    print(
        f"{torch.cuda.get_device_name() if cuda else 'CPU'}, {args.size}, {args.groups} x {SAMPLES} samples of {args.new_tokens} tokens at once"
    )
    print(
        f"tokens/s  psrl's whole path {statistics.median(ours):,.0f}  ({', '.join(f'{r:,.0f}' for r in ours)})",
        flush=True,
    )
    config = load_config(run)
    prompts = PreparedReader(run.data / PROMPTS)
    turns = [
        [np.frombuffer(prompts[group.prompt].prompt_ids, "<i4").tolist() for group in buffer for _ in range(SAMPLES)]
        for buffer in recorded_buffers(run, config)
    ]
    gen = config.gen_actor_rollout_ref.rollout
    options = user_options(gen)
    if not cuda:
        del options["gpu_memory_utilization"]  # there it would be a share of the host's memory
    arguments = engine_arguments(
        model,
        dtype=str(gen.dtype),
        max_num_seqs=gen.max_num_seqs,
        max_model_len=context_length(config),
        kv_cache_bytes=None if cuda else 2**30,
        options=options,
    )
    theirs = asyncio.run(bare(arguments, turns, args.new_tokens))
    print(f"tokens/s  bare AsyncLLM     {statistics.median(theirs):,.0f}  ({', '.join(f'{r:,.0f}' for r in theirs)})")
    print(f"ratio {statistics.median(ours) / statistics.median(theirs):.3f} (goal 0.95)")


def overrides(args: argparse.Namespace, model: Path, cuda: bool) -> list[str]:
    found = [
        f"model={model}", "trainer.logger=[console]", "trainer.save_freq=0", f"trainer.total_training_steps={args.steps}",
        "psrl.staleness=0", "psrl.rollout_coordination.partial_rollout.enable=False", f"psrl.staleness_buffer_entries={args.groups}",
        f"psrl.rollout_n={SAMPLES}", f"{ACTOR}.ppo_mini_batch_size={args.groups}", "data.task=digit_sum", "data.task_params.size=20000",
        f"data.max_prompt_length={PROMPT_TOKENS}", f"data.max_response_length={args.new_tokens}", f"{ROLLOUT}.ignore_eos=True",
        "psrl.deployment.n_rollout_instances=1", f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.max_num_seqs={args.groups * SAMPLES}",
    ]  # fmt: skip
    if not cuda:
        return [*found, "preset=laptop", f"{ROLLOUT}.dtype=float32", "trainer.device=cpu", *args.extra]
    return [
        *found, "preset=cluster", "trainer.device=cuda", f"trainer.gpu_memory_fraction={args.memory}", f"{ROLLOUT}.dtype=bfloat16",
        f"{ROLLOUT}.gpu_memory_utilization={args.memory}", f"{ACTOR}.mixed_precision=bfloat16", f"{ACTOR}.gradient_checkpointing=True",
        f"{ACTOR}.use_torch_compile=False", "psrl.deployment.train_ngpus_per_node=1", "psrl.deployment.rollout_ngpus_per_node=1",
        *args.extra,
    ]  # fmt: skip


def rates(run: RunDir, tokens: int) -> list[float]:
    """Tokens a second of each buffer but the first: what lies between two switches of the one instance."""
    (spans,) = by_name(read_timeline(run.timeline), "instance").values()
    switched = [span.end_s for span in spans if span.name == SWITCH]
    found = []
    for begin, end in zip(switched[1:], [*switched[2:], float("inf")], strict=True):
        busy = [span for span in spans if span.name == BUSY and begin <= span.start_s < end]
        if busy:
            found.append(tokens / (busy[-1].end_s - busy[0].start_s))
    return found


if __name__ == "__main__":
    main()
