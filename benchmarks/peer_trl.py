"""psrl against TRL's GRPOTrainer on the same work, both in one run: same model, prompts, rewards, samples a step.

    python benchmarks/peer_trl.py [short|longtail] [--steps N] [--rounds N]

TRL gets an environment of its own (.venv-trl, made on the first run). The two take turns, so that a slow moment of the
machine does not meet only one of them; the ratio of the medians is reported.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from report_machine import describe_machine

ROOT = Path(__file__).resolve().parents[1]
TRL_PYTHON = ROOT / ".venv-trl" / "bin" / "python"
TRL = "trl==1.16.*"

WORK = {
    "short": {
        "task": "digit_sum",
        "max_tokens": 8,
        "lr": 1e-3,
        "goal": 1.0,
        "data": ["data.task=digit_sum", "data.max_response_length=8", "data.max_prompt_length=32"],
    },
    "longtail": {
        "task": "longtail_count",
        "max_tokens": 256,
        "lr": 3e-4,
        "goal": 2.0,
        "data": [
            "data.task=longtail_count",
            "data.max_response_length=256",
            "data.max_prompt_length=32",
            "model.tiny.warm_start_accuracy=0.6",
        ],
    },
}
GROUPS, SAMPLES, WARMUP = 16, 8, 5


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("work", choices=WORK, nargs="?", default="short")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--overrides", nargs="*", default=[])
    args = parser.parse_args()
    make_trl_environment()
    work = WORK[args.work]
    with tempfile.TemporaryDirectory(prefix="psrl-peer-") as scratch:
        model, prompts = prepare(Path(scratch) / "base", work)
        rounds = {"trl": [], "psrl": []}
        for number in range(args.rounds):
            rounds["trl"].append(run_trl(Path(scratch) / f"trl{number}", work, model, prompts, args.steps))
            rounds["psrl"].append(run_psrl(Path(scratch) / f"psrl{number}", work, model, args.steps, args.overrides))
    report(args, work, rounds)
    return 0


def make_trl_environment() -> None:
    if TRL_PYTHON.exists():
        return
    print("making .venv-trl ...", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", str(TRL_PYTHON.parents[1])], check=True)
    for packages in (["torch==2.13.0"], [TRL]):
        subprocess.run([str(TRL_PYTHON), "-m", "pip", "install", "-q", *packages], check=True)


def psrl_command(run_dir: Path, work: dict, *overrides: str) -> list[str]:
    return [
        sys.executable, "-m", "psrl.launch", "preset=laptop", f"run_dir={run_dir}", *work["data"],
        f"psrl.staleness_buffer_entries={GROUPS}", f"psrl.rollout_n={SAMPLES}", "model.tiny.intermediate_size=256",
        f"train_actor_rollout_ref.actor.optim.lr={work['lr']}", "train_actor_rollout_ref.actor.optim.lr_scheduler_type=constant", "trainer.save_freq=0", "trainer.logger=[console]", *overrides,
    ]  # fmt: skip


def prepare(base: Path, work: dict) -> tuple[Path, list[dict]]:
    """One warm-started model and the task's prompts, for both sides."""
    subprocess.run(
        psrl_command(base, work, "trainer.total_training_steps=1"), check=True, stdout=subprocess.DEVNULL, cwd=ROOT
    )
    from psrl.models.tokenizer import load_tokenizer
    from psrl.role import load_config
    from psrl.rundir.layout import RunDir
    from psrl.tasks.registry import build_task, task_spec

    config = load_config(RunDir(base))
    tokenizer = load_tokenizer(base / "model")
    prompts = []
    for item in build_task(task_spec(config)).items():
        prompts.append(
            {
                "prompt": tokenizer._tokenizer.decode(tokenizer.encode_chat(item.messages), skip_special_tokens=False),
                "truth": str(item.ground_truth),
            }
        )
    return base / "model", prompts


def run_trl(scratch: Path, work: dict, model: Path, prompts: list[dict], steps: int) -> dict:
    scratch.mkdir()
    spec = {
        "task": work["task"], "model": str(model), "prompts": prompts, "groups": GROUPS, "samples": SAMPLES, "max_tokens": work["max_tokens"],
        "steps": steps, "lr": work["lr"], "warmup": WARMUP, "output_dir": str(scratch / "out"),
    }  # fmt: skip
    (scratch / "spec.json").write_text(json.dumps(spec))
    command = [
        str(TRL_PYTHON),
        str(ROOT / "benchmarks/peer_trl_worker.py"),
        str(scratch / "spec.json"),
        str(scratch / "result.json"),
    ]
    with (scratch / "log").open("w") as log:
        subprocess.run(command, check=True, stdout=log, stderr=log)
    return json.loads((scratch / "result.json").read_text())


def run_psrl(scratch: Path, work: dict, model: Path, steps: int, overrides: list[str]) -> dict:
    from psrl.telemetry.metrics import read_metrics

    command = psrl_command(scratch, work, f"model={model}", f"trainer.total_training_steps={steps}", *overrides)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    rows = read_metrics(scratch / "metrics.jsonl")
    # From the end of the warm-up step to the end of the last one, by the same wall clock for both sides; the final
    # checkpoint is not part of a step of either.
    seconds = rows[-1]["_timestamp"] - rows[WARMUP - 1]["_timestamp"] - rows[-1].get("timing_s/save_checkpoint", 0.0)
    summary = json.loads((scratch / "summary.json").read_text())
    return {
        "samples_per_s": GROUPS * SAMPLES * (len(rows) - WARMUP) / seconds,
        "step_s": seconds / (len(rows) - WARMUP),
        "rewards": [row["critic/rewards/mean"] for row in rows],
        "max_staleness": summary["max_staleness"],
        "rollout_busy": summary["rollout_busy_fraction"],
        "train_busy": summary["train_busy_fraction"],
    }


def report(args: argparse.Namespace, work: dict, rounds: dict[str, list[dict]]) -> None:
    def median(side: str, key: str) -> float:
        return statistics.median(r[key] for r in rounds[side])

    def reward(side: str, steps: int) -> float:
        return statistics.median(statistics.fmean(r["rewards"][-steps:]) for r in rounds[side])

    print(describe_machine())
    print(
        f"task {args.work}: {GROUPS} prompts x {SAMPLES} samples a step, at most {work['max_tokens']} new tokens, {args.steps} steps, {args.rounds} rounds"
    )
    print(f"{'':6} {'samples/s':>10} {'step s':>8} {'reward, all steps':>18} {'last 20':>8}")
    for side in ("trl", "psrl"):
        print(
            f"{side:6} {median(side, 'samples_per_s'):10.0f} {median(side, 'step_s'):8.3f} {reward(side, 0):18.3f} {reward(side, 20):8.3f}"
        )
    ratio = median("psrl", "samples_per_s") / median("trl", "samples_per_s")
    print(
        f"psrl / trl = {ratio:.2f} (goal {work['goal']:.1f}); per round: "
        + ", ".join(
            f"{p['samples_per_s'] / t['samples_per_s']:.2f}" for p, t in zip(rounds["psrl"], rounds["trl"], strict=True)
        )
    )
    for r in rounds["psrl"]:
        print(
            f"psrl busy: rollout {r['rollout_busy']:.2f}, trainer {r['train_busy']:.2f}; max staleness {r['max_staleness']}"
        )


if __name__ == "__main__":
    raise SystemExit(main())
