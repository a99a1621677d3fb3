"""Compressed node lists."""

from __future__ import annotations

import shutil
import socket
import subprocess
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psrl.slurm.node_list import expand

pytestmark = pytest.mark.unit

CASES = [
    ("n", "n"),
    ("a[1-3,7],b2", "a1 a2 a3 a7 b2"),
    ("linux[1,2]", "linux1 linux2"),
    (
        "node1g[0010,0011],node2g0005,node3g0007",
        "node1g0010 node1g0011 node2g0005 node3g0007",
    ),
    ("nodeA,nodeB[001,003],nodeC", "nodeA nodeB001 nodeB003 nodeC"),
    ("r[1-2]n[01-02]", "r1n01 r1n02 r2n01 r2n02"),
    ("a[8-11]", "a8 a9 a10 a11"),
    ("a[08-11]", "a08 a09 a10 a11"),
    ("a[098-101,5]", "a098 a099 a100 a101 a5"),
    ("b2,a[3,1],b1", "b2 a3 a1 b1"),
    ("gpu-a.site_1[2-3]", "gpu-a.site_12 gpu-a.site_13"),
    ("a[5-5]", "a5"),
    ("[1-2]", "1 2"),
]


@pytest.mark.parametrize(("text", "names"), CASES)
def test_a_list_is_expanded_in_its_order_with_its_zeros(text: str, names: str) -> None:
    assert expand(text) == names.split()


def test_an_empty_list_is_this_host() -> None:
    assert expand("") == [socket.gethostname()]


@pytest.mark.parametrize(
    "text",
    [
        "a[1-3",
        "a1-3]",
        "a[]",
        "a[1,]",
        "a[x]",
        "a[1-]",
        "a[1--2]",
        "a[[1]]",
        "a[1-2]]",
        "a,,b",
        ",a",
        "a,",
        "a b",
        "(null)",
    ],
)
def test_what_is_not_a_list_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(ValueError) as caught:
        expand(text)
    assert str(caught.value) == (
        f"node list {text!r} cannot be read: give names separated by commas, with numbers in closed brackets as in a[1-3,07],b2."
    )


def test_a_range_that_runs_backwards_is_named() -> None:
    with pytest.raises(ValueError, match=r"node list 'a\[1,10-9\]' cannot be read: 10-9 runs backwards"):
        expand("a[1,10-9]")


runs = st.lists(st.tuples(st.integers(0, 120), st.integers(1, 12)), min_size=1, max_size=4)
prefixes = st.from_regex(r"[a-z]{1,3}[a-z-]?", fullmatch=True)
lists = st.lists(st.tuples(prefixes, st.integers(1, 4), runs), min_size=1, max_size=4)


def names_of(prefix: str, width: int, number_runs: list[tuple[int, int]]) -> list[str]:
    return [f"{prefix}{number:0{width}}" for first, length in number_runs for number in range(first, first + length)]


def compress(prefix: str, names: list[str]) -> str:
    """Naive: neighbours of the same width that count up become a range."""
    numbers = [name.removeprefix(prefix) for name in names]
    chains = groupby(enumerate(numbers), key=lambda at: (int(at[1]) - at[0], len(at[1])))
    parts = [[number for _, number in chain] for _, chain in chains]
    return f"{prefix}[{','.join(part[0] if len(part) == 1 else f'{part[0]}-{part[-1]}' for part in parts)}]"


@given(lists)
def test_expanding_undoes_compressing(groups: list[tuple[str, int, list[tuple[int, int]]]]) -> None:
    names = [names_of(*group) for group in groups]
    text = ",".join(compress(group[0], mine) for group, mine in zip(groups, names, strict=True))
    assert expand(text) == [name for mine in names for name in mine]


@given(st.lists(runs, min_size=1, max_size=3))
@settings(max_examples=50)
def test_the_last_of_several_brackets_turns_fastest(brackets: list[list[tuple[int, int]]]) -> None:
    expected = [""]
    text = ""
    for letter, bracket in zip("rnx", brackets, strict=False):
        pieces = names_of(letter, 2, bracket)
        expected = [name + piece for name in expected for piece in pieces]
        text += compress(letter, pieces)
    assert expand(text) == expected


@pytest.mark.slurm
@pytest.mark.skipif(shutil.which("scontrol") is None, reason="needs Slurm's client commands")
def test_slurm_expands_alike(tmp_path: Path) -> None:
    """`scontrol show hostnames` needs a configuration that it can read, but no controller."""
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=none\nSlurmctldHost=localhost\n")
    for text, names in CASES:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", text],
            env={"SLURM_CONF": str(conf), "PATH": "/usr/bin:/usr/local/bin"},
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.stdout.split() == names.split(), text
