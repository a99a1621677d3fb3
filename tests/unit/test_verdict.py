"""The verdict lies in the run directory before anybody is told of it: who sees supervisors end without one calls the run failed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from coordinator_run import Run

from psrl.coordinator.ledger import Ledger, replay
from psrl.coordinator.records import End
from psrl.coordinator.service import Service
from psrl.outcome import current_outcome
from psrl.protocol import control as c
from psrl.rundir.layout import RunDir

pytestmark = pytest.mark.unit

SUPERVISOR = "supervisor-rollout"


def test_the_verdict_is_journalled_and_published_before_it_is_spoken(tmp_path: Path) -> None:
    run, run_dir = Run(), RunDir(tmp_path / "run")
    run_dir.create()
    run.hello("supervisor", SUPERVISOR, c.SupervisorState())
    heard: list[c.Message] = []

    class Connection:
        def poll(self, timeout_s: float) -> list[object]:
            run.core.end("completed", "")
            return []

        def lost_peers(self) -> list[bytes]:
            return []

        def send(self, peer: bytes, message: c.Message) -> None:
            verdict = current_outcome(run_dir)
            assert verdict is not None and verdict.status == "completed"
            assert [record.status for record in replay(run_dir.ledger) if isinstance(record, End)] == ["completed"]
            heard.append(message)

        def close(self) -> None:
            pass

    service = Service.__new__(Service)
    service.role = SimpleNamespace(run_dir=run_dir)
    service.core_config = SimpleNamespace(
        trainer=SimpleNamespace(keep_samples=True),
        psrl=SimpleNamespace(status_collection=SimpleNamespace(coordinator_sync_interval_in_ms=100)),
    )
    service.core, service.server, service.ledger = run.core, Connection(), Ledger.open(run_dir.ledger)
    service.names, service.peers, service.writing = {b"s": SUPERVISOR}, {SUPERVISOR: b"s"}, {}
    service.next_fence_check = float("inf")
    service.run()
    assert [type(message) for message in heard] == [c.Shutdown]
