"""`cppmega drift`: what changed between two trees, what that is to an edit, and what to do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from textwrap import indent

import pytest

from cppmega import cli
from cppmega.authoring import drift, drift_report, similar, statements
from cppmega.authoring.drift_result import Drift
from cppmega.catalogue import loader as catalogue
from cppmega.page import Page
from cppmega.tree.installed import Tree
from tests.authoring.drifts import FILE, OLD, advised, only, page
from tests.support import made

pytestmark = pytest.mark.slow


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


def test_comments_docstrings_and_blank_lines_are_no_change(compare, tmp_path: Path) -> None:
    new = OLD.replace("1):\n", '1):\n    """Works."""\n\n', 1).replace("sum(x)", "sum(x)  # all")
    found = compare(OLD, new, page(tmp_path / "pages"))
    one, target = only(found)
    assert (one.word, one.safe, target.word, found.safe) == ("same", True, "same", True)
    assert advised(found) == ("nothing", "")


_TRIED = """\
try:
    import json

    LIMIT = 4
except ImportError:
    LIMIT = 0
"""


def test_a_changed_statement_of_a_module(compare, tmp_path: Path) -> None:
    one = page(
        tmp_path / "pages",
        _TRIED,
        target=f"{FILE}:LIMIT",
        edit='replacing("LIMIT = 4", "LIMIT = 5")',
        patch='reached="never"',
    )
    found = compare(f"{_TRIED}\n{OLD}", f"import os\n\n{_TRIED}\n\n# as before\n", one)
    assert only(found)[0].word == "same"


def test_a_changed_field_of_a_class(compare, tmp_path: Path) -> None:
    old, new = "class Sizes:\n    a: int = 1\n    b = 2\n", "class Sizes:\n    a: float = 1\n"
    edit, target = 'replacing("1", "2")', f"{FILE}:Sizes.a"
    one = page(tmp_path / "pages", "a: int = 1\n", target=target, edit=edit)
    _, found = only(compare(old, new, one))
    assert (found.word, found.fits) == ("changed", True)
    assert [(c.old, c.new, c.meets) for c in found.changes] == [
        (("a: int = 1",), ("a: float = 1",), "replaced")
    ]


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


def test_a_verdict_has_at_most_ten_lines(compare, tmp_path: Path) -> None:
    found = compare(OLD, OLD.replace("total * scale", "total"), page(tmp_path / "pages"))
    many = replace(found, pages=found.pages * 50)
    shown = [*drift_report.verdict(many), drift_report.closing(many)]
    assert len(shown) < 10 and max(map(len, shown)) < 300
    assert shown[0].startswith("50 ") and "... 44 more" in shown
    assert "and 46 more" in shown[-1]


def test_an_edit_that_no_longer_fits_says_why(compare, tmp_path: Path) -> None:
    found = compare(OLD, OLD.replace("total * scale", "total"), page(tmp_path / "pages"))
    _, target = only(found)
    assert target.fits is False
    assert target.misfit.startswith("`total * scale` occurs 0 times, but the page declares 1")
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
    rest = "    for item in x:\n        total = total * item\n    return total, scale\n"
    renamed = OLD.replace("def work", "def labour").partition("    other =")[0] + rest
    found = compare(
        OLD,
        decoy,
        page(tmp_path / "pages"),
        **{"megatron/core/labour.py": "import os\n\n\nclass A:\n    pass\n\n\n" + renamed},
    )
    one, target = only(found)
    assert (one.word, one.safe) == ("gone", False)
    assert [match.target for match in target.nearest] == ["megatron/core/labour.py:labour"]
    assert 0.7 < target.nearest[0].likeness < 0.85
    assert "inspect megatron/core/labour.py:labour" in advised(found)[0]


METHOD = f"class Kit:\n{indent(OLD, '    ')}"


@pytest.mark.parametrize(
    ("old", "new", "target", "place"),
    [
        (OLD, OLD.replace("def work", "def labour"), "work", "labour"),
        (METHOD, OLD.replace("size + 1", "size + 2"), "Kit.work", "work"),
        (METHOD, METHOD.replace("Kit", "Tools"), "Kit.work", "Tools.work"),
        # Half of the words are others, but the name is the same.
        (
            METHOD,
            OLD.replace("total * scale", "max(min(x), scale, bias, beta)"),
            "Kit.work",
            "work",
        ),
    ],
)
def test_a_new_name_is_followed(
    compare, tmp_path: Path, old: str, new: str, target: str, place: str
) -> None:
    ours = page(tmp_path / "pages", target=f"{FILE}:{target}")
    one, drifted = only(compare(old, new, ours))
    assert (one.word, one.safe, one.new.state) == ("moved", False, "absent")
    assert drifted.places == (f"{FILE}:{place}",)


def test_a_definition_that_old_has_too_is_no_new_name(compare, tmp_path: Path) -> None:
    other = OLD.replace("def work", "def labour")
    one, target = only(compare(f"{OLD}\n\n{other}", other, page(tmp_path / "pages")))
    assert (one.word, target.nearest[0].target) == ("gone", f"{FILE}:labour")


def test_a_page_that_no_release_has_been_ported_to_is_safe_unless_it_is_wanted(
    tmp_path: Path,
) -> None:
    ours = page(tmp_path / "pages", patch=f'reached="forward", builds_on=("{FILE}:Kit",)')
    pages = {ours.name: ours}
    kit, bare = f"class Kit:\n    pass\n\n\n{OLD}", OLD.replace("size + 1", "size + 2")
    has, lacks = (
        (version, Tree(made.tree(tmp_path / version, {FILE: text}, version)))
        for version, text in (("1.0", kit), ("2.0", bare))
    )
    neither = drift.compare(lacks, lacks, pages)
    assert (neither.pages[0].word, neither.safe) == ("unported", True)
    assert list(drift_report.lines(neither)) == ["unported        work_works"]
    found = drift.compare(lacks, lacks, pages, {ours.name: ["small", "large"]})
    assert not found.safe
    said = drift_report.summary(found.pages[0], found)
    assert said.startswith("unported now: small, large cannot be built; nobody has ported it")
    found = drift.compare(has, lacks, pages, {ours.name: ["small"]})
    said = drift_report.summary(found.pages[0], found)
    assert said.startswith("unported now, applied before: small cannot be built; ")
    assert "until then, train small with 1.0" in advised(found)[0]
    answer = drift_report.as_json(found)
    assert (answer["unserved"], answer["patches"][0]["recipes"]) == (["work_works"], ["small"])
    end = "1 patch does not serve 2.0: work_works; small cannot be built there"
    assert drift_report.closing(found).endswith(end)


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


FEATURE = f'reached="forward", feature=("{FILE}",)'


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


def test_a_feature_that_goes_is_unsafe(compare, tmp_path: Path) -> None:
    """It may have a new name; `apply` after the upgrade refuses, too."""
    went = compare(OLD, None, page(tmp_path / "pages", patch=FEATURE))
    assert (went.pages[0].word, went.pages[0].new.state) == ("unported", "unported")
    assert advised(went)[1] == "python -m cppmega.apply_patches --without work_works"
    assert drift_report.closing(went).startswith("not safe: 1 of 1 patches")


def test_a_feature_under_a_new_name_is_no_feature_that_goes(compare, tmp_path: Path) -> None:
    """Upstream renamed the class that the bug depends on, and the function: the bug is there."""
    kit = f'reached="forward", feature=("{FILE}:Kit",)'
    text = f"class Kit:\n    pass\n\n\n{OLD}"
    renamed = text.replace("def work", "def labour").replace("Kit", "Tools")
    found = compare(text, renamed, page(tmp_path / "pages", patch=kit))
    one, target = only(found)
    assert (one.word, one.new.state, one.safe) == ("unported", "unported", False)
    assert target.places == (f"{FILE}:labour",)
    assert any(f"now {FILE}:labour" in line for line in drift_report.lines(found))


def test_a_renamed_target_may_have_the_fix(compare, tmp_path: Path) -> None:
    fixed = FIXED.replace("def work", "def labour")
    found = compare(OLD, fixed, page(tmp_path / "pages", patch=FEATURE, fixed=IS_FIXED))
    one, target = only(found)
    assert (one.word, one.new.state, target.places) == ("moved", "absent", (f"{FILE}:labour",))
    assert "if it has the fix, declare that in fixed_upstream()" in advised(found)[0]


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
