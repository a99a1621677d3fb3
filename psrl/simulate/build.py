"""From a configuration to a world: the same coordinator settings as the service, and the costs that are assumed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from psrl.config.cache_blocks import cache_block_size
from psrl.config.errors import ConfigError
from psrl.config.redundancy import redundant_sizes
from psrl.config.routing_checks import BY_COST_MODEL
from psrl.config.schema import Config
from psrl.config.simulation import CostConfig, SimulationConfig
from psrl.configured_routing import make_router
from psrl.configured_sessions import session_settings
from psrl.coordinator.core import Coordinator
from psrl.coordinator.placing import PromptFacts
from psrl.coordinator.prompts import PromptSource
from psrl.coordinator.service import settings
from psrl.coordinator.staleness import Staleness
from psrl.cost_model.files import load_cost_model, parallel_key
from psrl.deployment import total_agent_loops
from psrl.protocol.cost_model import CostModel
from psrl.rundir.layout import RunDir
from psrl.simulate.calibrate import load_calibration
from psrl.simulate.clock import Clock
from psrl.simulate.costs import Costs
from psrl.simulate.lengths import make_lengths
from psrl.simulate.prefix_cache import Blocks
from psrl.simulate.result import Observer, Result
from psrl.simulate.workload import Workload
from psrl.simulate.world import Journal, Plan, World

TRAIN_PASSES = 4
"""Marginal forward passes that a trained token costs where nothing was measured: old log-probs, forward, twice for backward."""
ROUND_S = 0.01
NEVER_S = 1e9


def simulate(
    config: Config,
    simulation: SimulationConfig,
    *,
    journal: Journal | None = None,
    timeline_dir: Path | None = None,
    observers: Sequence = (),
) -> Result:
    """Simulate one configuration and return its figures."""
    world, observer = build(config, simulation, journal=journal, timeline_dir=timeline_dir, observers=observers)
    observer.begin()
    world.run()
    return observer.result()


def build(
    config: Config,
    simulation: SimulationConfig,
    *,
    journal: Journal | None = None,
    timeline_dir: Path | None = None,
    observers: Sequence = (),
) -> tuple[World, Observer]:
    """A world that has not begun, and who observes it. `observers` are called with each SimStep too."""
    simulation = with_calibration(simulation)
    plan = make_plan(config, simulation, timeline_dir)
    warmup = simulation.warmup_steps
    observer = Observer(2 * (config.psrl.staleness + 1) if warmup is None else warmup, simulation.steps)

    def on_step(step) -> None:
        observer.on_step(step)
        for other in observers:
            other(step)

    world = World(plan, make_coordinator(config, simulation), Clock(), journal=journal, on_step=on_step)
    observer.world = world
    return world, observer


def make_coordinator(config: Config, simulation: SimulationConfig) -> Coordinator:
    """As the service makes it, for a fresh run with enough prompts."""
    p, sizes = config.psrl, redundant_sizes(config)
    staleness = Staleness(
        buffer_entries=p.staleness_buffer_entries,
        staleness=p.staleness,
        redundant_entries=sizes.launched_groups,
        keep_checkpoints=config.trainer.keep_last,
    )
    prompts = PromptSource(
        num_prompts=(simulation.steps + p.staleness + 2) * sizes.launched_groups,
        seed=config.data.seed,
        shuffle=config.data.shuffle,
    )
    nowhere = SimpleNamespace(config=config, local=True, attempt="", run_dir=RunDir(Path("/dev/null/simulated")))
    own = dataclasses.replace(
        settings(nowhere),  # type: ignore[arg-type]
        validation=None,
        sessions=session_settings(config),  # turns are simulation.environment's, whatever loop would play them
        max_instances=p.deployment.n_rollout_instances,
        startup_timeout_s=NEVER_S,
        missing_timeout_s=NEVER_S,
    )
    return Coordinator(own, staleness, prompts, make_router(config), 1, 0.0, prompt_facts(config, simulation))


def prompt_facts(config: Config, simulation: SimulationConfig) -> Callable[[int], PromptFacts]:
    """All prompts have the same size, and in common what they begin with alike."""
    tokens, names_blocks = prompt_tokens(config, simulation), bool(cache_block_size(config))
    blocks = make_blocks(config, simulation)

    def facts(prompt: int) -> PromptFacts:
        return PromptFacts(tokens, "simulated", tuple(blocks.of_prompt(prompt, tokens)) if names_blocks else ())

    return facts


def make_blocks(config: Config, simulation: SimulationConfig) -> Blocks:
    policy = config.psrl.rollout_coordination.routing_strategy.cache_aware_policy
    return Blocks(policy.block_size, simulation.shared_prompt_tokens)


def prompt_tokens(config: Config, simulation: SimulationConfig) -> int:
    return simulation.prompt_tokens or max(1, config.data.max_prompt_length // 2)


def make_plan(config: Config, simulation: SimulationConfig, timeline_dir: Path | None = None) -> Plan:
    p, rollout = config.psrl, config.gen_actor_rollout_ref.rollout
    collects = p.status_collection
    calibration = load_calibration(Path(simulation.calibration)) if simulation.calibration else None
    calibrated = calibration.lengths if calibration else ()
    lengths = make_lengths(simulation.lengths, config.data.max_response_length, config.seed, calibrated)
    workload = Workload(
        prompt_tokens(config, simulation),
        lengths,
        simulation.environment,
        simulation.uniform_reward_share,
        config.seed,
    )
    return Plan(
        costs=make_costs(config, simulation.costs, calibration.decode if calibration else None),
        workload=workload,
        num_instances=p.deployment.n_rollout_instances,
        num_agents=total_agent_loops(p.deployment),
        max_num_seqs=rollout.max_num_seqs,
        kv_capacity=rollout.kv_cache_tokens,
        hand_back_waiting=p.rollout_coordination.routing_strategy.max_num_waiting_reqs_after_preemption,
        filtering=p.group_post_process.enable,
        steps=simulation.steps,
        save_freq=config.trainer.save_freq,
        round_s=ROUND_S if simulation.round_s is None else simulation.round_s,
        tick_s=tick_s(config, simulation),
        status_interval_s=collects.engine_sync_interval_in_ms / 1000 if collects.enable else None,
        blocks=make_blocks(config, simulation)
        if workload.multi_turn and simulation.environment.prefix_cached
        else None,
        names_blocks=bool(cache_block_size(config)),
        timelines=simulation.timelines,
        timeline_dir=timeline_dir,
    )


def tick_s(config: Config, simulation: SimulationConfig) -> float:
    """Decisions that time alone can change are looked at as often as in a run."""
    coordination = config.psrl.rollout_coordination
    syncs, routing = coordination.sync_and_mig_strategy, coordination.routing_strategy
    tick = simulation.tick_s
    if syncs.method != "greedy" or syncs.mig.enable:
        tick = min(tick, syncs.check_interval_in_ms / 1000)
    if routing.method in BY_COST_MODEL:
        tick = min(tick, routing.check_interval_in_ms / 1000)
    if (thunder := coordination.session_strategy.thunder_agent).enable:
        tick = min(tick, thunder.check_interval_in_ms / 1000)
    return tick


def with_calibration(simulation: SimulationConfig) -> SimulationConfig:
    """What is null filled in from the calibration, if there is one."""
    if not simulation.calibration:
        return simulation
    calibration = load_calibration(Path(simulation.calibration))
    given = dataclasses.asdict(simulation.costs)
    filled: dict[str, Any] = {k: calibration.costs.get(k) if v is None else v for k, v in given.items()}
    return dataclasses.replace(
        simulation,
        costs=CostConfig(**filled),
        prompt_tokens=simulation.prompt_tokens or calibration.prompt_tokens,
        round_s=0.0 if simulation.round_s is None else simulation.round_s,
    )


def make_costs(config: Config, given: CostConfig, calibrated: CostModel | None = None) -> Costs:
    """What is given, and what follows from the decode cost model where nothing is."""
    decode = decode_model(config, given, calibrated)
    d = config.psrl.deployment
    per_token = decode.other_latency_k
    trainers = d.train_nnodes * d.train_ngpus_per_node
    trained = TRAIN_PASSES * per_token * d.rollout_ngpus_per_node_per_instance / trainers
    values = {f.name: getattr(given, f.name) for f in dataclasses.fields(given) if f.name != "cost_model"}
    values = {name: 0.0 if value is None else value for name, value in values.items()}
    if given.prefill_s_per_token is None:
        values["prefill_s_per_token"] = per_token
    if given.train_s_per_token is None:
        values["train_s_per_token"] = trained
    return Costs(decode=decode, **values)


def decode_model(config: Config, given: CostConfig, calibrated: CostModel | None) -> CostModel:
    if calibrated is not None and not given.cost_model:
        return calibrated
    name = given.cost_model or config.psrl.rollout_coordination.routing_strategy.cost_model_path
    if not name:
        raise ConfigError(
            "A simulation needs the cost of a decode step: give simulation.costs.cost_model (a file of `python -m psrl.cost_model fit`, or a "
            "shipped name such as qwen_7b), or simulation.calibration."
        )
    return load_cost_model(name, parallel_key(config.psrl.deployment.rollout_ngpus_per_node_per_instance))
