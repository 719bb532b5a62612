"""`cppmega drift`: what changed between two trees, what that is to an edit, and what to do."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import zipfile
from functools import cache
from itertools import pairwise
from pathlib import Path
from textwrap import indent

import pytest

from cppmega import cli
from cppmega.authoring import drift, drift_report, similar, statements
from cppmega.authoring.drift_result import Drift, PageDrift, TargetDrift
from cppmega.catalogue import loader as catalogue
from cppmega.errors import CppmegaError
from cppmega.overlay import verbs as overlay
from cppmega.overlay.verbs import Session
from cppmega.page import Page
from cppmega.rewriting import fingerprint
from cppmega.tree import resolve as given
from cppmega.tree.installed import Tree
from tests.support import REPOSITORY, VERSIONS, made, pristine, speed

pytestmark = pytest.mark.slow

FILE = "megatron/core/work.py"
OLD = """\
def work(x, scale=1):
    size = len(x)
    total = sum(x)
    if size > 3:
        total = total * scale
    size -= 1
    other = size + 1
    return total, other
"""
EDIT = 'replacing("total * scale", "total * scale * 2")'

SIGNATURE = ("parameter ", "returns ")
"""How a change of a signature is told, which is on no line of its own."""


def page(
    folder: Path,
    old: str = OLD,
    *,
    pins: dict[str, str] | None = None,
    target: str = f"{FILE}:work",
    edit: str = EDIT,
    fixed: str = "return False",
    patch: str = 'reached="forward"',
    name: str = "work_works",
    more: str = "",
) -> Page:
    """A page that pins `old` for 1.0, and more texts for other versions."""
    path = made.page(
        folder, name, target=target, source=old, edit=edit, patch=patch, fixed=fixed, more=more
    )
    texts = {"1.0": old} | (pins or {})
    prints = {version: fingerprint.of_source(text) for version, text in texts.items()}
    text = path.read_text()
    path.write_text(re.sub(r"\{'?\"?0\.19\.2[^}]*\}", repr(prints), text))
    return catalogue.load_page(name, path, str(folder))


@pytest.fixture
def compare(tmp_path: Path):
    """Compare two made trees, whose one file of interest is given."""

    def go(old: str | None, new: str | None, *pages: Page, **files: str) -> Drift:
        trees = []
        for version, text in (("1.0", old), ("2.0", new)):
            at = {FILE: text} if text is not None else {}
            at |= {path: more for path, more in files.items() if version == "2.0"}
            trees.append((version, Tree(made.tree(tmp_path / version, at, version))))
        return drift.compare(trees[0], trees[1], {page.name: page for page in pages})

    return go


def only(found: Drift) -> tuple[PageDrift, TargetDrift]:
    """The one page and its one target."""
    ((one,), (target,)) = found.pages, found.pages[0].targets
    return one, target


def advised(found: Drift) -> tuple[str, str]:
    return drift_report.advice(found.pages[0], found)


def test_comments_docstrings_and_blank_lines_are_no_change(compare, tmp_path: Path) -> None:
    new = OLD.replace("1):\n", '1):\n    """Works."""\n\n', 1).replace("sum(x)", "sum(x)  # all")
    found = compare(OLD, new, page(tmp_path / "pages"))
    one, target = only(found)
    assert (one.word, one.safe, target.word, found.safe) == ("same", True, "same", True)
    assert advised(found) == ("nothing", "")


def test_a_change_elsewhere_is_told_from_one_of_what_the_edit_replaces(
    compare, tmp_path: Path
) -> None:
    new = OLD.replace("size + 1", "size + 2").replace("x, scale=1", "x, scale=1, *, bias=0")
    found = compare(OLD, new, page(tmp_path / "pages"))
    one, target = only(found)
    assert (one.word, one.safe, target.fits, target.known) == ("changed", False, True, "")
    assert [(c.old, c.new, c.after, c.meets) for c in target.changes] == [
        ((), ("parameter *", "parameter bias = 0"), "parameter scale = 1", "elsewhere"),
        (("other = size + 1",), ("other = size + 2",), "size -= 1", "elsewhere"),
    ]
    sentence, command = advised(found)
    assert "still fits" in sentence and command == "cppmega pin work_works 2.0"


def test_a_change_of_what_the_edit_replaces_is_marked(compare, tmp_path: Path) -> None:
    new = OLD.replace("total * scale", "total * scale + 1")
    found = compare(OLD, new, page(tmp_path / "pages"))
    _, target = only(found)
    assert target.fits is True
    assert [change.meets for change in target.changes] == ["replaced"]
    assert "upstream changed what it replaces" in advised(found)[0]
    said = "\n".join(drift_report.lines(found))
    assert "! -     total = total * scale\n" in said
    assert "! +     total = total * scale + 1\n" in said


def test_a_change_right_beside_the_edit_is_marked(compare, tmp_path: Path) -> None:
    new = OLD.replace("total * scale\n", "total * scale\n        total += 1\n")
    _, target = only(compare(OLD, new, page(tmp_path / "pages")))
    assert [change.meets for change in target.changes] == ["beside"]


def test_an_edit_that_no_longer_fits_says_why(compare, tmp_path: Path) -> None:
    found = compare(OLD, OLD.replace("total * scale", "total"), page(tmp_path / "pages"))
    _, target = only(found)
    assert target.fits is False
    assert target.misfit == "`total * scale` occurs 0 times, but the page declares 1"
    assert target.changes[0].meets == "replaced"
    assert "write an Edit for the new text" in advised(found)[0]


def test_a_body_of_our_own_undoes_what_upstream_changes_below_it(compare, tmp_path: Path) -> None:
    """Our body repeats upstream's line, so no comparison with the old text shows it as ours."""
    more = (
        "def body(x, scale=1):\n    size = len(x)\n    total = sum(x) * scale * 2\n"
        "    size -= 1\n    other = size + 1\n    return total, other\n"
    )
    ours = page(tmp_path / "pages", edit="body_of(body)", more=more)
    _, target = only(compare(OLD, OLD.replace("size + 1", "size + 2"), ours))
    assert [(c.new, c.meets) for c in target.changes] == [(("other = size + 2",), "replaced")]


def test_another_layout_is_a_change_without_statements(compare, tmp_path: Path) -> None:
    new = OLD.replace("size + 1", "(\n        size + 1\n    )")
    found = compare(OLD, new, page(tmp_path / "pages"))
    one, target = only(found)
    assert (one.word, target.changes, target.fits) == ("changed", (), True)
    assert any("layout changed" in line for line in drift_report.lines(found))


def test_a_text_that_the_page_knows_is_safe(compare, tmp_path: Path) -> None:
    new = OLD.replace("size + 1", "size + 2")
    found = compare(OLD, new, page(tmp_path / "pages", pins={"2.0": new, "0.9": new}))
    one, target = only(found)
    assert (one.word, one.safe, target.known, len(target.changes)) == ("changed", True, "2.0", 1)
    assert found.safe and "safe: all 1 patches" in drift_report.closing(found)


@pytest.mark.parametrize("text", [OLD, OLD.replace("size + 1", "size + 2")], ids=["same", "other"])
def test_a_moved_target_is_found_with_its_text(compare, tmp_path: Path, text: str) -> None:
    place = "megatron/core/elsewhere.py"
    found = compare(OLD, "", page(tmp_path / "pages"), **{place: text})
    one, target = only(found)
    assert (one.word, one.safe, target.places) == ("moved", False, (f"{place}:work",))
    assert bool(target.known) == (text is OLD) and bool(target.changes) == (text is not OLD)
    sentence, _ = advised(found)
    assert f"{place}:work" in sentence
    assert ("the same text" in sentence) == (text is OLD)


def test_a_target_that_is_gone_has_its_nearest_matches(compare, tmp_path: Path) -> None:
    decoy = "def worker(a):\n    return a\n"
    renamed = OLD.replace("def work", "def labour").replace("size + 1", "size + 2")
    found = compare(
        OLD,
        decoy,
        page(tmp_path / "pages"),
        **{"megatron/core/labour.py": "import os\n\n\nclass A:\n    pass\n\n\n" + renamed},
    )
    one, target = only(found)
    assert (one.word, one.safe) == ("gone", False)
    assert [match.target for match in target.nearest] == ["megatron/core/labour.py:labour"]
    assert target.nearest[0].likeness > 0.9
    assert "inspect megatron/core/labour.py:labour" in advised(found)[0]


def test_nothing_like_it_is_said_too(compare, tmp_path: Path) -> None:
    found = compare(OLD, "def f():\n    pass\n", page(tmp_path / "pages"))
    assert only(found)[1].nearest == ()
    assert any("nothing similar is left" in line for line in drift_report.lines(found))


FIXED = OLD.replace("total * scale", "total * scale * 2")
IS_FIXED = f'return "scale * 2" in source.text("{FILE}:work")'


def test_a_fix_of_upstreams_needs_nothing(compare, tmp_path: Path) -> None:
    found = compare(OLD, FIXED, page(tmp_path / "pages", fixed=IS_FIXED))
    assert (found.pages[0].word, found.safe) == ("upstreamed", True)


def test_a_fix_that_is_lost_again_is_said_loudly(compare, tmp_path: Path) -> None:
    found = compare(FIXED, OLD, page(tmp_path / "pages", fixed=IS_FIXED))
    one, target = only(found)
    assert (one.word, one.safe) == ("lost-again", True)
    assert target.changes[0].new == ("    total = total * scale",)
    assert "UPSTREAM LOST ITS FIX AGAIN: 1.0 has it" in next(drift_report.lines(found))
    assert "upstream lost its fix again: work_works" in drift_report.closing(found)


def test_a_fix_that_may_be_lost_is_unsafe(compare, tmp_path: Path) -> None:
    new = OLD.replace("total * scale", "total * scale + 1")
    found = compare(FIXED, new, page(tmp_path / "pages", fixed=IS_FIXED))
    assert (found.pages[0].word, found.safe) == ("lost-again", False)
    assert "MAY HAVE LOST" in next(drift_report.lines(found))


FEATURE = f'reached="forward", feature=("{FILE}:work",)'


HALF = """\
def labour(x, scale=1):
    size = len(x)
    total = sum(x)
    for each in range(size):
        print(each, total)
        yield each
"""


def test_a_target_that_is_half_like_it_is_not_offered(
    compare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the words are those of any code around it."""
    ours = page(tmp_path / "pages")
    found = compare(OLD, HALF, ours)
    assert only(found)[1].nearest == ()
    monkeypatch.setattr(similar, "_ALIKE", 0.4)
    (match,) = similar.most_similar(found.new.tree, f"{FILE}:work", statements.of_source(OLD))
    assert 0.4 < match.likeness < 0.7


_FIRST = 'replacing("size = len(x)", "size = len(x) + 0")'


@pytest.mark.parametrize(
    ("new", "meets"),
    [
        (OLD.replace("size = len(x)", "size = len(x) + 7"), "elsewhere"),
        (OLD.replace("total * scale", "total * scale + 7"), "replaced"),
    ],
    ids=["line of the other page", "its own line"],
)
def test_a_page_answers_for_its_own_lines_alone(
    compare, tmp_path: Path, new: str, meets: str
) -> None:
    """A page that another one follows edits the same symbol, in lines of its own."""
    first = page(tmp_path / "pages", name="first_works", edit=_FIRST)
    second = page(tmp_path / "pages", patch='reached="forward", after=("first_works",)')
    by_name = {one.page.name: one for one in compare(OLD, new, first, second).pages}
    (target,) = by_name["work_works"].targets
    assert [change.meets for change in target.changes] == [meets]
    if meets == "elsewhere":  # the page before it no longer fits: that is for it to say
        assert target.fits is None and by_name["first_works"].targets[0].fits is False


PROOF = "from megatron.core.work import work\nassert work([1, 2, 3, 4], 3)[0] == {}"


@pytest.mark.parametrize(
    ("wanted", "proof", "word", "safe"),
    [("60", "passed", "upstreamed", True), ("61", "failed", "not-fixed", False)],
)
def test_the_proof_says_whether_upstream_has_the_fix(
    tmp_path: Path,
    capsys,
    monkeypatch: pytest.MonkeyPatch,
    wanted: str,
    proof: str,
    word: str,
    safe: bool,
) -> None:
    pages = tmp_path / "pages"
    monkeypatch.setattr(catalogue, "builtin_folder", lambda: pages)
    path = Path(page(pages, fixed=IS_FIXED).path)
    text = path.read_text()
    start = text.index("def verify")
    path.write_text(text[:start] + "def verify():\n" + indent(PROOF.format(wanted), "    ") + "\n")
    trees = [made.tree(tmp_path / name, {FILE: text}) for name, text in (("a", OLD), ("b", FIXED))]
    for prove in ([], ["--prove"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(["drift", *map(str, trees), "--json", *prove])
        answer = json.loads(capsys.readouterr().out)
        row = next(row for row in answer["patches"] if row["name"] == "work_works")
        if prove:
            assert (row["proof"], row["change"], row["safe"]) == (proof, word, safe)
            assert (ended.value.code == 0) == safe == answer["ok"]
        else:
            assert (row["proof"], row["change"], ended.value.code) == (None, "upstreamed", 0)


def test_plain_drift_says_that_nothing_is_proved(compare, tmp_path: Path) -> None:
    found = compare(OLD, FIXED, page(tmp_path / "pages", fixed=IS_FIXED))
    assert any("upstreamed (by text, not proved)" in line for line in drift_report.lines(found))
    sides = (found.new.label, found.new.tree)
    both = drift.compare(sides, sides, {"work_works": found.pages[0].page})
    (line,) = drift_report.lines(both)
    assert line.startswith("upstreamed") and "(by text, not proved) work_works" in line


def test_a_feature_that_comes_and_one_that_goes(compare, tmp_path: Path) -> None:
    ours = page(tmp_path / "pages", patch=FEATURE)
    came = compare(None, OLD, ours)
    assert (came.pages[0].word, came.safe) == ("newly-needed", True)


def test_a_feature_that_goes_is_safe(compare, tmp_path: Path) -> None:
    went = compare(OLD, None, page(tmp_path / "pages", patch=FEATURE))
    assert (went.pages[0].word, went.safe) == ("not-applicable", True)


def test_a_feature_under_a_new_name_is_no_feature_that_goes(compare, tmp_path: Path) -> None:
    """`apply` on NEW says not-applicable, and the bug trains on."""
    renamed = OLD.replace("def work", "def labour")
    found = compare(OLD, renamed, page(tmp_path / "pages", patch=FEATURE))
    one, target = only(found)
    assert (one.word, one.new.state, one.safe) == ("gone", "not-applicable", False)
    assert target.nearest[0].target == f"{FILE}:labour"
    assert "not safe" in drift_report.closing(found)


def test_a_feature_under_a_new_name_with_the_fix_is_safe(compare, tmp_path: Path) -> None:
    fixed = FIXED.replace("def work", "def labour")
    found = compare(OLD, fixed, page(tmp_path / "pages", patch=FEATURE, fixed=IS_FIXED))
    one, target = only(found)
    assert (one.word, one.safe, target.fixed_there) == ("not-applicable", True, True)
    assert any("the first has the fix" in line for line in drift_report.lines(found))


def test_a_feature_that_comes_with_an_unknown_text_is_unsafe(compare, tmp_path: Path) -> None:
    new = OLD.replace("size + 1", "size + 2")
    found = compare(None, new, page(tmp_path / "pages", patch=FEATURE))
    assert (found.pages[0].word, found.safe) == ("unknown", False)
    assert advised(found)[1] == "cppmega pin work_works 2.0"


def test_a_target_that_is_there_twice(compare, tmp_path: Path) -> None:
    found = compare(OLD, f"{OLD}\n\n{OLD}", page(tmp_path / "pages"))
    one, target = only(found)
    assert (one.word, one.safe, target.misfit) == ("ambiguous", False, "it is defined 2 times")


def test_a_page_for_another_package_is_not_compared_without_it(compare, tmp_path: Path) -> None:
    path = made.page(
        tmp_path / "pages",
        target="liger_kernel/x.py:f",
        edit='replacing("return x", "return 2 * x"), distribution="liger-kernel"',
    )
    found = compare(OLD, OLD, catalogue.load_page(path.stem, path, "made"))
    assert (found.pages[0].word, found.safe) == ("not-compared", True)


def other_package(folder: Path, text: str, version: str) -> tuple[str, Tree]:
    """A release of liger-kernel as its wheel has it: without any megatron."""
    made.write(folder, {"liger_kernel/x.py": text.encode()})
    made.dist_info(folder, version, "liger_kernel")
    return f"liger-kernel=={version}", Tree(folder)


def test_two_releases_of_another_package_are_compared(tmp_path: Path) -> None:
    path = made.page(
        tmp_path / "pages",
        target="liger_kernel/x.py:double",
        edit='replacing("return x", "return 2 * x"), distribution="liger-kernel"',
    )
    ours = page(tmp_path / "pages")
    pages = {one.name: one for one in (catalogue.load_page(path.stem, path, "made"), ours)}
    stock, later = "def double(x):\n    return x\n", "def double(x):\n    x = +x\n    return x\n"
    old = other_package(tmp_path / "old", stock, "0.8.4")
    new = other_package(tmp_path / "new", later, "0.8.5")
    found = drift.compare(old, new, pages)
    words = {one.page.name: one.word for one in found.pages}
    assert words == {"double_doubles": "changed", "work_works": "not-compared"}
    assert advised(found)[1] == "cppmega pin double_doubles 0.8.5"
    assert drift_report.closing(found).startswith("not safe: 1 of 1 patches need work for liger-")
    same = drift.compare(old, old, pages)
    assert drift_report.closing(same).startswith("safe: all 1 patches are known on liger-kernel==")


def test_releases_of_two_packages_have_nothing_to_compare(tmp_path: Path) -> None:
    megatron = ("0.19.2", Tree(made.tree(tmp_path / "megatron")))
    with pytest.raises(CppmegaError) as caught:
        drift.compare(megatron, other_package(tmp_path / "other", "", "0.8.5"), {})
    assert caught.value.name == "nothing-to-compare"


def test_an_edit_on_top_of_another_pages_is_tried_on_top_of_it(compare, tmp_path: Path) -> None:
    first = page(tmp_path / "pages")
    second = page(
        tmp_path / "pages",
        name="works_more",
        edit='replacing("total * scale * 2", "total * scale * 4")',
        patch='reached="forward", after=("work_works",)',
    )
    found = compare(OLD, OLD.replace("size + 1", "size + 2"), first, second)
    assert [one.targets[0].fits for one in found.pages] == [True, True]


def test_a_patched_tree_counts_as_what_it_was_before(tmp_path: Path) -> None:
    ours = page(tmp_path / "pages")
    old = made.tree(tmp_path / "old", {FILE: OLD}, "1.0")
    new = made.tree(tmp_path / "new", {FILE: OLD.replace("size + 1", "size + 2")}, "2.0")
    session = Session(old, ())
    session.pages = {ours.name: ours}
    assert overlay.apply(session).ok
    bytes_ = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    found = drift.compare(("old", Tree(old)), ("new", Tree(new)), session.pages)
    _, target = only(found)
    assert [change.meets for change in target.changes] == ["elsewhere"]
    assert {path: path.read_bytes() for path in bytes_} == bytes_


# What people name.


def wheel(root: Path, to: Path) -> Path:
    with zipfile.ZipFile(to, "w") as archive:
        for path in root.rglob("*"):
            archive.write(path, path.relative_to(root))
    return to


def test_a_wheel_a_folder_and_the_package_itself_are_one_tree(tmp_path: Path) -> None:
    root = made.tree(tmp_path / "root", {FILE: OLD}, "1.0")
    built = wheel(root, tmp_path / "megatron_core-1.0-py3-none-any.whl")
    for name in (str(built), str(root), str(root / "megatron")):
        tree = given.tree_of(name, tmp_path / "scratch", print)
        assert (tree.version, tree.read(FILE)) == ("1.0", OLD.encode())


@pytest.mark.parametrize(
    ("name", "error"),
    [("no/such/folder", "no-such-megatron"), ("{}/torn.whl", "no-wheel"), ("{}", "no-megatron")],
)
def test_what_is_no_megatron_is_refused(tmp_path: Path, name: str, error: str) -> None:
    (tmp_path / "torn.whl").write_bytes(b"PK")
    with pytest.raises(CppmegaError) as caught:
        given.tree_of(name.format(tmp_path), tmp_path / "scratch", print)
    assert caught.value.name == error


def test_a_version_is_not_a_path() -> None:
    assert given.is_version("0.19.2") and given.is_version("0.20.0rc1")
    assert not given.is_version("trees/0.19.2") and not given.is_version("main")


RUN = """
import sys
from pathlib import Path
from cppmega.catalogue import loader as catalogue
folder = Path(sys.argv.pop(1))
catalogue.builtin_folder = lambda: folder
from cppmega.cli.main import main
try:
    main()
finally:
    assert "torch" not in sys.modules
"""


def command(pages: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """`cppmega` with a catalogue of its own, in a process."""
    return subprocess.run(
        [sys.executable, "-c", RUN, str(pages), *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        check=False,
    )


def test_the_command_answers_on_every_exit(tmp_path: Path) -> None:
    page(tmp_path / "pages")
    old = made.tree(tmp_path / "old", {FILE: OLD}, "1.0")
    new = made.tree(tmp_path / "new", {FILE: OLD.replace("size + 1", "size + 2")}, "2.0")
    same = command(tmp_path / "pages", "drift", old, old)
    assert (same.returncode, same.stdout.split()) == (0, ["same", "work_works"])
    assert "safe: all 1 patches" in same.stderr
    unsafe = command(tmp_path / "pages", "drift", old, new, "--json")
    answer = json.loads(unsafe.stdout)
    assert unsafe.returncode == 1 and answer["schema"] == 1 and answer["ok"] is False
    (one,) = answer["patches"]
    assert (one["name"], one["change"], one["safe"]) == ("work_works", "changed", False)
    assert one["targets"][0]["changes"][0] == {
        "old": ["other = size + 1"],
        "new": ["other = size + 2"],
        "after": "size -= 1",
        "meets": "elsewhere",
    }
    assert one["next"] == f"cppmega pin work_works 2.0 --from {new}"
    wrong = command(tmp_path / "pages", "drift", old, tmp_path / "none", "--json")
    assert wrong.returncode == 1
    assert json.loads(wrong.stdout)["error"]["name"] == "no-such-megatron"


# What really changed upstream.

PAIRS = list(pairwise(VERSIONS))


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


@pytest.mark.parametrize(("old", "new"), PAIRS)
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


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_an_upgrade_is_safe_exactly_if_apply_would_go_through(old: str, new: str) -> None:
    states = {one.page.name: one.new.state for one in real(old, new).pages}
    outcome = overlay.status(Session(pristine(new), ()))
    failing = {v.name for v in outcome.plan.failures}
    assert {one.page.name for one in real(old, new).pages if not one.safe} == failing, states


def of_page(old: str, new: str, name: str) -> dict[str, TargetDrift]:
    one = next(one for one in real(old, new).pages if one.page.name == name)
    return {target.target.partition(":")[2]: target for target in one.targets}


@pytest.mark.parametrize(("old", "new"), PAIRS)
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
    assert found.pages[0].word == "gone"
    assert targets["roll_tensor"].nearest[0].target == "megatron/core/transformer/mtp_roll.py:roll"
    assert targets["_roll_tensor_packed_seq"].word == "same"


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
