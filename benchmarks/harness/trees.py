"""The trees that a benchmark compares: copies of one pristine megatron, which is never changed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import REPOSITORY
from cppmega.guard import files
from cppmega.overlay import verbs
from cppmega.tree import links

BESIDE = "transformer_engine"
Gates = Iterable[tuple[str, str]]
"""Variables that turn pages on, as a recipe has them."""


def copy(site: Path, root: Path) -> None:
    """Copy `megatron/` and its dist-info into ROOT; link Transformer Engine, which has pages."""
    shutil.copytree(site / "megatron", root / "megatron")
    for info in site.glob("megatron_core-*.dist-info"):
        shutil.copytree(info, root / info.name)
    for folder in (*site.glob(BESIDE), *site.glob(f"{BESIDE}*.dist-info")):
        links.link(folder, root / folder.name)


def environment(*first: Path, gates: Gates = ()) -> dict[str, str]:
    """This environment and these gates, the repository and then folders first in PYTHONPATH."""
    folders = (str(REPOSITORY), *map(str, first), os.environ.get("PYTHONPATH"))
    path = os.pathsep.join(filter(None, folders))  # an empty entry would be the current folder
    return {**os.environ, **dict(gates), "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def apply(root: Path, *options: str, gates: Gates = ()) -> None:
    """Apply the pages that these options choose, in a process of its own."""
    command = [sys.executable, "-m", "cppmega.apply_patches", "--megatron", str(root), *options]
    subprocess.run(command, check=True, env=environment(gates=gates), stdout=sys.stderr)


def made(site: Path, root: Path, *options: str, gates: Gates = ()) -> Path:
    """A copy, made once, with the pages that these options choose."""
    if not root.is_dir():
        copy(site, root)
    apply(root, *options, gates=gates)
    return root


def only(pages: Sequence[str]) -> Iterator[str]:
    """The options that choose these pages and no others."""
    return (word for page in pages for word in ("--only", page))


def applied(root: Path) -> tuple[str, ...]:
    """The pages that are in the code of a tree."""
    command = [sys.executable, "-m", "cppmega", "status", "--megatron", str(root), "--json"]
    done = subprocess.run(command, check=True, env=environment(), capture_output=True)
    patches = json.loads(done.stdout)["patches"]
    return tuple(one["name"] for one in patches if one["state"] in ("applied", "armed"))


@contextmanager
def overlaid(megatron: Path, pages: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A copy with these pages, from which this process then imports megatron; its versions."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "patched"
        copy(megatron, root)
        session = verbs.Session(root)
        outcome = verbs.apply(session, only=pages)
        assert outcome.ok, outcome.plan.failures
        files.only_from(root)
        yield {"megatron-core": session.read_tree().version, "overlay": outcome.digest}
