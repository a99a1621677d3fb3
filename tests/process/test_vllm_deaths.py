"""Whole runs whose instances decode with vLLM, and whose processes die while they do."""

from __future__ import annotations

import pytest
from runs import DEADLINE_S, NewRun
from vllm_runs import REAL_VLLM, VLLM, all_gone, engine_of

pytestmark = REAL_VLLM

RESTART_S = 2 * DEADLINE_S
"""A start of vLLM takes half a minute of a core, and here they come one after the other."""


@pytest.mark.timeout(5 * DEADLINE_S)
def test_killed_workers_and_cores_end_their_instance_and_a_killed_instance_ends_them(new_run: NewRun) -> None:
    run = new_run(
        {
            **VLLM,
            "gen_actor_rollout_ref.rollout.engine_kwargs.vllm.distributed_executor_backend": "mp",
            "psrl.fault_tolerance.max_restarts": 3,
            "trainer.total_training_steps": 40,
        }
    )
    run.start()
    core, worker = engine_of(run)
    gone = [core, worker]
    worker.kill()
    run.until(lambda: "vLLM's engine core" in run.log("instance-0"), "the instance said why it ends")
    run.until(run.steps_from_now(1), "the run went on with another one", RESTART_S)
    core, worker = engine_of(run, besides=gone)
    gone += [core, worker]
    core.kill()
    run.until(lambda: "ended by signal SIGKILL" in run.log("instance-0"), "the instance said why it ends")
    core, worker = engine_of(run, besides=gone)
    gone += [core, worker, *core.children(recursive=True)]
    run.kill("instance-0")
    run.until(lambda: all_gone(gone), "nothing was left of the three engines")
    run.interrupt()
    assert run.wait() == 130, run.story()
    assert run.audit().findings == []
    run.nothing_left()
