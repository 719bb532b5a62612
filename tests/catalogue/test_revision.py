"""What the digest and the revisions cover: the code that is reached, and nothing else."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import cppmega
from cppmega.catalogue import revision
from cppmega.overlay import receipt
from cppmega.rewriting import code_text
from tests.support.lab import B, Lab
from tests.support.made import write

KERNEL = """\
\"\"\"A kernel.\"\"\"


def scaled(x):
    \"\"\"Scale.\"\"\"
    return 3 * x  # thrice
"""
PLAIN = 'replacing("x + x", "2 * x")'
RUNS_A_KERNEL = (
    'inserting("from cppmega.ops.scale import scaled", before="return x + x"), '
    'replacing("x + x", "scaled(x)")'
)


class Package:
    """A made package in the place of ours, which the following of imports looks into."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def write(self, **files: str) -> None:
        """Modules by name, `__` for a dot; as another process would find them."""
        for name, text in files.items():
            write(self.place, {f"{name.replace('__', '/')}.py": text.encode()})
        forget()


def forget() -> None:
    for cached in (revision._module, revision._closure, revision.engine_revision):
        cached.cache_clear()


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    return Lab(tmp_path, monkeypatch)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Package]:
    place = tmp_path / "package" / "cppmega"
    monkeypatch.setattr(revision, "PACKAGE_FOLDER", place)
    made = Package(place)
    made.write(
        ops__scale="from cppmega.ops.deeper import THREE\n\n" + KERNEL,
        ops__deeper="THREE = 3\n",
        ops__other="X = 1\n",
        shared="from . import deeper\n",
        deeper="def f():\n    import cppmega.lazy\n",
        lazy="X = 1\n",
        other="X = 1\n",
    )
    yield made
    monkeypatch.undo()
    forget()


def patched(lab: Lab) -> str:
    """Apply a page whose text imports a kernel lazily, and one beside it; the digest."""
    if not (lab.root / "megatron").exists():
        lab.wheel()
    lab.page(edit=f"in_order({RUNS_A_KERNEL})")
    lab.page("beside", f"{B}:single", 'replacing("return x", "return 1 * x")')
    return lab.apply().digest


# -- the text that counts --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        'def f(x):\n    """Doc.\n\n    # more\n    """\n\n    # c\n    return x  # c\n',
        'def f(x):\n    "é"; return x\n'.replace("; ", "\n    "),
        "# -*- coding: utf-8 -*-\n\n\ndef f(x):\n\n    return x\n\n\n",
        "def f(x):\r\n    return x\r\n",
        'def f(x):\n    return x\n    "what comes after"\n',
    ],
)
def test_comments_docstrings_and_blank_lines_do_not_count(text: str) -> None:
    assert code_text.code_of(text.encode()).bare == code_text.code_of(PLAIN_F).bare


PLAIN_F = b"def f(x):\n    return x\n"


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("X = '# a'\n", "X = '# b'\n"),
        ("X = '''\n\n'''\n", "X = '''\n'''\n"),
        ("X = f'''{1}\n  \n'''\n", "X = f'''{1}\n'''\n"),
        ("X = '''a # b\n'''\n", "X = '''a\n'''\n"),
        ("def f():\n    x\n", "def f():\n  x\n"),
        ("f(1)\n", "f(2)\n"),
        ("# coding: latin-1\nX = 'é'\n", "# coding: utf-8\nX = 'é'\n"),
    ],
)
def test_code_counts_that_looks_like_a_comment(one: str, two: str) -> None:
    assert code_text.code_of(one.encode()).bare != code_text.code_of(two.encode()).bare


def test_a_docstring_alone_is_a_pass() -> None:
    alone = code_text.code_of(b'class A:\n    "Doc."\n').bare
    assert alone == code_text.code_of(b"class A:\n    pass\n").bare


def test_the_bare_text_of_everything_here_is_the_same_code() -> None:
    """On real files: what is left parses to the same tree, and no comment is left."""
    folder = Path(cppmega.__file__).parent
    for file in sorted(folder.rglob("*.py"))[::4]:
        text = file.read_text()
        bare = code_text.bare(text)
        assert _without_strings(bare) == _without_strings(text), file
        assert code_text.bare(bare) == bare


def _without_strings(text: str) -> str:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(getattr(node, "body", None), list):
            kept = [s for s in node.body if not code_text._is_string(s)]
            whole = isinstance(node, ast.Module)  # it may be empty; a function or a class may not
            node.body = kept or ([ast.Pass()] if node.body and not whole else [])
    return ast.dump(tree)


# -- what is reached -------------------------------------------------------------------------------


def test_a_changed_kernel_is_another_digest(lab: Lab, package: Package) -> None:
    """It is imported by the patched text alone, and lazily."""
    first = patched(lab)
    package.write(ops__scale=KERNEL.replace("3", "4"))
    verdict = lab.verdict()
    assert verdict.state == "pending" and "cppmega.ops.scale" in verdict.detail
    assert lab.verdict("beside").state == "applied"
    outcome = lab.apply()
    assert outcome.ok and outcome.digest != first and not outcome.changed
    assert lab.status().ok


def test_a_kernel_of_a_kernel_counts_too(lab: Lab, package: Package) -> None:
    first = patched(lab)
    package.write(ops__deeper="THREE = 4\n")
    assert lab.verdict().state == "pending"
    assert lab.apply().digest != first


def test_only_what_is_reached_counts(lab: Lab, package: Package) -> None:
    first = patched(lab)
    package.write(ops__other="X = 2\n", other="X = 2\n")
    assert lab.status().ok and lab.apply().digest == first
    lab.revert("page")
    digest = lab.receipt().digest
    package.write(ops__scale=KERNEL.replace("3", "4"))
    assert lab.status().ok and lab.status().digest == digest != first


def test_a_comment_in_a_kernel_changes_nothing(lab: Lab, package: Package) -> None:
    first = patched(lab)
    package.write(ops__deeper='"""Doc."""\n\nTHREE = 3  # three\n')
    assert lab.status().ok and lab.status().digest == first
    assert not lab.apply().receipt_changed


def test_a_docstring_that_is_read_counts(lab: Lab, package: Package) -> None:
    package.write(ops__scale=KERNEL + "\n\nWHAT = scaled.__doc__\n")
    first = patched(lab)
    package.write(ops__scale=KERNEL.replace("Scale.", "Scales.") + "\n\nWHAT = scaled.__doc__\n")
    assert lab.apply().digest != first


def test_a_comment_in_a_page_is_written_and_changes_no_digest(lab: Lab) -> None:
    """A comment inside a helper stands in Megatron's file: the state stays, apply writes it."""
    lab.wheel()
    given = {"more": {"helpers": "(twice,)"}, "edit": 'replacing("x + x", "twice(x)")'}
    lab.page(code="def twice(x):\n    return 2 * x\n", **given)  # type: ignore[arg-type]
    first = lab.apply().digest
    code = "def twice(x):\n    # the sum\n    return 2 * x\n"
    lab.page(code=code, what="something else", **given)  # type: ignore[arg-type]
    assert lab.status().ok and lab.status().digest == first
    outcome = lab.apply()
    assert outcome.changed and outcome.digest == first and "# the sum" in lab.text()
    assert not lab.apply().receipt_changed


def test_a_helper_of_a_page_is_named_by_the_digest(lab: Lab) -> None:
    lab.wheel()
    given = {"more": {"helpers": "(twice,)"}, "edit": 'replacing("x + x", "twice(x)")'}
    lab.page(code="def twice(x):\n    return 2 * x\n", **given)  # type: ignore[arg-type]
    first = lab.apply().digest
    lab.page(code="def twice(x):\n    return x * 2\n", **given)  # type: ignore[arg-type]
    assert lab.apply().digest != first


# -- revisions -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    ["import cppmega.shared", "def f():\n    from cppmega import shared", "X = 'cppmega.shared'"],
    ids=["at top", "lazily", "by its name"],
)
def test_changed_module_of_a_page_is_a_changed_page(
    lab: Lab, package: Package, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    """Several pages share a module of ours: what it imports, relatively and lazily, counts."""
    monkeypatch.setitem(sys.modules, "cppmega.shared", ModuleType("cppmega.shared"))
    lab.wheel()
    lab.page(code=code)
    lab.apply()
    package.write(other="X = 2\n")
    lab.applied("page")
    package.write(lazy="X = 1  # one\n")
    lab.applied("page")
    package.write(lazy="X = 2\n")
    assert lab.verdict().state == "pending" and "cppmega.lazy" in lab.verdict().detail


def test_a_page_is_made_of_the_files_that_it_reads(lab: Lab) -> None:
    lab.wheel()
    (lab.pages / "table.txt").write_text("2")
    lab.page(code="from pathlib import Path\nT = Path(__file__).with_name('table.txt').read_text()")
    lab.apply()
    (lab.pages / "table.txt").write_text("3")
    assert lab.verdict().state == "pending"
    assert lab.apply().ok


def test_a_page_is_made_of_its_folder(lab: Lab) -> None:
    lab.wheel()
    lab.page("whole", code="from .second import X").rename(lab.pages / "kept")
    folder = lab.pages / "whole"
    write(folder, {"second.py": b"X = 1\n", "table.txt": b"1\n"})
    (lab.pages / "kept").rename(folder / "__init__.py")
    lab.apply()
    write(folder, {"second.py": b"X = 1  # one\n"})
    lab.applied("whole")
    for path, data in (("second.py", b"X = 2\n"), ("table.txt", b"2\n")):
        write(folder, {path: data})
        assert lab.verdict("whole").state == "pending"
        assert lab.apply().ok


def test_the_engine_is_what_its_entrances_import() -> None:
    """One rule, no list: whatever the rewriting imports decides what a patched file looks like."""
    covered = set(revision.reached(revision._ENTRANCES))
    assert {
        "cppmega.rewriting.fingerprint",
        "cppmega.rewriting.inserted",
        "cppmega.tree.installed",
    } <= covered
    assert not {name for name in covered if name.startswith("cppmega.ops")}


def test_the_package_itself_offers_names_and_does_nothing() -> None:
    """Its `__init__` is run by every import and is in no hash."""
    tree = ast.parse(Path(cppmega.__file__).read_bytes())
    assigned, on_use = (ast.Assign, ast.Assign), ast.FunctionDef
    assert [type(n) for n in tree.body] == [ast.Expr, ast.Assign, ast.If, *assigned, on_use]
    assert ast.unparse(tree.body[1]) == "TYPE_CHECKING = False"
    assert ast.unparse(tree.body[2].test) == "TYPE_CHECKING"
    assert tree.body[-1].name == "__getattr__"


def test_what_is_known_of_files_is_kept_and_not_believed_of_other_rules(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second `status` hashes bytes and parses no page; another version of us asks again."""
    lab.wheel()
    page = lab.page()
    lab.apply()
    key = receipt.sha256(page.read_bytes())
    kept = lab.receipt().code
    assert key in kept
    monkeypatch.setattr(code_text, "_known", {})
    code_text.remember(kept)
    assert key in code_text._known
    monkeypatch.setattr(code_text, "_known", {})
    code_text.remember({**kept, "rules": "other"})
    assert not code_text._known
    path = lab.root / ".cppmega" / "receipt.json"
    raw = json.loads(path.read_bytes())
    raw["code"] = {**kept, key: [1, 2, 3, 4, "x"], "a": None, "b": ["x"]}
    path.write_text(json.dumps(raw))
    assert lab.status().ok
