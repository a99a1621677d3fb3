"""Many turns, shared prefixes, slow environments: what routing and session scheduling do to trajectories an hour, on real processes.

    python benchmarks/agentic.py [--steps N] [--only NAME ...] [--keep DIR] [--rows FILE] [--gpu]

Each conversation is a long system message that all share and turns of a drawn text each way, after an environment's lognormal
time (agentic_environment.py). The KV caches of the two instances hold about half of the conversations that are open, at their full
length (a quarter with `--gpu`). Nothing is learned, so all runs do the same work. "busy ms/turn" is what engines spent on a turn: the
rollout's cost, whatever the trainer takes. `--gpu`: a random 1.7B model, two vLLM instances and the trainer share one GPU; conversations of 14,000 tokens, of which the
model writes a few a turn, so that prefilling is most of the work where caches lose them. With `--rows` what was measured before, with
the same arguments, is shown along and not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gpu_headline
import headline_runs
import torch
from report_machine import describe_machine

from psrl.rundir.layout import RunDir
from psrl.telemetry.metrics import read_metrics
from psrl.telemetry.timeline import SWITCH
from psrl.telemetry.timeline_read import read_timeline

WARMUP = 3
Row = dict[str, Any]
COORDINATION = "psrl.rollout_coordination."
ROUTING, THUNDER = f"{COORDINATION}routing_strategy.", f"{COORDINATION}session_strategy.thunder_agent."
ROLLOUT = "gen_actor_rollout_ref.rollout."
TURNS, TURN_TOKENS, SYSTEM_TOKENS, PROMPT_TOKENS = 6, 32, 128, 16
GPU_TURNS, GPU_TURN_TOKENS, GPU_CONTEXT = 32, 8, 16384
COMMON = [
    "preset=laptop", "trainer.logger=[console]", "trainer.report=False", "trainer.save_freq=0", "psrl.staleness=1",
    "psrl.deployment.n_rollout_instances=2", "data.reasoning_gym.dataset=null", "data.task=agentic_environment:Chores",
    f"data.task_params={{system_tokens: {SYSTEM_TOKENS}, prompt_tokens: {PROMPT_TOKENS}}}",
    "data.max_prompt_length=256", "data.max_response_length=768",
    f"{ROLLOUT}agent.default_agent_loop=tool_agent", f"{ROLLOUT}multi_turn.environment=agentic_environment:Environment",
    f"{ROLLOUT}multi_turn.environment_params={{turns: {TURNS}, tokens: {TURN_TOKENS}, seconds: 0.3}}",
    f"{ROLLOUT}multi_turn.max_tokens_per_turn={TURN_TOKENS}", f"{ROLLOUT}multi_turn.cut_message=go_on",
    f"{ROLLOUT}ignore_eos=True", "train_actor_rollout_ref.actor.optim.lr=1e-9",
    "psrl.staleness_buffer_entries=8", "psrl.rollout_n=4",
]  # fmt: skip
ON_CPU = [
    "model.tiny.hidden_size=256", "model.tiny.num_layers=4", "model.tiny.warm_start_steps=0",
    f"{ROLLOUT}kv_cache_tokens=8192", f"{ROLLOUT}max_num_seqs=32",
    "psrl.deployment.train_cores=[0]", "psrl.deployment.rollout_cores=[1]",
]  # fmt: skip
ON_GPU = [
    "trainer.device=cuda", "trainer.gpu_memory_fraction=0.5", f"{ROLLOUT}name=vllm", f"{ROLLOUT}dtype=bfloat16",
    f"{ROLLOUT}gpu_memory_utilization=0.15", f"{ROLLOUT}max_num_seqs=128", "psrl.staleness_buffer_entries=3", "psrl.rollout_n=8",
    # Blocks of 16 tokens; with the second key no engine measures memory while the other one allocates.
    f"{ROLLOUT}engine_kwargs.vllm={{num_gpu_blocks_override: 4608, kv_cache_memory_bytes: {12 * 2**30}}}",
    "data.task_params={system_tokens: 512, prompt_tokens: 64}", "data.max_prompt_length=768", "data.max_response_length=14336",
    f"{ROLLOUT}multi_turn.environment_params={{turns: {GPU_TURNS}, tokens: 400, seconds: 0.1}}",
    f"{ROLLOUT}multi_turn.max_tokens_per_turn={GPU_TURN_TOKENS}",
    "train_actor_rollout_ref.actor.mixed_precision=bfloat16", "train_actor_rollout_ref.actor.gradient_checkpointing=True",
    "train_actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768",
]  # fmt: skip
STICKY = f"{ROUTING}enable_trajectory_sticky=True"
CASES: dict[str, list[str]] = {
    "request_num_balance": [],
    "+ sticky": [STICKY],
    "cache_aware_v1": [f"{ROUTING}method=cache_aware_v1"],
    "cache_aware_v1 + sticky": [STICKY, f"{ROUTING}method=cache_aware_v1"],
    "+ ThunderAgent": [STICKY, f"{ROUTING}method=cache_aware_v1", f"{THUNDER}enable=True"],
}


GPU_CASES: dict[str, list[str]] = {
    **CASES,
    "cache_aware_v1 + sticky + LMCache": [
        *CASES["cache_aware_v1 + sticky"], "psrl.lmcache.enable=True", "psrl.lmcache.offload_size_gb=30",
        f"{ROUTING}cache_aware_policy.lmcache_overlap_weight=0.5",
    ],
}  # fmt: skip
"""With what needs vLLM on a GPU, and LMCache beside it."""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", nargs="*", choices=GPU_CASES, default=list(CASES))
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--rows", type=Path, help="figures of earlier calls, and of this one")
    parser.add_argument("--gpu", action="store_true", help="vLLM on one GPU, a random model, longer conversations")
    parser.add_argument("--size", default="1.7b", help="--gpu: of trainer_models.SIZES")
    parser.add_argument("--set", nargs="*", default=[], help="further overrides for every case")
    args = parser.parse_args()
    where = "trainer and two vLLM instances on one GPU" if args.gpu else "trainer on core 0, two instances on core 1"
    print(f"{describe_machine()}\n{args.steps} steps, one run each; {where}\n")
    print(
        f"{'':34} {'step s':>8} {'trajectories/h':>15} {'speed-up':>9} {'tokens/s':>9} {'busy ms/turn':>13} {'computed tokens/turn':>21} {'prefix hits':>12} {'busiest':>8}  sessions",
        flush=True,
    )
    rows: dict[str, Row] = json.loads(args.rows.read_text()) if args.rows and args.rows.exists() else {}
    for name, row in rows.items():
        print(line(name, row, rows), flush=True)
    with contextlib.ExitStack() as stack:
        scratch = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="psrl-agentic-")))
        own = [*COMMON, *(ON_GPU if args.gpu else ON_CPU), *args.set]
        model = gpu_model(scratch, args.size) if args.gpu else cpu_model(scratch, own)
        for name in [name for name in args.only if name not in rows]:
            run_dir = scratch / name.strip("+ ").replace(" ", "_")
            launch(run_dir, [*own, f"model={model}", f"trainer.total_training_steps={args.steps}", *GPU_CASES[name]])
            rows[name] = measure(run_dir, *((2, GPU_TURN_TOKENS) if args.gpu else (WARMUP, TURN_TOKENS)))
            print(line(name, rows[name], rows), flush=True)
            if args.rows:
                args.rows.write_text(json.dumps(rows, indent=1))
    if next(iter(rows), "") != next(iter(CASES)):  # speed-ups above were not yet those over the default
        print("\n" + "\n".join(line(name, rows[name], rows) for name in GPU_CASES if name in rows))
    return 0


def cpu_model(scratch: Path, overrides: list[str]) -> Path:
    launch(scratch / "base", [*overrides, "trainer.total_training_steps=1"])
    return scratch / "base" / "model"


def gpu_model(scratch: Path, size: str) -> Path:
    directory = scratch / f"model-{size}"
    if not directory.exists():  # of an earlier call with the same --keep
        gpu_headline.random_model(size, GPU_CONTEXT, directory, "cuda" if torch.cuda.is_available() else "cpu")
    return directory


def launch(run_dir: Path, overrides: list[str]) -> None:
    import_path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    headline_runs.launch(run_dir, overrides, {"PYTHONPATH": import_path})


def measure(run_dir: Path, warmup: int, turn_tokens: int) -> Row:
    """Neither `warmup` steps count nor the last one. "busiest": the share of all tokens that the instance with the most of them made."""
    metrics = read_metrics(run_dir / "metrics.jsonl")
    steady = metrics[warmup:-1]
    seconds = sum(row["timing_s/step"] for row in steady)
    samples = sum(row["training/num_samples"] for row in steady)
    work = {
        track.name: [span.attributes for span in track.spans if span.name == SWITCH]
        for track in read_timeline(RunDir(run_dir).timeline)
        if track.role == "instance"
    }

    def total(counter: str) -> float:
        return sum(each.get(counter, 0) for own in work.values() for each in own)

    made = [sum(each.get("generated_tokens", 0) for each in own) for own in work.values()]
    turns = max(1.0, sum(made) / turn_tokens)
    computed, hits = total("prompt_tokens"), total("prefix_hit_tokens")
    audit = subprocess.run([sys.executable, "-m", "psrl.audit", str(run_dir)], capture_output=True)
    sessions = [
        f"{key.rpartition('/')[2]}={metrics[-1][key]:g}"
        for key in sorted(metrics[-1])
        if key.startswith("rollout/sessions/")
    ]
    return {
        "step_s": seconds / len(steady),
        "hourly": 3600 * samples / seconds,
        "tokens_s": sum(row["training/num_samples"] * row["response_length/mean"] for row in steady) / seconds,
        "busy_ms": 1e3 * total("busy_s") / turns,
        "computed": computed / turns,
        "hits": hits / max(1, hits + computed),
        "busiest": max(made) / max(1, sum(made)),
        "sessions": " ".join([*sessions, "audit clean" if audit.returncode == 0 else "AUDIT FAILED"]),
    }


def line(name: str, row: Row, rows: Mapping[str, Row]) -> str:
    """Speed-ups refer to the default, or to the first row there is."""
    default = rows.get(next(iter(CASES)), next(iter(rows.values())))
    return (
        f"{name:34} {row['step_s']:8.3f} {row['hourly']:15.0f} {row['hourly'] / default['hourly']:9.2f} {row['tokens_s']:9.0f} "
        f"{row['busy_ms']:13.1f} {row['computed']:21.1f} {row['hits']:12.1%} {row['busiest']:8.0%}  {row['sessions']}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
