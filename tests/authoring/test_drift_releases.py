"""`cppmega drift`: what really changed between releases of upstream."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from cppmega.authoring import drift
from cppmega.authoring.drift_result import Drift, TargetDrift
from cppmega.catalogue import loader as catalogue
from cppmega.overlay import verbs as overlay
from cppmega.overlay.verbs import Session
from cppmega.tree.installed import Tree
from tests.support import REPOSITORY, VERSIONS, made, pristine, speed
from tests.support.weekly import weekly

pytestmark = pytest.mark.slow

SIGNATURE = ("parameter ", "returns ")
"""How a change of a signature is told, which is on no line of its own."""

*EARLIER, NEWEST = pairwise(VERSIONS)
every_pair = pytest.mark.parametrize(
    ("old", "new"), [*(pytest.param(*pair, marks=weekly) for pair in EARLIER), NEWEST]
)


@cache
def real(old: str, new: str) -> Drift:
    sides = [(version, Tree(pristine(version))) for version in (old, new)]
    return drift.compare(sides[0], sides[1], catalogue.load())


@cache
def parsed(version: str, path: str) -> ast.Module | None:
    file = pristine(version) / path
    return ast.parse(file.read_bytes()) if file.is_file() else None


@cache
def code_of(version: str, target: str) -> str:
    """A definition as Python reads it, found without the engine; "" where it is missing."""
    path, _, symbol = target.partition(":")
    kinds = (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)
    node: ast.AST | None = parsed(version, path)
    for name in symbol.split("."):
        nodes = [] if node is None else ast.walk(node)
        node = next((n for n in nodes if isinstance(n, kinds) and n.name == name), None)
    if node is None:
        return ""
    for inner in ast.walk(node):
        if isinstance(inner, kinds) and ast.get_docstring(inner, clean=False) is not None:
            inner.body = inner.body[1:] or [ast.Pass()]
    return ast.unparse(node)


@every_pair
def test_what_is_said_to_have_changed_has_changed_and_nothing_else(old: str, new: str) -> None:
    said = 0
    for one in real(old, new).pages:
        for target in one.targets:
            before, after = code_of(old, target.target), code_of(new, target.target)
            if target.word == "same":
                assert before == after, target
            elif target.word == "changed":
                assert (before == after) == (not target.changes), target
                for change in target.changes:
                    for line in change.old:
                        assert line.startswith(SIGNATURE) or line.strip() in before, change
                    for line in change.new:
                        assert line.startswith(SIGNATURE) or line.strip() in after, change
            elif target.word in ("moved", "gone"):
                assert not after
            said += 1
    assert said >= 4


@every_pair
def test_an_upgrade_is_safe_exactly_if_apply_would_go_through(old: str, new: str) -> None:
    states = {one.page.name: one.new.state for one in real(old, new).pages}
    outcome = overlay.status(Session(pristine(new), ()))
    failing = {v.name for v in outcome.plan.failures}
    assert {one.page.name for one in real(old, new).pages if not one.safe} == failing, states


def of_page(old: str, new: str, name: str) -> dict[str, TargetDrift]:
    """What changed for one page; those of all pages together take much longer."""
    sides = [(version, Tree(pristine(version))) for version in (old, new)]
    (one,) = drift.compare(sides[0], sides[1], {name: catalogue.load()[name]}).pages
    return {target.target.partition(":")[2]: target for target in one.targets}


@pytest.mark.parametrize(("old", "new"), [*EARLIER, NEWEST])
def test_the_dataset_helpers_never_changed(old: str, new: str) -> None:
    assert of_page(old, new, "dataset_helpers_prebuilt")["compile_helpers"].word == "same"


def test_017_gave_the_packed_roll_its_empty_pieces() -> None:
    roll = of_page("0.16.1", "0.17.1", "mtp_roll_packed_sequences")
    assert roll["roll_tensor"].word == "same"
    packed = roll["_roll_tensor_packed_seq"]
    assert packed.word == "changed"
    assert "    if local_seq_len == 0:" in packed.changes[0].new
    assert {change.meets for change in packed.changes} == {"replaced"}  # our edit has no loop
    assert not any(change.old for change in packed.changes)


def test_019_lets_the_roll_be_given_nothing() -> None:
    roll = of_page("0.18.2", "0.19.2", "mtp_roll_packed_sequences")
    (change,) = roll["roll_tensor"].changes
    assert change.new == ("if tensor is None:", "    return (None, None)")
    assert (change.old, change.meets) == ((), "elsewhere")
    assert roll["_roll_tensor_packed_seq"].word == "same"


MTP = "megatron/core/transformer/multi_token_prediction.py"


def test_a_real_function_that_was_renamed_and_moved_is_found(tmp_path: Path) -> None:
    """Real text, and what a later release may well do with it."""
    text = (pristine("0.19.2") / MTP).read_text()
    old = made.tree(tmp_path / "old", {MTP: text}, "0.19.2")
    function = re.search(r"\ndef roll_tensor\(.*?\n(?=\ndef )", text, re.S)
    assert function is not None
    renamed = {
        MTP: text.replace(function[0], "\n"),
        "megatron/core/transformer/mtp_roll.py": function[0].replace("roll_tensor(", "roll(", 1),
    }
    new = made.tree(tmp_path / "new", renamed, "0.20.0")
    pages = catalogue.load()
    pages = {name: pages[name] for name in ("mtp_roll_packed_sequences",)}
    found = drift.compare(("0.19.2", Tree(old)), ("0.20.0", Tree(new)), pages)
    targets = {target.target.partition(":")[2]: target for target in found.pages[0].targets}
    assert found.pages[0].word == "moved"
    assert targets["roll_tensor"].places == ("megatron/core/transformer/mtp_roll.py:roll",)
    assert targets["_roll_tensor_packed_seq"].word == "same"


@weekly
def test_the_report_takes_seconds(tmp_path: Path) -> None:
    """Ten, of a processor of the usual speed that does nothing else."""
    for version in ("0.18.2", "0.19.2"):
        pristine(version)
    code = (
        "import resource, runpy, sys\n"
        "sys.argv = ['cppmega', 'drift', '0.18.2', '0.19.2', '--json']\n"
        "try:\n    runpy.run_module('cppmega', run_name='__main__')\n"
        "finally:\n"
        "    used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "    print('seconds', used.ru_utime + used.ru_stime, file=sys.stderr)\n"
    )
    before = speed.slowness()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=False
    )
    assert json.loads(done.stdout)["schema"] == 1
    slow = (before + speed.slowness()) / 2
    assert float(done.stderr.split("seconds")[-1]) / slow < 10
