"""Whole runs for tests: `python -m psrl.launch` as a process of its own, watched and hurt from outside.

Nothing in here reaches into a run: it reads the run directory, as anybody could, and sends signals.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil

import psrl
from psrl.audit import AuditReport, audit
from psrl.coordinator.ledger import replay
from psrl.coordinator.records import AnyRecord, Occupy, Publish, Release, Reserve, Start, Take
from psrl.join import joiner_name
from psrl.outcome import Outcome, read_outcome
from psrl.protocol.samples import Group
from psrl.role import load_config
from psrl.rundir.layout import RunDir
from psrl.rundir.segments import read_sample
from psrl.telemetry.metrics import read_metrics

DEADLINE_S = 300.0
"""Longest wait for anything here: a run takes seconds on an idle machine, this allows for a busy one."""
MARK = "PSRL_TEST_RUN"
SMALL: dict[str, object] = {
    "preset": "laptop",
    "data.reasoning_gym.dataset": "null",
    "data.task": "digit_sum",
    "data.max_prompt_length": 64,
    "data.max_response_length": 16,
    "psrl.staleness_buffer_entries": 4,
    "psrl.rollout_n": 2,
    "trainer.total_training_steps": 6,
    "trainer.save_freq": 2,
    "trainer.logger": "[console]",
    "trainer.report": False,
    "train_actor_rollout_ref.actor.optim.lr_scheduler_type": "constant",
}
LONG: dict[str, object] = {"data.max_response_length": 256, "gen_actor_rollout_ref.rollout.ignore_eos": "True"}
"""Every response takes 256 decode steps: a kill meets samples in the making."""
ONE_INSTANCE: dict[str, object] = {"psrl.deployment.n_rollout_instances": 1}

T = TypeVar("T")


class Run:
    """One run directory and the launchers that were started on it, one after the other."""

    def __init__(self, path: Path, overrides: Mapping[str, object], module_dir: Path | None = None) -> None:
        self.dir = RunDir(path)
        self.overrides = SMALL | dict(overrides)
        self.launcher: subprocess.Popen[bytes] | None = None
        self.joiners: list[subprocess.Popen[bytes]] = []
        self._token = secrets.token_hex(8)
        """In the environment of every process of this run, however it was started."""
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, filter(None, [Path(psrl.__file__).parent.parent, module_dir]))),
            MARK: self._token,
        }
        self._output = path.with_name(f"{path.name}.out")
        self._known: set[psutil.Process] = set()

    # ---- start, wait, end ------------------------------------------------------------------------------------

    def start(self, changes: Mapping[str, object] | None = None) -> None:
        """A launcher with `overrides` and, for this start, `changes`."""
        self.launcher = self._launch(changes or {})

    def _launch(self, changes: Mapping[str, object]) -> subprocess.Popen[bytes]:
        settings = self.overrides | dict(changes)
        argv = [
            sys.executable,
            "-m",
            "psrl.launch",
            f"run_dir={self.dir.path}",
            *(f"{k}={v}" for k, v in settings.items()),
        ]
        with self._output.open("ab") as output:
            return subprocess.Popen(
                argv,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def join(self, *arguments: str) -> Joiner:
        """A joiner on this host."""
        joiner = Joiner(self, arguments)
        self.joiners.append(joiner.process)
        return joiner

    def second_launcher(self) -> int:
        """Exit code of another launcher on the same run directory, while the first one runs."""
        return self._launch({}).wait(DEADLINE_S)

    def wait(self, timeout_s: float = DEADLINE_S) -> int:
        """Exit code of the launcher (-9: it was killed); the test fails if it is not there in time."""
        assert self.launcher is not None
        try:
            return self.launcher.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the launcher has not ended within {timeout_s:g} s\n{self.story()}") from None

    def launch(self, changes: Mapping[str, object] | None = None) -> int:
        """`start` and `wait`."""
        self.start(changes)
        return self.wait()

    def until(self, condition: Callable[[], T | None], what: str, deadline_s: float = DEADLINE_S) -> T:
        """The first true value of `condition`; fails when the launcher ends or the deadline passes before."""
        assert self.launcher is not None
        deadline = time.monotonic() + deadline_s
        while True:
            ended = self.launcher.poll() is not None
            if value := condition():
                return value
            assert not ended, f"the run ended with {self.launcher.returncode} before {what}\n{self.story()}"
            assert time.monotonic() < deadline, f"waited {deadline_s:g} s for {what}\n{self.story()}"
            time.sleep(0.05)

    def close(self) -> None:
        """Kill whatever is left, each process by its own id."""
        for process in self.processes():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass
        for process in filter(None, [self.launcher, *self.joiners]):
            process.wait(DEADLINE_S)

    # ---- processes -------------------------------------------------------------------------------------------

    def processes(self) -> set[psutil.Process]:
        """Living processes of this run: the launcher's tree, whoever was in it before, and whoever carries the mark."""
        if self.launcher is not None and self.launcher.poll() is None:
            try:
                launcher = psutil.Process(self.launcher.pid)
                self._known |= {launcher, *launcher.children(recursive=True)}
            except psutil.NoSuchProcess:
                pass
        self._known |= {p for p in psutil.process_iter() if self._is_marked(p)}
        self._known = {p for p in self._known if lives(p)}
        return set(self._known)

    def _is_marked(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARK) == self._token
        except (psutil.Error, OSError):
            return False

    def find(self, name: str) -> psutil.Process | None:
        """The process of the role `name` ("instance-0", "supervisor-trainer"), None if there is none now."""
        for process in self.processes():
            try:
                argv = process.cmdline()
            except psutil.Error:
                continue
            if name in argv and str(self.dir.path) in argv and process.pid != getattr(self.launcher, "pid", None):
                return process
        return None

    def kill(self, name: str, number: int = signal.SIGKILL) -> psutil.Process:
        """Send a signal to the role `name`, waiting until it is there. Returns its process."""
        process = self.until(lambda: self.find(name), f"{name} was there")
        process.send_signal(number)
        return process

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """Send a signal to the launcher."""
        assert self.launcher is not None
        self.launcher.send_signal(number)

    def nothing_left(self) -> None:
        """Every process of the run ends within the deadline."""
        deadline = time.monotonic() + 60.0
        while left := self.processes():
            assert time.monotonic() < deadline, (
                f"processes are left: {[(p.pid, p.cmdline()) for p in left]}\n{self.story()}"
            )
            time.sleep(0.05)

    # ---- what the run directory says -------------------------------------------------------------------------

    def records(self) -> list[AnyRecord]:
        return list(replay(self.dir.ledger)) if self.dir.ledger.is_dir() else []

    @property
    def version(self) -> int:
        """The newest version in the ledger; 0 before the first."""
        return next((r.version for r in reversed(self.records()) if isinstance(r, Publish | Start)), 0)

    def steps_from_now(self, steps: int) -> Callable[[], bool]:
        """True once `steps` more versions are published."""
        wanted = self.version + steps
        return lambda: self.version >= wanted

    def stands_still(self, seconds: float) -> Callable[[], bool]:
        """Whether no version has come for so long."""
        last, since = self.version, time.monotonic()

        def still() -> bool:
            nonlocal last, since
            if self.version != last:
                last, since = self.version, time.monotonic()
            return time.monotonic() - since >= seconds

        return still

    def open_groups(self) -> dict[int, Reserve]:
        """Groups in the making."""
        found: dict[int, Reserve] = {}
        for record in self.records():
            if isinstance(record, Reserve):
                found[record.group] = record
            elif isinstance(record, Occupy | Release):
                found.pop(record.group, None)
        return found

    def audit(self) -> AuditReport:
        """The audit of the ledger, which must be free of findings."""
        config = load_config(self.dir)
        report = audit(
            self.records(), buffer_entries=config.psrl.staleness_buffer_entries, staleness=config.psrl.staleness
        )
        assert report.findings == [], report.lines()
        return report

    @property
    def outcome(self) -> Outcome:
        found = read_outcome(self.dir)
        assert found is not None, self.story()
        return found

    def steps(self) -> list[int]:
        """Steps of the surviving history in the metrics file."""
        return [row["training/global_step"] for row in read_metrics(self.dir.metrics)]

    def log(self, name: str) -> str:
        path = self.dir.logs / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def output(self) -> str:
        """What all launchers printed."""
        return self._output.read_text(errors="replace") if self._output.exists() else ""

    def story(self) -> str:
        """Everything that helps to understand a failed test."""
        logs = sorted(self.dir.logs.glob("*.log")) if self.dir.logs.is_dir() else []
        parts = [
            f"--- launcher\n{self.output[-4000:]}",
            *(f"--- {log.name}\n{self.log(log.stem)[-4000:]}" for log in logs),
        ]
        return "\n".join(parts)


class Joiner:
    """`python -m psrl.join` as a process of its own; its log is in `output`."""

    def __init__(self, run: Run, arguments: tuple[str, ...]) -> None:
        self._output = run.dir.path.with_name(f"{run.dir.path.name}.join-{len(run.joiners)}.out")
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "psrl.join", str(run.dir.path), *arguments],
                env=run.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    @property
    def name(self) -> str:
        """The name that its roles have after "instance-" and "agent-loop-"."""
        return joiner_name({}, socket.gethostname(), self.process.pid)

    def wait(self, timeout_s: float = DEADLINE_S) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the joiner has not ended within {timeout_s:g} s\n{self.output}") from None


def trained(records: list[AnyRecord]) -> dict[int, list[Reserve]]:
    """Buffer -> the groups trained in it, in the surviving history: a trainer start takes back what its checkpoint does
    not hold."""
    groups: dict[int, Reserve] = {}
    buffers: dict[int, list[Reserve]] = {}
    version = 0
    for record in records:
        match record:
            case Reserve():
                groups[record.group] = record
            case Start():
                version = record.version
                buffers = {buffer: taken for buffer, taken in buffers.items() if buffer < version}
            case Take():
                buffers.setdefault(record.buffer, []).extend(groups[number] for number in record.groups)
            case Publish():
                version = record.version
    return {buffer: taken for buffer, taken in buffers.items() if buffer < version}


def at_work(run: Run, names: Collection[str]) -> bool:
    """Each of these instances has made a group: a process may be busy with imports, one that said hello with its first weights."""
    records = run.records()
    sealed = {record.group for record in of(records, Occupy)}
    return set(names) <= {reserve.instance for reserve in of(records, Reserve) if reserve.group in sealed}


def stopped_at_work(run: Run, name: str) -> tuple[psutil.Process, set[int]]:
    """The process of an instance, stopped in mid-generation, and the groups that it was making."""

    def reserved() -> set[int]:
        return {group for group, reserve in run.open_groups().items() if reserve.instance == name}

    def stopped() -> tuple[psutil.Process, set[int]] | None:
        before, process = reserved(), run.find(name)
        if run.version < 1 or not before or process is None:
            return None
        worked = process.cpu_times().user + 0.1
        run.until(lambda: process.cpu_times().user > worked, f"{name} had worked on them")
        process.suspend()
        time.sleep(1.0)  # what had left it is in the ledger now; what is open still can only be here
        if groups := before & reserved():
            return process, groups
        process.resume()
        return None

    return run.until(stopped, f"{name} was in mid-generation")


GATE = '''
import pathlib, time

def reward(data_source, solution_str, ground_truth, extra_info):
    """Waits while the gate is closed: the run then waits too, and no step is used up."""
    while (pathlib.Path(__file__).parent / "closed").exists():
        time.sleep(0.02)
    return float(len(solution_str) % 2)
'''


def gated(directory: Path) -> dict[str, object]:
    """A reward that waits while `directory`/closed exists."""
    (directory / "gate.py").write_text(GATE)
    return {"reward.function": "gate:reward", "reward.timeout_s": DEADLINE_S}


def lives(process: psutil.Process) -> bool:
    """It runs, and is no zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


NewRun = Callable[..., Run]
"""The fixture `new_run`: (overrides, name) to a run that is not started yet."""


def sealed_groups(run: Run) -> dict[int, Group]:
    """Every group that was sealed for training, by number, read as a trainer reads it."""
    refs = {record.group: record.ref for record in of(run.records(), Occupy)}
    return {
        group: msgspec.msgpack.decode(read_sample(run.dir.samples, r.segment, r.offset, r.length, r.crc), type=Group)
        for group, r in refs.items()
    }


def of(records: list[AnyRecord], kind: type[T]) -> list[T]:
    """The records of one kind."""
    return [record for record in records if isinstance(record, kind)]
