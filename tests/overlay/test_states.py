"""One word for what is so, on a tree as it was installed and on a tree that somebody changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from cppmega.overlay import verbs as overlay
from cppmega.overlay.survey import Survey
from cppmega.tree.installed import Tree
from tests.support.git import commit_all
from tests.support.lab import FILES, TARGET, A, B, Lab
from tests.support.made import dist_info, edit_text, pin, write

LAYER = f"{A}:Layer"
"""A feature that the pages of these tests depend on."""

# -- the target changed ------------------------------------------------------------------------


def test_changed_statement_is_drifted(lab: Lab) -> None:
    """One statement of the target changed: the patch may be wrong for it, and is not applied."""
    lab.wheel()
    lab.page()
    lab.change(A, b"return x + x", b"return x + x + 0")
    verdict = lab.refused()
    assert verdict.state == "drifted" and "by hand" in verdict.detail
    assert "force-reinstall" in verdict.next


def test_changed_statement_is_drifted_where_nobody_vouches(lab: Lab) -> None:
    """The same in an export of upstream's main."""
    lab.files[A] = FILES[A].replace(b"return x + x", b"return x + x + 0")
    lab.export()
    lab.page(pins={"1.0": pin(FILES[A], "double")})
    verdict = lab.refused()
    assert verdict.state == "drifted" and "1.0" in verdict.detail
    assert verdict.next == f"cppmega drift 1.0 {lab.root}"


def test_a_text_that_no_release_had_is_explained_instead_of_compared(lab: Lab) -> None:
    """A pin of a branch names no version that could be downloaded; of several, the newest is."""
    lab.files[A] = FILES[A].replace(b"return x + x", b"return x + x + 0")
    lab.export()
    known = pin(FILES[A], "double")
    lab.page(pins={"main-d98e8a64": known})
    assert lab.refused().next == "cppmega explain page"
    lab.page(pins={"0.9.2": known, "0.19.2": known, "main-d98e8a64": known})
    assert lab.refused().next == f"cppmega drift 0.19.2 {lab.root}"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"# the sum", b"# a sum"),
        (b'"""Twice."""', b'"""Two times."""'),
        (b"LIMIT = 1", b"LIMIT=2"),
    ],
)
def test_a_known_target_in_an_edited_file_is_foreign(lab: Lab, old: bytes, new: bytes) -> None:
    """A comment changed: the text is known, yet the file is not upstream's (a hand edit)."""
    lab.wheel()
    lab.page()
    lab.change(A, old, new)
    verdict = lab.refused()
    assert verdict.state == "foreign" and A in verdict.detail


def test_a_foreign_edit_is_in_the_diff(lab: Lab) -> None:
    lab.wheel()
    lab.page()
    lab.page("other", f"{B}:single", 'replacing("return x", "return 1 * x")')
    lab.apply()
    lab.change(A, b"LIMIT = 1", b"LIMIT=2")
    said: list[str] = []
    session = lab.session()
    session.say = said.append
    shown = overlay.diff(session, None, {})
    assert "+LIMIT=2" in shown and "+    return 1 * x" in shown
    assert len(said) == 1 and said[0].startswith(f"{A}: edited by others; cp ")
    assert "+LIMIT=2" in overlay.diff(lab.session(), lab.page().stem, {})


def test_comment_does_not_matter_where_nobody_vouches(lab: Lab) -> None:
    """A release that only touched a comment is still patched."""
    lab.files[A] = FILES[A].replace(b"# the sum", b"# another comment\n\n")
    lab.export()
    lab.page(pins={"1.0": pin(FILES[A], "double")})
    assert lab.apply().ok
    assert lab.receipt().files[A].origin == "unverified"


def test_edit_in_the_target_comes_before_the_edit_elsewhere(lab: Lab) -> None:
    """What is wrong with the target is said first, then what is wrong with the file."""
    lab.wheel()
    lab.page()
    lab.change(A, b"return x + x", b"return 3 * x")
    lab.change(A, b"LIMIT = 1", b"LIMIT = 2")
    assert lab.refused().state == "drifted"


@pytest.mark.parametrize("vouched", [True, False])
def test_moved_symbol_says_where_it_is(lab: Lab, vouched: bool) -> None:
    """Upstream moved the function: the bug is present, the old place is not."""
    lab.page()
    text = FILES[A]
    start, end = text.index(b"def double"), text.index(b"class Layer")
    lab.files |= {A: text[:start] + text[end:], B: FILES[B] + b"\n\n" + text[start:end]}
    lab.wheel() if vouched else lab.export()
    verdict = lab.refused()
    assert verdict.state == "moved" and B in verdict.detail


@pytest.mark.parametrize("vouched", [True, False])
def test_missing_symbol_is_absent_and_never_done(lab: Lab, vouched: bool) -> None:
    """Nothing matched is a failure, never "already patched"."""
    lab.page()
    lab.files[A] = FILES[A].replace(b"double", b"treble")
    lab.wheel() if vouched else lab.export()
    assert lab.refused().state == "absent"


def test_missing_file_is_absent(lab: Lab) -> None:
    lab.page()
    del lab.files[A]
    lab.wheel()
    verdict = lab.refused()
    assert verdict.state == "absent" and "file" in verdict.detail


_TWICE = b"\n\ndef double(x):\n    return x + x\n"
_EITHER = b"""\
if LIMIT:

    def double(x):
        return x + x
else:

    def double(x):
        return x + x
"""


@pytest.mark.parametrize("vouched", [True, False])
@pytest.mark.parametrize("extra", [_TWICE, _EITHER])
def test_duplicated_symbol_is_ambiguous(lab: Lab, vouched: bool, extra: bytes) -> None:
    """Two definitions: editing one of them might edit the one that nobody calls."""
    lab.page()
    lab.files[A] = FILES[A] + extra
    lab.wheel() if vouched else lab.export()
    assert lab.refused().state == "ambiguous"


def test_duplicated_class_makes_its_methods_ambiguous(lab: Lab) -> None:
    lab.page(target=f"{A}:Layer.forward", edit='replacing("double(x)", "x")')
    start = FILES[A].index(b"class Layer")
    lab.files[A] = FILES[A] + b"\n\n" + FILES[A][start:]
    lab.export()
    assert lab.refused().state == "ambiguous"


@pytest.mark.parametrize("fixed", ["True", "False", "'x' not in source.text(TARGET)"])
@pytest.mark.parametrize("vouched", [True, False])
def test_torn_file_is_never_upstreamed_or_not_applicable(
    lab: Lab, fixed: str, vouched: bool
) -> None:
    """Half a file has no feature and no bug: that is no answer about upstream."""
    lab.wheel() if vouched else lab.export()
    lab.page(fixed=fixed, feature=(LAYER,), code=f"TARGET = {TARGET!r}")
    (lab.root / A).write_bytes(FILES[A][: FILES[A].index(b"x):")])
    verdict = lab.refused()
    assert verdict.state == "drifted" and "cannot be read as Python" in verdict.detail


def test_torn_file_of_a_feature_elsewhere_is_no_missing_feature(lab: Lab) -> None:
    """The feature's own file is torn: nobody can say that the feature is missing."""
    lab.page(pins={"1.0": "0" * 16}, feature=(f"{B}:single",))
    lab.files[B] = b"def single(x:\n"
    lab.export()
    assert lab.refused().state == "drifted"


@pytest.mark.parametrize(
    "data", [b"\xff\xfe", b"# coding: latin-7x\n", b"\0", b"# coding: utf-7\n"]
)
def test_bytes_that_are_no_python(lab: Lab, data: bytes) -> None:
    """Whatever the file holds, the answer is a state and not a traceback."""
    lab.wheel()
    lab.page()
    (lab.root / A).write_bytes(data + FILES[A])
    assert lab.refused().state == "drifted"


def test_encoding_that_does_not_give_the_bytes_back(lab: Lab) -> None:
    """Writing the file would change bytes that no edit meant."""
    lab.files[A] = b"# coding: raw_unicode_escape\n# \\u00e9\n" + FILES[A]
    lab.export()
    lab.page(pins={"1.0": pin(FILES[A], "double")})
    verdict = lab.refused()
    assert verdict.state == "drifted" and "same bytes" in verdict.detail


def test_torn_file_elsewhere_is_no_new_place(lab: Lab) -> None:
    lab.page()
    lab.files |= {A: FILES[A].replace(b"double", b"treble"), B: b"def double(x):\nif (\n"}
    lab.export()
    assert lab.refused().state == "absent"


def test_where_symbols_moved_in_a_checkout_is_asked_anew(lab: Lab) -> None:
    """The RECORD of an editable installation does not change with the files."""
    lab.wheel()
    record = next(lab.root.glob("*.dist-info")) / "RECORD"
    lines = record.read_text().splitlines(keepends=True)
    record.write_text("".join(line for line in lines if not line.startswith("megatron/")))
    before = Survey(Tree(lab.root))
    assert before.elsewhere(f"{A}:moved") == []
    (lab.root / B).write_bytes(b"def moved(x):\n    return x\n")
    assert Survey(Tree(lab.root), before.used).elsewhere(f"{A}:moved") == [B]


def test_hand_edit_is_never_upstreamed(lab: Lab) -> None:
    """Somebody pasted the fix into the installed file: that is not upstream's fix."""
    lab.wheel()
    lab.page(fixed='"2 * x" in source.file(FILE)', code=f"FILE = {A!r}")
    lab.change(A, b"return x + x", b"return 2 * x")
    assert lab.refused().state == "drifted"


def test_hand_deleted_feature_is_not_not_applicable(lab: Lab) -> None:
    """The wheel has the symbol, somebody deleted it: the feature is not missing upstream."""
    lab.wheel()
    lab.page(feature=(LAYER,))
    lab.change(A, b"def double(x):", b"def treble(x):")
    lab.change(A, b"class Layer:", b"class Lair:")
    assert lab.refused().state == "absent"


def test_invalid_escapes_upstream_are_no_syntax_error(lab: Lab) -> None:
    """They only warn, and here as in many programs warnings are errors."""
    lab.files[A] = FILES[A].replace(b"return x + x", b"return x + x + len('\\d')")
    lab.wheel()
    lab.page(edit='replacing("x + x", "2 * x")')
    assert lab.apply().ok


# -- what upstream has or has not ----------------------------------------------------------------


def test_upstreamed_by_the_code(lab: Lab) -> None:
    lab.page(fixed=f'"2 * x" in source.text({TARGET!r})')
    lab.files[A] = FILES[A].replace(b"x + x", b"2 * x")
    lab.wheel()
    assert lab.verdict().state == "upstreamed"
    outcome = lab.apply()
    assert outcome.ok and not outcome.changed


def test_not_applicable_names_the_missing_symbol(lab: Lab) -> None:
    lab.page(feature=(f"{A}:Missing.symbol",), pins={"1.0": "0" * 16})
    lab.wheel()
    verdict = lab.verdict()
    assert verdict.state == "not-applicable" and "Missing.symbol" in verdict.detail
    assert lab.apply().ok


def test_feature_that_moved_is_not_missing(lab: Lab) -> None:
    lab.page(feature=(f"{A}:single",), pins={"1.0": "0" * 16})
    lab.wheel()
    assert lab.refused().state == "drifted"


def test_distribution_that_is_not_installed(lab: Lab) -> None:
    data = {"distribution": "'mamba-ssm'"}
    lab.page(target="mamba_ssm/x.py:f", pins={"2.0": "0" * 16}, more=data)
    lab.wheel()
    verdict = lab.verdict()
    assert (verdict.state, verdict.detail) == ("not-applicable", "mamba-ssm is not installed here")
    assert lab.apply().ok


def test_distribution_that_is_in_another_folder(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron from a checkout, the other package from an environment: that is said, not hidden."""
    write(tmp_path / "site-packages", {"liger_kernel/__init__.py": b"", "liger_kernel/x.py": b""})
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    more = {"distribution": "'liger-kernel'"}
    lab.page(target="liger_kernel/x.py:f", pins={"0.8.5": "0" * 16}, more=more)
    lab.wheel()
    verdict = lab.verdict()
    assert verdict.state == "not-applicable"
    assert f"imports it from {tmp_path / 'site-packages'}, which is not patched" in verdict.detail


def test_file_of_another_distribution_is_restored_from_its_own_release(lab: Lab) -> None:
    lab.wheel()
    lab.files["liger_kernel/x.py"] = FILES[A]
    write(lab.root, lab.files)
    dist_info(lab.root, "0.8.5", "liger_kernel")
    more = {"distribution": "'liger-kernel'"}
    lab.page(target="liger_kernel/x.py:double", pins={"0.8.5": pin(FILES[A], "double")}, more=more)
    assert lab.apply().ok
    assert b"2 * x" in (lab.root / "liger_kernel/x.py").read_bytes()
    assert lab.revert().ok
    lab.change("liger_kernel/x.py", b"LIMIT = 1", b"LIMIT = 9")
    verdict = lab.refused()
    assert verdict.state == "foreign" and verdict.next.endswith("liger-kernel==0.8.5")
    lab.change("liger_kernel/x.py", b"x + x", b"x - x")
    assert lab.refused().next.endswith("liger-kernel==0.8.5")


def test_questions_about_upstream_are_not_asked_of_our_own_text(lab: Lab) -> None:
    """Page two must not take page one's patch in the same file for upstream's fix, or the
    second apply would find another world than the first."""
    lab.wheel()
    lab.page("one")
    lab.apply()
    lab.page(
        "two", pins={"0.9": "0" * 16}, fixed='"2 * x" in source.file(FILE)', code=f"FILE = {A!r}"
    )
    assert lab.verdict("two").state == "drifted"
    assert lab.refused("two").state == "drifted"


def _two_shapes(lab: Lab, *more: str) -> None:
    """Version 1 needs an edit of `double` only, version 2 of `double` and of `tail`."""
    double = edit_text(
        TARGET,
        'replacing("x + x", "2 * x")',
        FILES[A],
        dict.fromkeys("12", pin(FILES[A], "double")),
    )
    tail = edit_text(
        f"{A}:tail", 'replacing("str(x)", "repr(x)")', b"", {"2": pin(FILES[A], "tail")}
    )
    lab.page(edits=", ".join([double, tail, *more]))


def test_a_page_is_never_applied_by_half(lab: Lab) -> None:
    """Version 2 with one target drifted looks like version 1 to whoever checks only its texts."""
    _two_shapes(lab)
    lab.files[A] = FILES[A].replace(b"str(LIMIT)", b"str(LIMIT + 1)")
    lab.export()
    verdict = lab.refused()
    assert verdict.state == "drifted" and verdict.target == f"{A}:tail"
    lab.files[A] = FILES[A]
    lab.export()
    assert lab.apply().ok
    assert "2 * x" in lab.text() and "repr(x)" in lab.text()


def test_a_version_that_is_pinned_in_one_of_two_targets_is_refused(lab: Lab) -> None:
    """Version 2 edits `tail`, whose text this version has too: its pin was forgotten."""
    double = edit_text(
        TARGET,
        'replacing("x + x", "2 * x")',
        b"",
        {"2": "0" * 16, "3": pin(FILES[A], "double")},
    )
    tail = edit_text(
        f"{A}:tail", 'replacing("str(x)", "repr(x)")', b"", {"2": pin(FILES[A], "tail")}
    )
    lab.page(edits=f"{double}, {tail}")
    lab.export()
    verdict = lab.refused()
    assert verdict.state == "drifted" and "no pinned version combines them" in verdict.detail


def test_text_that_is_left_alone_is_known(lab: Lab) -> None:
    """A symbol that needs no edit in one version is pinned there, and then its shape fits."""
    old = FILES[A].replace(b"str(LIMIT)", b"repr(LIMIT)")
    alone = edit_text(f"{A}:tail", "left_alone", old, {"1": pin(old, "tail")})
    _two_shapes(lab, alone)
    lab.files[A] = old
    lab.export()
    assert lab.apply().ok
    assert "2 * x" in lab.text() and "repr(x)" not in lab.text()
    lab.applied("page")


def test_missing_symbol_of_a_larger_shape(lab: Lab) -> None:
    """Version 1 does not have the second symbol at all: the smaller shape fits."""
    _two_shapes(lab)
    lab.files[A] = FILES[A][: FILES[A].index(b"def tail")]
    lab.export()
    assert lab.apply().ok


# -- what an edited file says of the other pages --------------------------------------------------

ADDED = b"\n# a note\n"


def _pages_around(lab: Lab) -> None:
    """Pages that this version does not need, or not yet; each has an edit in A and one in B."""
    single = edit_text(f"{B}:single", 'replacing("x", "x + 1", times=1)', b"", {"0.9": "0" * 16})
    for name, target, header in (
        ("absent_in_b", f"{A}:double", {"feature": (f"{B}:later",)}),
        ("absent_in_a", f"{A}:double", {"feature": (f"{A}:later",)}),
        ("fixed_in_b", f"{A}:double", {"fixed": f'"return x" in source.text("{B}:single")'}),
        ("fixed_in_a", f"{A}:double", {"fixed": f'"x + x" in source.text("{A}:double")'}),
        ("new_here", f"{A}:missing", {}),
    ):
        edits = edit_text(target, 'replacing("x + x", "2 * x")', b"", {"0.9": "0" * 16})
        lab.page(name, edits=f"{edits}, {single}", **header)


@pytest.mark.parametrize("vouched", [True, False])
def test_a_comment_in_one_file_says_nothing_untrue_of_other_pages(lab: Lab, vouched: bool) -> None:
    """Where upstream's text is at hand, as in a checkout, the answers are those of upstream."""
    _pages_around(lab)
    if vouched:
        lab.wheel()
    else:
        commit_all(lab.export())
    before = {v.name: (v.state, v.target) for v in lab.status().verdicts}
    (lab.root / A).write_bytes(FILES[A] + ADDED)
    after = {v.name: v for v in lab.status().verdicts}
    assert before["absent_in_a"][0] == "not-applicable" and before["fixed_in_a"][0] == "upstreamed"
    for name, verdict in after.items():
        if not vouched or name in ("absent_in_b", "fixed_in_b"):
            assert (verdict.state, verdict.target) == before[name], verdict
        else:
            assert verdict.state == "foreign" and verdict.target.startswith(f"{A}:"), verdict
            assert "unknown whether the patch is needed" in verdict.detail
        assert "by hand" not in verdict.detail and B not in verdict.target
