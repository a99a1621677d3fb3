"""`python -m psrl.start MODULE ARGUMENTS`: a role's module as the program, loaded without garbage collections.

torch and transformers leave a million objects that are never garbage. To look through them again and again while they come
in takes a fifth of the time that a role needs to start (4.1 s of CPU time for an instance, 3.3 s without); `run_role`
sets them aside for good, so that no later collection stops a decode step to look at them either.
"""

from __future__ import annotations

import gc
import runpy
import sys


def main() -> None:
    gc.disable()
    module = sys.argv[1]
    sys.argv[:2] = sys.argv[:1]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
