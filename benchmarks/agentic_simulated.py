"""What routing by prefix and the session strategy bring to agents of many turns, simulated: 64 instances, KV caches that are
short and that are not.

    python benchmarks/agentic_simulated.py [--steps N] [--jobs N] [--save]

Decode costs are the published coefficients of qwen_32b on two GPUs an instance (TP2); prefill follows from them. Everything
else that is assumed is in `ASSUMED` and `WORKLOADS`. Nothing here was measured. A simulation takes one core for a minute or
two; the figures do not depend on it.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from psrl.config.checks import check
from psrl.simulate.build import make_costs, simulate
from psrl.simulate.compose import compose_simulation
from psrl.simulate.result import Result

RESULTS = Path(__file__).parent / "results" / "2026-11-30-simulated-agentic.txt"
GROUPS, SAMPLES, INSTANCES = 128, 8, 64
ROUTING = "psrl.rollout_coordination.routing_strategy"
THUNDER = "psrl.rollout_coordination.session_strategy.thunder_agent"
STICKY = f"{ROUTING}.enable_trajectory_sticky=True"
CACHE_AWARE = f"{ROUTING}.method=cache_aware_v1"
SETTINGS = {
    "request_num_balance": [],
    "+ trajectory sticky": [STICKY],
    "cache_aware_v1": [CACHE_AWARE],
    "cache_aware_v1, sticky": [CACHE_AWARE, STICKY],
    "  + ThunderAgent": [CACHE_AWARE, STICKY, f"{THUNDER}.enable=True"],
}
ASSUMED = [
    "preset=cluster",
    "task=chain_sum",
    "psrl.staleness=1",
    f"psrl.staleness_buffer_entries={GROUPS}",
    f"psrl.rollout_n={SAMPLES}",
    f"psrl.deployment.n_rollout_instances={INSTANCES}",
    "psrl.deployment.rollout_ngpus_per_node_per_instance=2",
    "data.max_prompt_length=8192",
    "data.max_response_length=16384",
    "train_actor_rollout_ref.actor.ppo_max_token_len_per_gpu=65536",
    "gen_actor_rollout_ref.rollout.max_model_len=65536",
    "algorithm.rollout_correction.rollout_is=token",
    f"{ROUTING}.cache_aware_policy.block_size=256",
    "simulation.costs.cost_model=qwen_32b",
    "simulation.costs.train_s_per_token=0",
    "simulation.costs.push_s=2",
    "simulation.costs.pull_s=5",
    "simulation.costs.switch_s=1",
    "simulation.prompt_tokens=4096",
    "simulation.shared_prompt_tokens=2048",
    "simulation.lengths.sigma=0.5",
    "simulation.environment.seconds=5",
    "simulation.environment.sigma=1",
    "simulation.environment.tokens=600",
    "simulation.compare_synchronous=False",
    "simulation.write=False",
]
TURN_TOKENS = 150
"""Response tokens of a turn, on average."""


@dataclass(frozen=True, slots=True)
class Workload:
    turns: int
    kv_tokens: int

    def overrides(self) -> list[str]:
        return [
            f"simulation.environment.turns={self.turns}",
            f"simulation.lengths.mean_tokens={TURN_TOKENS * self.turns}",
            f"gen_actor_rollout_ref.rollout.kv_cache_tokens={self.kv_tokens}",
        ]

    @property
    def fits(self) -> float:
        """Samples of mean length that an instance's KV cache holds at once."""
        return self.kv_tokens / (4096 + (TURN_TOKENS + 600) * self.turns / 2)


WORKLOADS = [Workload(30, 150_000), Workload(30, 300_000), Workload(10, 300_000)]


def run(workload: Workload, setting: list[str], steps: int, warmup: int = 2) -> Result:
    config, simulation = compose_simulation(
        [
            *ASSUMED,
            *workload.overrides(),
            *setting,
            f"simulation.steps={warmup + steps}",
            f"simulation.warmup_steps={warmup}",
        ]
    )
    check(config, only_planned=True)
    return simulate(config, simulation)


def prefill_share(result: Result) -> float:
    """Of the instances' time, what they prefilled."""
    config, simulation = compose_simulation(ASSUMED)
    costs = make_costs(config, simulation.costs)
    return result.prefilled_tokens_per_s * costs.prefill_s_per_token / INSTANCES


HEAD = (
    f"{'setting':24}{'trajectories/h':>15}{'gain':>7}{'tokens/s':>10}{'prefix hits':>12}{'prefill':>9}{'busy':>6}"
    f"{'preempted':>10}{'hung':>7}{'length':>8}"
)


def row(name: str, result: Result, default: Result) -> str:
    return (
        f"{name:24}{result.samples_per_hour:>15,.0f}{result.samples_per_hour / default.samples_per_hour:>6.2f}x"
        f"{result.generated_tokens_per_s:>10,.0f}{result.prefix_hit_share:>12.0%}{prefill_share(result):>9.0%}"
        f"{result.rollout_busy:>6.0%}{result.preemptions:>10,}{result.counters.get('sessions/hung', 0):>7,}"
        f"{result.mean_length_consumed:>8,.0f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2, help="steps that count, after two that warm up")
    parser.add_argument("--jobs", type=int, default=1, help="simulations at a time")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name} too")
    args = parser.parse_args()
    lines = [
        f"$ python benchmarks/agentic_simulated.py --steps {args.steps}",
        "assumed, with what psrl.simulate derives from the decode cost model (prefill):",
        *(f"  {line}" for line in ASSUMED),
        "busy, prefill: shares of the instances' time. hung: times that a session was. length: of what trained.",
    ]
    with ProcessPoolExecutor(args.jobs) as pool:
        started = {(w, name): pool.submit(run, w, s, args.steps) for w in WORKLOADS for name, s in SETTINGS.items()}
        for workload in WORKLOADS:
            lines += [
                "",
                f"{workload.turns} turns of about {TURN_TOKENS} tokens, {workload.kv_tokens:,} tokens of KV an instance: room for "
                f"{workload.fits:.1f} of {2 * GROUPS * SAMPLES / INSTANCES:.0f} samples in flight",
                HEAD,
            ]
            default = started[workload, next(iter(SETTINGS))].result()
            for name in SETTINGS:
                lines.append(row(name, started[workload, name].result(), default))
                print(workload, lines[-1], file=sys.stderr, flush=True)
    print("\n".join(lines))
    if args.save:
        RESULTS.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
