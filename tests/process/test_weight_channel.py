"""Weights move between real processes, over real NIXL and through real files; this process is the rollout instance."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from weight_role import differing, kill_for_good, make_publisher, make_puller, shards, specs, stop_for_good, whole
from weight_world import DEADLINE_S, Process, World, publish, soon

from psrl.config.schema import Config
from psrl.protocol.weights import SharedSlot
from psrl.role import Role
from psrl.trainer.backends.base import WeightShard
from psrl.weights import node_store
from psrl.weights.channel import make_publisher as publisher_of_role
from psrl.weights.channel import make_puller as puller_of_role
from psrl.weights.channel import mapped_reads, nixl_available
from psrl.weights.channel.background import BackgroundPull
from psrl.weights.channel.base import PullError, StagedWeights
from psrl.weights.channel.nixl_publisher import NixlPublisher
from psrl.weights.checksum import checksum
from psrl.weights.mode import settle_mode
from psrl.weights.receiver import Pulled, PullFailed, WeightReceiver
from psrl.weights.split import Split

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(nixl_available() is not None, reason=f"nixl: {nixl_available()}"),
]

CHANNELS = ["shm", "filesystem"]


@pytest.mark.parametrize(
    ("channel", "num_ranks"), [("shm", 1), ("shm", 3), ("nixl", 1), ("nixl", 2), ("filesystem", 2)]
)
def test_staged_weights_are_bit_equal_to_the_shards(world: World, channel: str, num_ranks: int) -> None:
    publishers = world.publishers(channel, num_ranks)
    puller = make_puller(channel, world.run_dir, specs(1))
    for version in range(3):
        publish(publishers, version)
        staged = puller.pull(version, 0, soon())
        assert (staged.version, staged.incarnation) == (version, 0)
        assert differing(staged, 1, version) == []
        assert staged.nbytes == sum(tensor.nbytes for _, tensor in staged.tensors())
    puller.close()


@pytest.mark.parametrize(
    ("ps_mode", "route", "dtype", "transport"),
    [
        ("auto", "auto", None, "shm (on one host)"),
        ("nixl", "nixl", "bfloat16", f"nixl ({os.environ.get('UCX_TLS', 'posix,cma,tcp')})"),
        ("filesystem", "auto", "bfloat16", "filesystem"),
    ],
)
def test_the_configuration_decides_channel_and_dtype(
    world: World, ps_mode: str, route: str, dtype: str | None, transport: str
) -> None:
    config = Config()
    config.psrl.ps_mode, config.psrl.weights.route = ps_mode, route
    config.model.dtype = "float32" if dtype else "bfloat16"
    config.gen_actor_rollout_ref.rollout.dtype = dtype
    settle_mode(config, world.run_dir)
    role = Role(world.run_dir, config, "trainer-0", "here", local=True, attempt="0")
    publisher, puller = publisher_of_role(role, 0, 1), puller_of_role(role, specs(1))
    publisher.serve()
    publisher.publish(0, 0, shards(1, 0, 0, 1))
    staged = puller.pull(0, 0, soon())
    assert differing(staged, 1, 0) == []
    assert puller.transport == staged.transport == transport
    puller.close()
    publisher.close()


@pytest.mark.parametrize("channel", CHANNELS)
def test_a_version_can_be_pulled_only_when_every_rank_has_it_whole(world: World, channel: str) -> None:
    first, second = world.publishers(channel, 2)
    publish([first, second], 0)
    publish([first], 1)
    puller = make_puller(channel, world.run_dir, specs(1))
    with pytest.raises(PullError, match=r"rank 1|r1\.json") as caught:
        puller.pull(1, 0, soon(2.0 if channel == "filesystem" else DEADLINE_S))  # ranks refuse at once
    assert caught.value.retryable
    publish([second], 1)
    assert differing(puller.pull(1, 0, soon()), 1, 1) == []
    puller.close()


@pytest.mark.parametrize("channel", CHANNELS)
def test_a_version_that_is_not_kept_any_more_is_refused(world: World, channel: str) -> None:
    publishers = world.publishers(channel, 1)
    for version in range(3):
        publish(publishers, version)
    puller = make_puller(channel, world.run_dir, specs(1))
    with pytest.raises(PullError, match=r"not held|not kept"):
        puller.pull(0, 0, soon())
    for version in (1, 2):
        assert differing(puller.pull(version, 0, soon()), 1, version) == []
    puller.close()


@pytest.mark.parametrize("channel", CHANNELS)
def test_wrong_names_or_dtypes_are_refused_by_name_and_for_good(world: World, channel: str) -> None:
    publish(world.publishers(channel, 1), 0)
    renamed = {("other" if name == "scale" else name): spec for name, spec in specs(1).items()}
    float32 = {name: (shape, torch.float32) for name, (shape, _) in specs(1).items()}
    for expected, message in [(renamed, "unexpected scale; missing other"), (float32, "published as bfloat16")]:
        puller = make_puller(channel, world.run_dir, expected)
        with pytest.raises(PullError, match=message) as caught:
            puller.pull(0, 0, soon())
        assert not caught.value.retryable
        puller.close()


def test_publishing_the_next_version_does_not_disturb_a_reader(world: World) -> None:
    publishers = world.publishers("shm", 1, mib=8)
    publish(publishers, 0)
    puller = make_puller("shm", world.run_dir, specs(8))
    during = []

    def publish_next(_arrived: int) -> None:
        if not during:
            during.append(publishers[0].ask(publish=[1, 0]))

    puller.on_progress = publish_next
    assert differing(puller.pull(0, 0, soon()), 8, 0) == []
    assert during[0]["revoked"] == 0
    assert differing(puller.pull(1, 0, soon()), 8, 1) == []
    puller.close()


@pytest.mark.parametrize("channel", ["shm", "nixl"])
def test_a_slow_reader_loses_its_slot_and_notices(world: World, channel: str) -> None:
    publishers = world.publishers(channel, 1, mib=8)
    publish(publishers, 0)
    puller = make_puller(channel, world.run_dir, specs(8))
    during = []

    def publish_two(_arrived: int) -> None:
        if not during:
            during.extend([publishers[0].ask(publish=[1, 0]), publishers[0].ask(publish=[2, 0])])

    puller.on_progress = publish_two
    with pytest.raises(PullError, match="overwrote version 0"):
        puller.pull(0, 0, soon())
    assert [answer["revoked"] for answer in during] == [0, 1]
    assert differing(puller.pull(2, 0, soon()), 8, 2) == []
    puller.close()


def test_readers_do_not_queue_behind_each_other(world: World) -> None:
    publishers = world.publishers("shm", 1, mib=4)
    publish(publishers, 0)
    others = [world.reader("shm", 4), world.reader("shm", 4)]
    puller = make_puller("shm", world.run_dir, specs(4))
    during: list[dict] = []

    def let_others_read(_arrived: int) -> None:
        # This reader is in the middle of its read, and stays there until both others are through.
        if not during:
            for other in others:
                other.say(pull=[0, 0, DEADLINE_S])
            during.extend(other.hear() for other in others)

    puller.on_progress = let_others_read
    assert differing(puller.pull(0, 0, soon()), 4, 0) == []
    assert [answer["differing"] for answer in during] == [[], []]
    assert publishers[0].ask(readers=True)["peak"] >= 2
    puller.close()


def test_a_killed_publisher_fails_the_pull_and_its_successor_is_found(world: World) -> None:
    publishers = world.publishers("nixl", 2, mib=8)
    publish(publishers, 0)
    puller = make_puller("nixl", world.run_dir, specs(8))
    earlier = puller.pull(0, 0, soon())
    publish(publishers, 1)
    server = publishers[1].server_pid()

    def kill_both(_arrived: int) -> None:
        publishers[1].kill()
        kill_for_good(server)

    puller.on_progress = kill_both
    with pytest.raises(PullError) as caught:
        puller.pull(1, 0, soon())
    assert "deadline" not in caught.value.cause and caught.value.retryable
    with pytest.raises(RuntimeError, match="are gone"):
        next(earlier.tensors())  # the torn buffer can not be taken for weights
    publishers[0].kill()
    puller.on_progress = None
    successors = world.publishers("nixl", 2, mib=8)
    publish(successors, 0, incarnation=1)
    staged = puller.pull(0, 1, soon())
    assert differing(staged, 8, 0) == []
    puller.close()


def test_a_running_publisher_of_an_older_incarnation_is_left_for_its_successor(world: World) -> None:
    publish(world.publishers("nixl", 1), 5, incarnation=0)
    puller = make_puller("nixl", world.run_dir, specs(1))
    puller.pull(5, 0, soon())
    publish(world.publishers("nixl", 2), 3, incarnation=1)  # another number of ranks, too
    assert differing(puller.pull(3, 1, soon()), 1, 3) == []
    puller.close()


@pytest.mark.parametrize("channel", CHANNELS)
def test_nothing_published_is_an_error_by_the_deadline(world: World, channel: str) -> None:
    puller = make_puller(channel, world.run_dir, specs(1))
    with pytest.raises(PullError):
        puller.pull(0, 0, soon(0.5))
    puller.close()


def test_a_stopped_publisher_fails_the_pull_by_its_deadline(world: World) -> None:
    publishers = world.publishers("shm", 1)
    publish(publishers, 0)
    puller = make_puller("shm", world.run_dir, specs(1))
    stop_for_good(publishers[0].pid)
    with pytest.raises(PullError, match="deadline"):
        puller.pull(0, 0, soon(1.0))
    os.kill(publishers[0].pid, signal.SIGCONT)
    assert differing(puller.pull(0, 0, soon()), 1, 0) == []
    puller.close()


def test_a_read_that_stops_in_mid_transfer_keeps_only_the_abandoned_buffer(world: World) -> None:
    # Over TCP the progress of who offers the memory is needed, so the read hangs; its bytes arrive later, after it was given up.
    tcp = {"UCX_TLS": "tcp"}
    publishers = world.publishers("nixl", 1, mib=16, **tcp)
    publish(publishers, 0)
    reader = world.reader("nixl", 16, **tcp)
    assert reader.ask(pull=[0, 0, DEADLINE_S])["differing"] == []  # the two have met
    publish(publishers, 1)
    server = publishers[0].server_pid()
    failed = reader.ask(pull=[1, 0, 5.0], stop=server)
    assert "deadline" in failed["error"] and failed["hanging"] == 1
    os.kill(server, signal.SIGCONT)
    for version in (2, 3, 4):
        publish(publishers, version)
        again = reader.ask(pull=[version, 0, DEADLINE_S])
        assert again["differing"] == []
    assert again["hanging"] == 0
    nobody_reads(publishers[0])


def nobody_reads(publisher: Process) -> None:
    """Once it has heard that they have left."""
    end = soon()
    while publisher.ask(readers=True)["now"]:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_killed_reader_holds_nothing_up(world: World) -> None:
    publishers = world.publishers("nixl", 1, mib=8)
    publish(publishers, 0)
    reader = world.reader("nixl", 8)
    reader.say(pull=[0, 0, DEADLINE_S], announce=1)
    assert reader.hear() == {"started": True}
    reader.kill()
    for version in (1, 2, 3):
        assert publishers[0].ask(publish=[version, 0])["nbytes"] > 0
    nobody_reads(publishers[0])
    puller = make_puller("nixl", world.run_dir, specs(8))
    assert differing(puller.pull(3, 0, soon()), 8, 3) == []
    puller.close()


@pytest.mark.parametrize("channel", ["shm", "nixl"])
def test_bytes_that_changed_after_publication_are_never_staged(world: World, channel: str) -> None:
    publishers = world.publishers(channel, 1)
    publish(publishers, 0)
    publishers[0].ask(scribble=0)
    puller = make_puller(channel, world.run_dir, specs(1))
    with pytest.raises(PullError, match="wrong checksum"):
        puller.pull(0, 0, soon())
    puller.close()


@pytest.mark.parametrize("fault", ["altered", "short", "gone"])
def test_a_damaged_file_is_never_staged(world: World, fault: str) -> None:
    publish(world.publishers("filesystem", 1), 0)
    payload = world.run_dir.weights / "v0-0-r0.bin"
    data = payload.read_bytes()
    payload.unlink()
    if fault != "gone":
        payload.write_bytes(data[:4096] + bytes([data[4096] ^ 1]) + data[4097:] if fault == "altered" else data[:-100])
    puller = make_puller("filesystem", world.run_dir, specs(1))
    with pytest.raises(PullError, match=r"v0-0-r0\.bin"):
        puller.pull(0, 0, soon(1.0))
    payload.write_bytes(data)  # it has become visible at last
    assert differing(puller.pull(0, 0, soon()), 1, 0) == []
    puller.close()


@pytest.mark.parametrize("channel", CHANNELS)
def test_versions_only_go_forward(tmp_path: Path, channel: str) -> None:
    world = World(tmp_path)
    publisher = make_publisher(channel, world.run_dir, 0, 1)
    publisher.serve()
    publisher.publish(4, 1, shards(1, 4, 0, 1))
    for version, incarnation in [(4, 1), (3, 1), (9, 0)]:
        with pytest.raises(ValueError, match="not newer than the published version 4 of incarnation 1"):
            publisher.publish(version, incarnation, shards(1, 4, 0, 1))
    with pytest.raises(ValueError, match="fixed for a run"):
        publisher.publish(5, 1, shards(1, 4, 0, 1)[1:])
    publisher.publish(2, 2, shards(1, 2, 0, 1))
    publisher.close()


def test_an_idle_publisher_sleeps(world: World) -> None:
    publishers = world.publishers("nixl", 1)
    publish(publishers, 0)
    puller = make_puller("nixl", world.run_dir, specs(1))
    puller.pull(0, 0, soon())
    assert publishers[0].ask(idle=3.0)["cpu"] < 0.1
    puller.close()


def test_a_pull_runs_beside_the_loop_and_one_at_a_time(world: World) -> None:
    publishers = world.publishers("nixl", 1, mib=8)
    publish(publishers, 0)
    background = BackgroundPull(make_puller("nixl", world.run_dir, specs(8)), timeout_s=DEADLINE_S)
    assert background.poll() is None and not background.busy
    background.start(0, 0)
    with pytest.raises(RuntimeError, match="another one is going on"):
        background.start(0, 0)
    outcome, end = None, soon()
    while outcome is None and time.monotonic() < end:
        outcome = background.poll()
        time.sleep(0.001)
    assert isinstance(outcome, StagedWeights) and outcome.pull_s > 0
    assert differing(outcome, 8, 0) == []
    assert not background.busy and background.poll() is None
    background.start(7, 0)
    failure, end = None, soon()
    while failure is None and time.monotonic() < end:
        failure = background.poll()
        time.sleep(0.001)
    assert isinstance(failure, PullError) and "version 7" in failure.cause
    background.close()


def test_closing_ends_a_pull_that_hangs(world: World) -> None:
    publishers = world.publishers("nixl", 1)
    publish(publishers, 0)
    os.kill(publishers[0].pid, signal.SIGSTOP)
    background = BackgroundPull(make_puller("nixl", world.run_dir, specs(1)), timeout_s=3600.0)
    background.start(0, 0)
    background.close()
    assert not background.busy


def test_a_trainer_killed_while_it_writes_is_noticed(world: World) -> None:
    publishers = world.publishers("shm", 1, mib=8)
    publish(publishers, 0)
    publish(publishers, 1)
    puller = make_puller("shm", world.run_dir, specs(8))

    def die_in_the_slot_that_is_read(_arrived: int) -> None:
        if publishers[0].child.poll() is None:
            publishers[0].say(die_writing=[2, 0])
            publishers[0].child.wait(DEADLINE_S)

    puller.on_progress = die_in_the_slot_that_is_read
    with pytest.raises(PullError, match="overwrote version 0"):
        puller.pull(0, 0, soon())
    with pytest.raises(PullError, match=r"rank 0|did not answer") as caught:
        puller.pull(1, 0, soon(1.0))
    assert caught.value.retryable
    puller.on_progress = None
    publish(world.publishers("shm", 1, mib=8), 1, incarnation=1)
    assert differing(puller.pull(1, 1, soon()), 8, 1) == []
    puller.close()


def test_a_version_that_was_whole_survives_its_trainer(world: World) -> None:
    publishers = world.publishers("shm", 1, mib=8)
    publish(publishers, 0)
    puller = make_puller("shm", world.run_dir, specs(8))
    puller.on_progress = lambda _arrived: publishers[0].kill()
    assert differing(puller.pull(0, 0, soon()), 8, 0) == []
    puller.close()


def test_a_segment_out_of_reach_is_read_by_nixl_unless_it_was_asked_for(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    publish(world.publishers("auto", 1), 0)

    def out_of_reach(_slot: SharedSlot) -> NoReturn:
        raise PermissionError("another container")

    monkeypatch.setattr(mapped_reads, "map_shared", out_of_reach)
    puller = make_puller("auto", world.run_dir, specs(1))
    staged = puller.pull(0, 0, soon())
    assert differing(staged, 1, 0) == [] and staged.transport.startswith("nixl (")
    assert "another container" in caplog.text
    puller.close()
    puller = make_puller("shm", world.run_dir, specs(1))
    with pytest.raises(PullError, match=r"psrl\.weights\.route=shm: .*another container; use auto or nixl"):
        puller.pull(0, 0, soon())
    puller.close()


def test_an_impossible_route_is_final(world: World) -> None:
    publish(world.publishers("auto", 1), 0)
    puller = make_puller("vram", world.run_dir, specs(1))
    with pytest.raises(PullError, match="route=vram is impossible") as caught:
        puller.pull(0, 0, soon())
    assert not caught.value.retryable
    puller.close()


@pytest.mark.parametrize("route", ["shm", "nixl"])
def test_each_engine_rank_receives_its_part_and_only_the_switch_changes_its_tensors(world: World, route: str) -> None:
    # Two trainer ranks, an engine over two GPUs: columns of o_proj, fused and cut q, k, v, a norm for both.
    attention, split = "model.layers.0.self_attn.", Split(2, 2)
    full = {
        f"{attention}{name}_proj.weight": torch.randn(8, 6) for name in "qkv"
    } | {f"{attention}o_proj.weight": torch.randn(6, 8), "model.norm.weight": torch.randn(6)}  # fmt: skip
    publishers = [NixlPublisher(world.run_dir, rank, 2, torch.bfloat16, split=split) for rank in range(2)]
    for rank, publisher in enumerate(publishers):
        half = {name: tensor.shape[0] // 2 for name, tensor in full.items()}
        publisher.serve()
        publisher.publish(
            0, 0, [WeightShard(name, tuple(tensor.shape), rank * half[name], tensor[rank * half[name] :][: half[name]])
                   for name, tensor in full.items()])  # fmt: skip
    shapes = {f"{attention}qkv_proj.weight": (12, 6), f"{attention}o_proj.weight": (6, 4), "model.norm.weight": (6,)}
    for rank in range(2):
        engine = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
        receiver = WeightReceiver(
            world.run_dir.path, engine, device="cpu", route=route, fused=True, ways=2, num_kv_heads=2, rank=rank
        )
        receiver.start(0, 0, DEADLINE_S)
        outcome, end = None, soon()
        while outcome is None and time.monotonic() < end:
            outcome = receiver.poll()
            time.sleep(0.001)
        assert isinstance(outcome, Pulled) and outcome.transport.startswith(route)
        assert all(not tensor.any() for tensor in engine.values()) and receiver.version == -1
        assert receiver.switch() > 0 and receiver.version == 0
        rows = slice(4 * rank, 4 * rank + 4)
        wanted = {
            f"{attention}qkv_proj.weight": torch.cat([full[f"{attention}{name}_proj.weight"][rows] for name in "qkv"]),
            f"{attention}o_proj.weight": full[f"{attention}o_proj.weight"][:, rows],
            "model.norm.weight": full["model.norm.weight"],
        }
        assert all(torch.equal(engine[name], tensor.bfloat16()) for name, tensor in wanted.items())
        receiver.close()
    for publisher in publishers:
        publisher.close()


def sums(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    return {name: checksum(tensor.reshape(-1).view(torch.uint8)) for name, tensor in tensors.items()}


def published(mib: int, version: int) -> dict[str, int]:
    return sums({name: tensor.to(specs(mib)[name][1]) for name, tensor in whole(mib, version).items()})


@pytest.mark.parametrize("route", ["shm", "nixl"])
def test_an_engine_never_holds_torn_weights_when_its_trainers_are_killed_in_mid_pull(world: World, route: str) -> None:
    publishers = world.publishers(route, 2, mib=8)
    publish(publishers, 0)
    engine = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in specs(8).items()}
    receiver = WeightReceiver(world.run_dir.path, engine, device="cpu", route=route)
    receiver._puller._transfers._window_bytes = 2**20

    def pull(version: int, incarnation: int) -> Pulled | PullFailed:
        before, outcome, end = sums(engine), None, soon()
        receiver.start(version, incarnation, DEADLINE_S)
        while outcome is None and time.monotonic() < end:
            outcome = receiver.poll()
            assert sums(engine) == before, "the engine decodes with these"
        assert outcome is not None
        return outcome

    assert isinstance(pull(0, 0), Pulled)
    receiver.switch()
    assert sums(engine) == published(8, 0)

    publish(publishers, 1)
    receiver._puller.on_progress = lambda _arrived: [publisher.kill() for publisher in publishers]
    outcome = pull(1, 0)
    if route == "shm":  # what was whole stays readable for those that have it mapped
        assert isinstance(outcome, Pulled)
        receiver.switch()
        assert sums(engine) == published(8, 1)
    else:
        assert isinstance(outcome, PullFailed) and outcome.retryable
        with pytest.raises(RuntimeError, match="no weights have arrived"):
            receiver.switch()
        assert sums(engine) == published(8, 0)

    receiver._puller.on_progress = None
    publish(world.publishers(route, 2, mib=8), 2, incarnation=1)
    assert isinstance(pull(2, 1), Pulled)
    receiver.switch()
    assert sums(engine) == published(8, 2)
    receiver.close()


def test_one_instance_of_a_node_fetches_for_all(world: World) -> None:
    publishers = world.publishers("nixl", 2, mib=4)
    first, second = (make_puller("nixl", world.run_dir, specs(4)) for _ in range(2))
    for version in range(3):
        publish(publishers, version)
        for puller in (first, second):
            assert differing(puller.pull(version, 0, soon()), 4, version) == []
    assert first._transfers._nixl and not second._transfers._nixl  # the second has never met a trainer's agent
    first.close()
    second.close()


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP])
def test_an_instance_that_dies_or_stops_while_it_fetches_holds_nobody_up(
    world: World, monkeypatch: pytest.MonkeyPatch, fate: signal.Signals
) -> None:
    monkeypatch.setattr(node_store, "PATIENCE_S", 0.3)
    publish(world.publishers("nixl", 1, mib=8), 0)
    fetching = world.reader("nixl", 8)
    fetching.say(pull=[0, 0, DEADLINE_S], stop=fetching.pid)
    while Path(f"/proc/{fetching.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)
    if fate == signal.SIGKILL:
        fetching.kill()
    puller = make_puller("nixl", world.run_dir, specs(8))
    assert differing(puller.pull(0, 0, soon()), 8, 0) == []
    if fate == signal.SIGSTOP:
        os.kill(fetching.pid, signal.SIGCONT)
        assert fetching.hear()["differing"] == []  # in its own store, which nobody else looks at any more
    puller.close()
