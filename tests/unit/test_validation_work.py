"""A validator's part of the prompts, the held-out prompts, and what configurations are refused."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from psrl.config.checks import check
from psrl.config.errors import ConfigError
from psrl.config.schema import Config
from psrl.deployment import instances_per_node, one_host, rollout_nodes, rollout_shares
from psrl.protocol.generation import SamplingParams, TokenChunk
from psrl.protocol.validation import SourceScores, Validate
from psrl.rollout.validation_work import ValidationWork
from psrl.rundir.layout import RunDir
from psrl.slurm.begin import deployment_of
from psrl.supervisor.specs import share_children
from psrl.tasks.base import PreparedPrompt
from psrl.tasks.registry import build_task, task_spec
from psrl.tasks.validation import prompt_of, training_task, validation_spec, validation_task

pytestmark = pytest.mark.unit


@dataclass
class Result:
    reward: float | None


def prompt(index, source="a"):
    return PreparedPrompt(
        index=index,
        prompt_ids=np.array([index, 9], dtype="<i4").tobytes(),
        data_source=source,
        ground_truth=str(index),
    )


def chunk(group, sample, tokens, finish=""):
    return TokenChunk(
        group=group, sample=sample, token_ids=tokens, logprobs=[0.0] * len(tokens), spans=[], finish=finish
    )


def work(part=0, parts=1, samples=2, prompts=3, version=4):
    order = Validate(version=version, incarnation=0, part=part, parts=parts)
    data = [prompt(i, "a" if i < 2 else "b") for i in range(prompts)]
    return ValidationWork(order, data, SamplingParams(temperature=0.0), samples=samples, max_response=8, seed=1)


def test_parts_cover_every_prompt_once():
    asked = [r.group for part in range(3) for r in work(part, 3, prompts=10).requests()]
    assert sorted(asked) == list(range(10))
    (first, *_) = work().requests()
    assert (first.min_version, first.prompt_ids) == (4, (0, 9))
    assert [(s.sample, s.max_new_tokens) for s in first.samples] == [(0, 8), (1, 8)]


def test_two_versions_draw_the_same_numbers():
    seeds = [[s.seed for r in work(version=v).requests() for s in r.samples] for v in (4, 8)]
    assert seeds[0] == seeds[1] and len(set(seeds[0])) == 6
    assert all(s.exact for r in work().requests() for s in r.samples)


def test_scores_are_summed_by_source():
    made = work()
    made.add(chunk(0, 0, [1, 2]))
    made.add(chunk(0, 0, [3], "stop"))
    for group, sample in ((0, 1), (1, 0), (1, 1), (2, 0)):
        made.add(chunk(group, sample, [5], "stop"))
    assert not made.complete
    made.add(chunk(2, 1, [7] * 8, "length"))
    assert made.complete
    answers = made.answers(lambda ids: " ".join(map(str, ids)))
    assert [[a.solution_str for a in of_prompt] for of_prompt in answers] == [
        ["1 2 3", "5"], ["5", "5"], ["5", "7 7 7 7 7 7 7 7"],
    ]  # fmt: skip
    assert [of_prompt[0].ground_truth for of_prompt in answers] == ["0", "1", "2"]
    results = [[Result(1.0), Result(0.0)], [Result(0.5), Result(None)], [Result(1.0), Result(1.0)]]
    assert made.scores(results) == {
        "a": SourceScores(samples=4, failed=1, reward_sum=1.5, response_tokens=6),
        "b": SourceScores(samples=2, reward_sum=2.0, response_tokens=9, cut_off=1),
    }


# ---- which prompts -------------------------------------------------------------------------------------------


def config(**changes):
    made = OmegaConf.structured(Config)
    base = {
        "data.task": "digit_sum",
        "psrl.rollout_n": 2,
        "psrl.staleness_buffer_entries": 4,
        "trainer.total_training_steps": 4,
        "trainer.test_freq": 2,
        "psrl.deployment.n_validate_instances": 1,
    }
    for key, value in (base | changes).items():
        OmegaConf.update(made, key, value)
    return OmegaConf.to_object(made)


def test_training_never_sees_a_held_out_prompt():
    c = config(**{"data.val_max_samples": 30})
    held_out = [prompt_of(item) for item in validation_task(c).items()]
    every = [prompt_of(item) for item in build_task(task_spec(c)).items()]
    left = [prompt_of(item) for item in training_task(c, build_task(task_spec(c))).items()]
    assert len(held_out) == len(set(held_out)) == 30
    assert not set(left) & set(held_out)
    assert [p for p in every if p not in set(held_out)] == left and len(left) < len(every)


def test_without_validation_training_has_everything():
    c = config(**{"trainer.test_freq": -1, "psrl.deployment.n_validate_instances": 0})
    task = build_task(task_spec(c))
    assert training_task(c, task) is task


def test_a_file_of_its_own_takes_nothing_from_training(tmp_path):
    rows = [{"prompt": f"{i} + 1 =", "data_source": "digit_sum", "ground_truth": str(i + 1)} for i in (1, 2, 2, 3)]
    path = tmp_path / "val.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    c = config(**{"data.val_files": str(path), "reward.function": "my:reward"})
    assert validation_spec(c).kind == "files"
    assert [item.ground_truth for item in validation_task(c).items()] == ["2", "3", "4"]
    task = build_task(task_spec(c))
    assert training_task(c, task) is task
    with pytest.raises(ConfigError, match=r"^data\.val_files=.*none\.jsonl does not exist"):
        validation_task(config(**{"data.val_files": str(tmp_path / "none.jsonl")}))


# ---- where it runs, and what is refused ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rollouts", "validators", "room", "shares"),
    [
        (2, 1, 8, [(2, 1)]),
        (3, 1, 2, [(2, 0), (1, 1)]),
        (6, 2, 4, [(4, 0), (2, 2)]),
        (4, 4, 4, [(4, 0), (0, 4)]),
    ],
)
def test_validators_have_places_of_their_own(rollouts, validators, room, shares):
    c = config(**{"psrl.deployment.n_rollout_instances": rollouts, "psrl.deployment.n_validate_instances": validators})
    d = c.psrl.deployment
    d.rollout_ngpus_per_node = room
    assert [(len(s.instances), len(s.validators)) for s in rollout_shares(d)] == shares
    assert (rollout_nodes(d), instances_per_node(d)) == (len(shares), sum(shares[0]))
    here = one_host(d)[1]
    assert (here.instances, here.validators) == (range(rollouts), range(validators))
    names = [child.name for child in share_children(c, RunDir(Path("/run")), here)]
    assert [n for n in names if n.startswith("validator")] == [f"validator-{i}" for i in range(validators)]


def test_places_that_do_not_divide_are_refused():
    d = config(**{"psrl.deployment.n_rollout_instances": 8}).psrl.deployment
    with pytest.raises(ConfigError, match="n_rollout_instances=8 with n_validate_instances=1 does not divide over 2"):
        rollout_nodes(d)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"psrl.deployment.n_validate_instances": 0}, "trainer.test_freq=2 needs instances of its own"),
        ({"psrl.deployment.n_validate_instances": -1}, "n_validate_instances=-1 is refused"),
        ({"trainer.test_freq": -1}, "n_validate_instances=1 would stay idle with trainer.test_freq=-1"),
        (
            {"data.task": None, "data.train_files": "a.jsonl"},
            "trainer.test_freq=2 with data.train_files needs data.val_files",
        ),
        ({"data.val_max_samples": 0}, "data.val_max_samples=0 is refused"),
        ({"trainer.val_timeout_s": 0.0}, "trainer.val_timeout_s=0 is refused"),
        ({"gen_actor_rollout_ref.rollout.val_kwargs.n": 0}, "val_kwargs.n=0 is refused: it must be at least 1"),
        ({"gen_actor_rollout_ref.rollout.val_kwargs.top_p": 0.0}, "val_kwargs.top_p=0.0 is refused"),
        ({"gen_actor_rollout_ref.rollout.val_kwargs.temperature": -1.0}, "val_kwargs.temperature=-1.0 is refused"),
    ],
)
def test_refusals(changes, says):
    with pytest.raises(ConfigError) as refusal:
        check(config(**changes))
    assert says in str(refusal.value)


def test_a_configuration_with_validation_is_accepted():
    check(config())


def test_a_hand_written_job_gives_the_validators_places_of_its_own_instances():
    environ = {"SLURM_GPUS_PER_NODE_HET_GROUP_0": "8", "SLURM_GPUS_PER_NODE_HET_GROUP_1": "h100:4"}
    key = "psrl.deployment.n_rollout_instances"
    assert [deployment_of((1, 2), environ, validators)[key] for validators in (0, 1, 8)] == [8, 7, 1]
