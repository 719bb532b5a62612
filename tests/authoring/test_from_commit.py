"""`cppmega new --from-commit`: the page does to the parent's text what the commit does."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from cppmega.authoring import from_commit, scaffold
from cppmega.catalogue import loader as catalogue
from cppmega.errors import CppmegaError
from cppmega.overlay import verbs as overlay
from cppmega.overlay.verbs import Session
from cppmega.page import Page
from cppmega.rewriting.rewrite import Step, rewrite
from cppmega.tree.installed import Tree
from tests.support import made
from tests.support.git import commit_all, run_git

FILE = "megatron/core/kit.py"
OLD = '''
import os


def run(x, scale):
    """Run it."""
    total = 0
    for item in x:
        if item is None:
            continue
        total += item
        print("a")
    print("a")
    return total * scale


class Kit:
    limit = 1

    def __init__(self, config):
        self.config = config
        self.a = self.b = None

    def use(self, x):
        try:
            return self.config.f(x)
        finally:
            self.a = None

    def old(self):
        return 1
'''


def checkout(folder: Path, old: str, new: str) -> Path:
    made.write(folder, {FILE: old.encode(), "megatron/core/__init__.py": b"", "README": b"a"})
    commit_all(folder)
    made.write(folder, {FILE: new.encode()})
    run_git(folder, "commit", "-qam", 'Fix the "kit" {x}')
    return folder


def written(folder: Path, pages: Path, tree: Tree | None = None) -> tuple[Page, from_commit.Commit]:
    commit = from_commit.read(folder, "HEAD")
    path = scaffold.new("fresh", pages, (), tree, {}, commit)
    return catalogue.load_page("fresh", path, str(pages)), commit


def result(page: Page, old: str) -> str:
    """The file after the edits of a page, without marks, in the layout of ast."""
    steps = [Step(page.name, edit, marked=False, silent=True) for edit in page.patch.edits]
    return rewrite(old.encode(), FILE, steps).data.decode()


def members(text: str) -> set[str]:
    """All statements, and the names of the definitions around them, in any order of helpers."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (doc := ast.get_docstring(node)):
            node.body[0] = ast.Expr(ast.Constant(doc))  # in any margin
    return {ast.unparse(node) for node in tree.body}


@pytest.mark.parametrize(
    ("old", "new", "calls"),
    [
        ("total = 0\n", "total = 1\n", ["replacing"]),
        ("        total += item\n", "", ["replacing"]),
        ("is None:\n", "is None or item < 0:\n", ["replacing"]),
        ("    return total * scale", "    os.sync()\n    return total * scale", ["inserting"]),
        ('    print("a")\n    return', '    print("b")\n    return', ["replacing"]),
        ("def run(x, scale):", "def run(x, scale, y: int = 2):", ["adding_parameter"]),
        ("def run(x, scale)", "def _half(x):\n    return x / 2\n\n\ndef run(x, scale)", None),
        ("    limit = 1\n", "    limit = 1\n    more = 2\n", ["inserting"]),
        ("\n    def old(self):\n        return 1\n", "", ["replacing"]),
        ("return 1\n", "return 1\n\n    def new(self):\n        return 2\n", ["inserting"]),
        (
            "return 1\n",
            'return 1\n\n    def new(self):\n        """One.\n\n        Two.\n        """\n',
            ["inserting"],
        ),
        ("finally:\n            self.a = None", "finally:\n            self.b = '\\n'", None),
        ("import os\n", "import os\nimport math\n", None),
    ],
)
def test_an_edit_per_statement_gives_the_code_of_the_commit(
    tmp_path: Path, old: str, new: str, calls: list[str] | None
) -> None:
    assert OLD.count(old) == 1
    # Two hunks always, so that helpers and imports have an edit that carries them.
    changed = OLD.replace(old, new).replace("self.config = config", "self.config = (config, 1)")
    page, commit = written(checkout(tmp_path / "c", OLD, changed), tmp_path / "pages")
    assert commit.left == []
    assert members(result(page, OLD)) == members(changed)
    codes = [code.partition("(")[0] for change in commit.changes for code in change.edits]
    assert calls is None or sorted(codes) == sorted([*calls, "replacing"])


@pytest.mark.parametrize(
    ("old", "new", "left"),
    [
        ("import os\n", "import os\n\nLIMIT = 2\n", [f"{FILE}:4: a statement of the module"]),
        ("import os\n", "", [f"{FILE}: import os: the import is removed"]),
        ("class Kit:", "class Kit(dict):", [f"{FILE}:17 Kit: the bases or decorators"]),
        ("def run(x,", "def run(x: list,", [f"{FILE}:5 run: no edits make this change"]),
        ("def run(", "@staticmethod\ndef run(", [f"{FILE}:6 run: its decorators change"]),
        ("class Kit:", "class New:\n    pass\n\n\nclass Kit:", [f"{FILE}:17 New: no edit of"]),
        ("def run(", "def ran(", [f"{FILE}:5 run before the commit: a page removes no"]),
    ],
)
def test_a_hunk_that_no_edit_expresses_is_named_in_the_page(
    tmp_path: Path, old: str, new: str, left: list[str]
) -> None:
    changed = OLD.replace(old, new)
    if "Kit(" not in new:
        changed = changed.replace("return 1\n", "return 2\n")
    folder = checkout(tmp_path / "c", OLD, changed)
    page, commit = written(folder, tmp_path / "pages")
    assert [hunk[: len(wanted)] for hunk, wanted in zip(commit.left, left, strict=True)] == left
    text = Path(page.path).read_text()
    assert all(f"# TODO: {hunk}\n" in text for hunk in commit.left)


def test_the_page_applies_and_its_proof_does_not_pass(
    tmp_path: Path, catalogue_folder: Path
) -> None:
    root = made.tree(tmp_path / "root", {FILE: OLD})
    folder = checkout(tmp_path / "c", OLD, OLD.replace("total = 0", "total = 1"))
    page, _ = written(folder, catalogue_folder, Tree(root))
    (edit,) = page.patch.edits
    assert list(edit.pins) == [f"before-{run_git(folder, 'rev-parse', 'HEAD')[:12]}", "0.19.2"]
    assert overlay.apply(Session(root)).ok
    assert "total = 1" in (root / FILE).read_text()
    assert page.verify is not None
    with pytest.raises(AssertionError, match="write the proof"):
        page.verify()


def test_a_version_that_lacks_one_of_the_texts_is_not_pinned(tmp_path: Path) -> None:
    root = made.tree(tmp_path / "root", {FILE: OLD.replace("return 1", "return 3")})
    changed = OLD.replace("total = 0", "total = 1").replace("return 1", "return 2")
    page, _ = written(checkout(tmp_path / "c", OLD, changed), tmp_path / "pages", Tree(root))
    assert [len(edit.pins) for edit in page.patch.edits] == [1, 1]


@pytest.mark.parametrize(
    ("rev", "name"), [("nothing", "git-failed"), ("HEAD^", "git-failed"), ("--all", "git-failed")]
)
def test_a_commit_that_is_not_there_is_refused(tmp_path: Path, rev: str, name: str) -> None:
    folder = checkout(tmp_path / "c", OLD, OLD.replace("return 1", "return 2"))
    with pytest.raises(CppmegaError) as caught:  # HEAD^ has no parent
        from_commit.read(folder, rev)
    assert caught.value.name == name
