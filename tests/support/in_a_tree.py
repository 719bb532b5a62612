"""What checks find that run in one process of a tree, which is told by the names of functions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.support import made_once, python

BEFORE = """
from tests.support import te_stand_ins

te_stand_ins.before_ranks()
"""
"""What a process needs whose checks build models by Megatron's own specs."""


def kept(name: str, *given: Any, **more: Any) -> Any:
    """The same as `asked`, found once in a session, in whichever process of it."""
    with made_once(f"{name}.json") as (file, missing):
        if missing:
            file.write_text(json.dumps(asked(*given, **more)))
    return json.loads(file.read_text())


def asked(
    root: Path,
    modules: str | Iterable[str],
    names: Iterable[str],
    before: str = "",
    env: Mapping[str, str] | None = None,
) -> Any:
    """Name of a function -> what it returned, or the traceback of the one that fails.

    Args:
        root: the tree.
        modules: below `tests`, where the functions are.
        names: of functions that take a folder.
        before: code that runs before they are imported.
        env: further variables of the process.
    """
    chosen = [modules] if isinstance(modules, str) else list(modules)
    code = f"""
import importlib
{before}
from tests.upstream_patches import forked_ranks

found = {{}}
for module in {chosen!r}:
    found |= vars(importlib.import_module("tests." + module))
forked_ranks.report(found, {list(names)!r})
"""
    done = python(root, code, env=dict(env or {}))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
