"""How calls turn out in a module. As a program, `python outcomes.py CALLS MODULE`, it prints them as JSON in its last line."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def outcomes(source: str, calls: Sequence[str]) -> list[str]:
    """Of each call, one after the other in the same process: the value's repr, or the exception's type.

    >>> outcomes("def half(x): return x / 2", ["half(3)", "half('a')"])
    ['1.5', 'raises TypeError']
    """
    names: dict[str, Any] = {"__name__": "module"}
    exec(source, names)
    return [_outcome(call, names) for call in calls]


def _outcome(call: str, names: dict[str, Any]) -> str:
    try:
        return repr(eval(call, names))
    except Exception as error:  # what a call raises is how it turns out
        return f"raises {type(error).__name__}"


if __name__ == "__main__":
    found = outcomes(Path(sys.argv[2]).read_text(encoding="utf-8"), json.loads(sys.argv[1]))
    print("\n" + json.dumps(found))
