"""Whole simulations whose figures were worked out by hand, under the real coordinator."""

from __future__ import annotations

import pytest

from psrl.config.schema import Config
from psrl.config.simulation import SimulationConfig
from psrl.protocol.cost_model import CostModel
from psrl.simulate import build as build_module
from psrl.simulate.build import build, simulate

pytestmark = pytest.mark.unit

STEP_OF_ONE_SECOND = CostModel(
    other_threshold=1.0, other_latency_b=0.0, other_latency_k=0.0, attn_latency_b=0.0, attn_latency_k=0.0
)


@pytest.fixture(autouse=True)
def one_second_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "decode_model", lambda *given: STEP_OF_ONE_SECOND)


def config(**changes: object) -> Config:
    """Two groups of two samples a step, one instance with four places, so that a buffer is one batch."""
    c = Config()
    c.psrl.staleness_buffer_entries, c.psrl.rollout_n = 2, 2
    c.psrl.deployment.n_rollout_instances = 1
    c.gen_actor_rollout_ref.rollout.max_num_seqs = 4
    c.data.max_response_length = 100
    for key, value in changes.items():
        setattr(c.psrl, key, value)
    return c


def simulation(tokens: int = 10, **costs: float) -> SimulationConfig:
    s = SimulationConfig(steps=12, round_s=0.0, write=False)
    s.lengths.distribution, s.lengths.mean_tokens = "fixed", tokens
    s.costs.prefill_s_per_token = s.costs.train_s_per_token = 0.0
    for key, value in costs.items():
        setattr(s.costs, key, value)
    return s


def test_synchronous_step_is_the_sum_of_its_parts() -> None:
    # push 1, pull 2, switch 3, ten tokens, reward 0.5, train 5
    r = simulate(config(staleness=0), simulation(push_s=1, pull_s=2, switch_s=3, reward_s=0.5, train_s=5))
    assert r.step_s == pytest.approx(21.5)
    assert r.rollout_busy == pytest.approx(10 / 21.5)
    assert r.train_busy == pytest.approx(6 / 21.5)
    assert r.staleness == {0: r.steps * 2}
    assert r.generated_tokens_per_s == pytest.approx(40 / 21.5)


@pytest.mark.parametrize(("train_s", "step_s"), [(5.0, 10.0), (10.0, 10.0), (15.0, 15.0)])
def test_at_staleness_1_the_slower_side_sets_the_pace(train_s: float, step_s: float) -> None:
    assert simulate(config(staleness=1), simulation(train_s=train_s)).step_s == pytest.approx(step_s)


@pytest.mark.parametrize(("train_s", "step_s"), [(5.0, 15.0), (15.0, 25.0)])
def test_at_staleness_0_both_sides_wait_for_each_other(train_s: float, step_s: float) -> None:
    assert simulate(config(staleness=0), simulation(train_s=train_s)).step_s == pytest.approx(step_s)


def test_a_train_bound_run_lags_by_what_it_may() -> None:
    r = simulate(config(staleness=2), simulation(train_s=50))
    assert r.step_s == pytest.approx(50)
    assert r.train_busy == pytest.approx(1)
    assert max(r.staleness) == 2


def partial(c: Config, enable: bool) -> Config:
    c.psrl.rollout_coordination.partial_rollout.enable = enable
    return c


def test_partial_rollout_pays_with_a_prefill_and_waiting_pays_with_idle_places() -> None:
    s = simulation(tokens=20, train_s=30, switch_s=1, prefill_s_per_token=0.01)
    s.prompt_tokens = 100
    on, off = (simulate(partial(config(staleness=1), enable), s) for enable in (True, False))
    assert on.prefilled_tokens_per_s >= off.prefilled_tokens_per_s
    assert on.pulls == off.pulls


def test_redundant_samples_shorten_the_step_and_the_answers() -> None:
    c = config(staleness=0)
    s = simulation(train_s=1)
    s.steps, s.lengths.distribution, s.lengths.prompt_share = 40, "lognormal", 0.0
    c.gen_actor_rollout_ref.rollout.max_num_seqs = 64
    plain = simulate(c, s)
    redundant = c.psrl.rollout_coordination.redundant_rollout
    redundant.enable, redundant.redundant_rollout_n = True, 4
    more = simulate(c, s)
    assert more.step_s < 0.8 * plain.step_s
    assert more.mean_length_consumed < 0.8 * more.mean_length_population
    assert plain.mean_length_consumed == pytest.approx(plain.mean_length_population, rel=0.15)
    assert more.counters["samples/redundant"] > 0
    redundant.redundant_rollout_n, redundant.redundant_global_batch_size = 2, 4
    groups = simulate(c, s)
    assert groups.step_s < plain.step_s
    assert groups.released["redundant"] > 0


def test_a_turn_away_holds_no_place() -> None:
    # ten tokens in two turns with 7 s between them: 17 s of rollout, 10 of them decoding
    s = simulation(train_s=3)
    s.environment.turns, s.environment.seconds = 2, 7.0
    r = simulate(config(staleness=0), s)
    assert r.step_s == pytest.approx(20)
    assert r.rollout_busy == pytest.approx(10 / 20)


def test_a_full_cache_preempts() -> None:
    c = config(staleness=0)
    c.gen_actor_rollout_ref.rollout.kv_cache_tokens = 130
    s = simulation(tokens=40, train_s=1)
    s.prompt_tokens = 10
    r = simulate(c, s)
    assert r.preemptions > 0
    assert r.mean_length_consumed == 40


def test_uniform_rewards_are_dropped_and_made_up_for() -> None:
    c = config(staleness=0)
    c.psrl.group_post_process.enable = True
    s = simulation(train_s=1)
    s.uniform_reward_share = 0.5
    r = simulate(c, s)
    assert r.released["filtered"] > 0
    assert r.step_s > 11


METHODS = ["request_num_balance", "round_robin", "random", "throughput_optimal", "cache_aware", "cache_aware_v1"]


@pytest.mark.parametrize("method", METHODS)
def test_every_router_runs_and_repeats_itself(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    c = config(staleness=1)
    c.psrl.deployment.n_rollout_instances = 3
    c.psrl.rollout_coordination.routing_strategy.method = method
    c.psrl.rollout_coordination.routing_strategy.cost_model_path = "qwen_7b"
    s = simulation(train_s=3)
    s.lengths.distribution = "lognormal"
    s.environment.turns, s.environment.seconds, s.environment.sigma = 3, 2.0, 0.5
    first, again = (simulate(c, s) for _ in range(2))
    assert first == again
    c.seed = 1
    assert simulate(c, s) != first


@pytest.mark.parametrize("method", ["retry", "truncate"])
def test_stragglers_are_hurried(method: str) -> None:
    c = config(staleness=0)
    c.psrl.staleness_buffer_entries = 8
    c.gen_actor_rollout_ref.rollout.max_num_seqs = 64
    proactive = c.psrl.rollout_coordination.proactive_filter_strategy
    proactive.method, proactive.threshold = method, 0.5
    s = simulation(train_s=1)
    s.lengths.distribution, s.lengths.sigma = "lognormal", 1.0
    r = simulate(c, s)
    assert r.counters.get("truncated", 0) + r.released.get("straggler", 0) > 0


def test_migration_moves_samples() -> None:
    c = config(staleness=1)
    c.psrl.staleness_buffer_entries, c.psrl.rollout_n = 4, 8
    c.psrl.deployment.n_rollout_instances = 4
    c.gen_actor_rollout_ref.rollout.max_num_seqs = 32
    c.psrl.rollout_coordination.routing_strategy.method = "random"
    mig = c.psrl.rollout_coordination.sync_and_mig_strategy.mig
    mig.enable, mig.threshold, mig.stop_threshold = True, 2.0, 1.0
    s = simulation(train_s=1)
    s.lengths.distribution, s.lengths.sigma = "lognormal", 1.0
    r = simulate(c, s)
    assert r.counters["migrated_samples"] > 0


def test_nothing_is_lost_whatever_is_switched_on() -> None:
    c = config(staleness=2)
    c.psrl.staleness_buffer_entries, c.psrl.rollout_n = 4, 4
    c.psrl.deployment.n_rollout_instances = 3
    c.gen_actor_rollout_ref.rollout.max_num_seqs, c.gen_actor_rollout_ref.rollout.kv_cache_tokens = 16, 250
    redundant = c.psrl.rollout_coordination.redundant_rollout
    redundant.enable, redundant.redundant_rollout_n, redundant.redundant_global_batch_size = True, 6, 6
    c.psrl.rollout_coordination.routing_strategy.max_num_waiting_reqs_after_preemption = 0
    s = simulation(40, train_s=3, pull_s=1, switch_s=0.3, dispatch_s=0.1, reward_s=0.2, prefill_s=0.1)
    s.lengths.distribution, s.steps, s.prompt_tokens = "lognormal", 30, 20
    world, observer = build(c, s)
    observer.begin()
    world.run()
    assert observer.result().preemptions > 0
    at: dict[tuple[int, int], str] = {}
    for instance in world.instances:
        for sample in [*instance.engine.running.values(), *instance.engine.waiting]:
            assert not sample.done and sample.instance == instance.name
            assert (sample.group.number, sample.index) not in at
            at[sample.group.number, sample.index] = instance.name
        assert instance.engine.kv_tokens == sum(
            s.tokens + instance.engine.decode_steps - s.start_step for s in instance.engine.running.values()
        )
