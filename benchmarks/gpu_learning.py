"""Real learning on a GPU: SmolLM2-135M-Instruct on a reasoning-gym task from its instruct weights, vLLM and the trainer on one GPU.

    python benchmarks/gpu_learning.py [--strategies fsdp2 megatron] [--steps 150] [--dataset chain_sum] [--out runs/gpu_learning]

The strategies' runs share the GPU at the same time: what they learn counts here, not how fast.

The reward is the dataset's own verifier's, of the whole response: the model has to answer right and nothing else. A run that --out holds
already is not run again. Prints the means of ten steps each and draws the curves to OUT/reward.png.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean

from headline_runs import completed, launch
from report_machine import describe_machine

from psrl.telemetry.metrics import read_metrics

ACTOR, ROLLOUT = "train_actor_rollout_ref.actor", "gen_actor_rollout_ref.rollout"
SHOWN = {
    "reward": "critic/rewards/mean",
    "tokens": "response_length/mean",
    "kl": "rollout_corr/kl",
    "lag": "staleness/max",
    "step s": "timing_s/step",
}
EACH = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", default=["fsdp2", "megatron"])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--dataset", default="chain_sum")
    parser.add_argument("--params", default="{min_terms:2,max_terms:2,min_digits:1,max_digits:1}")
    parser.add_argument("--lr", default="1e-5")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_learning"))
    parser.add_argument("--extra", nargs="*", default=[], help="more KEY=VALUE for every run")
    args = parser.parse_args()
    args.out = args.out.resolve()
    curves = {}
    print(describe_machine(), flush=True)
    runs = {strategy: args.out / strategy for strategy in args.strategies}
    with ThreadPoolExecutor(len(runs)) as pool:
        todo = {strategy: run for strategy, run in runs.items() if not completed(run)}
        for done in [pool.submit(launch, run, overrides(args, strategy)) for strategy, run in todo.items()]:
            done.result()
    for strategy, run in runs.items():
        summary = json.loads((run / "summary.json").read_text())
        rows = read_metrics(run / "metrics.jsonl")
        curves[strategy] = [row["critic/rewards/mean"] for row in rows]
        print(f"{strategy}: {summary['status']}, {len(rows)} steps; means of {EACH} steps each")
        print("".join(f"{name:>9}" for name in ("steps", *SHOWN)))
        for first in range(0, len(rows), EACH):
            part = rows[first : first + EACH]
            figures = [fmean(row[key] for row in part if key in row) for key in SHOWN.values()]
            print(f"{first + len(part):>9}" + "".join(f"{figure:>9.3f}" for figure in figures))
        begin, end = fmean(curves[strategy][:EACH]), fmean(curves[strategy][-EACH:])
        print(f"reward {begin:.3f} -> {end:.3f}\n", flush=True)
    plot(curves, args)


def overrides(args: argparse.Namespace, strategy: str) -> list[str]:
    found = [
        "model=smollm2_135m", "trainer.logger=[console]", "trainer.save_freq=0", f"trainer.total_training_steps={args.steps}",
        f"data.reasoning_gym.dataset={args.dataset}", f"data.reasoning_gym.params={args.params}", "data.task=null",
        "data.max_prompt_length=128", "data.max_response_length=32", "psrl.staleness=1", "psrl.staleness_buffer_entries=32",
        "psrl.rollout_n=8", f"{ACTOR}.strategy={strategy}", f"{ACTOR}.ppo_mini_batch_size=16", f"{ACTOR}.optim.lr={args.lr}",
        f"{ACTOR}.optim.lr_scheduler_type=constant", "algorithm.rollout_correction.rollout_is=token",
        "psrl.deployment.n_rollout_instances=1", f"{ROLLOUT}.name=vllm",
    ]  # fmt: skip
    if args.device == "cpu":
        return [*found, "preset=laptop", "trainer.device=cpu", *args.extra]
    return [
        *found, "preset=cluster", "trainer.device=cuda", "trainer.gpu_memory_fraction=0.25", f"{ROLLOUT}.gpu_memory_utilization=0.15",
        f"{ROLLOUT}.engine_kwargs.vllm={{kv_cache_memory_bytes: {8 * 2**30}}}",  # so no engine measures while another one allocates
        f"{ROLLOUT}.dtype=bfloat16", f"{ROLLOUT}.max_num_seqs=256", f"{ACTOR}.mixed_precision=bfloat16",
        "psrl.deployment.train_ngpus_per_node=1", "psrl.deployment.rollout_ngpus_per_node=1", *args.extra,
    ]  # fmt: skip


def plot(curves: dict[str, list[float]], args: argparse.Namespace) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4))
    for name, rewards in curves.items():
        smooth = [fmean(rewards[max(0, i - EACH + 1) : i + 1]) for i in range(len(rewards))]
        (line,) = axes.plot(range(1, len(rewards) + 1), smooth, label=f"{name}, mean of {EACH} steps")
        axes.plot(range(1, len(rewards) + 1), rewards, color=line.get_color(), alpha=0.25, linewidth=0.8)
    axes.set_xlabel("step")
    axes.set_ylabel("reward")
    axes.set_title(f"SmolLM2-135M-Instruct, {args.dataset}, staleness 1", loc="left", fontsize=10)
    axes.legend(frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(args.out / "reward.png", dpi=150)


if __name__ == "__main__":
    main()
