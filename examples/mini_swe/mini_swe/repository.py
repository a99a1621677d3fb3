"""One repository with its bug, drawn by a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from textwrap import dedent

from mini_swe.kinds import KINDS
from mini_swe.outcomes import outcomes

MODULES = ("tools", "helpers", "core", "util", "shop", "common")


@dataclass(frozen=True, slots=True)
class Repository:
    """What the agent gets (`files`, `issue`), and what decides (`hidden` calls, as they turn out in `mended`)."""

    module: str
    """Its file, for example tools.py."""
    files: dict[str, str]
    """Path -> content, the bug included."""
    mended: str
    """The module's file without the bug."""
    issue: str
    hidden: tuple[str, ...]


def make_repository(kind: str, seed: int) -> Repository:
    """The same arguments make the same repository. Raises KeyError for an unknown kind."""
    bug, rng = KINDS[kind], random.Random(f"{kind} {seed}")
    name, module, limit = rng.choice(bug.names), rng.choice(MODULES), str(rng.choice(bug.limits))

    def drawn(text: str) -> str:
        return text.replace("NAME", name).replace("LIMIT", limit)

    assert bug.source.count(bug.right) == 1, f"{kind}: its passage is there once"
    mended, example = drawn(bug.source), drawn(bug.example)
    test = f"""
        import unittest

        from {module} import {name}


        class {name.title().replace("_", "")}Test(unittest.TestCase):
            def test_an_example(self):
                self.assertEqual({example}, {outcomes(mended, [example])[0]})
    """
    files = {
        f"{module}.py": drawn(bug.source.replace(bug.right, bug.wrong)),
        f"test_{module}.py": dedent(test).lstrip(),
        "README.md": f"# {module}\n\nTests: `python -m unittest`.\n",
    }
    return Repository(f"{module}.py", files, mended, drawn(bug.issue), tuple(map(drawn, bug.hidden)))
