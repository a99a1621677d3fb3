"""What asynchrony buys on GPUs: one long-tailed workload, trainers on half of the GPUs and vLLM instances on the other half, in one
setting after the other.

    python benchmarks/gpu_headline.py [--gpus 2] [--size 1.7b] [--steps 12] [--out runs/headline] [--minutes 9] [--at-once 4]
    python benchmarks/gpu_headline.py --size 0.6b --groups 16 --mean 256 --cap 2048 --steps 9     # a short one
    python benchmarks/gpu_headline.py --gpus 1 [--at-once 2] ...                    # trainer and engine by halves on one GPU, or in turns
    python benchmarks/gpu_headline.py --device cpu --model tiny [--steps 20]        # a check of this script

A Qwen3-shaped model with random weights; every response ends at a length drawn for its sample (lognormal, --mean, cut at --cap), so
each setting does the same work. Settings are added one to the other. "ceiling" is the busier side's share of a step, so step x
ceiling is the step that no schedule beats; "predicted" is the simulator's, calibrated on the synchronous run. "pull" is what a
weight pull moves a second, beside a plain copy of as many bytes between the same two devices.

A setting that --out holds already (rows.json) is not run again, and none begins that would not end within --minutes: call it
again for the rest. One that fails is shown and does not keep the others from running. With --at-once several settings run side
by side, each on --gpus of its own. A setting starts while the one before it does its last step, which no figure counts, and writes
its checkpoint. Compile caches of trainer and engine stay on the node, so the first run starts slowest.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headline_figures import WARMUP, Row, measure, plain_copy, plot, predict, table
from headline_runs import completed, gpu_sets, launch, run_all
from report_machine import describe_machine

P, COORDINATION = "psrl", "psrl.rollout_coordination"
ACTOR, ROLLOUT = "train_actor_rollout_ref.actor", "gen_actor_rollout_ref.rollout"
SIZES = ("0.6b", "1.7b", "4b")
PROMPT_TOKENS = 64
DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {"groups": 32, "mean": 1024.0, "cap": 8192, "steps": 12},
    "cpu": {"groups": 8, "mean": 32.0, "cap": 192, "steps": 20},
}
SAMPLES = 8
MINI_BATCHES = 4


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


def settings_of_one_gpu() -> dict[str, list[str]]:
    """Trainer and engine side by side on one GPU, half of the memory each; or in turns, with most of it each."""
    partial = f"{COORDINATION}.partial_rollout.enable"
    found = {"synchronous": [f"{P}.staleness=0", f"{partial}=False"]}
    for n in (1, 2, 3):
        found[f"staleness {n}"] = [f"{P}.staleness={n}", f"{partial}=False"]
        found[f"staleness {n} partial"] = [f"{P}.staleness={n}", f"{partial}=True"]
    turns = [
        *found["synchronous"], f"{P}.colocate=True", "trainer.gpu_memory_fraction=0.9", f"{ROLLOUT}.gpu_memory_utilization=0.8"
    ]  # fmt: skip
    tms = [*turns, f"{P}.tms.range=all", f"{P}.tms.enable_cuda_graph=True"]
    return {**found, "in turns tms": tms, "in turns tms nixl": [*tms, f"{P}.tms.enable_nixl=True"], "in turns": turns}


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
    parser.add_argument(
        "--at-once", type=int, default=1, help="settings that run at the same time, each on --gpus of the machine's"
    )
    parser.add_argument("--compile", action="store_true", help="compiled trainers: faster, after a minute at the start")
    parser.add_argument("--extra", nargs="*", default=[], help="more KEY=VALUE for every run")
    args = parser.parse_args()
    for name, value in DEFAULTS[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    common = [*workload(args), *args.extra]
    remember(args.out / "workload.json", common)
    known = settings_of_one_gpu() if args.gpus == 1 and args.device == "cuda" else settings(args.groups)
    chosen = {name: own for name, own in known.items() if not args.only or name in args.only}
    rows = collect(args.out, known, args.gpus)
    runs = {place(args.out, name): [*common, *own] for name, own in chosen.items() if name not in rows}
    gpus = gpu_sets(args.gpus, args.at_once) if args.device == "cuda" else [None] * args.at_once
    failed = run_all(runs, gpus, minutes=args.minutes, enough_steps=args.steps - 1)
    rows = collect(args.out, known, args.gpus)
    if not rows:
        raise SystemExit(f"nothing has been measured in {args.out}")
    predict(rows, known, common, args.out, args.steps)
    copy_gb_s = plain_copy(args.device, max(int(row["nbytes"]) for row in rows.values()))
    lines = [
        describe_machine(),
        f"{args.gpus} x {args.device}, model {args.model or args.size}, {args.steps} steps of {args.groups} x {SAMPLES} samples, the first "
        f"{WARMUP} not counted; lengths lognormal, mean {args.mean:g}, cut at {args.cap}",
        "",
        *table(rows, copy_gb_s),
    ]
    print("\n".join(lines))
    (args.out / "headline.txt").write_text("\n".join(lines) + "\n")
    if find_spec("matplotlib"):
        plot(rows, args.out / "headline.png")
    else:
        print("no plot: matplotlib is not installed here; call it again where it is")
    return 1 if failed else 0


def collect(out: Path, known: Iterable[str], gpus: int) -> dict[str, Row]:
    """The rows of all settings that have run, of those that rows.json knows and whose runs are gone too; kept there."""
    kept = out / "rows.json"
    rows: dict[str, Row] = json.loads(kept.read_text()) if kept.exists() else {}
    rows |= {
        name: measure(place(out, name), gpus) for name in known if name not in rows and completed(place(out, name))
    }
    rows = {name: rows[name] for name in known if name in rows}
    kept.write_text(json.dumps(rows, indent=1))
    return rows


# ---- what runs -------------------------------------------------------------------------------------------------


def place(out: Path, name: str) -> Path:
    return out / name.replace("+ ", "and ").replace(" ", "_")


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
            f"{ROLLOUT}.max_num_seqs=512", f"{ACTOR}.use_torch_compile={args.compile}", f"{ROLLOUT}.gpu_memory_utilization=0.8",
            f"{ACTOR}.mixed_precision=bfloat16", f"{ACTOR}.gradient_checkpointing=True",
            f"{ACTOR}.ppo_max_token_len_per_gpu={max(32768, args.cap + PROMPT_TOKENS)}",
        ]  # fmt: skip
        if args.gpus == 1:
            overrides += ["trainer.gpu_memory_fraction=0.45", f"{ROLLOUT}.gpu_memory_utilization=0.45"]
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
    from trainer_models import shape
    from transformers import AutoModelForCausalLM

    from psrl.models.tiny_tokenizer import END_ID, PAD_ID, make_tokenizer, save_tokenizer

    config = shape(size)
    config.update(
        {"max_position_embeddings": context, "bos_token_id": None, "eos_token_id": END_ID, "pad_token_id": PAD_ID}
    )
    incoming = directory.with_name(f".{directory.name}.tmp")
    incoming.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    with torch.device(device):
        weights = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    weights.save_pretrained(incoming)
    save_tokenizer(make_tokenizer(["1 + 2 = 3"]), incoming, context)
    incoming.rename(directory)


def remember(path: Path, common: Sequence[str]) -> None:
    """What lies in --out must be of the same workload."""
    if path.exists() and json.loads(path.read_text()) != list(common):
        raise SystemExit(f"{path} is of another workload: choose another --out, or remove it")
    path.write_text(json.dumps(list(common), indent=1))


if __name__ == "__main__":
    raise SystemExit(main())
