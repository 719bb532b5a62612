"""First on the path of every Python that a guarded run starts: makes it join the run's overlay.

Spawned data-loader workers and helper processes import megatron again; without this file they would
run without the runtime patches. The environment's own sitecustomize, if there is one, still runs.

A Python of another environment, such as that of a system's tool, may be of any version, and may
lack what the guard needs: it finds its path and its stderr as if this file did not exist. So this
file is valid for Python 2, too. Its environment stays: a Python of the run that it starts joins.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120

_VARIABLE = "_".join(("CPPMEGA", "PYTHON"))
"""`cppmega.host.env.PYTHON`, which not every Python can import."""


def _is_of_the_run():
    # type: () -> bool
    tag = getattr(getattr(sys, "implementation", None), "cache_tag", None)
    own = "%s %s" % (tag, os.path.realpath(sys.prefix))  # noqa: UP031
    return os.environ.get(_VARIABLE) == own


def _others():
    # type: () -> list[str]
    return [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]  # noqa: PTH100


def _run_the_next_one():
    # type: () -> None
    others = _others()
    if sys.version_info[0] == 2:  # noqa: UP036
        imp = __import__("imp")
        try:
            found = imp.find_module("sitecustomize", others)
        except ImportError:
            return
        imp.load_module("sitecustomize", *found)
        return
    import importlib.machinery
    import importlib.util

    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _join():
    # type: () -> None
    import importlib.util

    if importlib.util.find_spec("cppmega") is None:
        root = os.path.join(_HERE, "..", "..", "..")  # noqa: PTH118
        sys.path.append(os.path.abspath(root))  # noqa: PTH100
    from cppmega.guard import child as guard_child

    guard_child.join_or_die()


try:
    _run_the_next_one()
finally:  # Python reports what that one raises, after this process has joined
    if _is_of_the_run():
        _join()
    else:
        sys.path[:] = _others()
