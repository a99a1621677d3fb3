"""psrl.fine_grain_overlap: what a chunk comes to, every refusal and every notice, each naming its key."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from psrl.config.checks import check
from psrl.config.compose import compose_config
from psrl.config.errors import ConfigError
from psrl.config.overlap_checks import ChunkSize, check_overlap, chunk_size, effective_chunk
from psrl.config.schema import Config
from psrl.trainer.chunks import Chunk, chunk_plan

pytestmark = pytest.mark.unit

GRANULARITY = "psrl.fine_grain_overlap.granularity"
MULTIPLIER = "psrl.fine_grain_overlap.multiplier"
SCOPE = "psrl.fine_grain_overlap.overlap_scope"
ACTOR = "train_actor_rollout_ref.actor"
MICRO = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
MINI = f"{ACTOR}.ppo_mini_batch_size"


def composed(**changes: object) -> Config:
    """16 groups of 4 samples a buffer, mini-batches of 4 groups, 2 ranks, micro-batches of 2 samples a rank."""
    settings = {
        "psrl.staleness_buffer_entries": 16,
        "psrl.rollout_n": 4,
        "psrl.deployment.train_ngpus_per_node": 2,
        MINI: 4,
        MICRO: 2,
        **changes,
    }
    overrides = [f"{key}={value}" for key, value in settings.items()]
    return OmegaConf.to_object(compose_config(["preset=laptop", "task=chain_sum", *overrides]))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("granularity", "multiplier", "expected"),
    [
        ("none", 1, ChunkSize("none", 64)),
        ("none", 9, ChunkSize("none", 64)),
        ("micro_batch", 1, ChunkSize("micro_batch", 4)),
        ("micro_batch", 3, ChunkSize("micro_batch", 12)),
        ("micro_batch", 4, ChunkSize("micro_batch", 16)),  # as large as a mini-batch, not larger
        ("micro_batch", 5, ChunkSize("mini_batch", 16)),  # one mini-batch, not five
        ("micro_batch", 1000, ChunkSize("mini_batch", 16)),
        ("mini_batch", 1, ChunkSize("mini_batch", 16)),
        ("mini_batch", 3, ChunkSize("mini_batch", 48)),
        ("mini_batch", 4, ChunkSize("mini_batch", 64)),
        ("mini_batch", 5, ChunkSize("none", 64)),
    ],
)
def test_a_chunk_is_clamped_to_the_next_level(granularity: str, multiplier: int, expected: ChunkSize) -> None:
    assert chunk_size(granularity, multiplier, micro_batch=4, mini_batch=16, buffer=64) == expected
    assert effective_chunk(composed(**{GRANULARITY: granularity, MULTIPLIER: multiplier})) == expected


def test_the_greedy_sample_of_remax_belongs_to_its_group() -> None:
    config = composed(**{GRANULARITY: "mini_batch", "algorithm.adv_estimator": "remax"})
    assert effective_chunk(config) == ChunkSize("mini_batch", 20)
    assert chunk_plan(config) == [Chunk(4, 20), Chunk(8, 40), Chunk(12, 60), Chunk(16, 80)]


def test_without_a_mini_batch_size_a_mini_batch_is_the_buffer() -> None:
    assert effective_chunk(composed(**{GRANULARITY: "mini_batch", MINI: "null"})) == ChunkSize("mini_batch", 64)
    assert effective_chunk(composed(**{GRANULARITY: "micro_batch", MULTIPLIER: 17, MINI: "null"})).samples == 64


PRE_STEP = {GRANULARITY: "mini_batch", SCOPE: "pre_step"}
ACCUMULATE = {GRANULARITY: "micro_batch", SCOPE: "accumulate"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({GRANULARITY: "token"}, [f"{GRANULARITY}=token", "none | mini_batch | micro_batch"]),
        ({SCOPE: "all"}, [f"{SCOPE}=all", "recompute | pre_step | accumulate"]),
        ({MULTIPLIER: 0}, [f"{MULTIPLIER}=0", "at least 1"]),
        ({MICRO: 0}, [f"{MICRO}=0", "at least 1"]),
        (
            {GRANULARITY: "micro_batch", f"{ACTOR}.use_dynamic_bsz": True},
            [f"{GRANULARITY}=micro_batch", f"{ACTOR}.use_dynamic_bsz=True"],
        ),
        ({GRANULARITY: "micro_batch", MICRO: "null"}, [f"{GRANULARITY}=micro_batch", MICRO, "null"]),
        (PRE_STEP | {GRANULARITY: "none"}, [f"{SCOPE}=pre_step", f"{GRANULARITY}=none", "mini_batch"]),
        (PRE_STEP | {MULTIPLIER: 5}, [f"{SCOPE}=pre_step", f"{MULTIPLIER}=5", "smaller multiplier"]),
        (
            PRE_STEP | {GRANULARITY: "micro_batch"},
            [f"{SCOPE}=pre_step", f"{GRANULARITY}=micro_batch", f"{MULTIPLIER}=1", "recompute or accumulate", "multiplier"],
        ),
        (PRE_STEP | {f"{ACTOR}.ppo_epochs": 2}, [f"{SCOPE}=pre_step", f"{ACTOR}.ppo_epochs=2", "set it to 1"]),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_sentence(changes: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check(composed(**changes))
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


@pytest.mark.parametrize("multiplier", [1, 100])
def test_megatron_takes_no_pre_step_of_micro_batches_even_clamped(multiplier: int) -> None:
    config = composed(
        **PRE_STEP | {GRANULARITY: "micro_batch", MULTIPLIER: multiplier, f"{ACTOR}.strategy": "megatron"}
    )
    with pytest.raises(ConfigError, match=rf"{ACTOR}.strategy=megatron"):
        check_overlap(config)


@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus"])
def test_estimators_that_whiten_over_the_buffer(estimator: str) -> None:
    config = composed(**ACCUMULATE)
    config.algorithm.adv_estimator = estimator
    with pytest.raises(ConfigError, match=rf"{SCOPE}=accumulate .* algorithm.adv_estimator={estimator}"):
        check_overlap(config)
    config = composed(**PRE_STEP)
    config.algorithm.adv_estimator = estimator
    (notice,) = check_overlap(config)
    assert f"algorithm.adv_estimator={estimator}" in notice and "pre_step" in notice
    config.psrl.fine_grain_overlap.overlap_scope = "recompute"
    assert check_overlap(config) == []


def test_accumulate_cannot_normalise_weights_over_the_batch() -> None:
    config = composed(**ACCUMULATE)
    config.algorithm.rollout_correction.rollout_is_batch_normalize = True
    with pytest.raises(ConfigError, match=rf"{SCOPE}=accumulate .*rollout_is_batch_normalize=True"):
        check_overlap(config)


def test_pre_step_normalises_weights_within_a_chunk_and_says_so() -> None:
    config = composed(**PRE_STEP)
    config.algorithm.rollout_correction.rollout_is_batch_normalize = True
    (notice,) = check_overlap(config)
    assert "rollout_is_batch_normalize=True" in notice and f"{SCOPE}=pre_step" in notice


def test_a_group_whose_reward_has_a_kl_in_it_is_not_accumulated_in_pieces() -> None:
    kl = ACCUMULATE | {"algorithm.use_kl_in_reward": True}
    with pytest.raises(ConfigError, match=rf"{SCOPE}=accumulate .* algorithm.use_kl_in_reward=True"):
        check(composed(**kl))
    assert check(composed(**kl | {GRANULARITY: "mini_batch"})) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, []),
        (PRE_STEP, []),
        (PRE_STEP | {GRANULARITY: "micro_batch", MULTIPLIER: 5}, [f"{GRANULARITY}=micro_batch", f"{MULTIPLIER}=5", "granularity=mini_batch"]),
        (ACCUMULATE, []),
        (ACCUMULATE | {f"{ACTOR}.ppo_epochs": 2}, []),
        ({GRANULARITY: "mini_batch", f"{ACTOR}.use_dynamic_bsz": True}, []),
        ({GRANULARITY: "mini_batch", MULTIPLIER: 5}, [f"{GRANULARITY}=mini_batch", f"{MULTIPLIER}=5", "granularity=none"]),
        ({GRANULARITY: "mini_batch", MINI: "null"}, [f"{GRANULARITY}=mini_batch", "nothing overlaps", MINI]),
    ],
)  # fmt: skip
def test_what_is_accepted_says_what_it_does_not_do(changes: dict[str, object], words: list[str]) -> None:
    notices = check(composed(**changes))
    assert len(notices) == bool(words)
    for word in words:
        assert word in notices[0], notices[0]
