"""Each example as a user meets it: copied somewhere else, started from another directory, on a host without Slurm."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from agent_sessions import ScriptedSession
from omegaconf import OmegaConf

from psrl.agents.base import Endpoint
from psrl.agents.select import make_agent
from psrl.config.checks import check
from psrl.config.compose import compose_config, normalise
from psrl.config.help import documented_keys
from psrl.config.schema import Config
from psrl.deployment import shares_of
from psrl.launch import register_launchers
from psrl.models.tiny_tokenizer import make_tokenizer, save_tokenizer
from psrl.models.tokenizer import load_tokenizer
from psrl.sessions.tool_calls import split_tool_calls
from psrl.slurm.job_text import END, READ_VERDICT
from psrl.tasks.base import Answer
from psrl.tasks.prepare import prepare as prepare_prompts
from psrl.tasks.prepared import PreparedReader
from psrl.tasks.registry import build_task, task_spec

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
NODES = {
    "grpo_gsm8k_qwen2.5_3b": (1, 1),
    "dapo_qwen2.5_7b": (2, 2),
    "megatron_qwen2.5_32b": (8, 8),
    "mini_swe": (1, 1),
}
"""Trainer and rollout nodes, of 8 GPUs each."""
INSTANCES = {"grpo_gsm8k_qwen2.5_3b": 8, "dapo_qwen2.5_7b": 16, "megatron_qwen2.5_32b": 16, "mini_swe": 8}
LAPTOP = {"multi_turn": "HiddenSum", "calculator": "CalculatorTask", "black_box": "HiddenSum"}
"""Those that run on two cores, and their tasks; `run.sh` starts them."""
DRY = "hydra.launcher.dry_run=true"

every_example = pytest.mark.parametrize("name", NODES)


@dataclass(frozen=True)
class Started:
    """What `launch.sh` of a copied example did, and what is left of it on disk."""

    code: int
    out: str
    err: str
    left: list[str]
    """Files and directories in the directory that it was started from."""
    changed: list[str]
    """Files that the copy has more or fewer than the example."""


def launch(name: str, place: Path, arguments: Sequence[str]) -> Started:
    """Copy the example below `place` and start it from another directory, with no Slurm command in reach."""
    copy, here, programs = place / "my copy", place / "here", place / "bin"
    shutil.copytree(EXAMPLES / name, copy)
    here.mkdir()
    programs.mkdir()
    for program in ("bash", "dirname", "realpath"):
        (programs / program).symlink_to(cast(str, shutil.which(program)))
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH"))}
    env |= {"PATH": str(programs), "PSRL_PYTHON": sys.executable}
    done = subprocess.run(
        [copy / "launch.sh", *arguments], env=env, cwd=here, capture_output=True, text=True, timeout=120
    )
    names = [{str(p.relative_to(top)) for p in top.rglob("*")} for top in (copy, EXAMPLES / name)]
    left = sorted(str(p.relative_to(here)) for p in here.rglob("*"))
    return Started(done.returncode, done.stdout, done.stderr, left, sorted(names[0] ^ names[1]))


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Started]:
    """A dry run of every example."""
    return {name: launch(name, tmp_path_factory.mktemp("user"), [DRY]) for name in NODES}


def overrides_of(name: str) -> list[str]:
    file = EXAMPLES / name / "overrides.sh"
    source = f'source "{file}"' if file.exists() else f'source <(sed /^exec/d "{file.with_name("run.sh")}")'
    command = f'{source} && printf "%s\\0" "${{overrides[@]}}"'
    return subprocess.check_output(["bash", "-euc", command], text=True).rstrip("\0").split("\0")


def config_of(name: str, *, on_slurm: bool = True) -> Config:
    """As job.sbatch composes it, or run.sh."""
    overrides, notices = normalise(overrides_of(name), has_accelerator=False, on_slurm=on_slurm)
    assert notices == []
    return cast(Config, OmegaConf.to_object(compose_config(overrides)))


def directives(text: str) -> list[set[str]]:
    """A component's directives each, without job name and log file."""
    found: list[set[str]] = [set()]
    for line in re.findall(r"^#SBATCH (.+)$", text, re.MULTILINE):
        if line == "hetjob":
            found.append(set())
        elif not line.startswith(("--job-name=", "--output=")):
            found[-1].add(line)
    return found


# ---- the launcher ------------------------------------------------------------------------------------------------


@every_example
def test_a_dry_run_prints_one_job_of_two_components(name: str, planned: dict[str, Started]) -> None:
    started = planned[name]
    assert started.code == 0, started.err
    assert started.out.count("#!/bin/bash") == 1
    components = directives(started.out)
    assert len(components) == 2
    [srun] = re.findall(r"^srun .*\n.*$", started.out, re.MULTILINE)
    steps = srun.split(" : ")
    for number, (nodes, component, step) in enumerate(zip(NODES[name], components, steps, strict=True)):
        assert {f"--nodes={nodes}", "--gpus-per-node=8", "--ntasks-per-node=1"} <= component
        assert {f"--het-group={number}", f"--nodes={nodes}", f"--ntasks={nodes}", "--gpus-per-node=8"} <= {
            *step.split()
        }


@every_example
def test_a_dry_run_leaves_nothing_behind(name: str, planned: dict[str, Started]) -> None:
    assert planned[name].code == 0, planned[name].err
    assert planned[name].left == [] and planned[name].changed == []


@every_example
def test_a_dry_run_warns_of_nothing(name: str, planned: dict[str, Started]) -> None:
    assert planned[name].err.splitlines() == ["psrl: not compared with the cluster: there is no scontrol on this host"]


@every_example
def test_the_arithmetic_of_the_readme_is_right(name: str) -> None:
    rows = [row for row in (EXAMPLES / name / "README.md").read_text().splitlines() if row.endswith(" GB |")]
    assert len(rows) >= 3
    for row in rows:
        terms, said = row.strip("| ").rpartition("|")[2].removesuffix(" GB").split(" = ")
        product, _, divisor = terms.partition(" / ")
        value = math.prod(map(float, product.split(" x "))) / float(divisor or 1) / 1e9
        assert abs(value - float(said)) <= (0.5 if "." not in said else 0.05), row


def test_every_example_is_in_the_table() -> None:
    assert {path.name for path in EXAMPLES.iterdir() if path.is_dir()} == {*NODES, *LAPTOP}
    rows = re.findall(r"^\| \[(\S+)\]\(\1\)", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert rows == [*LAPTOP, *NODES]


@every_example
def test_every_key_is_there_once(name: str) -> None:
    register_launchers()
    text = (EXAMPLES / name / "launch.sh").read_text()
    keys = [o.partition("=")[0] for o in overrides_of(name) if not o.startswith("+profile=")]
    assert len(keys) == len(set(keys))
    settings = re.findall(r"hydra\.launcher\.[a-z_.]+(?==)", text)
    assert settings and {*keys, *settings} <= documented_keys().keys()


@every_example
def test_the_deployment_fills_its_nodes(name: str) -> None:
    config = config_of(name)
    assert check(config, only_planned=True) == []
    trainers, rollouts = shares_of(config.psrl.deployment, NODES[name])
    assert {len(share.ranks) for share in trainers} == {8}
    gpus = config.psrl.deployment.rollout_ngpus_per_node_per_instance
    assert {len(share.instances) * gpus for share in rollouts} == {8}
    assert sum(len(share.instances) for share in rollouts) == INSTANCES[name]


@every_example
def test_a_sample_of_full_length_can_be_trained(name: str) -> None:
    config = config_of(name)
    longest = config.data.max_prompt_length + config.data.max_response_length
    assert longest <= config.train_actor_rollout_ref.actor.ppo_max_token_len_per_gpu


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([DRY, "psrl.deployment.n_rollout_instances=9"], "psrl.deployment.n_rollout_instances=9 does not divide over"),
        (
            ["gen_actor_rollout_ref.rollout.tensor_model_parallel_size=2"],
            "gen_actor_rollout_ref.rollout.tensor_model_parallel_size=2 x pipeline_model_parallel_size=1 needs 2 GPUs",
        ),
    ],
)
def test_more_arguments_win_and_wrong_ones_are_refused(tmp_path: Path, arguments: list[str], said: str) -> None:
    started = launch("grpo_gsm8k_qwen2.5_3b", tmp_path, arguments)
    assert (started.code, started.out) == (2, "")
    assert started.err.splitlines()[-1].startswith(f"psrl: {said}")


def test_an_appended_value_makes_a_sweep(tmp_path: Path) -> None:
    started = launch("dapo_qwen2.5_7b", tmp_path, [DRY, "psrl.staleness=0,3"])
    assert started.code == 0, started.err
    members = re.findall(r"^# member (\d): .* psrl\.staleness=(\d) ", started.out, re.MULTILINE)
    assert members == [("0", "0"), ("1", "3")]


# ---- the batch script --------------------------------------------------------------------------------------------


@every_example
def test_the_batch_script_asks_for_what_the_launcher_asks_for(name: str, planned: dict[str, Started]) -> None:
    script = EXAMPLES / name / "job.sbatch"
    text = script.read_text()
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    assert text.endswith(END) and READ_VERDICT in text
    assert directives(text) == directives(planned[name].out)
    for setting in (r"^export PSRL_SIGNAL_DELAY_S=(\d+)", r"^max_requeues=(\d+)"):
        assert re.findall(setting, text, re.MULTILINE) == re.findall(setting, planned[name].out, re.MULTILINE)


@every_example
def test_the_batch_script_starts_the_step_as_the_template_does(name: str) -> None:
    template = (ROOT / "slurm" / "het_fsdp2_vllm.sbatch").read_text()
    assert (EXAMPLES / name / "job.sbatch").read_text().endswith(template[template.index("\nsrun ") :])


def test_a_batch_script_without_its_overrides_says_so(tmp_path: Path) -> None:
    script = EXAMPLES / "grpo_gsm8k_qwen2.5_3b" / "job.sbatch"
    env = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "7", "PSRL_PYTHON": sys.executable}
    done = subprocess.run(["bash", script], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == (
        f"psrl: there is no overrides.sh in {tmp_path}: submit job.sbatch from its own directory, or with sbatch --chdir\n"
    )


# ---- on a laptop -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAPTOP)
def test_a_laptop_example_is_accepted_and_its_agent_is_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES / name)
    config = config_of(name, on_slurm=False)
    assert check(config) == []
    assert make_agent(config, Endpoint("http://127.0.0.1:1", "key")) is not None
    assert type(build_task(task_spec(config))).__name__ == LAPTOP[name]
    script = EXAMPLES / name / "run.sh"
    assert os.access(script, os.X_OK) and subprocess.run(["bash", "-n", script]).returncode == 0


def test_the_dialogues_of_the_calculator_are_what_a_run_shows_token_for_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES / "calculator")
    config = config_of("calculator", on_slurm=False)
    config.data.task_params |= {"size": 16}
    config.data.max_prompt_length = 256  # of a tokenizer that has no phrases
    task, agent = build_task(task_spec(config)), make_agent(config)
    assert agent is not None
    save_tokenizer(make_tokenizer([]), tmp_path, 512)
    tokenizer = load_tokenizer(tmp_path)
    prepare_prompts(config, task, tokenizer, tmp_path / "prompts.bin")
    prompts = PreparedReader(tmp_path / "prompts.bin")
    items = list(task.items())
    assert {len(item.dialogue) for item in items} == {1, 3} and len(prompts) == len(items)
    for number, item in enumerate(items):
        said = [m["content"] for m in item.dialogue if m["role"] == "assistant"]
        turns = [(text, split_tool_calls(text, "c")[1]) for text in said]
        session = ScriptedSession([{"role": "assistant", "content": "", "tool_calls": c} if c else t for t, c in turns])
        ending = asyncio.run(agent.run(session, prompts[number]))
        assert not ending.failed and ending.metrics["tool_calls"] == len(said) - 1
        first, last = session.asked[0], session.asked[-1]
        for asked, shown in ((first, item.messages), (last, [*item.messages, *item.dialogue[:-1]])):
            assert tokenizer.render_chat(asked.messages, asked.tools) == tokenizer.render_chat(shown)
        assert np.frombuffer(prompts[number].prompt_ids, "<i4").tolist() == tokenizer.encode_chat(item.messages)
        answer = Answer(solution_str=said[-1], data_source=item.data_source, extra_info=item.extra_info)
        assert task.score(answer) == 1.0


@pytest.mark.parametrize(
    ("written", "score"),
    [
        ("{}", 1.0),
        (" {}.0\n", 1.0),
        ("so <answer>{}</answer>", 1.0),
        ("7{}", 0.0),
        ("{}0", 0.0),
        ("It is {}", 0.0),
        ("", 0.0),
    ],
)
def test_a_result_among_other_digits_scores_nothing(
    written: str, score: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES / "calculator")
    task = build_task(task_spec(config_of("calculator", on_slurm=False)))
    item = next(iter(task.items()))
    text = written.format(item.ground_truth)
    assert task.score(Answer(solution_str=text, data_source=item.data_source, extra_info=item.extra_info)) == score


# ---- GSM8K -------------------------------------------------------------------------------------------------------

PREPARE = EXAMPLES / "grpo_gsm8k_qwen2.5_3b" / "prepare_gsm8k.py"
ROWS = [
    ("Mara packs 3 boxes of 14 candles. How many candles?", "3 * 14 = <<3*14=42>>42 candles.\n#### 42", "42"),
    ("A barge of 1,200 tonnes takes on 50 more. Tonnes?", "1200 + 50 = 1250.\n#### 1,250", "1250"),
    ("At dawn it is 4 degrees, then 9 fewer. Degrees?", "4 - 9 = -5.\n####-5", "-5"),
    ("A pen costs $2.50. What does Ola pay for one?", "One pen.\n#### $2.50 ", "2.50"),
]
"""Question, answer, ground truth."""


def line(question: object, answer: object) -> str:
    return json.dumps({"question": question, "answer": answer}) + "\n"


def prepare(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, PREPARE, source, target], capture_output=True, text=True)


def test_prepared_rows_are_read_and_scored_by_psrl_itself(tmp_path: Path) -> None:
    source, target = tmp_path / "train.jsonl", tmp_path / "data" / "train.parquet"
    source.write_text("".join(line(question, answer) for question, answer, _ in ROWS) + "\n")
    done = prepare(source, target)
    assert (done.returncode, done.stdout) == (0, f"{target}: 4 prompts\n"), done.stderr
    assert [path.name for path in target.parent.iterdir()] == ["train.parquet"]

    config = config_of("grpo_gsm8k_qwen2.5_3b")
    config.data.train_files = str(target)
    task = build_task(task_spec(config))
    items = list(task.items())
    assert [item.ground_truth for item in items] == [truth for _, _, truth in ROWS]
    for item, (question, answer, truth) in zip(items, ROWS, strict=True):
        [message] = item.messages
        assert message["role"] == "user" and message["content"].startswith(question) and "####" in message["content"]

        def score(text: str, item=item) -> float | None:
            return task.score(Answer(solution_str=text, data_source=item.data_source, ground_truth=item.ground_truth))

        assert score(answer) == score(f"#### {truth}") == score(f"It is \\boxed{{{truth}}}.") == 1.0
        assert score(f"{truth} is wrong, so\n#### 77") == score("I do not know") == 0.0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file or directory"),
        ("", "train.jsonl is empty"),
        (line("How many?", "#### 1") + "{", "train.jsonl line 2 is not one of GSM8K's: "),
        (line("How many?", "It is 3."), "line 1 is not one of GSM8K's: its answer does not end with #### and a number"),
        (line("How many?", "#### three"), "its answer does not end with #### and a number"),
        (line("How many?", 3), "it has no text named 'answer'"),
        ('{"answer": "#### 3"}', "it has no text named 'question'"),
        ("[3]", "it has no text named 'question'"),
    ],
)
def test_what_is_not_gsm8k_is_refused_and_an_old_file_stays(tmp_path: Path, content: str | None, said: str) -> None:
    source, target = tmp_path / "train.jsonl", tmp_path / "train.parquet"
    target.write_text("old")
    if content is not None:
        source.write_text(content)
    done = prepare(source, target)
    assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1
    assert target.read_text() == "old" and not list(tmp_path.glob(".*"))


def test_a_name_that_psrl_would_not_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(line("How many?", "#### 1"))
    done = prepare(tmp_path / "train.jsonl", tmp_path / "train.pq")
    assert done.returncode == 2 and "train.pq must end with .parquet" in done.stderr
