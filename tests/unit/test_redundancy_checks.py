"""Sizes of redundancy, and every refusal about redundancy, filters, stragglers and interrupted samples."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from psrl.config.checks import check
from psrl.config.compose import compose_config
from psrl.config.errors import ConfigError
from psrl.config.redundancy import RedundantSizes, redundant_sizes

pytestmark = pytest.mark.unit

R = "psrl.rollout_coordination.redundant_rollout"
P = "psrl.rollout_coordination.proactive_filter_strategy"
PARTIAL = "psrl.rollout_coordination.partial_rollout"
ON = f"{R}.enable=True"


def composed(*overrides: str):
    small = ["preset=laptop", "task=chain_sum", "psrl.staleness_buffer_entries=8", "psrl.rollout_n=4"]
    return OmegaConf.to_object(compose_config([*small, *overrides]))


@pytest.mark.parametrize(
    ("overrides", "sizes"),
    [
        ([], (8, 4, 8, 4)),
        ([ON, f"{R}.redundant_global_batch_size=10"], (8, 4, 10, 4)),
        ([ON, f"{R}.redundant_rollout_n=6"], (8, 4, 8, 6)),
        ([ON, f"{R}.alg_global_batch_size=8", f"{R}.redundant_global_batch_size=8", f"{R}.redundant_rollout_n=5"], (8, 4, 8, 5)),
    ],
)  # fmt: skip
def test_sizes_are_resolved_once(overrides: list[str], sizes: tuple[int, int, int, int]) -> None:
    config = composed(*overrides)
    check(config)
    assert redundant_sizes(config) == RedundantSizes(*sizes)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([f"{R}.redundant_rollout_n=6"], ["redundant_rollout_n=6", "enable=False", "True"]),
        ([f"{R}.alg_global_batch_size=8"], ["alg_global_batch_size=8", "enable=False"]),
        ([ON, f"{R}.redundant_global_batch_size=7"], ["redundant_global_batch_size=7", "psrl.staleness_buffer_entries=8"]),
        ([ON, f"{R}.redundant_rollout_n=3"], ["redundant_rollout_n=3", "psrl.rollout_n=4", "at least as many"]),
        ([ON, f"{R}.redundant_rollout_n=0"], ["redundant_rollout_n=0", "psrl.rollout_n=4"]),
        ([ON, f"{R}.alg_global_batch_size=16"], ["alg_global_batch_size=16", "psrl.staleness_buffer_entries=8"]),
        ([ON, f"{R}.alg_rollout_n=5"], ["alg_rollout_n=5", "psrl.rollout_n=4"]),
        (
            [ON, f"{R}.redundant_rollout_n=9", "psrl.rollout_coordination.routing_strategy.max_concurrent_seqs_per_instance=8"],
            ["redundant_rollout_n=9", "max_concurrent_seqs_per_instance=8"],
        ),
        ([ON, f"{R}.redundant_rollout_n=9", "gen_actor_rollout_ref.rollout.max_num_seqs=8"], ["9 samples", "max_num_seqs=8"]),
        ([f"{PARTIAL}.enable=False", f"{PARTIAL}.interrupt_as_prompt=True"], ["interrupt_as_prompt=True", "enable=True"]),
        (["psrl.group_post_process.name=best"], ["psrl.group_post_process.name=best", "dynamic_sampling_filter"]),
        (["psrl.group_post_process.enable=True", "algorithm.filter_groups.metric=''"], ["algorithm.filter_groups.metric", "seq_reward"]),
        (["algorithm.filter_groups.max_num_gen_batches=0"], ["max_num_gen_batches=0", "at least 1"]),
        ([f"{P}.method=drop"], [f"{P}.method=drop", "retry", "truncate"]),
        ([f"{P}.method=retry"], [f"{P}.threshold=null", f"{P}.method=retry", "between 0 and 1"]),
        ([f"{P}.method=truncate", f"{P}.threshold=1.0"], ["threshold=1", "between 0 and 1"]),
        ([f"{P}.method=truncate", f"{P}.threshold=0"], ["threshold=0", "between 0 and 1"]),
        ([f"{P}.threshold=0.5"], ["threshold=0.5", "method=null"]),
        ([ON, "train_actor_rollout_ref.actor.ppo_mini_batch_size=3", f"{R}.redundant_global_batch_size=9"], ["ppo_mini_batch_size=3", "psrl.staleness_buffer_entries=8"]),
    ],
)  # fmt: skip
def test_refusals_are_one_sentence(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check(composed(*overrides))
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".")
    for word in words:
        assert word in message, message


def test_redundancy_without_effect_is_a_warning() -> None:
    assert any(f"{R}.enable=True without effect" in warning for warning in check(composed(ON)))
    assert not any(R in warning for warning in check(composed(ON, f"{R}.redundant_rollout_n=5")))
