"""The first weights go from node to node: readers with a store each stand for the nodes, over real NIXL."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter

import psutil
import pytest
from runs import NewRun
from weight_role import until_status
from weight_world import DEADLINE_S, Process, World, publish

from psrl.weights.broadcast import TRAINERS, source_of
from psrl.weights.channel import nixl_available
from psrl.weights.channel.relay import relay_name

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(nixl_available() is not None, reason=f"nixl: {nixl_available()}"),
]

MIB = 8
FANOUT = 2


def nodes(world: World, count: int, fanout: int = FANOUT, **env: str) -> list[Process]:
    names = [f"node{len(world.processes)}-{i}" for i in range(count)]
    return [world.reader("nixl", MIB, name, FANOUT=str(fanout), **env) for name in names]


def pull(process: Process, version: int = 0, incarnation: int = 0, **more: int) -> dict:
    return process.ask(pull=[version, incarnation, DEADLINE_S], **more)


def numbers_taken(world: World, version: int = 0, incarnation: int = 0) -> int:
    return sum(1 for _ in world.run_dir.rendezvous.glob(f"{relay_name(version, incarnation)}.*"))


def wait_for_numbers(world: World, count: int) -> None:
    end = time.monotonic() + DEADLINE_S
    while numbers_taken(world) < count:
        assert time.monotonic() < end, f"{count} nodes have not taken a number"
        time.sleep(0.01)


def test_the_trainers_serve_no_more_nodes_than_the_fan_out(world: World) -> None:
    publishers = world.publishers("nixl", 2, MIB)
    publish(publishers, 0)
    readers = nodes(world, 5)
    for reader in readers:
        reader.say(pull=[0, 0, DEADLINE_S])
    answers = [reader.hear() for reader in readers]
    assert [answer["differing"] for answer in answers] == [[]] * 5
    assert Counter(answer["source"] for answer in answers) == Counter(source_of(n, FANOUT) for n in range(5))
    # Only the first version of an incarnation goes that way.
    publish(publishers, 1)
    later = [pull(reader, 1) for reader in readers]
    assert [(answer["differing"], answer["source"]) for answer in later] == [([], TRAINERS)] * 5
    publish(publishers, 1, incarnation=1)
    again = [pull(reader, 1, 1) for reader in readers]
    assert [answer["differing"] for answer in again] == [[]] * 5
    assert [answer["source"] for answer in again] == [source_of(n, FANOUT) for n in range(5)]


def test_a_node_killed_while_it_is_read_from_leaves_its_readers_to_the_trainers(world: World) -> None:
    publish(world.publishers("nixl", 1, MIB), 0)
    first, second, third, fourth, fifth = nodes(world, 5)
    assert [pull(first)["source"], pull(second)["source"]] == [TRAINERS, TRAINERS]
    torn = pull(third, kill=first.pid)  # it has read a part from the first when that one dies
    assert (torn["differing"], torn["source"]) == ([], TRAINERS)
    late = pull(fourth)
    assert (late["differing"], late["source"]) == ([], TRAINERS)
    other = pull(fifth)
    assert (other["differing"], other["source"]) == ([], 1)


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP])
def test_a_node_that_dies_or_stops_before_it_has_them_holds_nobody_up(world: World, fate: signal.Signals) -> None:
    publish(world.publishers("nixl", 1, MIB), 0)
    first, second, third = nodes(world, 3, TREE_PATIENCE_S="2.5")
    first.say(pull=[0, 0, DEADLINE_S], stop=first.pid)
    wait_for_numbers(world, 1)
    assert pull(second)["source"] == TRAINERS
    third.say(pull=[0, 0, DEADLINE_S])
    wait_for_numbers(world, 3)
    if fate == signal.SIGKILL:
        first.kill()
    answer = third.hear()
    assert (answer["differing"], answer["source"]) == ([], TRAINERS)


def test_a_node_that_does_not_get_them_says_so_to_who_waits(world: World) -> None:
    publishers = world.publishers("nixl", 1, MIB)
    publish(publishers, 0)
    first, second = nodes(world, 2, fanout=1)
    first.say(pull=[0, 0, DEADLINE_S], stop=first.pid)
    wait_for_numbers(world, 1)
    second.say(pull=[0, 0, DEADLINE_S])
    wait_for_numbers(world, 2)
    until_status(first.pid, psutil.STATUS_STOPPED)  # in the middle of its pull
    server = publishers[0].server_pid()
    publishers[0].kill()
    until_status(server, psutil.STATUS_ZOMBIE)  # until it has gone, the rest may still be read
    os.kill(first.pid, signal.SIGCONT)
    for answer in (first.hear(), second.hear()):
        assert answer["retryable"] and "deadline" not in answer["error"]


def test_what_another_node_sends_is_judged_by_the_trainers_checksums(world: World) -> None:
    publish(world.publishers("nixl", 1, MIB), 0)
    first, second, third = nodes(world, 3)
    assert [pull(first)["differing"], pull(second)["differing"]] == [[], []]
    with world.stores[1].open("r+b") as store:  # the first one's, behind its header
        store.seek(3 * 4096 + 77)
        byte = store.read(1)[0]
        store.seek(3 * 4096 + 77)
        store.write(bytes([byte ^ 0xFF]))
    answer = pull(third)
    assert (answer["differing"], answer["source"]) == ([], TRAINERS)


def test_a_whole_run_whose_first_weights_go_along_the_tree(new_run: NewRun) -> None:
    run = new_run({"psrl.broadcast_init": True, "psrl.weights.route": "nixl", "trainer.total_training_steps": 2})
    assert run.launch() == 0, run.story()
    assert run.audit().status == "completed"
    relays = sorted(path.name for path in run.dir.rendezvous.glob("relay-*"))
    assert relays == [f"{relay_name(0, 0)}.000000"], "the instances of one node share what one of them has fetched"
    run.nothing_left()
