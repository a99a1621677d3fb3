"""The dashboard process against the real wandb, offline: what it writes is read back from wandb's own files."""

import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from psrl.telemetry.metrics import MetricsWriter
from psrl.telemetry.wandb_file import highest_step
from psrl.telemetry.wandb_logger import StepCursor, histogram_arrays, run_id

pytestmark = pytest.mark.process

DEADLINE_S = 120


def make_run(path, name="a-run"):
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(
        f"trainer:\n  project_name: a-project\n  experiment_name: {name}\npsrl:\n  staleness: 1\n"
        "optim:\n  lr: 1e-06\nalias: ${psrl.staleness}\n"
    )
    return path


def write_steps(run_dir, steps):
    with MetricsWriter(run_dir / "metrics.jsonl") as writer:
        for step in steps:
            histogram = {"0": 3, "2": 1}
            row = {"training/global_step": step, "critic/rewards/mean": step / 10, "staleness/hist": histogram}
            writer.write(row | {"actor/grad_norm": float("nan"), "training/num_samples": 8, "timing_s/step": 0.5})


def start(run_dir, *options, **environment):
    env = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    env |= {"HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9"} | environment
    command = [
        sys.executable,
        "-m",
        "psrl.telemetry.wandb_logger",
        str(run_dir),
        "--finish-deadline-s",
        str(DEADLINE_S / 2),
    ]
    command += options
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process):
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, output
    return output


def finish_run(run_dir, status="completed"):
    (run_dir / "outcome.json").write_text(json.dumps({"status": status}))


def wait_for(condition):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


def logged(run_dir):
    found = (line.strip() for path in (run_dir / "logs").glob("wandb_steps.*") for line in path.open())
    return [int(line) for line in found if line.isdigit()]


def records(path):
    """Protobuf records of a .wandb file: 7-byte header, then 32-KiB blocks of (crc u32, length u16, type u8, bytes)."""
    from wandb.proto import wandb_internal_pb2

    data, offset, parts = path.read_bytes(), 7, b""
    while offset + 7 <= len(data):
        left = 32768 - offset % 32768
        if left < 7:
            offset += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, offset)
        parts += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # the only, or the last piece of a record
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def offline_runs(run_dir):
    """For each start in order of time: (run record, [history row])."""
    out = []
    for path in sorted((run_dir / "logs" / "wandb").glob("offline-run-*/*.wandb")):
        header, history = None, []
        for record in records(path):
            if record.HasField("run"):
                header = record.run
            elif record.HasField("history"):
                items = record.history.item
                history.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
        out.append((header, history))
    return out


def test_two_starts_share_one_run_and_each_step_is_logged_once(tmp_path):
    run_dir = make_run(tmp_path / "run")
    write_steps(run_dir, [1, 2, 3])
    first = start(run_dir)
    wait_for(lambda: logged(run_dir) == [1, 2, 3])  # follows a run that is still going on
    write_steps(run_dir, [4])
    finish_run(run_dir, "interrupted")
    finish(first)
    (run_dir / "outcome.json").unlink()

    second = start(run_dir)
    write_steps(run_dir, [3, 4, 5, 6])  # resumed at the checkpoint of step 2
    wait_for(lambda: logged(run_dir)[-1:] == [6])
    finish_run(run_dir)
    finish(second)

    runs = offline_runs(run_dir)
    assert len(runs) == 2
    assert {header.run_id for header, _ in runs} == {run_id(run_dir)}
    assert [[row["_step"] for row in history] for _, history in runs] == [[1, 2, 3, 4], [5, 6]]
    header, history = runs[0]
    assert (header.project, header.display_name) == ("a-project", "a-run")
    config = {update.key: json.loads(update.value_json) for update in header.config.update}
    assert config["psrl"] == {"staleness": 1} and config["optim"] == {"lr": 1e-6} and config["alias"] == 1
    assert history[1]["critic/rewards/mean"] == 0.2 and history[1]["training/global_step"] == 2
    assert "actor/grad_norm" not in history[1]
    totals = [(row["training/total_samples"], row["training/total_time_s"]) for _, rows in runs for row in rows]
    assert totals == [(8 * step, 0.5 * step) for step in range(1, 7)]  # steps 3 and 4 count once
    assert history[0]["staleness/hist/_type"] == "histogram" and history[0]["staleness/hist/values"] == [3, 0, 1]
    times = [json.loads(line)["_timestamp"] for line in (run_dir / "metrics.jsonl").open()]
    assert history[0]["_timestamp"] == times[0]  # when the step was done, not when it was logged


def test_validations_go_along_with_the_steps_under_their_own_version(tmp_path):
    run_dir = make_run(tmp_path / "run")
    write_steps(run_dir, [1, 2, 3, 4])
    with MetricsWriter(run_dir / "validation.jsonl") as writer:
        for version in (0, 2, 4):
            writer.write({"training/global_step": version, "val/version": version, "val/reward_mean": version / 8})
    finish(start(run_dir, "--once"))
    ((_, history),) = offline_runs(run_dir)
    assert [row["_step"] for row in history] == [1, 2, 3, 4]
    assert [(row.get("val/version"), row.get("val/reward_mean")) for row in history] == [
        (0, 0.0), (2, 0.25), (None, None), (4, 0.5),
    ]  # fmt: skip
    assert [row["training/global_step"] for row in history] == [1, 2, 3, 4]


def test_members_of_a_sweep_have_ids_of_their_own_and_a_race_ends_with_one(tmp_path):
    ids = set()
    for name in ("a", "b", "c"):
        run_dir = make_run(tmp_path / name)
        code = "import sys, pathlib, psrl.telemetry.wandb_logger as w; print(w.run_id(pathlib.Path(sys.argv[1])))"
        command = [sys.executable, "-c", code, str(run_dir)]
        racers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
        answers = {racer.communicate(timeout=DEADLINE_S)[0].strip() for racer in racers}
        assert len(answers) == 1 and answers != {""}
        assert [path.name for path in (run_dir / "rendezvous").iterdir()] == ["wandb_id"]
        ids |= answers
    assert len(ids) == 3


def test_sigterm_logs_what_is_there_and_ends(tmp_path):
    run_dir = make_run(tmp_path / "run")
    write_steps(run_dir, [1])
    process = start(run_dir)
    wait_for(lambda: logged(run_dir) == [1])
    write_steps(run_dir, [2])
    for number in (signal.SIGINT, signal.SIGUSR2, signal.SIGTERM):  # only the last one is for it
        process.send_signal(number)
    finish(process)
    assert [row["_step"] for _, history in offline_runs(run_dir) for row in history] == [1, 2]


def make_member(sweep_dir, number, *overrides):
    """A member of a sweep without a name of its own."""
    run_dir = make_run(sweep_dir / str(number), "null")
    sweep = {"id": "ab12cd34", "dir": str(sweep_dir), "number": number, "overrides": list(overrides)}
    (run_dir / "run.json").write_text(json.dumps({"run_id": "x", "created": "", "sweep": sweep}))
    return run_dir


def test_members_of_a_sweep_are_one_group_and_each_goes_on_under_its_id(tmp_path):
    members = [make_member(tmp_path / "s", n, f"psrl.staleness={n}", "optim.lr=1e-6", "note='a b'") for n in range(3)]
    for run_dir in members:
        write_steps(run_dir, [1, 2])
        finish(start(run_dir, "--once"))
    write_steps(members[1], [3])
    finish(start(members[1], "--once"))  # requeued

    runs = [offline_runs(run_dir) for run_dir in members]
    headers = [header for parts in runs for header, _ in parts]
    assert [len(parts) for parts in runs] == [1, 2, 1]
    assert {header.run_group for header in headers} == {"ab12cd34"}
    assert [len({header.run_id for header, _ in parts}) for parts in runs] == [1, 1, 1]
    assert len({header.run_id for header in headers}) == 3
    assert [header.display_name for header in headers] == ["0-staleness=0", *["1-staleness=1"] * 2, "2-staleness=2"]
    assert [list(header.tags) for header in headers[:1]] == [["staleness=0"]]
    config = {update.key: json.loads(update.value_json) for update in headers[0].config.update}
    assert config["sweep/psrl.staleness"] == 1  # typed, as resolved: the file says 1 for every member of this test
    assert "sweep/optim.lr" not in config  # the same in every member


def steps_in_order(run_dir):
    return [row["_step"] for _, history in offline_runs(run_dir) for row in history]


def test_a_preempted_job_loses_no_step(tmp_path):
    """SIGTERM goes to every process of the job at once: W&B's own dies of it with what it has not written."""
    run_dir = make_run(tmp_path / "run")
    write_steps(run_dir, [1, 2, 3])
    process = start(run_dir)
    wait_for(lambda: logged(run_dir) == [1, 2, 3])
    write_steps(run_dir, [4])
    others = psutil.Process(process.pid).children(recursive=True)
    assert others, "W&B has a process of its own"
    for other in others:
        other.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    finish(process)
    assert steps_in_order(run_dir) == [1, 2, 3, 4]

    write_steps(run_dir, [3, 4, 5])  # requeued, resumed at the checkpoint of step 2
    finish(start(run_dir, "--once"))
    assert steps_in_order(run_dir) == [1, 2, 3, 4, 5]
    assert {header.run_id for header, _ in offline_runs(run_dir) if header} == {run_id(run_dir)}


def test_a_killed_logger_leaves_no_gap(tmp_path):
    run_dir = make_run(tmp_path / "run")
    write_steps(run_dir, [1])
    process = start(run_dir)
    wait_for(lambda: logged(run_dir) == [1])
    others = psutil.Process(process.pid).children(recursive=True)
    for other in others:
        other.suspend()  # what writes the file: it gets no further
    write_steps(run_dir, [2, 3])
    wait_for(lambda: logged(run_dir) == [1, 2, 3])
    for victim in [*others, process]:
        victim.kill()
    process.communicate(timeout=DEADLINE_S)
    held = steps_in_order(run_dir)
    write_steps(run_dir, [4])
    finish(start(run_dir, "--once"))
    assert len(held) < 3 and steps_in_order(run_dir) == [1, 2, 3, 4]


def test_after_an_unclean_end_what_is_held_is_not_logged_again(tmp_path):
    run_dir = make_run(tmp_path / "run")
    write_steps(run_dir, [1, 2, 3])
    finish(start(run_dir, "--once"))
    assert highest_step(run_dir / "logs" / "wandb", run_id(run_dir)) == 3
    mark = run_dir / "logs" / f"wandb_steps.{run_id(run_dir)}"
    mark.write_text(mark.read_text().replace("end", "5"))  # logged up to 5, then killed
    write_steps(run_dir, [4, 5, 6])
    finish(start(run_dir, "--once"))
    assert steps_in_order(run_dir) == [1, 2, 3, 4, 5, 6]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("lines", "held", "highest"),
    [
        (None, 9, 0),
        ("1\n2\nend", 0, 2),
        ("1\n2", 1, 1),
        ("1\n2", 7, 2),
        ("1\n2\nend\n3\n4", 0, 2),
        ("1\n2\nend\n3\n4", 3, 3),
        ("1\n2\nend\n3\nend", 0, 3),
    ],
)
def test_what_a_start_goes_on_from(tmp_path, lines, held, highest):
    path = tmp_path / "wandb_steps.x"
    if lines is not None:
        path.write_text(f"\n{lines}\n")
    rows = [{"training/global_step": step} for step in range(1, 12)]
    assert next(iter(StepCursor(path, lambda: held).new(rows)))["training/global_step"] == highest + 1


def test_it_ends_when_its_parent_dies(tmp_path):
    run_dir = make_run(tmp_path / "run")
    write_steps(run_dir, [1])
    command = [sys.executable, "-m", "psrl.telemetry.wandb_logger", str(run_dir)]
    code = f"import subprocess, time; print(subprocess.Popen({command!r}).pid, flush=True); time.sleep({DEADLINE_S})"
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    wait_for(lambda: logged(run_dir) == [1])
    parent.kill()
    parent.wait(DEADLINE_S)
    parent.stdout.close()
    wait_for(lambda: ended(pid))


def ended(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize("breakage", ["config", "logs"])
def test_a_failure_is_one_line_and_exit_status_0(tmp_path, breakage):
    run_dir = make_run(tmp_path / "run")
    write_steps(run_dir, [1])
    if breakage == "config":
        (run_dir / "config.yaml").write_text("trainer: {project_name: [unclosed")
    else:
        (run_dir / "logs").write_text("a file where the directory should be")
    output = finish(start(run_dir, "--once"))
    assert "dashboard off: " in output and "Traceback" not in output


@pytest.mark.unit
@pytest.mark.parametrize(
    ("counts", "width", "expected"),
    [
        ({"0": 3, "2": 1}, 1, ([3, 0, 1], [0, 1, 2, 3])),
        ({"1": 5}, 1, ([5], [1, 2])),
        ({"10": 1, "9": 2}, 1, ([2, 1], [9, 10, 11])),
        ({"16": 1, "18": 4, "24": 2}, 2, ([1, 4, 0, 2], [16, 18, 20, 24, 26])),
    ],
)
def test_histogram_arrays(counts, width, expected):
    assert histogram_arrays(counts, lambda _: width) == expected
