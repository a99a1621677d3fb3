"""Deaths of vLLM's processes while new weights are on their way to them, in a whole run: it goes on, and no weights are ever torn.

The instance, which does the reading, is stopped in the midst of it, so that the death surely comes before the last byte.
"""

from __future__ import annotations

import contextlib
import os
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from runs import DEADLINE_S, NewRun, Run
from vllm_runs import (
    EVERY_VERSION,
    REAL_VLLM,
    VLLM,
    all_gone,
    each_version_made_its_tokens,
    engine_of,
    every_step_learns,
)

from psrl.host_memory import map_file
from psrl.rundir.node_local import node_store_path
from psrl.weights.channel.slot_header import read_header
from psrl.weights.memory import PAGE

pytestmark = REAL_VLLM

WIDE: dict[str, object] = {
    **VLLM,
    **EVERY_VERSION,
    "model.tiny.hidden_size": 256,  # 16 MiB: time enough to meet a transfer
    "model.tiny.intermediate_size": 1024,
    "model.tiny.num_layers": 4,
    "psrl.weights.route": "nixl",
    "gen_actor_rollout_ref.rollout.engine_kwargs.vllm.distributed_executor_backend": "mp",
    "psrl.fault_tolerance.max_restarts": 2,
    "trainer.total_training_steps": 200,
}


def fetched(run: Run) -> Callable[[], list[bool]] | None:
    """Looks at which of the two slots of this node's store are whole (psrl.weights.node_store): one loses its header when a newer
    version begins to arrive in it, and gets it back with the last byte. None: there is no store yet."""
    with contextlib.suppress(FileNotFoundError), node_store_path(run.dir.path).open("r+b") as file:
        size = os.fstat(file.fileno()).st_size
        if size > 2 * PAGE:
            store = map_file(file.fileno(), size)
            slots = store[PAGE:].chunk(2)
            return lambda: [read_header(slot) is not None for slot in slots]
    return None


def stopped_in_mid_transfer(run: Run, instance: psutil.Process) -> Callable[[], list[bool]]:
    """Stop an instance while it reads a version from the trainer. Returns what tells whether that has arrived after all."""

    def caught() -> Callable[[], list[bool]] | None:
        whole, end_s = fetched(run), time.monotonic() + 5.0
        if whole is None or not all(whole()):
            return None
        while all(whole()):
            if time.monotonic() > end_s:
                return None
            time.sleep(0.0005)
        instance.suspend()
        time.sleep(0.2)
        if not all(whole()):
            return whole
        instance.resume()  # it was over before the signal took effect
        return None

    return run.until(caught, "a transfer was under way")


def handed_over(instance: psutil.Process) -> Callable[[], int]:
    """Checksum of the memory in which an instance hands whole weights to its workers."""
    found = [fd for fd in Path(f"/proc/{instance.pid}/fd").iterdir() if "psrl-weights" in str(fd.readlink())]
    return lambda: zlib.crc32(found[0].read_bytes())


@pytest.mark.timeout(5 * DEADLINE_S)
def test_processes_killed_in_mid_transfer_cost_their_instance_and_no_token_is_made_by_torn_weights(
    new_run: NewRun, tmp_path: Path
) -> None:
    run = new_run({**WIDE, **every_step_learns(tmp_path)})
    run.start()
    core, worker = engine_of(run)
    instance = run.until(lambda: run.find("instance-0"), "there was an instance")
    gone = [core, worker, instance]
    whole = stopped_in_mid_transfer(run, instance)
    core.kill()
    run.until(lambda: all_gone([core, worker]), "its worker went with the core")
    assert not all(whole())
    instance.resume()
    run.until(lambda: all_gone(gone), "the instance ended")
    run.until(run.steps_from_now(2), "the run went on with another one", 2 * DEADLINE_S)

    core, worker = engine_of(run, besides=gone)
    instance = run.until(lambda: run.find("instance-0"), "there was an instance again")
    gone += [core, worker, instance]
    whole = stopped_in_mid_transfer(run, instance)
    content = handed_over(instance)
    before = content()
    worker.suspend()
    instance.resume()
    run.until(lambda: all(whole()) and content() != before, "the weights lay before a worker that did not take them")
    worker.kill()
    run.until(lambda: all_gone(gone), "the instance ended in the midst of the switch")
    newest = run.version
    run.until(run.steps_from_now(2), "the run went on with a third one", 2 * DEADLINE_S)

    run.interrupt()
    assert run.wait() == 130, run.story()
    assert run.audit().findings == []
    assert run.log("coordinator").count("instance instance-0 ended") == 2
    assert each_version_made_its_tokens(run)[-1] >= newest, "the third one had no newer weights"
    run.nothing_left()
