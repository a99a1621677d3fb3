"""What is refused of redundancy, filters, stragglers and interrupted samples: one sentence each."""

from __future__ import annotations

from psrl.config.algorithm_checks import greedy_samples
from psrl.config.errors import ConfigError
from psrl.config.redundancy import redundant_sizes
from psrl.config.schema import Config

REDUNDANT = "psrl.rollout_coordination.redundant_rollout"
PROACTIVE = "psrl.rollout_coordination.proactive_filter_strategy"
PROACTIVE_METHODS = (None, "retry", "truncate")
FILTERS = ("dynamic_sampling_filter",)


def check_redundancy(config: Config) -> list[str]:
    """Refuse what contradicts itself (ConfigError); return warnings."""
    _check_partial(config)
    _check_filter(config)
    _check_stragglers(config)
    return _check_redundant(config)


def _check_redundant(config: Config) -> list[str]:
    p, asked = config.psrl, config.psrl.rollout_coordination.redundant_rollout
    sizes = {
        "alg_global_batch_size": asked.alg_global_batch_size,
        "redundant_global_batch_size": asked.redundant_global_batch_size,
        "alg_rollout_n": asked.alg_rollout_n,
        "redundant_rollout_n": asked.redundant_rollout_n,
    }
    named = {name: size for name, size in sizes.items() if size is not None}
    if named and not asked.enable:
        name, size = next(iter(named.items()))
        raise ConfigError(
            f"{REDUNDANT}.{name}={size} is set but {REDUNDANT}.enable=False: set it to True, or leave the size null."
        )
    for name, size in named.items():
        groups = name.endswith("global_batch_size")
        key = "psrl.staleness_buffer_entries" if groups else "psrl.rollout_n"
        trained = p.staleness_buffer_entries if groups else p.rollout_n
        if name.startswith("alg_") and size != trained:
            raise ConfigError(
                f"{REDUNDANT}.{name}={size} differs from {key}={trained}: both say what trains, so give one value, or "
                "leave the first null."
            )
        if size < trained:
            raise ConfigError(
                f"{REDUNDANT}.{name}={size} is refused: fewer would be launched than train ({key}={trained}); give at "
                "least as many."
            )
    launched = redundant_sizes(config)
    if launched.launched_samples > launched.samples and greedy_samples(config.algorithm.adv_estimator):
        raise ConfigError(
            f"{REDUNDANT}.redundant_rollout_n={asked.redundant_rollout_n} with algorithm.adv_estimator=remax is refused: the "
            "greedy sample is the baseline of its group and may not be one of those that are dropped; leave it null, or "
            "use redundant_global_batch_size."
        )
    limit = p.rollout_coordination.routing_strategy.max_concurrent_seqs_per_instance
    if asked.enable and launched.launched_samples > limit:
        raise ConfigError(
            f"{REDUNDANT}.redundant_rollout_n={launched.launched_samples} is more than psrl.rollout_coordination."
            f"routing_strategy.max_concurrent_seqs_per_instance={limit}: no instance could take a group."
        )
    if asked.enable and (launched.launched_groups, launched.launched_samples) == (launched.groups, launched.samples):
        return [
            f"{REDUNDANT}.enable=True without effect: set redundant_global_batch_size above {launched.groups} or "
            f"redundant_rollout_n above {launched.samples}."
        ]
    return []


def _check_partial(config: Config) -> None:
    partial = config.psrl.rollout_coordination.partial_rollout
    if partial.interrupt_as_prompt and not partial.enable:
        key = "psrl.rollout_coordination.partial_rollout"
        raise ConfigError(
            f"{key}.interrupt_as_prompt=True needs {key}.enable=True: without partial rollout nothing is interrupted."
        )


def _check_filter(config: Config) -> None:
    asked, filters = config.psrl.group_post_process, config.algorithm.filter_groups
    if asked.name not in FILTERS:
        raise ConfigError(f"psrl.group_post_process.name={asked.name} is refused: allowed is {' | '.join(FILTERS)}.")
    if asked.enable and not filters.metric:
        raise ConfigError(
            "algorithm.filter_groups.metric is empty: name seq_reward, or a key that the reward function returns."
        )
    if filters.max_num_gen_batches < 1:
        raise ConfigError(
            f"algorithm.filter_groups.max_num_gen_batches={filters.max_num_gen_batches} is refused: it must be at least 1."
        )


def _check_stragglers(config: Config) -> None:
    asked = config.psrl.rollout_coordination.proactive_filter_strategy
    if asked.method not in PROACTIVE_METHODS:
        raise ConfigError(f"{PROACTIVE}.method={asked.method} is refused: allowed is null | retry | truncate.")
    if asked.method is None and asked.threshold is not None:
        raise ConfigError(
            f"{PROACTIVE}.threshold={asked.threshold:g} is set but {PROACTIVE}.method=null: choose retry or truncate, or "
            "leave the threshold null."
        )
    if asked.method is not None and (asked.threshold is None or not 0 < asked.threshold < 1):
        shown = "null" if asked.threshold is None else f"{asked.threshold:g}"
        raise ConfigError(
            f"{PROACTIVE}.threshold={shown} is refused with {PROACTIVE}.method={asked.method}: give the share of the "
            "buffer that must be filled before it acts, between 0 and 1."
        )
