"""Many turns, shared prefixes, slow environments: what routing and session scheduling do to trajectories an hour, on real processes.

    python benchmarks/agentic.py [--steps N] [--only NAME ...] [--keep DIR] [--gpu]

Each conversation is a long system message that all share and turns of a drawn text each way, after an environment's lognormal
time (agentic_environment.py). The KV caches of the two instances hold about half of the conversations that are open, at their full
length (a quarter with `--gpu`). Nothing is learned, so all runs do the same work. "busy ms/turn" is what engines spent on a turn: the
rollout's cost, whatever the trainer takes. `--gpu`: a random 1.7B model, two vLLM instances and the trainer share one GPU; conversations of 14,000 tokens, of which the
model writes a few a turn, so that prefilling is most of the work where caches lose them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import gpu_headline
import headline_runs
import torch
from report_machine import describe_machine

from psrl.rundir.layout import RunDir
from psrl.telemetry.metrics import read_metrics
from psrl.telemetry.timeline import SWITCH
from psrl.telemetry.timeline_read import read_timeline

WARMUP = 3
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
    "cache_aware_v1 + sticky": [STICKY, f"{ROUTING}method=cache_aware_v1"],
    "+ ThunderAgent": [STICKY, f"{ROUTING}method=cache_aware_v1", f"{THUNDER}enable=True"],
}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--gpu", action="store_true", help="vLLM on one GPU, a random model, longer conversations")
    parser.add_argument("--size", default="1.7b", help="--gpu: of trainer_models.SIZES")
    parser.add_argument("--set", nargs="*", default=[], help="further overrides for every case")
    args = parser.parse_args()
    where = "trainer and two vLLM instances on one GPU" if args.gpu else "trainer on core 0, two instances on core 1"
    print(f"{describe_machine()}\n{args.steps} steps, one run each; {where}\n")
    print(
        f"{'':26} {'step s':>8} {'trajectories/h':>15} {'speed-up':>9} {'tokens/s':>9} {'busy ms/turn':>13} {'computed tokens/turn':>21} {'prefix hits':>12}  sessions",
        flush=True,
    )
    with contextlib.ExitStack() as stack:
        scratch = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="psrl-agentic-")))
        own = [*COMMON, *(ON_GPU if args.gpu else ON_CPU), *args.set]
        model = gpu_model(scratch, args.size) if args.gpu else cpu_model(scratch, own)
        first = 0.0
        for number, name in enumerate(args.only):
            run_dir = scratch / f"{number:02}"
            launch(run_dir, [*own, f"model={model}", f"trainer.total_training_steps={args.steps}", *CASES[name]])
            first = report(name, run_dir, first, *((2, GPU_TURN_TOKENS) if args.gpu else (WARMUP, TURN_TOKENS)))
    return 0


def cpu_model(scratch: Path, overrides: list[str]) -> Path:
    launch(scratch / "base", [*overrides, "trainer.total_training_steps=1"])
    return scratch / "base" / "model"


def gpu_model(scratch: Path, size: str) -> Path:
    gpu_headline.random_model(
        size, GPU_CONTEXT, scratch / f"model-{size}", "cuda" if torch.cuda.is_available() else "cpu"
    )
    return scratch / f"model-{size}"


def launch(run_dir: Path, overrides: list[str]) -> None:
    import_path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    headline_runs.launch(run_dir, overrides, {"PYTHONPATH": import_path})


def report(name: str, run_dir: Path, first: float, warmup: int, turn_tokens: int) -> float:
    """Print a line; returns the trajectories an hour that speed-ups refer to. Neither `warmup` steps count nor the last one."""
    rows = read_metrics(run_dir / "metrics.jsonl")
    steady = rows[warmup:-1]
    seconds = sum(row["timing_s/step"] for row in steady)
    hourly = 3600 * sum(row["training/num_samples"] for row in steady) / seconds
    tokens = sum(row["training/num_samples"] * row["response_length/mean"] for row in steady) / seconds
    work = [
        span.attributes
        for track in read_timeline(RunDir(run_dir).timeline)
        for span in track.spans
        if span.name == SWITCH and track.role == "instance"
    ]
    computed = sum(w.get("prompt_tokens", 0) for w in work)
    hits = sum(w.get("prefix_hit_tokens", 0) for w in work)
    busy = sum(w.get("busy_s", 0) for w in work)
    turns = sum(w.get("generated_tokens", 0) for w in work) / turn_tokens
    sessions = " ".join(
        f"{key.rpartition('/')[2]}={rows[-1][key]:g}" for key in sorted(rows[-1]) if key.startswith("rollout/sessions/")
    )
    audit = subprocess.run([sys.executable, "-m", "psrl.audit", str(run_dir)], capture_output=True)
    print(
        f"{name:26} {seconds / len(steady):8.3f} {hourly:15.0f} {hourly / (first or hourly):9.2f} {tokens:9.0f} "
        f"{1e3 * busy / max(turns, 1):13.1f} {computed / max(turns, 1):21.1f} {hits / max(hits + computed, 1):12.1%}  {sessions} "
        f"{'audit clean' if audit.returncode == 0 else 'AUDIT FAILED'}",
        flush=True,
    )
    return first or hourly


if __name__ == "__main__":
    raise SystemExit(main())
