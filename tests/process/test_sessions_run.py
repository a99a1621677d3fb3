"""Whole runs whose samples are conversations: turns with an environment, black boxes, guests, and what deaths do to them."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import openai
import pytest
from runs import DEADLINE_S, NewRun, Run, at_work, of

from psrl.coordinator.records import Occupy
from psrl.models.resolve import run_model
from psrl.models.tokenizer import load_tokenizer
from psrl.protocol.samples import Group, Sample
from psrl.rundir.segments import read_sample
from psrl.telemetry.metrics import read_metrics

pytestmark = pytest.mark.process

ROLLOUT = "gen_actor_rollout_ref.rollout"
HIDDEN_SUM: dict[str, object] = {
    "data.task": "hidden_sum",
    "data.max_prompt_length": 32,
    "data.max_response_length": 64,
    "psrl.staleness": 1,
    "trainer.keep_samples": True,
}
PLAYED = HIDDEN_SUM | {
    f"{ROLLOUT}.agent.default_agent_loop": "tool_agent",
    f"{ROLLOUT}.multi_turn.environment": "hidden_sum",
    f"{ROLLOUT}.multi_turn.max_assistant_turns": 5,
}


@pytest.fixture(scope="module")
def taught_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that plays hidden_sum well enough to have conversations of several turns."""
    run = Run(
        tmp_path_factory.mktemp("taught") / "run",
        PLAYED | {"trainer.total_training_steps": 1, "model.tiny.hidden_size": 64, "model.tiny.num_layers": 2},
    )
    try:
        assert run.launch() == 0, run.story()
    finally:
        run.close()
    return run.dir.path / "model"


def sealed(run: Run) -> list[Group]:
    refs = [record.ref for record in of(run.records(), Occupy)]
    return [
        msgspec.msgpack.decode(read_sample(run.dir.samples, r.segment, r.offset, r.length, r.crc), type=Group)
        for r in refs
    ]


def ids(data: bytes) -> list[int]:
    return np.frombuffer(data, dtype="<i4").tolist()


def check_capture(sample: Sample) -> None:
    """Log-probs and versions where the model wrote, and nowhere else."""
    mask = list(sample.mask) or [1] * (len(sample.response_ids) // 4)
    logprobs = np.frombuffer(sample.logprobs, dtype="<f4").tolist()
    assert len(mask) == len(logprobs) == len(ids(sample.response_ids))
    covered = {i for span in sample.spans for i in range(span.start, span.end)}
    assert covered == {i for i, by_model in enumerate(mask) if by_model}
    assert {score for score, by_model in zip(logprobs, mask, strict=True) if not by_model} <= {0.0}


def conversation(run: Run, group: Group, sample: Sample) -> str:
    tokenizer = load_tokenizer(run_model(run.dir).path)
    return tokenizer.decode_batch([ids(group.prompt_ids) + ids(sample.response_ids)], skip_special_tokens=False)[0]


def test_samples_are_conversations_with_an_environment(new_run: NewRun, taught_model: Path) -> None:
    run = new_run(PLAYED | {"model": taught_model})
    assert run.launch() == 0, run.story()
    run.audit()
    groups = sealed(run)
    samples = [sample for group in groups for sample in group.samples]
    assert len(samples) >= 6 * 4 * 2
    for sample in samples:
        check_capture(sample)
    turns = [sample.metrics["num_turns"] for sample in samples]
    assert max(turns) >= 3 and {sample.reward for sample in samples} <= {0.0, 1.0}
    # A conversation of three turns: two questions of the model, each answered, then its answer.
    group, played = next((g, s) for g in groups for s in g.samples if s.metrics["num_turns"] == 3)
    text = conversation(run, group, played)
    assert text.count("<|assistant|>") == 3 and text.count("<|user|>") == 3, text
    runs_of_mask = [int(m) for m, before in zip(played.mask, b"\xff" + played.mask, strict=False) if m != before]
    assert runs_of_mask == [1, 0, 1, 0, 1]
    rows = read_metrics(run.dir.metrics)
    assert rows[-1]["num_turns/max"] >= 2


def test_conversations_survive_the_death_of_their_instance(new_run: NewRun, taught_model: Path) -> None:
    """Turns that were being made go on elsewhere; conversations at their environment come back to another instance."""
    slow = {f"{ROLLOUT}.max_num_seqs": 2, "psrl.fault_tolerance.max_restarts": 1}
    run = new_run(PLAYED | slow | {"model": taught_model, "trainer.total_training_steps": 1000})
    run.start()
    run.until(lambda: at_work(run, ["instance-0", "instance-1"]), "both instances had made groups")
    process = run.kill("instance-0", signal.SIGSTOP)
    run.until(run.stands_still(6.0), "turns were at the stopped instance, without which no buffer could be filled")
    process.kill()
    run.until(run.steps_from_now(4), "what was being made at the death was trained: nothing may be older")
    run.interrupt()
    assert run.wait() == 130, run.story()
    run.audit()
    for group in sealed(run):
        for sample in group.samples:
            check_capture(sample)
    assert "were at instance-0: they go on elsewhere" in run.log("agent-loop-0")


def test_an_agent_loop_that_dies_costs_conversations_not_groups(new_run: NewRun, taught_model: Path) -> None:
    run = new_run(PLAYED | {"model": taught_model, "trainer.total_training_steps": 12})
    run.start()
    run.until(run.steps_from_now(2), "two steps were done")
    run.kill("agent-loop-0")
    assert run.wait() == 0, run.story()
    run.audit()


BLACK_BOX = '''
from openai import OpenAI

def play(base_url, api_key, prompt):
    """The last sample of each group raises in its second turn."""
    client = OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=60)
    messages = list(prompt["messages"])
    values = prompt["extra_info"]["values"]
    fault = int(base_url.split("-")[-1].split("/")[0])  # the sample's number
    for turn in range(5):
        reply = client.chat.completions.create(model="tiny", messages=messages, max_tokens=16)
        message = reply.choices[0].message
        messages.append({"role": "assistant", "content": message.content or ""})
        if fault == 3 and turn == 1:
            raise RuntimeError("this agent is broken")
        text = (message.content or "").strip()
        if reply.choices[0].finish_reason != "stop" or text.startswith("="):
            break
        messages.append({"role": "user", "content": str(values.get(text, "?"))})
    return None
'''


def test_black_boxes_are_trained_from_what_was_captured(new_run: NewRun, taught_model: Path, tmp_path: Path) -> None:
    """An ordinary function that knows only the openai client; one sample in four raises, and none of those is trained."""
    (tmp_path / "boxes.py").write_text(textwrap.dedent(BLACK_BOX))
    box = {
        f"{ROLLOUT}.agent.default_agent_loop": "black_box_agent",
        f"{ROLLOUT}.agent.black_box.function": "boxes:play",
        "psrl.rollout_n": 4,
        "model": taught_model,
    }
    run = new_run(HIDDEN_SUM | box)
    assert run.launch() == 0, run.story()
    run.audit()
    groups = sealed(run)
    assert len(groups) >= 6 * 4
    for group in groups:
        for sample in group.samples:
            check_capture(sample)
    broken = [group.samples[3] for group in groups if group.samples[3].metrics["num_turns"] >= 2]
    assert broken and all(sample.reward is None for sample in broken)
    assert "this agent is broken" in run.log("agent-loop-0")
    assert max(s.metrics["num_turns"] for g in groups for s in g.samples[:3]) >= 3


@pytest.mark.parametrize(
    "own",
    [
        {f"{ROLLOUT}.agent.default_agent_loop": "black_box_agent", f"{ROLLOUT}.agent.black_box.function": "nope:play"},
        {f"{ROLLOUT}.agent.default_agent_loop": "tool_agent", f"{ROLLOUT}.multi_turn.environment": "nope:Play"},
    ],
)
def test_agents_that_cannot_be_made_are_refused_before_anything_starts(
    new_run: NewRun, taught_model: Path, own: dict[str, object]
) -> None:
    run = new_run(HIDDEN_SUM | own | {"model": taught_model})
    assert run.launch() == 2, run.story()
    assert "importing nope failed" in run.output.splitlines()[-1] and run.records() == []


def test_guests_talk_to_the_policy_while_it_trains(new_run: NewRun, taught_model: Path) -> None:
    serving: Mapping[str, object] = {
        "model": taught_model,
        f"{ROLLOUT}.agent.serve_sessions": True,
        "trainer.total_training_steps": 400,
    }
    run = new_run(HIDDEN_SUM | serving)  # its own samples are single responses
    run.start()
    run.until(run.steps_from_now(2), "two steps were done")
    told = subprocess.run(
        [sys.executable, "-m", "psrl.sessions", str(run.dir.path)],
        env=run.environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert told.returncode == 0, told.stderr
    said = dict(line.removeprefix("export ").split("  #")[0].split("=", 1) for line in told.stdout.splitlines())
    client = openai.OpenAI(
        base_url=said["OPENAI_BASE_URL"].strip(), api_key=said["OPENAI_API_KEY"], max_retries=0, timeout=DEADLINE_S
    )
    assert [model.id for model in client.models.list()]
    question = [{"role": "user", "content": "sum a b"}]
    seen = run.version
    replies, end = [], time.monotonic() + DEADLINE_S
    while run.version < seen + 3 or len(replies) < 2:
        reply = client.chat.completions.create(model="tiny", messages=question, max_tokens=8, temperature=0.0)
        replies.append(reply.choices[0].message.content)
        assert time.monotonic() < end, "training and answers go on beside each other"
    assert any(replies)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=said["OPENAI_BASE_URL"].strip(), api_key="wrong", max_retries=0).models.list()
    run.interrupt()
    run.wait()
    run.nothing_left()
    run.audit()


def test_where_sessions_are_is_said_in_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "psrl.sessions", str(tmp_path / "nowhere")]
    told = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert told.returncode == 2 and told.stderr == f"{tmp_path / 'nowhere'} is no run directory.\n"
