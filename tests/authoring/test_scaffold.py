"""`cppmega new` and `cppmega pin`: pages that load, and pins that every law has seen."""

from __future__ import annotations

import difflib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cppmega.authoring import pin as pinning
from cppmega.authoring import pin_source, scaffold
from cppmega.authoring.pin import Pinned
from cppmega.catalogue import loader as catalogue
from cppmega.errors import CppmegaError
from cppmega.overlay import verbs as overlay
from cppmega.overlay.verbs import Session
from cppmega.page import Page
from cppmega.proof import verify
from cppmega.rewriting import fingerprint
from cppmega.tree import resolve, wheels
from cppmega.tree.installed import Tree
from tests.authoring.drifts import command
from tests.support import REPOSITORY, made, pristine

pytestmark = pytest.mark.slow


def pins_of(page: Page) -> dict[tuple[int, str], str]:
    """Every pin of a page."""
    return {
        (index, version): pin
        for index, edit in enumerate(page.patch.edits)
        for version, pin in edit.pins.items()
    }


TARGET = "megatron/core/thing.py:double"
STOCK = "def double(x):\n    return x\n"
LATER = "def double(x):\n    x = +x\n    return x\n"
"""Another text of it, to which the edit of a made page still applies."""


@pytest.fixture
def catalogue_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A catalogue of its own, and no wheels."""
    folder = tmp_path / "pages"
    folder.mkdir()
    monkeypatch.setattr(catalogue, "builtin_folder", lambda: folder)

    def none(version: str, say: object, distribution: str) -> Path:
        raise CppmegaError("no-wheel", "none", "none", "none")

    monkeypatch.setattr(wheels, "unpacked", none)
    return folder


# new


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
        ("megatron/core/two.py:f", "target-ambiguous", ""),
    ],
)
def test_a_wrong_target_is_refused_with_the_nearest(
    catalogue_folder: Path, tmp_path: Path, target: str, name: str, hint: str
) -> None:
    twice = "def f():\n    pass\n\n\ndef f():\n    pass\n"
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


# Where a pin is added to the text of a page.

A, B, C = "a" * 16, "b" * 16, "c" * 16
OTHER = {0: C}
SPELLINGS = {
    "dict": (OTHER, f'{{"1.0": "{A}"}}', f'{{"1.0": "{A}", "3.0": "{C}"}}'),
    "long dict": (
        OTHER,
        f'{{\n                "1.0": "{A}",\n                "2.0": "{B}",\n            }}',
        f'{{\n                "1.0": "{A}",\n                "2.0": "{B}",\n'
        f'                "3.0": "{C}",\n            }}',
    ),
    "dict that gets too long": (
        OTHER,
        f'{{"1.0": "{A}", "2.0": "{B}", "2.1": "{B}"}}',
        f'{{\n                "1.0": "{A}",\n                "2.0": "{B}",\n'
        f'                "2.1": "{B}",\n                "3.0": "{C}",\n            }}',
    ),
}
SPELT = '''\
"""A made page.

What: it doubles.
Why: upstream forgot; seen in a test.
Upstream: Not sent: it is made.
Remove: never.
Numerics: changes results: they become right.
"""

from cppmega.edits import replacing
from cppmega.page import Edit, Patch, Source

VERSIONS = ("1.0",  "2.0")  # stays as it is


def edits(target,   pins):
    return Edit(target=target, pins=pins, edit=replacing("x", "2 * x"))


PATCH = Patch(
    edits=(
        Edit(
            target="megatron/core/thing.py:double",
            pins=%s,
            edit=replacing("x", "2 * x"),
        ),
        edits("megatron/core/thing.py:half", {"1.0": "dddddddddddddddd"}),
    ),
    reached="forward",
)


def fixed_upstream(source: Source) -> bool:
    return False


def verify() -> None:
    raise AssertionError
'''


def spelt(folder: Path, pins: str) -> Page:
    folder.mkdir(exist_ok=True)
    (folder / "spelt.py").write_bytes((SPELT % pins).encode())
    return catalogue.load_page("spelt", folder / "spelt.py", "made")


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_pin_is_added_and_every_other_byte_stays(tmp_path: Path, spelling: str) -> None:
    wanted, before, after = SPELLINGS[spelling]
    page = spelt(tmp_path / "pages", before)
    assert pin_source.with_pins(page, wanted, "3.0").decode() == SPELT % after


def test_the_argument_of_a_function_is_a_place_for_a_pin(tmp_path: Path) -> None:
    page = spelt(tmp_path / "pages", f'{{"1.0": "{A}"}}')
    text = pin_source.with_pins(page, {1: C}, "3.0").decode()
    assert text.count("3.0") == 1
    new = pin_source.copy_with(page, text.encode(), tmp_path / "new")
    assert pins_of(new) == pins_of(page) | {(1, "3.0"): C}


def test_edits_with_equal_pins_are_distinguished_by_their_order(tmp_path: Path) -> None:
    page = spelt(tmp_path / "pages", '{"1.0": "dddddddddddddddd"}')
    text = pin_source.with_pins(page, {1: B, 0: A}, "3.0")
    new = pins_of(pin_source.copy_with(page, text, tmp_path / "new"))
    assert new == pins_of(page) | {(0, "3.0"): A, (1, "3.0"): B}


COMPUTED = {
    "fromkeys": f'dict.fromkeys(("1.0", "2.0"), "{A}")',
    "union": f'{{"1.0": "{A}"}} | {{"2.0": "{B}"}}',
    "keys that are names": f'{{VERSIONS[0]: "{A}"}}',
    "the same dict twice": f'{{"1.0": "{A}"}}, **{{"mark": {{"1.0": "{A}"}} and None}}',
}


@pytest.mark.parametrize("spelling", COMPUTED)
def test_pins_that_are_computed_are_refused_with_what_to_write(
    tmp_path: Path, spelling: str
) -> None:
    page = spelt(tmp_path / "pages", COMPUTED[spelling])
    before = Path(page.path).read_bytes()
    with pytest.raises(pin_source.PinsNotFoundError) as caught:
        pin_source.with_pins(page, OTHER, "3.0")
    assert caught.value.name == "pins-not-found" and f'"3.0": "{C}"' in caught.value.next
    assert Path(page.path).read_bytes() == before


def test_pages_of_ours_can_be_pinned_further(tmp_path: Path) -> None:
    """With the text that they have, for a version to come; only pins in a module that a page
    imports are added by hand."""
    refused = []
    for name, page in catalogue.load().items():
        versions = [version for edit in page.patch.edits for version in edit.pins]
        # A page may be for branches alone.
        newest = ([each for each in versions if each[0].isdigit()] or versions)[-1]
        wanted = {i: e.pins[newest] for i, e in enumerate(page.patch.edits) if newest in e.pins}
        try:
            data = pin_source.with_pins(page, wanted, "99.0")
        except pin_source.PinsNotFoundError:
            refused.append(name)
            continue
        new = pins_of(pin_source.copy_with(page, data, tmp_path / name))
        added = {(index, "99.0"): pin for index, pin in wanted.items()}
        assert new == pins_of(page) | added, name
    assert refused == ["float16_keep_fp32", "mhc_connections"]


# pin


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
        ("def double(x):\n    return 2 * x\n", {}, "nothing-to-pin"),
        (LATER, {"version": "0.19.2"}, "label-taken"),
        (LATER, {"like": "0.1"}, "no-such-pin"),
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
    assert json.loads(refused.stdout)["error"]["name"] == "no-such-megatron"
