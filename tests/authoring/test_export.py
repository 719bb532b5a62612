"""`cppmega export`: a commit for upstream, whose test needs nothing of this package."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from cppmega.authoring import export, proof_source
from cppmega.authoring.export import Exported
from cppmega.catalogue import loader as catalogue
from cppmega.errors import CppmegaError
from cppmega.tree.installed import Tree
from tests.support import made, pages
from tests.support.git import commit_all, run_git

FILE = "megatron/core/thing.py"
TARGET = f"{FILE}:double"
CODE = """
from cppmega.proof import stand_ins
from cppmega.proof.stand_ins import Arguments as Given

FACTOR = 2


def _cppmega_factor():
    return 2


def wanted(args):
    return args.x * FACTOR
"""
VERIFY = """
    from megatron.core import thing

    from cppmega.proof.stand_ins import quiet_training
    from ._shared import close

    wanted_value = wanted(Given(x=3))
    module = stand_ins.module("absent")  # another name than that of the function
    assert close(thing.double(3), wanted_value) and module
"""
EDIT = "replacing('return x', 'return x * _cppmega_factor()'), helpers=(_cppmega_factor,)"


class Desk:
    """A checkout, a folder of pages, and formatters that leave everything as it is."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.pages = folder / "checkout", folder / "pages"
        made.write(self.root, {FILE: made.THING.encode(), "megatron/core/__init__.py": b""})
        made.write(self.root, {"tests/unit_tests/a.py": b""})
        commit_all(self.root, "--initial-branch=main")
        bin_ = folder / "bin"
        bin_.mkdir()
        for name in ("black", "isort"):
            (bin_ / name).write_text("#!/bin/sh\ncat\n")
            (bin_ / name).chmod(0o755)
        monkeypatch.setenv("PATH", str(bin_), prepend=":")
        for who in ("AUTHOR", "COMMITTER"):
            monkeypatch.setenv(f"GIT_{who}_NAME", "t")
            monkeypatch.setenv(f"GIT_{who}_EMAIL", "t@example.org")

    def export(
        self, edit: str = EDIT, verify: str = VERIFY, code: str = CODE, branch: str = ""
    ) -> Exported:
        path = made.page(self.pages, target=TARGET, edit=edit, more=code, verify=dedent(verify))
        (self.pages / "_shared.py").write_text("def close(a, b):\n    return abs(a - b) < 1e-6\n")
        page = catalogue.load_page(path.stem, path, str(self.pages))
        return export.export(page, Tree(self.root), branch)

    def show(self, what: str) -> str:
        return run_git(self.root, "show", what)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(tmp_path, monkeypatch)


def test_the_commit_has_the_edit_and_a_test_that_needs_it(desk: Desk, tmp_path: Path) -> None:
    before = made.snapshot(desk.root / "megatron")
    done = desk.export()
    assert (done.branch, done.test) == (
        "fix/double-doubles",
        "tests/unit_tests/test_double_doubles.py",
    )
    patched, test = desk.show(f"{done.branch}:{FILE}"), desk.show(f"{done.branch}:{done.test}")
    assert "def _factor():" in patched and "return x * _factor()" in patched
    assert "cppmega" not in f"{patched}{test}{desk.show(done.branch)}".lower()
    # The checkout is as it was.
    assert made.snapshot(desk.root / "megatron") == before
    assert run_git(desk.root, "status", "--porcelain", "--branch") == "## main\n"
    made.write(tmp_path / "run", {**{f"megatron/{p}": d for p, d in before.items()}})
    made.write(tmp_path / "run", {done.test: test.encode()})
    command = [
        sys.executable,
        "-c",
        f"from test_double_doubles import {'test_double_doubles'} as t; t()",
    ]
    paths = f"{tmp_path}/run:{tmp_path}/run/tests/unit_tests"
    for text, status in ((before["core/thing.py"], 1), (patched.encode(), 0)):
        made.write(tmp_path / "run", {FILE: text})
        ran = subprocess.run(
            command, env={"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}, check=False
        )
        assert ran.returncode == status


def test_a_branch_is_not_overwritten(desk: Desk) -> None:
    desk.export()
    with pytest.raises(CppmegaError) as caught:
        desk.export()
    assert caught.value.name == "branch-exists"
    assert desk.export(branch="fix/again").branch == "fix/again"


OURS = "def verify():\n    from cppmega.ops.common import weight_gradient\n"


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"edit": "lambda stock: stock, kind='function-swap'"}, "at run time"),
        ({"edit": "replacing('return x', 'from cppmega import ops')"}, "calls cppmega"),
        ({"verify": "    from cppmega.ops import common\n    assert common.x"}, "cppmega.ops"),
        ({"verify": "    '''As cppmega does.'''\n    assert FACTOR"}, "would name cppmega"),
        (
            {
                "verify": "from cppmega.proof.stand_ins import module\n_module(module('x'))",
                "code": f"{CODE}\n\ndef _module(x): ...\n",
            },
            "two definitions that are called module",
        ),
    ],
)
def test_what_upstream_cannot_take_is_refused(desk: Desk, how: dict[str, str], why: str) -> None:
    with pytest.raises(CppmegaError, match=why) as caught:
        desk.export(**how)
    assert caught.value.name == "export-refused"
    assert run_git(desk.root, "branch", "--list", "fix/*") == ""


def test_what_is_missing_is_named(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin" / "black").write_text("#!/bin/sh\necho wrong version >&2; exit 1\n")
    with pytest.raises(CppmegaError, match="wrong version") as caught:
        desk.export()
    assert caught.value.name == "formatter-missing"
    (desk.root / FILE).write_text(made.THING.replace("return x\n", "return 2 * x\n"))
    with pytest.raises(CppmegaError) as caught:
        desk.export()
    assert caught.value.name == "nothing-to-export"
    desk.root = made.tree(tmp_path / "installed")
    with pytest.raises(CppmegaError) as caught:
        desk.export()
    assert caught.value.name == "not-a-checkout"


def test_a_name_of_a_test_is_not_taken_for_what_it_copies(tmp_path: Path) -> None:
    code = "from cppmega.proof import stand_ins as parts\n\n\ndef inner():\n    return 1\n"
    verify = """
    from cppmega.proof.stand_ins import module, forget as drop

    def inner_of(inner=inner):
        return [forget for forget in (inner(),)]

    module = parts.module("x"), module("y")
    assert inner_of() and drop
"""
    path = made.page(tmp_path, more=code, verify=dedent(verify))
    text = proof_source.test_module(catalogue.load_page(path.stem, path, "made"))
    assert 'module = _module("x"), _module("y")' in text
    assert "def inner_of(inner=_inner):\n        return [forget for forget in (inner(),)]" in text
    assert text.count("def _module(") == 1 and "drop" not in text and "_forget" in text


@pytest.mark.parametrize("name", sorted(n for n, p in pages().items() if p.patch.purpose == "fix"))
def test_the_proof_of_each_fix_is_a_test_or_says_what_it_calls(name: str) -> None:
    try:
        text = proof_source.test_module(pages()[name])
    except CppmegaError as error:
        assert error.name == "export-refused" and "its proof" in error.what
    else:
        defined = {node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
        assert f"test_{name}" in defined and "cppmega" not in text.lower()
