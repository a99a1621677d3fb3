"""What staleness, partial rollout, redundancy and routing bring to a 32B-class model on a long-tailed reasoning workload: a
simulated sweep, as one table and one plot.

    python benchmarks/simulate_sweep.py [--steps N] [--output PREFIX]

Decode costs are the published coefficients of qwen_32b on two GPUs an instance (TP2). What is assumed beside them is in
`ASSUMED`. Nothing here was measured.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from psrl.config.checks import check
from psrl.simulate.build import make_costs, simulate
from psrl.simulate.compose import compose_simulation
from psrl.simulate.result import Result

STALENESS = (0, 1, 2, 3, 10)
PARTIAL = (True, False)
REDUNDANT = (False, True)
ROUTERS = ("request_num_balance", "throughput_optimal", "profile=reasoning")
"""The last one is request_num_balance with what the shipped profile adds: migration, and an engine that preempted hands its queue back."""
GROUPS, SAMPLES = 128, 8
ASSUMED = [
    "preset=cluster",
    "task=chain_sum",
    f"psrl.staleness_buffer_entries={GROUPS}",
    f"psrl.rollout_n={SAMPLES}",
    "psrl.deployment.n_rollout_instances=16",
    "psrl.deployment.rollout_ngpus_per_node_per_instance=2",
    "psrl.deployment.train_nnodes=4",
    "psrl.deployment.train_ngpus_per_node=8",
    "data.max_prompt_length=1024",
    "data.max_response_length=16384",
    # About as many as the KV cache holds of half-finished responses: with more the engines preempt and prefill again all the time.
    "gen_actor_rollout_ref.rollout.max_num_seqs=96",
    # Two 80 GB GPUs, 90% of them, less 64 GB of bf16 weights, at 64 layers x 8 KV heads x 128 x 2 x 2 bytes a token.
    "gen_actor_rollout_ref.rollout.kv_cache_tokens=300000",
    "algorithm.rollout_correction.rollout_is=token",
    "psrl.rollout_coordination.routing_strategy.cost_model_path=qwen_32b",
    "simulation.lengths.mean_tokens=4000",
    "simulation.lengths.sigma=0.8",
    "simulation.lengths.prompt_share=0.5",
    "simulation.costs.push_s=2",
    "simulation.costs.pull_s=5",
    "simulation.costs.switch_s=1",
    "simulation.write=False",
]


@dataclass(frozen=True, slots=True)
class Case:
    staleness: int
    partial: bool
    redundant: bool
    router: str

    def overrides(self) -> list[str]:
        c = "psrl.rollout_coordination"
        own = [
            f"psrl.staleness={self.staleness}",
            f"{c}.partial_rollout.enable={self.partial}",
            f"+{self.router}" if self.router.startswith("profile") else f"{c}.routing_strategy.method={self.router}",
        ]
        if self.router.startswith("profile") and not self.partial:
            own.append(f"{c}.sync_and_mig_strategy.mig.enable=False")  # a migrated request is a partial one
        if self.redundant:
            own += [
                f"{c}.redundant_rollout.enable=True",
                f"{c}.redundant_rollout.redundant_global_batch_size={GROUPS * 5 // 4}",
                f"{c}.redundant_rollout.redundant_rollout_n={SAMPLES * 5 // 4}",
            ]
        return own


def run(case: Case, steps: int, *more: str) -> Result:
    """`steps` steps after the warm-up."""
    warmup = min(2 * (case.staleness + 1), case.staleness + 6)
    config, simulation = compose_simulation(
        [*ASSUMED, *case.overrides(), f"simulation.steps={warmup + steps}", f"simulation.warmup_steps={warmup}", *more]
    )
    check(config, only_planned=True)
    return simulate(config, simulation)


def ceilings(steps: int) -> tuple[float, float]:
    """(trainer, rollout) seconds a step if that side never waited: the trainer's own time on the tokens of a step, and
    instances that always have enough to do and never stop for new weights, under the best of the routers."""
    free = [f"simulation.costs.{name}=0" for name in ("push_s", "pull_s", "switch_s", "train_s_per_token")]
    alone = [run(Case(4, False, False, router), steps, *free) for router in ROUTERS]
    rollout = min(alone, key=lambda r: r.step_s)
    config, simulation = compose_simulation([*ASSUMED])
    costs = make_costs(config, simulation.costs)
    tokens = GROUPS * SAMPLES * (rollout.mean_length_consumed + config.data.max_prompt_length // 2)
    return costs.train_seconds(round(tokens)) + costs.push_s, rollout.step_s


def shares(result: Result) -> tuple[float, float, float]:
    """Shares of the instances' time: prefilling, standing still for weights, nothing to decode."""
    config, simulation = compose_simulation([*ASSUMED])
    costs = make_costs(config, simulation.costs)
    n = config.psrl.deployment.n_rollout_instances
    prefill = result.prefilled_tokens_per_s * costs.prefill_s_per_token / n
    paused = result.pulls * costs.switch_s / (result.steps * result.step_s * n)
    return prefill, paused, max(0.0, 1 - result.rollout_busy - paused)


def table(results: dict[Case, Result], train_s: float, rollout_s: float) -> list[str]:
    ceiling = max(train_s, rollout_s)
    lines = [
        f"ceiling: max(train {train_s:.0f} s, rollout {rollout_s:.0f} s) = {ceiling:.0f} s a step of {GROUPS} x {SAMPLES} samples",
        "",
        f"{'router':22}{'partial':>8}{'redundant':>10}{'staleness':>10}{'step s':>8}{'speed-up':>9}{'of ceiling':>11}{'tok/s used':>11}"
        f"{'train':>7}{'decode':>8}{'prefill':>8}{'paused':>7}{'idle':>6}{'length':>8}{'of all':>8}{'lag':>6}",
    ]
    for case, r in results.items():
        if case.staleness == 0:
            lines.append("")
        base = results[replace(case, staleness=0)]
        prefill, paused, idle = shares(r)
        lag = sum(k * n for k, n in r.staleness.items()) / sum(r.staleness.values())
        lines.append(
            f"{case.router:22}{'on' if case.partial else 'off':>8}{'on' if case.redundant else 'off':>10}{case.staleness:>10}"
            f"{r.step_s:>8.0f}{base.step_s / r.step_s:>8.2f}x{ceiling / r.step_s:>11.0%}{r.consumed_tokens_per_s:>11,.0f}{r.train_busy:>7.0%}"
            f"{r.rollout_busy - prefill:>8.0%}{prefill:>8.0%}{paused:>7.1%}{idle:>6.0%}{r.mean_length_consumed:>8,.0f}"
            f"{r.mean_length_population:>8,.0f}{lag:>6.2f}"
        )
    return lines


def plot(results: dict[Case, Result], ceiling: float, path: Path) -> None:
    from psrl.telemetry.figures import BLUE, GREEN, MUTED, new_figure, style

    with style():
        figure, axes = new_figure((14, 4.2), 1, len(ROUTERS), sharey=True)
        for ax, router in zip(axes, ROUTERS, strict=True):
            for partial, redundant in itertools.product(PARTIAL, REDUNDANT):
                own = [results[Case(s, partial, redundant, router)].step_s for s in STALENESS]
                name = f"partial rollout {'on' if partial else 'off'}{', redundant' if redundant else ''}"
                ax.plot(
                    range(len(STALENESS)), own, marker="o", color=GREEN if redundant else BLUE,
                    linestyle="-" if partial else "--", label=name,
                )  # fmt: skip
            ax.axhline(ceiling, color=MUTED, linewidth=1, label="max(rollout, train)")
            ax.set_xticks(range(len(STALENESS)), [str(s) for s in STALENESS])
            ax.set_ylim(bottom=0)
            ax.set_title(router)
            ax.set_xlabel("staleness")
        axes[0].set_ylabel("seconds a step (simulated)")
        axes[0].legend()
        figure.savefig(path, dpi=130)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="steps that count, after the warm-up")
    parser.add_argument("--output", type=Path, help="write PREFIX.txt and PREFIX.png")
    args = parser.parse_args()
    train_s, rollout_s = ceilings(args.steps)
    results: dict[Case, Result] = {}
    for router, partial, redundant, staleness in itertools.product(ROUTERS, PARTIAL, REDUNDANT, STALENESS):
        case = Case(staleness, partial, redundant, router)
        results[case] = run(case, args.steps)
        print(f"{case}: {results[case].step_s:.1f} s", file=sys.stderr, flush=True)
    assumed = [f"  {line}" for line in ASSUMED]
    lines = ["assumed, with what psrl.simulate derives from the decode cost model (prefill, training):", *assumed, ""]
    lines += table(results, train_s, rollout_s)
    print("\n".join(lines))
    if args.output:
        command = f"$ python benchmarks/simulate_sweep.py --steps {args.steps}"
        args.output.with_suffix(".txt").write_text("\n".join([command, *lines]) + "\n")
        plot(results, max(train_s, rollout_s), args.output.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
