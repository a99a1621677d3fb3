"""Turns on shared GPUs: what the coordinator orders, what the locks allow, what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from coordinator_run import Run, assigned, of
from omegaconf import OmegaConf

from psrl.colocate.choices import publishes_from_host, vllm_options
from psrl.colocate.gpu_lock import GpuLock, TurnError
from psrl.colocate.turn import InstanceTurn, TrainerTurn
from psrl.config.checks import check
from psrl.config.colocate_checks import refuse_without_saver
from psrl.config.compose import compose_config
from psrl.config.errors import ConfigError
from psrl.config.schema import DeploymentConfig
from psrl.protocol import control as c
from psrl.slurm.plan import plan_job
from psrl.slurm.settings import SlurmConf

pytestmark = pytest.mark.unit

ONE_EACH = ["psrl.colocate=True", "psrl.deployment.n_rollout_instances=1"]


# ---- the coordinator -------------------------------------------------------------------------------------------


def colocated(**kwargs) -> Run:
    """Trainer at version 0 that waits for buffer 0, one sleeping instance, one agent loop."""
    run = Run(colocate=True, **kwargs)
    state = c.InstanceState(endpoint="tcp://i", version=-1, incarnation=0, max_concurrent=64, asleep=True)
    assert not of(run.hello("instance", "instance-0", state), c.Wake), (
        "nobody knows yet that the trainer has left the GPU"
    )
    run.trainer()
    run.hello("agent_loop", "agent-loop-0", c.AgentState())
    return run


def want(run: Run, buffer: int) -> list[tuple[str, c.Message]]:
    return run.tell("trainer-0", c.WantBuffer(buffer=buffer, incarnation=run.core.staleness.incarnation))


def test_the_instance_wakes_when_the_trainer_waits_and_sleeps_when_its_buffer_is_there() -> None:
    run = colocated(staleness=0)
    assert not run.settle(), "the trainer has the GPU: nothing is pulled, nothing is made"
    said = want(run, 0)
    assert [type(m) for name, m in said if name == "instance-0"] == [c.Wake, c.Pull]
    first, second = assigned(run.pulled("instance-0", 0))
    assert not of(run.finish(first.group), c.Sleep)
    said = run.finish(second.group)
    assert of(said, c.Buffer) and of(said, c.Sleep) and not assigned(said)
    run.tell("trainer-0", c.Published(version=1, incarnation=0))
    assert not run.settle(), "published, but the trainer has not left yet"
    said = want(run, 1)
    assert [type(m) for name, m in said if name == "instance-0"] == [c.Wake, c.Pull]
    assert of(said, c.Pull)[0].version == 1


def test_samples_in_flight_wait_for_the_next_turn() -> None:
    run = colocated(staleness=1)
    want(run, 0)
    groups = [a.group for a in assigned(run.pulled("instance-0", 0))]
    assert len(groups) == 4, "two buffers' worth"
    run.finish(groups[0])
    assert of(run.finish(groups[1]), c.Sleep)
    route = c.RouteRequest(samples=[(groups[2], 0)], reason="abort", instance="instance-0", tokens=[3])
    assert not of(run.tell("agent-loop-0", c.SampleMoves(left=[(groups[2], "instance-0", 1)]), route), c.Routed)
    run.tell("trainer-0", c.Published(version=1, incarnation=0))
    want(run, 1)
    assert of(run.pulled("instance-0", 1), c.Routed)[0].samples == [(groups[2], 0, "instance-0")]


def test_a_buffer_that_is_ready_at_once_changes_no_turn() -> None:
    run = colocated(staleness=1)
    want(run, 0)
    for group in [a.group for a in assigned(run.pulled("instance-0", 0))][:2]:
        said = run.finish(group)
    assert of(said, c.Sleep)
    for group in list(run.core.placement.groups):  # they were finished while the order was on its way
        run.finish(group)
    run.tell("trainer-0", c.Published(version=1, incarnation=0))
    said = want(run, 1)
    assert of(said, c.Buffer) and not of(said, c.Wake) and not of(said, c.Sleep)


def test_words_that_crossed_the_order_to_sleep_do_not_wake_it() -> None:
    run = colocated(staleness=0)
    want(run, 0)
    for assignment in assigned(run.pulled("instance-0", 0)):
        run.finish(assignment.group)
    view = run.core.placement.instances["instance-0"]
    run.tell("instance-0", c.PullStarted(version=0), c.Switching(version=0))
    run.pulled("instance-0", 0)
    assert (view.asleep, view.version, view.pulling, view.draining) == (True, -1, -1, False)


def test_a_drain_gives_the_trainer_the_gpu_and_a_long_turn_is_no_missing_instance() -> None:
    run = colocated(staleness=0)
    want(run, 0)
    run.pulled("instance-0", 0)
    said = run.tell("supervisor", c.Drain(reason="SIGTERM", grace_s=1e6))
    assert of(said, c.DrainNow) and of(said, c.Sleep)
    run.now = 1000.0
    run.core.tick(run.now)
    assert run.core.ended is None


def test_nobody_joins() -> None:
    run = colocated()
    said = run.hello("supervisor", "join-1", c.SupervisorState(children=["join-1-instance-0"], joined=True))
    assert "psrl.colocate=True" in of(said, c.Shutdown)[0].cause


# ---- locks and turns -------------------------------------------------------------------------------------------


class Recorded:
    """Memory that only says what was done with it."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def region(self):
        raise NotImplementedError

    def pause(self) -> None:
        self.log.append("pause")

    def resume(self) -> None:
        self.log.append("resume")


def test_the_two_sides_never_have_the_gpu_together(tmp_path: Path) -> None:
    memory, now = Recorded(), [0.0]
    trainer = TrainerTurn(GpuLock(tmp_path, ["0"], "trainer-0"), memory, 0.0)
    instance = InstanceTurn(GpuLock(tmp_path, ["0"], "instance-0"), 10.0, clock=lambda: now[0])
    instance.ask()
    assert not instance.entered()
    trainer.leave()
    trainer.leave()
    assert instance.entered() and not instance.entered() and not instance.asleep
    with pytest.raises(
        TurnError, match=r"GPU 0 was not free for trainer-0 within .*turn_timeout_s=0 s: .* instance-0 \(pid"
    ):
        trainer.enter()
    assert memory.log == ["pause"]
    instance.leave()
    trainer.enter()
    trainer.enter()
    assert memory.log == ["pause", "resume"] and instance.asleep
    instance.ask()
    now[0] = 10.0
    with pytest.raises(TurnError, match=r"instance-0 within .* held by trainer-0"):
        instance.entered()


def test_an_order_to_sleep_ends_the_wait(tmp_path: Path) -> None:
    held = GpuLock(tmp_path, ["0"], "trainer-0")
    assert held.try_acquire()
    instance = InstanceTurn(GpuLock(tmp_path, ["0"], "instance-0"), 10.0)
    instance.ask()
    instance.leave()
    held.release()
    assert not instance.entered() and instance.asleep


def test_several_gpus_are_taken_together_or_not_at_all(tmp_path: Path) -> None:
    one, both = GpuLock(tmp_path, ["1"], "trainer-1"), GpuLock(tmp_path, ["0", "1"], "instance-0")
    assert one.try_acquire() and not both.try_acquire()
    assert GpuLock(tmp_path, ["0"], "trainer-0").try_acquire(), "the first was given back"


def test_a_killed_holder_gives_the_gpu_back(tmp_path: Path) -> None:
    code = (
        "import sys, time, pathlib; from psrl.colocate.gpu_lock import GpuLock\n"
        "GpuLock(pathlib.Path(sys.argv[1]), ['0'], 'instance-0').acquire(1); print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        lock = GpuLock(tmp_path, ["0"], "trainer-0")
        assert not lock.try_acquire()
        process.kill()
        lock.acquire(10.0)
    assert lock.held


def test_without_colocation_nothing_is_shared() -> None:
    trainer, instance = TrainerTurn(None, None, 1.0), InstanceTurn(None, 1.0)
    with trainer.region():
        trainer.leave()
        trainer.enter()
    assert not (trainer.shared or instance.shared or instance.asleep)
    assert instance.build(lambda: "engine", lambda made: pytest.fail("it must not sleep")) == "engine"


# ---- refusals --------------------------------------------------------------------------------------------------


def composed(*overrides: str):
    return OmegaConf.to_object(compose_config(["preset=laptop", "task=chain_sum", *overrides]))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["psrl.colocate=True"], ["1 GPUs to train and 2 to generate"]),
        ([*ONE_EACH, "psrl.fine_grain_overlap.granularity=mini_batch"], ["granularity=mini_batch", "psrl.colocate=True"]),
        ([*ONE_EACH, "psrl.deployment.n_validate_instances=1", "trainer.test_freq=1"], ["n_validate_instances=1"]),
        (
            [*ONE_EACH, "psrl.rollout_coordination.partial_rollout.enable=False"],
            ["psrl.staleness=1", "partial_rollout.enable=False"],
        ),
        ([*ONE_EACH, "psrl.weights.route=vram"], ["psrl.weights.route=vram", "enable_nixl=False"]),
        ([*ONE_EACH, "psrl.tms.range=rollout"], ["psrl.tms.range=rollout", "null | train | all"]),
        (["psrl.tms.range=train"], ["psrl.tms.range=train", "psrl.colocate=False"]),
        ([*ONE_EACH, "psrl.tms.range=train", "psrl.tms.enable_cuda_graph=True"], ["enable_cuda_graph=True", "range=train"]),
        ([*ONE_EACH, "psrl.tms.enable_nixl=True"], ["enable_nixl=True", "range=null"]),
        ([*ONE_EACH, "psrl.tms.range=all", "psrl.tms.enable_nixl=True", "psrl.ps_mode=filesystem"], ["psrl.ps_mode=filesystem"]),
        ([*ONE_EACH, "psrl.fault_tolerance.turn_timeout_s=0"], ["turn_timeout_s=0", "greater than 0"]),
    ],
)  # fmt: skip
def test_bad_combinations_are_one_sentence(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check(composed(*overrides))
    for word in words:
        assert word in str(caught.value)


def test_what_colocation_takes() -> None:
    assert check(composed(*ONE_EACH)) == []
    assert (
        check(composed(*ONE_EACH, "psrl.tms.range=all", "psrl.tms.enable_nixl=True", "psrl.tms.enable_cuda_graph=True"))
        == []
    )
    (notice,) = check(composed(*ONE_EACH, "psrl.staleness=2"))
    assert "gains nothing over 1" in notice


def test_the_saver_needs_a_gpu_and_its_package() -> None:
    config = composed(*ONE_EACH, "psrl.tms.range=train")
    with pytest.raises(ConfigError, match="there is no GPU here"):
        refuse_without_saver(config, has_gpu=False, installed=True)
    with pytest.raises(ConfigError, match="pip install 'psrl\\[tms\\]'"):
        refuse_without_saver(config, has_gpu=True, installed=False)
    refuse_without_saver(config, has_gpu=True, installed=True)
    refuse_without_saver(composed(*ONE_EACH), has_gpu=False, installed=False)


def test_what_engine_and_channel_hear_of_it() -> None:
    assert (vllm_options(composed()), publishes_from_host(composed())) == ({}, False)
    plain = composed(*ONE_EACH)
    assert vllm_options(plain) == {"enable_sleep_mode": True, "enforce_eager": True} and publishes_from_host(plain)
    everything = composed(
        *ONE_EACH, "psrl.tms.range=all", "psrl.tms.enable_nixl=True", "psrl.tms.enable_cuda_graph=True"
    )
    assert vllm_options(everything) == {"enable_sleep_mode": True} and not publishes_from_host(everything)


def test_on_slurm_both_sides_share_one_node() -> None:
    deployment = DeploymentConfig(n_rollout_instances=2, train_ngpus_per_node=2)

    def gpus(job: str, colocate: bool) -> list[int | None]:
        conf = SlurmConf(job=job, gpus_per_node=None)
        planned = plan_job(
            deployment, conf, number=0, run_dir=Path("/r"), python="python", cluster=None, colocate=colocate
        )
        return [component.gpus_per_node for component in planned.components]

    assert (gpus("single_node", False), gpus("single_node", True)) == ([4], [2])
    with pytest.raises(ConfigError, match=r"job=het puts trainer and rollout on different nodes"):
        gpus("het", True)
