"""`cppmega pin`: pins that every law has seen; and what it and `cppmega new` answer as commands."""

from __future__ import annotations

import difflib
import json
import re
import shutil
from pathlib import Path

import pytest

from cppmega.authoring import pin as pinning
from cppmega.authoring.pin import Pinned
from cppmega.catalogue import loader as catalogue
from cppmega.errors import CppmegaError
from cppmega.overlay import verbs as overlay
from cppmega.overlay.verbs import Session
from cppmega.proof import verify
from cppmega.rewriting import fingerprint
from cppmega.tree import resolve, wheels
from cppmega.tree.installed import Tree
from tests.authoring.drifts import command
from tests.authoring.texts import STOCK, TARGET
from tests.support import made, pristine

pytestmark = pytest.mark.slow

LATER = "def double(x):\n    x = +x\n    return x\n"
"""Another text of the target, to which the edit of a made page still applies."""


def pin(
    root: Path, page: Path, scratch: Path, version: str = "0.20.0", **options: object
) -> Pinned:
    loaded = catalogue.load_page(page.stem, page, "made")
    return pinning.pin(loaded, version, Tree(root), scratch, print, **options)  # type: ignore[arg-type]


def later(root: Path, text: str = LATER, version: str = "0.20.0") -> Path:
    return made.tree(root, {"megatron/core/thing.py": text}, version)


def test_a_pin_is_written_after_the_proof_has_run(catalogue_folder: Path, tmp_path: Path) -> None:
    path = made.page(catalogue_folder)
    path.chmod(0o640)
    before = path.read_text()
    root = later(tmp_path / "root")
    done = pin(root, path, tmp_path / "scratch")
    text = fingerprint.of_source(LATER)
    assert (done.added, done.like, done.proof) == ({TARGET: text}, "0.19.2", "passed")
    changed = list(difflib.ndiff(before.split("\n"), path.read_text().split("\n")))
    assert all("replacing" in line for line in changed if line.startswith("- "))
    page = catalogue.load_page(path.stem, path, "made")
    old = fingerprint.of_source(STOCK)
    assert dict(page.patch.edits[0].pins) == {"0.19.2": old, "0.20.0": text}
    assert path.stat().st_mode & 0o777 == 0o640
    assert sorted(p.name for p in catalogue_folder.iterdir() if p.suffix) == [path.name]
    assert not (root / ".cppmega").exists()
    (verdict,) = overlay.status(Session(root)).verdicts
    assert verdict.state == "pending"


def test_the_text_of_another_package_is_proved_beside_the_installed_megatron(
    catalogue_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its wheel holds no megatron, which the proof imports as well."""
    made.write(tmp_path / "wheel", {"liger_kernel/thing.py": LATER.encode()})
    made.dist_info(tmp_path / "wheel", "0.8.5", "liger_kernel")
    megatron = made.tree(tmp_path / "installed")
    monkeypatch.setattr(resolve, "find_root", lambda: megatron)
    path = made.page(
        catalogue_folder,
        target="liger_kernel/thing.py:double",
        edit='replacing("return x", "return 2 * x"), distribution="liger-kernel"',
        verify="import megatron.core.thing\nfrom liger_kernel.thing import double\n"
        "assert double(2) == 4",
    )
    tree = resolve.with_megatron(Tree(tmp_path / "wheel"), tmp_path / "joined")
    done = pin(tree.root, path, tmp_path / "scratch", "0.8.5")
    assert (list(done.added), done.proof) == (["liger_kernel/thing.py:double"], "passed")


@pytest.mark.parametrize(
    ("text", "page", "law"),
    [
        ("def double(x):\n    return +x\n", {}, "edit"),
        (LATER, {"edit": "lambda node: node"}, "edit"),
        (LATER, {"edit": 'replacing("return x", "return times * x")'}, "undefined-names"),
        ("def treble(x):\n    return x\n", {}, "known-target"),
        (STOCK + "\n\n" + LATER, {}, "known-target"),
        ("def double(x:\n", {}, "known-target"),
        (LATER, {"verify": "pass"}, "verify"),
        (LATER, {"verify": "raise AssertionError"}, "verify"),
        (
            LATER,
            {
                "verify": "import inspect\nfrom megatron.core import thing\n"
                'assert "2 * x" in inspect.getsource(thing)'
            },
            "verify",
        ),
    ],
    ids=[
        "edit does not fit",
        "edit does nothing",
        "undefined name",
        "no target",
        "two targets",
        "torn file",
        "proof passes on stock",
        "proof fails on patched",
        "proof reads the text",
    ],
)
def test_a_law_that_fails_is_named_and_nothing_is_written(
    catalogue_folder: Path, tmp_path: Path, text: str, page: dict[str, str], law: str
) -> None:
    path = made.page(catalogue_folder, **page)
    before = path.read_bytes()
    with pytest.raises(CppmegaError) as caught:
        pin(later(tmp_path / "root", text), path, tmp_path / "scratch")
    assert caught.value.name == f"law-{law}", caught.value.render()
    assert "Nothing was written" in caught.value.why
    assert path.read_bytes() == before


@pytest.fixture
def proved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Proofs pass without running; what was to be proved."""
    asked: list[str] = []

    def passes(session: Session, names: list[str]) -> list[verify.Proved]:
        asked.extend(names)
        return [verify.Proved(name, "passed", "", {}) for name in names]

    monkeypatch.setattr(verify, "verify", passes)
    return asked


def test_what_the_proof_needs_and_is_not_here(
    catalogue_folder: Path, tmp_path: Path, proved: list[str]
) -> None:
    path = made.page(catalogue_folder, patch='reached="forward", needs=("no_such_thing",)')
    root = later(tmp_path / "root")
    before = path.read_bytes()
    with pytest.raises(CppmegaError, match="no_such_thing") as caught:
        pin(root, path, tmp_path / "scratch")
    assert caught.value.name == "needs-missing" and path.read_bytes() == before
    done = pin(root, path, tmp_path / "again", unverified=True)
    assert (done.proof, proved) == ("unverified", ["double_doubles"])  # its text was compared
    assert "no_such_thing" in done.notes[0] and path.read_bytes() != before


def test_where_two_edits_fit_somebody_must_choose(
    catalogue_folder: Path, tmp_path: Path, proved: list[str]
) -> None:
    other = fingerprint.of_source("def double(x):\n    pass\n")
    more = f'Edit({TARGET!r}, {{"0.18.2": {other!r}}}, replacing("return x", "return x + x"))'
    path = made.page(
        catalogue_folder, edit=f'replacing("return x", "return 2 * x")),\n        {more[:-1]}'
    )
    root = later(tmp_path / "root")
    before = path.read_bytes()
    with pytest.raises(CppmegaError) as caught:
        pin(root, path, tmp_path / "scratch")
    assert caught.value.name == "ambiguous-edit" and path.read_bytes() == before
    assert "--like 0.19.2" in caught.value.next
    done = pin(root, path, tmp_path / "again", like="0.18.2")
    assert done.like == "0.18.2"
    page = catalogue.load_page(path.stem, path, "made")
    assert ["0.20.0" in edit.pins for edit in page.patch.edits] == [False, True]


def test_a_known_text_gets_a_further_version_and_then_no_more(
    catalogue_folder: Path, tmp_path: Path, proved: list[str]
) -> None:
    path = made.page(catalogue_folder)
    root = later(tmp_path / "root", STOCK)
    assert pin(root, path, tmp_path / "a").added == {TARGET: fingerprint.of_source(STOCK)}
    before = path.read_bytes()
    assert pin(root, path, tmp_path / "b").added == {}
    assert path.read_bytes() == before and proved == ["double_doubles"]


@pytest.mark.parametrize(
    ("text", "options", "name"),
    [
        ("def double(x):\n    return 2 * x\n", {}, "nothing-to-do"),
        (LATER, {"version": "0.19.2"}, "label-taken"),
        (LATER, {"like": "0.1"}, "pins-not-found"),
    ],
)
def test_what_cannot_be_pinned(
    catalogue_folder: Path, tmp_path: Path, text: str, options: dict[str, str], name: str
) -> None:
    fixed = f'return "2 * x" in source.text("{TARGET}")'
    path = made.page(catalogue_folder, fixed=fixed)
    with pytest.raises(CppmegaError) as caught:
        pin(later(tmp_path / "root", text), path, tmp_path / "scratch", **options)
    assert caught.value.name == name


def test_a_text_that_somebody_edited_is_not_pinned(catalogue_folder: Path, tmp_path: Path) -> None:
    path = made.page(catalogue_folder)
    root = later(tmp_path / "root")
    (root / "megatron/core/thing.py").write_text(LATER + "\n\nX = 1\n")
    with pytest.raises(CppmegaError) as caught:
        pin(root, path, tmp_path / "scratch")
    assert caught.value.name == "not-pristine"


def test_a_change_of_what_the_edit_replaces_is_to_be_read(
    catalogue_folder: Path,
    tmp_path: Path,
    proved: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A body of our own applies to anything, and every law holds: what upstream added is lost."""
    more = "def body(x):\n    return 2 * x\n"
    path = made.page(catalogue_folder, edit="body_of(body)", more=more)
    old = later(tmp_path / "old", STOCK, "0.19.2")
    monkeypatch.setattr(wheels, "unpacked", lambda version, *_: old)
    done = pin(later(tmp_path / "root"), path, tmp_path / "scratch")
    assert "upstream changed what the edit replaces since 0.19.2" in done.notes[0]
    assert "cppmega drift 0.19.2 0.20.0" in done.notes[0]


def test_a_page_that_is_a_folder(catalogue_folder: Path, tmp_path: Path, proved: list[str]) -> None:
    path = made.page(catalogue_folder, edit="EDIT", more="from .parts import EDIT")
    folder = catalogue_folder / path.stem
    folder.mkdir()
    (folder / "parts.py").write_text(
        "from cppmega.edits import replacing\nEDIT = replacing('return x', 'return 2 * x')\n"
    )
    path = path.rename(folder / "__init__.py")
    page = catalogue.load()["double_doubles"]
    done = pinning.pin(page, "0.20.0", Tree(later(tmp_path / "r")), tmp_path / "scratch", print)
    assert done.added and '"0.20.0"' in path.read_text()


def test_a_runtime_patch_is_pinned_too(
    catalogue_folder: Path, tmp_path: Path, proved: list[str]
) -> None:
    more = "def wrap(original):\n    def double(x):\n        return 2 * x\n    return double\n"
    path = made.page(catalogue_folder, edit='wrap, kind="function-swap"', more=more)
    done = pin(later(tmp_path / "root"), path, tmp_path / "scratch")
    assert done.added == {TARGET: fingerprint.of_source(LATER)}


@pytest.mark.parametrize("page", ["dataset_helpers_prebuilt", "mtp_roll_packed_sequences"])
def test_a_real_page_without_its_newest_pins_gets_them_back(
    tmp_path: Path, proved: list[str], page: str
) -> None:
    whole = catalogue.load()[page]
    text = Path(whole.path).read_text()
    (tmp_path / "pages").mkdir()
    for shared in Path(whole.path).parent.glob("_*.py"):
        shutil.copy(shared, tmp_path / "pages")
    path = tmp_path / "pages" / f"{page}.py"
    path.write_text(re.sub(r'\n *"0\.19\.2": "[0-9a-f]{16}",', "", text))
    tree = Tree(pristine("0.19.2"))
    lacking = catalogue.load_page(page, path, "made")
    # Where the edits of several versions pass the laws on the text, the proofs decide; here all
    # of them pass.
    done = pinning.pin(lacking, "0.19.2", tree, tmp_path / "s", print, like="0.18.2")
    assert set(done.added) == {e.target for e in whole.patch.edits if "0.19.2" in e.pins}
    again = catalogue.load_page(page, path, "made")
    for edit, original in zip(again.patch.edits, whole.patch.edits, strict=True):
        assert dict(edit.pins) == dict(original.pins)


def test_the_commands_answer_on_every_exit(tmp_path: Path) -> None:
    pages, root = tmp_path / "pages", later(tmp_path / "root", STOCK, "0.19.2")
    pages.mkdir()
    done = command(
        pages, "new", "fresh", "--target", TARGET, "--megatron", root, "--dir", pages, "--json"
    )
    answer = json.loads(done.stdout)
    assert done.returncode == 0 and answer["page"] == str(pages / "fresh.py")
    assert any("cppmega verify fresh" in step for step in answer["steps"])
    again = command(pages, "new", "fresh", "--dir", pages, "--json")
    assert again.returncode == 1
    assert json.loads(again.stdout)["error"]["name"] == "page-exists"
    (pages / "fresh.py").unlink()
    made.page(pages)
    held = command(pages, "pin", "double_doubles", "0.19.2", "--from", root, "--json")
    assert held.returncode == 0 and json.loads(held.stdout)["added"] == {}
    refused = command(pages, "pin", "double_doubles", "0.19.2", "--from", root / "no", "--json")
    assert refused.returncode == 1
    assert json.loads(refused.stdout)["error"]["name"] == "no-megatron"
