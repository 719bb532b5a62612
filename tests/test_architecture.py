"""Packages import downwards; what a linter cannot see is there under the name it is called by."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cppmega
from tests.support import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))
architecture = importlib.import_module("architecture")

PACKAGE = REPOSITORY / "cppmega"
NAMED = re.compile(r"(?<![\w/.-])cppmega((?:\.[A-Za-z]\w*)+)")
PUBLIC = {
    "guard": ("steps", "before_first_step", "after_first_step", "after_first_log"),
    "page": ("Edit", "Patch", "Source", "left_alone"),
    "edits": ("adding_argument", "adding_parameter", "body_of", "definition_of", "in_order"),
    "errors": ("CppmegaError",),
    "catalogue.megatron_args": (
        "has_experts",
        "has_mtp",
        "layer_pattern",
        "recomputes",
        "uses_dsa",
    ),
    "recipe": ("Recipe", "Mamba3", "M2RNN", "NgramHash", "Structure"),
    "recipes_index": ("load",),
    "proof.small_models": ("B", "H", "S", "V", "arguments", "batch", "config", "gpt", "hybrid"),
    "proof.stand_ins": ("Arguments", "forget", "module", "package", "quiet_training", "tilelang"),
    "cli": ("main",),
    "features.linear_cross_entropy.module": ("LinearCrossEntropyModule",),
    "features.linear_cross_entropy.heads": ("head_loss",),
    "ops.dsa_indexer": ("choose_keys", "indexer_loss"),
    "ops.common.bounds": ("Bounds",),
    "ops.pointwise.rope": ("rotated",),
}
"""What users' pages, recipes, patched files and entry points import."""


def test_the_import_contract_holds() -> None:
    lint = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run(
        [lint, "--no-cache"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]


def sources() -> list[Path]:
    folders = ("cppmega", "upstream_patches", "recipes", "scripts", "benchmarks")
    files = [path for folder in folders for path in (REPOSITORY / folder).rglob("*.py")]
    return [*files, *REPOSITORY.glob("scripts/*.sh"), REPOSITORY / "README.md"]


def missing(name: str) -> bool:
    """Whether no module, and nothing that a module defines, has that dotted name."""
    parts = name.strip(".").split(".")
    for count in range(len(parts), 0, -1):
        module = PACKAGE.joinpath(*parts[:count])
        for file in (module.with_suffix(".py"), module / "__init__.py"):
            if file.is_file():
                text = file.read_text()
                return not all(re.search(rf"\b{part}\b", text) for part in parts[count:])
    return not (PACKAGE / parts[0]).is_dir() and parts[0] not in NO_MODULES


NO_MODULES = ("upstream_patches", "toml", "catalogues", *cppmega.__all__)
"""The folder of pages, the file of settings, the group of entry points, and functions."""


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_every_module_named_in_a_string_exists(path: Path) -> None:
    """Ten processes are started by the name of their module, and patched text imports by name."""
    named = {match[1] for match in NAMED.finditer(path.read_text())}
    assert [name for name in sorted(named) if missing(name)] == []


@pytest.mark.slow
def test_names_that_users_import_stay() -> None:
    code = "\n".join(f"from cppmega.{m} import {', '.join(names)}" for m, names in PUBLIC.items())
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")


def test_the_picture_in_contributing_is_the_code() -> None:
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    assert text == architecture.rewritten(text), "run python scripts/architecture.py"
