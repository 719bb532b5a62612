"""`cppmega new`: pages that load, and neither apply nor pass before somebody has written them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cppmega.authoring import scaffold
from cppmega.catalogue import loader as catalogue
from cppmega.errors import CppmegaError
from cppmega.overlay import verbs as overlay
from cppmega.overlay.verbs import Session
from cppmega.rewriting import fingerprint
from cppmega.tree.installed import Tree
from tests.authoring.texts import STOCK, TARGET
from tests.support import REPOSITORY, made

pytestmark = pytest.mark.slow

TWO = "megatron/core/two.py"


def new(folder: Path, root: Path | None, *targets: str, name: str = "fresh") -> Path:
    tree = Tree(root) if root is not None else None
    return scaffold.new(name, folder, targets, tree, catalogue.load())


def problem(*args: object, **kwargs: object) -> CppmegaError:
    with pytest.raises(CppmegaError) as caught:
        new(*args, **kwargs)  # type: ignore[arg-type]
    return caught.value


def test_a_new_page_passes_the_header_law_and_is_pending(
    catalogue_folder: Path, tmp_path: Path
) -> None:
    root = made.tree(tmp_path / "root")
    new(catalogue_folder, root, TARGET)
    (page,) = catalogue.load().values()  # raises for a page that breaks the header law
    (edit,) = page.patch.edits
    assert (edit.target, dict(edit.pins)) == (TARGET, {"0.19.2": fingerprint.of_source(STOCK)})
    (verdict,) = overlay.status(Session(root)).verdicts
    assert verdict.state == "pending"


def test_a_page_without_edit_and_proof_is_neither_applied_nor_proved(
    catalogue_folder: Path, tmp_path: Path
) -> None:
    root = made.tree(tmp_path / "root")
    new(catalogue_folder, root, TARGET)
    with pytest.raises(CppmegaError, match="TODO_old_code") as caught:
        overlay.apply(Session(root))
    assert caught.value.name == "edit-mismatch"
    (page,) = catalogue.load().values()
    with pytest.raises(AssertionError, match="write the proof"):
        page.verify()


def test_a_page_without_a_target_stops_apply(catalogue_folder: Path, tmp_path: Path) -> None:
    new(catalogue_folder, None)
    outcome = overlay.apply(Session(made.tree(tmp_path / "root")))
    assert [v.state for v in outcome.plan.failures] == ["absent"]


def test_a_page_for_another_package_names_it_and_its_version(
    catalogue_folder: Path, tmp_path: Path
) -> None:
    root = made.tree(tmp_path / "root")
    made.write(root, {"liger_kernel/thing.py": STOCK.encode()})
    made.dist_info(root, "0.8.5", "liger_kernel")
    new(catalogue_folder, root, "liger_kernel/thing.py:double")
    (page,) = catalogue.load().values()
    (edit,) = page.patch.edits
    assert (edit.distribution, list(edit.pins)) == ("liger-kernel", ["0.8.5"])
    assert overlay.status(Session(root)).plan.verdicts["fresh"].state == "pending"
    found = problem(catalogue_folder, root, "liger_kernel/thing.py:triple", name="other")
    assert found.name == "target-absent" and "liger-kernel 0.8.5" in found.what


@pytest.mark.parametrize("symbol", ["LIMIT", "import.path", "Sizes.width"])
def test_a_page_for_a_statement_carries_no_mark(
    catalogue_folder: Path, tmp_path: Path, symbol: str
) -> None:
    text = "from os import path\n\nLIMIT = 1\n\n\nclass Sizes:\n    width: int = 1\n"
    root = made.tree(tmp_path / "root", {TWO: text})
    written = new(catalogue_folder, root, f"{TWO}:{symbol}")
    lines = {"LIMIT": "LIMIT = 1", "import.path": "from os import path"}
    old = lines.get(symbol, "width: int = 1")
    page = written.read_text().replace('"TODO_old_code"', repr(old))
    written.write_text(page.replace('"TODO_new_code"', repr(f"{old}\nmore = 2")))
    assert overlay.apply(Session(root)).ok
    assert f"{old}  # patched by cppmega: fresh\n" in (root / TWO).read_text()
    assert overlay.revert(Session(root)).ok and (root / TWO).read_text() == text


def test_what_is_there_is_not_overwritten(catalogue_folder: Path, tmp_path: Path) -> None:
    root = made.tree(tmp_path / "root")
    path = new(catalogue_folder, root, TARGET)
    before = path.read_bytes()
    assert problem(catalogue_folder, root, TARGET).name == "page-exists"
    assert problem(tmp_path / "other", root, TARGET).name == "page-exists"
    (catalogue_folder / "folder_page").mkdir()
    assert problem(catalogue_folder, root, name="folder_page").name == "page-exists"
    assert path.read_bytes() == before and not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("target", "name", "hint"),
    [
        ("megatron/core/thing.py:doubel", "target-absent", "megatron/core/thing.py:double"),
        ("megatron/thing.py:double", "target-absent", "megatron/core/thing.py:double"),
        ("megatron/core/thing.py", "bad-target", "megatron/core/transformer/mlp.py:MLP.forward"),
        ("megatron/core/two.py:f", "target-ambiguous", "two.py:f#1"),
        ("megatron/core/two.py:LIMITS", "target-absent", "megatron/core/two.py:LIMIT"),
        ("megatron/core/two.py:path", "target-absent", "megatron/core/two.py:import.path"),
    ],
)
def test_a_wrong_target_is_refused_with_the_nearest(
    catalogue_folder: Path, tmp_path: Path, target: str, name: str, hint: str
) -> None:
    twice = "from os import path\n\nLIMIT = 1\n\n\n" + "def f():\n    pass\n\n\n" * 2
    root = made.tree(tmp_path / "root", {"megatron/core/two.py": twice})
    error = problem(catalogue_folder, root, target)
    assert error.name == name and hint in error.next
    assert not list(catalogue_folder.iterdir())


def test_a_name_that_is_no_module_is_refused(catalogue_folder: Path) -> None:
    error = problem(catalogue_folder, None, name="Float16-Fix")
    assert (error.name, error.next) == ("bad-name", "cppmega new float16_fix")


def test_on_a_patched_tree_the_text_of_upstream_is_pinned(
    catalogue_folder: Path, tmp_path: Path
) -> None:
    root = made.tree(tmp_path / "root")
    made.page(catalogue_folder)
    assert overlay.apply(Session(root)).ok
    new(catalogue_folder, root, TARGET)
    pages = catalogue.load()
    (edit,) = pages["fresh"].patch.edits
    assert edit.pins["0.19.2"] == fingerprint.of_source(STOCK)
    # Another page edits that symbol: without an order both would be in conflict.
    assert pages["fresh"].patch.after == ("double_doubles",)


def test_several_targets_and_a_formatted_page(catalogue_folder: Path, tmp_path: Path) -> None:
    root = made.tree(tmp_path / "root")
    paths = [
        new(catalogue_folder, root, TARGET, "megatron/core/thing.py:half", name="two"),
        new(catalogue_folder, root, TARGET, name="one"),
        new(catalogue_folder, None, name="none"),
    ]
    assert [len(catalogue.load()[p.stem].patch.edits) for p in paths] == [2, 1, 1]
    config = f"--config={REPOSITORY / 'pyproject.toml'}"
    for verb in (["check", "--no-cache"], ["format", "--check", "--no-cache"]):
        arguments = [sys.executable, "-m", "ruff", *verb, config, *map(str, paths)]
        done = subprocess.run(arguments, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
