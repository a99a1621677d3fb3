"""Joiners in whole runs: they come to a running run, and leave it in every way. Real processes, real signals."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest
from runs import (
    DEADLINE_S,
    LONG,
    ONE_INSTANCE,
    Joiner,
    NewRun,
    Run,
    at_work,
    gated,
    of,
    stopped_at_work,
    trained,
)

from psrl.coordinator.records import Release, Reserve
from psrl.coordinator.service import DESCRIPTORS_PER_INSTANCE
from psrl.net.client import Client
from psrl.net.limits import new_context
from psrl.net.server import Server
from psrl.protocol.generation import GenerateRequest, TokenChunks
from psrl.rollout.connections import SOCKETS
from psrl.rundir.keys import new_keys
from psrl.telemetry.timeline_read import read_timeline

pytestmark = pytest.mark.process

STEPS = 24


def joined(run: Run, gate: Path, num_instances: int) -> tuple[Joiner, list[str]]:
    """Start the run and a joiner; its instances' names once each has made a group. `gate` is that of `gated`."""
    run.start()
    run.until(lambda: run.version >= 1, "a step was done")
    gate.touch()
    joiner = run.join("--instances", str(num_instances))
    names = [f"instance-{joiner.name}-{i}" for i in range(num_instances)]
    run.until(lambda: all(f"{name} is here" in run.log("coordinator") for name in names), f"{names} were there")
    gate.unlink()
    run.until(lambda: at_work(run, names), f"{names} had made groups")
    return joiner, names


def test_joined_instances_get_work_and_leave_without_losing_a_token(new_run: NewRun, tmp_path: Path) -> None:
    run = new_run({**LONG, **ONE_INSTANCE, **gated(tmp_path), "trainer.total_training_steps": STEPS})
    joiner, names = joined(run, tmp_path / "closed", 2)
    process, making = stopped_at_work(run, names[0])
    joiner.process.terminate()
    run.until(lambda: f"{joiner.name} leaves within" in run.log("coordinator"), "the coordinator knew that it leaves")
    process.resume()
    assert joiner.wait() == 0
    assert "left after SIGTERM" in joiner.output
    assert run.wait() == 0
    run.nothing_left()
    back = rf"instance-{joiner.name}-\d refused \d+ samples: they go on elsewhere with their [1-9]\d* tokens"
    assert re.search(back, run.log("agent-loop-0")), run.story()
    for name in names:
        assert "dismissed: all that was here has been taken over" in run.log(name)
        assert f"instance {name} has handed everything back and leaves" in run.log("coordinator")
        assert f"were at {name}" not in run.log("agent-loop-0"), "nothing was lost with it"
    whole_and_trained_once(run, making)
    tracks = read_timeline(run.dir.timeline)
    assert set(names) <= {track.name for track in tracks if track.role == "instance" and track.spans}


def whole_and_trained_once(run: Run, making: set[int]) -> None:
    """No group was lost, made anew or trained twice; `making` were in the joined instances when they left."""
    report = run.audit()
    assert report.status == "completed" and of(run.records(), Release) == []
    assert report.fates["trained"] == report.reserved == STEPS * 4
    buffers = trained(run.records())
    assert making and making <= {group.group for groups in buffers.values() for group in groups}
    assert run.steps() == list(range(1, STEPS + 1))
    assert run.outcome.counters.get("deaths/instance", 0) == 0


def test_a_killed_joiner_loses_nothing(new_run: NewRun, tmp_path: Path) -> None:
    run = new_run({**LONG, **ONE_INSTANCE, **gated(tmp_path), "trainer.total_training_steps": STEPS})
    joiner, (name,) = joined(run, tmp_path / "closed", 1)
    _, making = stopped_at_work(run, name)
    joiner.process.kill()
    assert joiner.wait() == -signal.SIGKILL
    run.until(lambda: f"{joiner.name}, which had joined, is gone" in run.log("coordinator"), "its loss was noticed")
    assert run.wait() == 0
    run.nothing_left()
    assert f"instance {name} is gone" in run.log("coordinator")
    assert re.search(rf"samples of \d+ groups were at {name}: .* with their \d+ tokens", run.log("agent-loop-0"))
    whole_and_trained_once(run, making)


def test_an_agent_loop_needs_no_more_open_files_for_an_instance_than_the_fleet_limit_counts() -> None:
    keys, fleet = new_keys(), 40
    server = Server(keys, "127.0.0.1", GenerateRequest)
    context, before = new_context(SOCKETS), open_files()
    clients = [Client(keys, TokenChunks, name=f"agent-loop-{i}", context=context) for i in range(fleet)]
    for client in clients:
        client.connect(server.endpoint)
    deadline = time.monotonic() + DEADLINE_S
    while not all(client.established for client in clients):
        assert time.monotonic() < deadline
        for client in clients:
            client.poll(0.0)
    accepted = fleet  # the other ends, in this same process
    assert open_files() - before - accepted <= DESCRIPTORS_PER_INSTANCE * fleet
    for client in clients:
        client.close(0.0)
    context.term()
    server.close(0.0)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_joiner_waits_for_the_run_goes_on_with_it_and_ends_with_it(new_run: NewRun, tmp_path: Path) -> None:
    steps = {"trainer.total_training_steps": 400}  # more than it gets to
    run = new_run({**LONG, **ONE_INSTANCE, **gated(tmp_path), **steps})
    stranger = run.join()
    assert stranger.wait() == 2 and "is no run directory" in stranger.output

    run.start()
    run.until(run.dir.config.exists, "the run directory was laid out")
    joiner = run.join("--agent-loops", "1")
    name = f"instance-{joiner.name}-0"
    run.until(lambda: at_work(run, [name]), f"{name} had made a group")
    (tmp_path / "closed").touch()
    run.interrupt()
    assert run.wait() == 130
    assert run.outcome.status == "interrupted"
    late = run.join("--wait-s", "0.1")
    assert late.wait() == 0 and "it was interrupted and has not gone on" in late.output
    assert joiner.process.poll() is None

    known, been = len(run.records()), run.log("coordinator").count(f"instance {name} is here")
    run.start({"trainer.total_training_steps": run.version + 8})  # none of which is made while the gate is closed
    run.until(lambda: run.log("coordinator").count(f"instance {name} is here") > been, "the joiner was there again")
    (tmp_path / "closed").unlink()
    run.until(lambda: any(r.instance == name for r in of(run.records()[known:], Reserve)), "it got groups again")
    assert run.wait() == 0
    assert joiner.wait() == 0 and "the run is over: completed" in joiner.output
    assert "waiting for the run" in joiner.output
    run.nothing_left()
    assert run.audit().status == "completed"

    late = run.join()
    assert late.wait(DEADLINE_S) == 0 and "nothing to join, the run is over: completed" in late.output
