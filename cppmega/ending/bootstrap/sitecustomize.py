"""First on the path of every Python that a guarded run starts: makes it join the run's overlay.

Spawned data-loader workers and helper processes import megatron again; without this file they would
run without the runtime patches. The environment's own sitecustomize, if there is one, still runs.
"""

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
_ROOT = os.path.abspath(os.path.join(_HERE, "..", "..", ".."))  # noqa: PTH100, PTH118
"""The folder that holds the package."""


def _run_the_next_one() -> None:
    others = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]  # noqa: PTH100
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _join() -> None:
    if importlib.util.find_spec("cppmega") is None:
        sys.path.append(_ROOT)
    from cppmega.ending import child as guard_child

    guard_child.join_or_die()


try:
    _run_the_next_one()
finally:  # Python reports what that one raises, after this process has joined
    _join()
