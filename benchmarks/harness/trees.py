"""The trees that a benchmark compares: copies of one pristine megatron, which is never changed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cppmega.overlay import verbs
from cppmega.page import PURPOSES
from cppmega.rank import imported
from cppmega.tree import links

BESIDE = "transformer_engine"


def copy(site: Path, root: Path) -> None:
    """Copy `megatron/` and its dist-info, as pip or an unpacked wheel leave them, into ROOT.

    Transformer Engine is linked, if SITE has it, so that its pages are applied as well.
    """
    shutil.copytree(site / "megatron", root / "megatron")
    for info in site.glob("megatron_core-*.dist-info"):
        shutil.copytree(info, root / info.name)
    for folder in (*site.glob(BESIDE), *site.glob(f"{BESIDE}*.dist-info")):
        links.link(folder, root / folder.name)


def patch(
    root: Path, only: Sequence[str] = (), environment: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """Apply these pages, or all of them, to a copy: its version and overlay digest."""
    session = verbs.Session(root)
    kinds = () if only else PURPOSES
    outcome = verbs.apply(session, only=only, kinds=kinds, environment=environment)
    assert outcome.ok, outcome.plan.failures
    return {"megatron-core": session.read_tree().version, "overlay": outcome.digest}


@contextmanager
def overlaid(
    megatron: Path, only: Sequence[str] = (), environment: Mapping[str, str] = os.environ
) -> Iterator[dict[str, Any]]:
    """A patched copy, from which this process then imports megatron: what `patch` returns."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "patched"
        copy(megatron, root)
        facts = patch(root, only, environment)
        imported.only_from(root)
        yield facts


@contextmanager
def stock_and_patched(
    megatron: Path, only: Sequence[str] = (), environment: Mapping[str, str] = os.environ
) -> Iterator[tuple[dict[str, Path], dict[str, Any]]]:
    """A pristine and a patched copy by name, and what `patch` returns."""
    with tempfile.TemporaryDirectory() as scratch:
        roots = {side: Path(scratch) / side for side in ("stock", "patched")}
        for root in roots.values():
            copy(megatron, root)
        yield roots, patch(roots["patched"], only, environment)


def answer(module: str, root: Path, timeout: float, **variables: str) -> tuple[Any, str]:
    """The JSON that `python -m MODULE --worker ROOT` printed last, if any, and its errors."""
    done = subprocess.run(
        [sys.executable, "-m", module, "--worker", str(root)],
        env={**os.environ, "MASTER_ADDR": "127.0.0.1", **variables},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return (json.loads(lines[-1]) if lines else None), done.stderr
