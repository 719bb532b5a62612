"""What the tests of the preflight share: launches to ask about, machines, and trees to break."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cppmega.preflight import examine as preflight
from cppmega.preflight.context import Context
from cppmega.preflight.devices import Devices
from cppmega.preflight.findings import Finding
from cppmega.preflight.messages import Device, ParsedLine, RankAnswer
from cppmega.recipe import Recipe
from cppmega.recipe import index as recipes_index
from cppmega.recipe.run_options import RunOptions
from cppmega.training import options as trainer_options
from tests.support import patched

SLICE = recipes_index.load("nam56r_h200_slice")
V32 = recipes_index.load("dsv32_h200_slice")
FUSED = recipes_index.load("nam56r_h200_slice_fused")
SMOKE = recipes_index.load("smoke_cpu")

GIB = 2**30
H200 = Device("NVIDIA H200", (9, 0), 140 * GIB, 139 * GIB, "GPU-1")
GB10 = Device("NVIDIA GB10", (12, 1), 120 * GIB, 119 * GIB)
TORCH = ("sm_80", "sm_90", "sm_100", "compute_120")


def launch(recipe: Recipe | None = None, *words: str, **more: Any) -> Context:
    """A launch in a clean environment, on a machine without a GPU unless it says otherwise."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("CPPMEGA_", "PYTHONPATH"))}
    more["environ"] = environ | more.get("environ", {})
    more.setdefault("training_machine", False)
    options, further = trainer_options.read(words) if recipe is not None else (RunOptions(), words)
    return Context(recipe=recipe, options=more.pop("options", options), arguments=further, **more)


def on(*found: Device, recipe: Any = SLICE, words: tuple[str, ...] = (), **more: Any) -> Context:
    """A launch on a machine with these GPUs."""
    fields = {name: more.pop(name) for name in ("imports", "reported") if name in more}
    context = launch(recipe, *words, training_machine=True, **more)
    context.__dict__["devices"] = Devices(found, TORCH, **fields)
    return context


def parsed(args: Mapping[str, Any]) -> RankAnswer:
    """The answer of a process whose parser read these arguments."""
    return RankAnswer(problems=[], line=ParsedLine(args=args))


def holds(name: str, context: Context) -> str:
    """The check holds; its detail."""
    (found,) = preflight.answers(name, context)
    assert found.state == "ok", found
    return found.what


def says_nothing(name: str, context: Context) -> str:
    """The check has nothing to say about this launch; why."""
    (found,) = preflight.answers(name, context)
    assert found.state == "not-applicable", found
    return found.what


def refuses(name: str, error: str, context: Context) -> Finding:
    """The check refuses the launch with that error; the first such finding, whole."""
    found = preflight.answers(name, context)
    assert {one.state for one in found} == {"failed"}, found
    fitting = [one for one in found if one.name == error]
    assert fitting, found
    assert all((one.what, one.why, one.next) > ("", "", "") for one in found)
    return fitting[0]


def own_tree(to: Path) -> Path:
    """A patched 0.19.2 to break: links to the shared one, so that only what breaks is written."""
    shutil.copytree(patched("0.19.2"), to, copy_function=os.link)
    return to


def write(path: Path, data: bytes) -> None:
    """Replace a file of a tree of one's own; never the linked one behind it."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def change(path: Path, old: bytes, new: bytes) -> None:
    """Edit a file of a tree of one's own by hand."""
    data = path.read_bytes()
    assert old in data, path
    write(path, data.replace(old, new, 1))


def only(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """The working directory of the launch."""
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
