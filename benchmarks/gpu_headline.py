"""What asynchrony buys on GPUs: one long-tailed workload, trainers on half of the GPUs and vLLM instances on the other half, in one
setting after the other.

    python benchmarks/gpu_headline.py [--gpus 2] [--size 1.7b] [--steps 12] [--out runs/headline] [--minutes 9]
    python benchmarks/gpu_headline.py --device cpu --model tiny [--steps 20]        # a check of this script

A Qwen3-shaped model with random weights; every response ends at a length drawn for its sample (lognormal, --mean, cut at --cap), so
each setting does the same work. Settings are added one to the other. "ceiling" is the busier side's share of a step, so step x
ceiling is the step that no schedule beats; "predicted" is the simulator's, calibrated on the synchronous run. "pull" is what a
weight pull moves a second, beside a plain copy of as many bytes between the same two devices.

A setting that --out holds already is not run again, and none begins that would not end within --minutes: call it again for the
rest. Compile caches of trainer and engine stay on the node, so the first run starts slowest.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from report_machine import describe_machine

WARMUP = 3
P, COORDINATION = "psrl", "psrl.rollout_coordination"
ACTOR, ROLLOUT = "train_actor_rollout_ref.actor", "gen_actor_rollout_ref.rollout"
SIZES = {
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}
VOCABULARY = 151936
PROMPT_TOKENS = 64
DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {"groups": 32, "mean": 1024.0, "cap": 8192, "steps": 12},
    "cpu": {"groups": 8, "mean": 32.0, "cap": 192, "steps": 20},
}
SAMPLES = 8
MINI_BATCHES = 4
Row = dict[str, float]


def settings(groups: int) -> dict[str, list[str]]:
    """Name -> overrides; from "partial rollout" on each has those of the one before, too."""
    partial = f"{COORDINATION}.partial_rollout.enable"
    found = {"synchronous": [f"{P}.staleness=0", f"{partial}=False"]}
    found |= {f"staleness {n}": [f"{P}.staleness={n}", f"{partial}=False"] for n in (1, 2, 3)}
    kept = [f"{P}.staleness=3", f"{partial}=True"]
    for name, more in (
        ("+ partial rollout", []),
        (
            "+ mini_batch overlap",
            [f"{P}.fine_grain_overlap.granularity=mini_batch", f"{P}.fine_grain_overlap.overlap_scope=pre_step"],
        ),
        (
            "+ redundancy",
            [
                f"{COORDINATION}.redundant_rollout.enable=True",
                f"{COORDINATION}.redundant_rollout.redundant_global_batch_size={groups * 5 // 4}",
            ],
        ),
    ):
        kept = [*kept, *more]
        found[name] = kept
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=DEFAULTS, default="cuda")
    parser.add_argument("--gpus", type=int, default=2, help="half of them train; on a CPU: processes")
    parser.add_argument("--size", choices=SIZES, help="null: 1.7b on two GPUs, else 4b")
    parser.add_argument("--model", help="tiny, or a model directory, instead of random weights of --size")
    parser.add_argument("--groups", type=int, help="of a buffer; 8 samples each")
    parser.add_argument("--mean", type=float, help="tokens of a response, before the cut")
    parser.add_argument("--cap", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--only", nargs="*", help="settings by name")
    parser.add_argument("--out", type=Path, default=Path("runs/headline"))
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--extra", nargs="*", default=[], help="more KEY=VALUE for every run")
    args = parser.parse_args()
    for name, value in DEFAULTS[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    end = time.monotonic() + 60 * args.minutes
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    common = [*workload(args), *args.extra]
    remember(args.out / "workload.json", common)
    chosen = {n: o for n, o in settings(args.groups).items() if not args.only or n in args.only}
    longest_s = 0.0
    for name, overrides in chosen.items():
        run_dir = args.out / name.replace(" ", "_").replace("+_", "and_")
        if (run_dir / "summary.json").exists() and json.loads((run_dir / "summary.json").read_text())[
            "status"
        ] == "completed":
            continue
        if time.monotonic() + longest_s > end:
            print(f"no time is left for {name!r} and what follows: call again", flush=True)
            break
        begun = time.monotonic()
        launch(run_dir, [*common, *overrides])
        longest_s = max(longest_s, time.monotonic() - begun)
        print(f"{name}: {time.monotonic() - begun:.0f} s with its start", flush=True)
    rows = {
        n: measure(d, args.gpus) for n in chosen if (d := args.out / n.replace(" ", "_").replace("+_", "and_")).exists()
    }
    predict(rows, chosen, common, args.out, args.steps)
    copy_gb_s = plain_copy(args.device, max(int(row["nbytes"]) for row in rows.values()))
    head = f"{args.gpus} x {args.device}, {args.size or args.model or ''} {args.steps} steps of {args.groups} x {SAMPLES} samples, first {WARMUP} not counted"
    text = "\n".join(
        [
            describe_machine(),
            head,
            f"lengths: lognormal, mean {args.mean:g}, cut at {args.cap}",
            "",
            *table(rows, copy_gb_s),
        ]
    )
    print(text)
    (args.out / "headline.txt").write_text(text + "\n")
    plot(rows, args.out / "headline.png")
    return 0


# ---- what runs -------------------------------------------------------------------------------------------------


def workload(args: argparse.Namespace) -> list[str]:
    """What all settings have in common."""
    half = max(1, args.gpus // 2)
    overrides = [
        "trainer.logger=[console]", "trainer.save_freq=0", f"trainer.total_training_steps={args.steps}",
        f"{P}.staleness_buffer_entries={args.groups}", f"{P}.rollout_n={SAMPLES}", f"{P}.weights.pull_timeout_s=60",
        f"{ACTOR}.ppo_mini_batch_size={args.groups // MINI_BATCHES}", f"{ACTOR}.optim.lr_scheduler_type=constant",
        "algorithm.rollout_correction.rollout_is=token", "data.task=digit_sum", "data.task_params.size=20000",
        f"data.max_prompt_length={PROMPT_TOKENS}", f"data.max_response_length={args.cap}",
        f"data.synthetic_lengths.mean_tokens={args.mean:g}", f"{ROLLOUT}.ignore_eos=True",
        f"{P}.deployment.train_ngpus_per_node={half}", f"{P}.deployment.n_rollout_instances={half}",
        f"{P}.deployment.rollout_ngpus_per_node={half}",
    ]  # fmt: skip
    if args.device == "cpu":
        cores = sorted(os.sched_getaffinity(0))
        overrides += [
            "preset=laptop", "trainer.device=cpu", f"{P}.deployment.train_cores={cores[:half]}",
            f"{P}.deployment.rollout_cores={cores[half:] or cores}",
        ]  # fmt: skip
    else:
        overrides += [
            "preset=cluster", "trainer.device=cuda", f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.dtype=bfloat16",
            f"{ROLLOUT}.max_num_seqs={args.groups * SAMPLES}", f"{ROLLOUT}.gpu_memory_utilization=0.8",
            f"{ACTOR}.mixed_precision=bfloat16", f"{ACTOR}.gradient_checkpointing=True",
            f"{ACTOR}.ppo_max_token_len_per_gpu={max(32768, args.cap + PROMPT_TOKENS)}",
        ]  # fmt: skip
    return [*overrides, f"model={model(args)}"]


def model(args: argparse.Namespace) -> str:
    """What `model=` shall be: made here once, below --out."""
    if args.model not in (None, "tiny"):
        return args.model
    if args.model == "tiny":
        base = args.out / "base"
        if not (base / "summary.json").exists():
            launch(base, ["preset=laptop", "data.task=digit_sum", f"data.max_prompt_length={PROMPT_TOKENS}", "trainer.logger=[console]",
                          f"data.max_response_length={args.cap}", "trainer.total_training_steps=1", "model.tiny.warm_start_steps=0"])  # fmt: skip
        return str(base / "model")
    args.size = args.size or ("1.7b" if args.gpus <= 2 else "4b")
    directory = args.out / f"model-{args.size}"
    if not directory.exists():
        random_model(args.size, PROMPT_TOKENS + args.cap, directory, args.device)
    return str(directory)


def random_model(size: str, context: int, directory: Path, device: str) -> None:
    """A Hugging Face directory with random weights in bfloat16 and the tiny model's tokenizer: ids beyond it have no text."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from psrl.models.tiny_tokenizer import END_ID, PAD_ID, make_tokenizer, save_tokenizer

    shape = Qwen3Config(
        vocab_size=VOCABULARY, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, max_position_embeddings=context,
        bos_token_id=None, eos_token_id=END_ID, pad_token_id=PAD_ID, **SIZES[size],
    )  # fmt: skip
    incoming = directory.with_name(f".{directory.name}.tmp")
    incoming.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    with torch.device(device):
        weights = Qwen3ForCausalLM._from_config(shape, dtype=torch.bfloat16)
    weights.save_pretrained(incoming)
    save_tokenizer(make_tokenizer(["1 + 2 = 3"]), incoming, context)
    incoming.rename(directory)


def launch(run_dir: Path, overrides: Sequence[str]) -> None:
    """One run; its output goes beside it, and is shown if it fails."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    log = run_dir.with_name(f"{run_dir.name}.log")
    with log.open("wb") as out:
        command = [sys.executable, "-m", "psrl.launch", f"run_dir={run_dir}", *overrides]
        done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT)
    if done.returncode:
        tails = [
            f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}"
            for path in [log, *sorted(run_dir.glob("logs/*.log"))]
        ]
        raise SystemExit("\n".join([*tails, f"{run_dir.name} ended with {done.returncode}"]))


def remember(path: Path, common: Sequence[str]) -> None:
    """What lies in --out must be of the same workload."""
    if path.exists() and json.loads(path.read_text()) != list(common):
        raise SystemExit(f"{path} is of another workload: choose another --out, or remove it")
    path.write_text(json.dumps(list(common), indent=1))


# ---- what is measured ------------------------------------------------------------------------------------------


def measure(run_dir: Path, gpus: int) -> Row:
    """Of a run, without the first steps and the last, which writes a checkpoint."""
    from psrl.telemetry.metrics import read_metrics
    from psrl.telemetry.summary import TRAIN_BUSY, busy_over
    from psrl.telemetry.timeline import BUSY, PULL, PUSH, SWITCH
    from psrl.telemetry.timeline_read import by_name, read_timeline

    rows = read_metrics(run_dir / "metrics.jsonl")[WARMUP:-1]
    tracks = read_timeline(run_dir / "timeline")
    instances, trainers = by_name(tracks, "instance").values(), by_name(tracks, "trainer")
    pushed = [span.end_s for span in next(iter(trainers.values())) if span.name == PUSH]
    windows = [(pushed[WARMUP], pushed[-2])]
    pulls = [s for own in instances for s in own if s.name == PULL and s.start_s >= pushed[0]]
    switches = [s.seconds for own in instances for s in own if s.name == SWITCH and s.start_s >= pushed[0]]
    step_s = statistics.fmean(row["timing_s/step"] for row in rows)
    tokens = statistics.fmean(row["response_length/mean"] * row["training/num_samples"] for row in rows)
    return {
        "step_s": step_s,
        "tokens_s_gpu": tokens / step_s / gpus,
        "rollout": statistics.fmean(busy_over(spans, windows, (BUSY,)) for spans in instances),
        "train": statistics.fmean(busy_over(spans, windows, TRAIN_BUSY) for spans in trainers.values()),
        "lag": max(row["staleness/max"] for row in rows),
        "nbytes": max((s.attributes["nbytes"] for s in pulls), default=0),
        "pull_gb_s": statistics.median(s.attributes["nbytes"] / s.seconds / 1e9 for s in pulls) if pulls else 0.0,
        "pause_ms": 1e3 * statistics.median(switches) if switches else 0.0,
    }


def predict(
    rows: dict[str, Row], chosen: Mapping[str, list[str]], common: Sequence[str], out: Path, steps: int
) -> None:
    """Add the simulator's step time to each row, where the synchronous run is there to calibrate on."""
    from psrl.config.command_line import prepare_overrides
    from psrl.config.errors import ConfigError
    from psrl.simulate.__main__ import prepare
    from psrl.simulate.build import simulate
    from psrl.simulate.calibrate import calibrate

    try:
        calibrate(out / "synchronous").save(out / "calibration.json")
    except ConfigError as error:
        print(f"nothing is predicted: {error}")
        return
    own = [
        f"simulation.calibration={out / 'calibration.json'}",
        f"simulation.steps={steps}",
        f"simulation.warmup_steps={WARMUP}",
    ]
    for name in rows:
        config, simulation = prepare(prepare_overrides([*common, *chosen[name], *own]))
        rows[name]["predicted_s"] = simulate(config, simulation).step_s


def plain_copy(device: str, nbytes: int) -> float:
    """GB/s of a plain copy between the first and the last GPU (on a CPU: in memory), in a process that leaves the GPUs afterwards."""
    code = (
        "import sys, time, torch\n"
        "device, size = sys.argv[1], int(sys.argv[2])\n"
        "last = f'cuda:{torch.cuda.device_count() - 1}' if device == 'cuda' else 'cpu'\n"
        "a = torch.ones(size, dtype=torch.uint8, device='cuda:0' if device == 'cuda' else 'cpu')\n"
        "b = torch.empty(size, dtype=torch.uint8, device=last)\n"
        "best = 1e9\n"
        "for _ in range(6):\n"
        "    begun = time.perf_counter(); b.copy_(a)\n"
        "    _ = [torch.cuda.synchronize(d) for d in {a.device, b.device} if d.type == 'cuda']\n"
        "    best = min(best, time.perf_counter() - begun)\n"
        "print(size / best / 1e9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, device, str(max(1, nbytes))], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


# ---- what is shown ---------------------------------------------------------------------------------------------


def table(rows: Mapping[str, Row], copy_gb_s: float) -> list[str]:
    base = rows.get("synchronous", next(iter(rows.values())))["step_s"]
    lines = [
        f"{'':22}{'step s':>9}{'speed-up':>10}{'predicted':>11}{'tokens/s/GPU':>14}{'rollout busy':>14}{'train busy':>12}{'ceiling':>9}"
        f"{'max lag':>9}{'pull GB/s':>11}{'of a copy':>11}{'pause ms':>10}"
    ]
    for name, row in rows.items():
        predicted = f"{row['predicted_s']:.2f}" if "predicted_s" in row else "-"
        lines.append(
            f"{name:22}{row['step_s']:9.2f}{base / row['step_s']:10.2f}{predicted:>11}{row['tokens_s_gpu']:14.0f}{row['rollout']:14.2f}"
            f"{row['train']:12.2f}{max(row['rollout'], row['train']):9.2f}{row['lag']:9.0f}{row['pull_gb_s']:11.2f}"
            f"{row['pull_gb_s'] / copy_gb_s:11.2f}{row['pause_ms']:10.1f}"
        )
    return [*lines, f"a plain copy of {max(row['nbytes'] for row in rows.values()) / 1e9:.2f} GB: {copy_gb_s:.1f} GB/s"]


def plot(rows: Mapping[str, Row], path: Path) -> None:
    """Step time by setting: measured, predicted, and what the busier side alone would take."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4))
    bars: list[tuple[str, str, list[float]]] = [
        ("measured", "#2563eb", [row["step_s"] for row in rows.values()]),
        ("predicted", "#93c5fd", [row.get("predicted_s", 0.0) for row in rows.values()]),
        (
            "the busier side alone",
            "#cbd5e1",
            [row["step_s"] * max(row["rollout"], row["train"]) for row in rows.values()],
        ),
    ]
    for i, (label, colour, heights) in enumerate(bars):
        places = [x + 0.27 * (i - 1) for x in range(len(rows))]
        axes.bar(places, heights, 0.25, label=label, color=colour)
    axes.set_xticks(range(len(rows)), list(rows), rotation=15, ha="right")
    axes.set_ylabel("seconds a step")
    axes.legend(frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    raise SystemExit(main())
