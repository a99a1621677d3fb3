"""Composition, help, and every refusal: one sentence that names key, value and the way out."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from psrl.config.checks import check, check_data_size, check_resume
from psrl.config.compose import compose_config, conf_dir, normalise
from psrl.config.errors import ConfigError
from psrl.config.flat import flatten
from psrl.config.help import documented_keys, render_help

pytestmark = pytest.mark.unit


def composed(*overrides: str):
    return OmegaConf.to_object(compose_config(["preset=laptop", "task=chain_sum", *overrides]))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["psrl.staleness=-1"], ["psrl.staleness=-1", "at least 0"]),
        (["psrl.staleness=[0,1,2]"], ["psrl.staleness=[0,1,2]", "an integer"]),
        (["psrl.staleness=two"], ["psrl.staleness=two", "an integer"]),
        (["psrl.staleness=1.5"], ["psrl.staleness=1.5", "an integer"]),
        (["psrl.staleness=0,1"], ["psrl.staleness=0,1", "-m"]),
        (["psrl.stalenes=1"], ["Unknown key psrl.stalenes", "psrl.staleness"]),
        (["+psrl.extra=1"], ["Unknown key psrl.extra"]),
        (["nonsense=1"], ["Unknown key nonsense", "--help"]),
        (["model=nosuch"], ["model=nosuch", "tiny"]),
        (["preset=nosuch"], ["preset=nosuch", "laptop"]),
        (["note=a=b"], ["note=a=b", "quote"]),
        (["psrl.ps_mode=rdma"], ["psrl.ps_mode=rdma", "nixl", "filesystem"]),
        (["psrl.weights.route=rdma"], ["psrl.weights.route=rdma", "auto", "vram", "shm", "nixl"]),
        (["psrl.weights.route=shm", "psrl.ps_mode=filesystem"], ["psrl.weights.route=shm", "psrl.ps_mode=nixl"]),
        (["psrl.broadcast_init=True", "psrl.ps_mode=filesystem"], ["psrl.broadcast_init=True", "psrl.ps_mode=nixl"]),
        (["psrl.broadcast_init=True", "psrl.weights.route=shm"], ["psrl.broadcast_init=True", "route=auto or nixl"]),
        (["psrl.rollout_coordination.routing_strategy.method=best"], ["routing_strategy.method=best", "request_num_balance"]),
        (["train_actor_rollout_ref.actor.strategy=deepspeed"], ["actor.strategy=deepspeed", "fsdp2"]),
        (["train_actor_rollout_ref.actor.ppo_mini_batch_size=5"], ["ppo_mini_batch_size=5", "psrl.staleness_buffer_entries=32", "divisor"]),
        (["psrl.log_prob.enable_rollout_engine_log_prob=False"], ["rollout_is", "psrl.log_prob.enable_rollout_engine_log_prob=False"]),
        (
            ["psrl.log_prob.enable_rollout_engine_log_prob=False", "algorithm.rollout_correction.rollout_is=null", "algorithm.rollout_correction.bypass_mode=True"],
            ["bypass_mode", "enable_rollout_engine_log_prob"],
        ),
        (["psrl.rollout_n=1"], ["psrl.rollout_n=1", "grpo", "at least 2"]),
        (["gen_actor_rollout_ref.rollout.max_model_len=128"], ["max_model_len=128", "data.max_prompt_length=128"]),
        (["data.train_files=/tmp/x.parquet"], ["data.train_files", "data.reasoning_gym.dataset", "exactly one"]),
        (["data.reasoning_gym.dataset=null"], ["no data is named", "data.train_files"]),
        (["trainer.total_training_steps=null"], ["no end", "trainer.total_epochs"]),
        (["trainer.total_training_steps=0"], ["trainer.total_training_steps=0", "at least 1"]),
        (["trainer.logger=[tensorboard]"], ["tensorboard", "console and wandb"]),
        (["train_actor_rollout_ref.actor.optim.lr=0"], ["optim.lr=0", "greater than 0"]),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check(composed(*overrides))
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_the_presets_are_accepted() -> None:
    assert check(composed()) == []
    cluster = OmegaConf.to_object(
        compose_config(["data.train_files=/data/x.parquet", "psrl.rollout_n=8", "trainer.total_epochs=1"])
    )
    assert check(cluster) == []  # type: ignore[arg-type]


def test_staleness_without_correction_warns_with_the_keys() -> None:
    (warning,) = check(composed("algorithm.rollout_correction.rollout_is=null"))
    assert "psrl.staleness=1" in warning and "algorithm.rollout_correction.rollout_is" in warning


def test_data_smaller_than_a_batch_is_refused_with_both_numbers() -> None:
    config = composed("psrl.staleness_buffer_entries=8")
    with pytest.raises(ConfigError, match="3 prompts < batch 8"):
        check_data_size(config, 3, skipped=0)
    check_data_size(config, 8, skipped=0)
    short = composed("psrl.staleness_buffer_entries=8", "data.drop_last=False", "trainer.total_epochs=1")
    check_data_size(short, 3, skipped=0)


def test_values_with_commas_spaces_and_quotes_survive() -> None:
    assert composed('note="a,b"').note == "a,b"
    assert composed("note=a\\,b").note == "a,b"
    assert composed("note='a = \"b\" c'").note == 'a = "b" c'


def test_laptop_preset_is_chosen_without_accelerator_and_says_so() -> None:
    overrides, notices = normalise(["psrl.staleness=2"], has_accelerator=False, on_slurm=False)
    assert overrides == ["preset=laptop", "task=chain_sum", "psrl.staleness=2"]
    assert len(notices) == 1 and "preset=laptop" in notices[0]
    assert normalise([], has_accelerator=True, on_slurm=False) == ([], [])
    assert normalise(["preset=cluster"], has_accelerator=False, on_slurm=False) == (["preset=cluster"], [])


@pytest.mark.parametrize(
    ("given", "task"),
    [
        ([], True),
        (["preset=laptop"], True),
        (["preset=cluster"], False),
        (["data.task=digit_sum"], False),
        (["data.train_files=/d/x.parquet"], False),
        (["data.reasoning_gym.dataset=gcd"], False),
        (["data.reasoning_gym.params.max_terms=3"], True),
    ],
)
def test_the_laptop_task_gives_way_to_data_that_is_named(given: list[str], task: bool) -> None:
    overrides, _ = normalise(given, has_accelerator=False, on_slurm=False)
    assert ("task=chain_sum" in overrides) is task
    config = OmegaConf.to_object(compose_config(overrides))
    assert (config.data.reasoning_gym.dataset == "chain_sum") is task
    assert ("min_terms" in config.data.reasoning_gym.params) is task


def test_old_spellings_are_accepted_with_one_notice() -> None:
    overrides, notices = normalise(["psrl.ps_mode=nixl_cpu", "model=/models/q"], has_accelerator=True, on_slurm=False)
    assert overrides == ["psrl.ps_mode=nixl", "model=hf", "model.path=/models/q"]
    assert len(notices) == 1
    overrides, notices = normalise(
        ["psrl.ps_mode=cpu,nixl_cpu", "preset=cluster"], has_accelerator=True, on_slurm=False
    )
    assert "psrl.ps_mode=filesystem,nixl" in overrides and len(notices) == 1


def test_presets_change_sizes_only_where_the_schema_has_a_key() -> None:
    known = documented_keys()
    for preset in (conf_dir() / "preset").glob("*.yaml"):
        values = OmegaConf.to_container(OmegaConf.load(preset)) or {}
        for key in flatten(values):
            assert not key or key in known or key.startswith("data.reasoning_gym.params."), f"{preset.name}: {key}"


def test_help_names_every_key_and_its_meaning() -> None:
    text = render_help()
    for key, entry in documented_keys().items():
        assert f"{key} = " in text
        assert entry.type_name in text
        assert entry.doc, f"{key} has no explanation"


@pytest.mark.parametrize(
    "key", ["trainer.total_training_steps", "psrl.deployment.n_rollout_instances", "trainer.logger", "note"]
)
def test_a_resume_may_change_length_deployment_and_logging(key: str) -> None:
    check_resume({key: 1, "psrl.staleness": 1}, {key: 2, "psrl.staleness": 1})


def test_a_resume_with_another_algorithm_is_refused_by_name() -> None:
    with pytest.raises(ConfigError) as caught:
        check_resume({"psrl.staleness": 1, "data.seed": 0}, {"psrl.staleness": 2, "data.seed": 1, "run_dir": "/r"})
    assert "data.seed" in str(caught.value) and "psrl.staleness" in str(caught.value) and "/r" in str(caught.value)


@pytest.mark.parametrize(
    "override", ["data.task_params={size: 64}", "data.task_params.size=64", "+data.task_params.size=64"]
)
def test_parameters_of_a_task_are_set_like_any_other_key(override: str) -> None:
    overrides, _ = normalise(
        ["data.reasoning_gym.dataset=null", "data.task=digit_sum", override], has_accelerator=True, on_slurm=False
    )
    assert composed(*overrides).data.task_params == {"size": 64}


@pytest.mark.parametrize("override", ["={block_size: 16}", ".block_size=16"])
@pytest.mark.parametrize("plus", ["", "+"])
def test_so_are_arguments_of_vllm(plus: str, override: str) -> None:
    key = "gen_actor_rollout_ref.rollout.engine_kwargs.vllm"
    overrides, _ = normalise([f"{plus}{key}{override}"], has_accelerator=True, on_slurm=False)
    assert composed(*overrides).gen_actor_rollout_ref.rollout.engine_kwargs.vllm == {"block_size": 16}
