"""Whole simulations of samples with several turns under the real coordinator: prefix caches, stickiness, the session strategy."""

from __future__ import annotations

import pytest
from test_simulate_world import STEP_OF_ONE_SECOND, config, simulation

from psrl.config.schema import Config
from psrl.config.simulation import SimulationConfig
from psrl.simulate import build as build_module
from psrl.simulate.build import build, simulate
from psrl.simulate.result import Result

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def one_second_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "decode_model", lambda *given: STEP_OF_ONE_SECOND)


def agents(turns: int = 4, seconds: float = 5.0, **costs: float) -> SimulationConfig:
    """Prompts of 100 tokens, 64 of them the same everywhere; 10 tokens a turn, and 60 from the environment between two."""
    s = simulation(10 * turns, **{"prefill_s_per_token": 0.01, **costs})
    s.prompt_tokens, s.shared_prompt_tokens = 100, 64
    s.environment.turns, s.environment.seconds, s.environment.tokens = turns, seconds, 60
    return s


def fleet(
    method: str = "request_num_balance", *, instances: int = 2, kv: int = 100_000, thunder: str = "", sticky=False
) -> Config:
    c = config(staleness=1, staleness_buffer_entries=4, rollout_n=4)
    c.psrl.deployment.n_rollout_instances = instances
    c.gen_actor_rollout_ref.rollout.max_num_seqs = 64
    c.gen_actor_rollout_ref.rollout.kv_cache_tokens = kv
    coordination = c.psrl.rollout_coordination
    coordination.routing_strategy.method = method
    coordination.routing_strategy.enable_trajectory_sticky = sticky
    coordination.session_strategy.thunder_agent.enable = bool(thunder)
    coordination.session_strategy.thunder_agent.continue_scope = thunder or "bucketed"
    coordination.session_strategy.thunder_agent.buffer_per_session = 16
    return c


def test_a_turn_that_stays_computes_what_is_new() -> None:
    """One instance, one sample: the prompt, then 60 new tokens a turn and what fills no whole block of 16 of the 110, 180
    and 250 tokens before them: 14, 4 and 10."""
    c = fleet(instances=1)
    c.psrl.staleness, c.psrl.staleness_buffer_entries, c.psrl.rollout_n = 0, 1, 1
    world, observer = build(c, agents())
    observer.begin()
    world.run()
    engine = world.instances[0].engine
    steps = world.trainer.finished
    assert engine.prompt_tokens / steps == 100 + (60 + 14) + (60 + 4) + (60 + 10)
    assert engine.prefix_hit_tokens / steps == 96 + 176 + 240


@pytest.mark.parametrize("method", ["cache_aware", "cache_aware_v1"])
def test_a_cache_aware_router_that_hears_of_the_caches_finds_prefixes(method: str) -> None:
    s = agents(turns=8)
    s.environment.sigma = 1.0
    by_number, by_cache = simulate(fleet(instances=8), s), simulate(fleet(method, instances=8), s)
    assert by_cache.prefix_hit_share > by_number.prefix_hit_share + 0.02


def test_without_caches_there_are_no_hits_and_stickiness_brings_nothing() -> None:
    s = agents()
    s.environment.prefix_cached = False
    assert simulate(fleet(sticky=True), s).prefix_hit_share == 0.0


def short(thunder: str, sticky: bool) -> Result:
    """32 samples in flight grow to 320 tokens each, 16 at each instance whose cache holds 1,600."""
    return simulate(fleet("cache_aware_v1", kv=1600, thunder=thunder, sticky=sticky), agents())


def test_the_session_strategy_keeps_prefixes_where_kv_is_short() -> None:
    without, with_it = short("", True), short("bucketed", True)
    assert "sessions/hung" not in without.counters and with_it.counters["sessions/hung"] > 0
    assert with_it.prefix_hit_share > without.prefix_hit_share
    assert with_it.mean_length_consumed == without.mean_length_consumed == 40


def test_all_that_hangs_goes_on_with_either_scope() -> None:
    for thunder, sticky in (("bucketed", True), ("bucketed", False), ("global", False)):
        r = short(thunder, sticky)
        assert r.counters["sessions/hung"] > 0
        assert r.steps == 8 and r.released == {}
