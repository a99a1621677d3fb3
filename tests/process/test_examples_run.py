"""The examples with agents as whole runs, with a model that knows nothing: their parts meet, and what is worth nothing scores 0."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

import msgspec
import pytest
from runs import NewRun, Run, of

from psrl.coordinator.records import Occupy
from psrl.protocol.samples import Group, Sample
from psrl.rundir.segments import read_sample

pytestmark = pytest.mark.process

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ROLLOUT = "gen_actor_rollout_ref.rollout"
SHORT: dict[str, object] = {
    "trainer.total_training_steps": 2,
    "trainer.keep_samples": True,
    "psrl.staleness_buffer_entries": 2,
    "psrl.deployment.n_rollout_instances": 1,
}


def samples_of(run: Run) -> list[Sample]:
    refs = [record.ref for record in of(run.records(), Occupy)]
    groups = [
        msgspec.msgpack.decode(read_sample(run.dir.samples, r.segment, r.offset, r.length, r.crc), type=Group)
        for r in refs
    ]
    return [sample for group in groups for sample in group.samples]


def test_the_black_box_example_runs_as_a_program_of_its_own(new_run: NewRun) -> None:
    program = shlex.join([sys.executable, str(EXAMPLES / "black_box" / "agent.py")])
    run = new_run(
        SHORT
        | {
            "data.task": "hidden_sum",
            f"{ROLLOUT}.agent.default_agent_loop": "black_box_agent",
            f"{ROLLOUT}.agent.black_box.command": f"'{program}'",
            f"{ROLLOUT}.agent.black_box.max_concurrent": 2,
        }
    )
    assert run.launch() == 0, run.story()
    run.audit()
    samples = samples_of(run)
    assert len(samples) >= 8 and {sample.reward for sample in samples} == {0.0}
    assert all(sample.metrics["asked"] >= 0 for sample in samples)


def test_the_calculator_example_runs(new_run: NewRun, tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "calculator" / "task.py", tmp_path)
    run = new_run(
        SHORT
        | {
            "data.task": "task:CalculatorTask",
            "data.task_params.size": 16,
            "data.task_params.min_digits": 3,
            "data.max_prompt_length": 256,  # the model of the tests has no tokens for whole phrases
            "data.max_response_length": 64,
            f"{ROLLOUT}.agent.default_agent_loop": "tool_agent",
            f"{ROLLOUT}.multi_turn.tools": "[calculator]",
        }
    )
    assert run.launch() == 0, run.story()
    run.audit()
    samples = samples_of(run)
    assert len(samples) >= 8 and {sample.reward for sample in samples} == {0.0}
    assert all(sample.metrics["assistant_turns"] >= 1 for sample in samples)


def test_the_swe_example_runs(new_run: NewRun, tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / "mini_swe" / "mini_swe", tmp_path / "mini_swe")
    run = new_run(
        SHORT
        | {
            "+profile": "agentic",
            "data.task": "mini_swe.task:MiniSwe",
            "data.task_params.size": 16,
            "data.max_prompt_length": 768,
            "data.max_response_length": 256,
            f"{ROLLOUT}.agent.default_agent_loop": "tool_agent",
            f"{ROLLOUT}.multi_turn.environment": "mini_swe.environment:SweEnvironment",
            f"{ROLLOUT}.multi_turn.max_tokens_per_turn": 16,
        }
    )
    assert run.launch() == 0, run.story()
    run.audit()
    samples = samples_of(run)
    assert len(samples) >= 8 and {sample.reward for sample in samples} == {0.0}
    assert {sample.metrics["assistant_turns"] for sample in samples} == {1.0}
