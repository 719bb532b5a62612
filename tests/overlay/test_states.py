"""One word for what is so, on a tree as it was installed and on a tree that somebody changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from cppmega.errors import CppmegaError
from cppmega.overlay import plan
from cppmega.rewriting import fingerprint
from tests.support.lab import FILES, TARGET, A, B, Lab
from tests.support.made import dist_info, edit_text, leftovers, pin, snapshot, write


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    return Lab(tmp_path, monkeypatch)


# -- what an apply does ------------------------------------------------------------------------


def test_apply_and_revert_restore_every_byte(lab: Lab) -> None:
    """The round trip: pending, applied, applied again without a write, off, pristine."""
    lab.wheel()
    lab.page()
    assert lab.verdict().state == "pending"
    outcome = lab.apply()
    assert outcome.ok and outcome.changed == [A]
    lab.applied("page")
    assert lab.value("double(4)") == 8
    assert "return 2 * x" in lab.text()
    before = {path: (lab.root / path).stat().st_mtime_ns for path in snapshot(lab.root)}
    again = lab.apply()
    assert again.ok and not again.changed and not again.receipt_changed
    assert again.digest == outcome.digest
    assert before == {path: (lab.root / path).stat().st_mtime_ns for path in snapshot(lab.root)}
    assert not leftovers(lab.root)
    assert lab.revert().ok
    lab.pristine()


def test_check_writes_nothing(lab: Lab) -> None:
    """`--check` says what it would do and leaves no trace, not even a lock."""
    lab.wheel()
    lab.page()
    before = snapshot(lab.root)
    outcome = lab.apply(check=True)
    assert outcome.changed == [A] and outcome.receipt_changed
    assert snapshot(lab.root) == before and not (lab.root / ".cppmega").exists()
    lab.apply()
    assert not lab.apply(check=True).changed


def test_text_is_known_whatever_the_version_says(lab: Lab) -> None:
    """The version string only serves messages: upstream's tags report wrong ones."""
    lab.wheel("7.0")
    lab.page()
    assert lab.apply().ok
    lab.applied("page")


def test_patched_text_is_never_patched_again(lab: Lab) -> None:
    """The result is f(pristine): a second page starts from upstream's text, not from ours."""
    lab.wheel()
    lab.page("one")
    lab.apply()
    lab.page("two", f"{A}:Layer.forward", 'replacing("double(x)", "double(x) + 1")')
    lab.apply()
    together = lab.text()
    lab.revert()
    lab.apply()
    assert lab.text() == together
    assert lab.text().count('_cppmega_reached("one")') == 1


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
    lab.page(fixed=fixed, feature=(TARGET,), code=f"TARGET = {TARGET!r}")
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


def test_hand_edit_is_never_upstreamed(lab: Lab) -> None:
    """Somebody pasted the fix into the installed file: that is not upstream's fix."""
    lab.wheel()
    lab.page(fixed='"2 * x" in source.file(FILE)', code=f"FILE = {A!r}")
    lab.change(A, b"return x + x", b"return 2 * x")
    assert lab.refused().state == "drifted"


def test_hand_deleted_feature_is_not_not_applicable(lab: Lab) -> None:
    """The wheel has the symbol, somebody deleted it: the feature is not missing upstream."""
    lab.wheel()
    lab.page(feature=(TARGET,))
    lab.change(A, b"def double(x):", b"def treble(x):")
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


# -- several pages -------------------------------------------------------------------------------


def _pair(lab: Lab, after_one: tuple[str, ...] = (), after_two: tuple[str, ...] = ()) -> None:
    lab.wheel()
    lab.page("one", edit='replacing("x + x", "2 * x")', after=after_one)
    lab.page("two", edit='replacing("x", "(x + 1)", times=2)', after=after_two)


def test_two_pages_on_one_symbol_need_an_order(lab: Lab) -> None:
    """Both are named; which one would win must not depend on the alphabet."""
    _pair(lab)
    assert lab.refused("one").state == "conflict"
    verdict = lab.refused("two")
    assert verdict.state == "conflict" and "one" in verdict.detail


def test_an_order_both_ways_is_no_order(lab: Lab) -> None:
    _pair(lab, ("two",), ("one",))
    with pytest.raises(CppmegaError) as caught:
        lab.apply()
    assert caught.value.name == "after-cycle"
    assert caught.value.what.count("one") + caught.value.what.count("two") == 3
    lab.pristine()


def test_an_order_in_a_circle_is_named(lab: Lab) -> None:
    """Over three pages it was an endless recursion."""
    lab.wheel()
    for name, earlier in (("a", "b"), ("b", "c"), ("c", "a")):
        lab.page(name, after=(earlier,))
    with pytest.raises(CppmegaError) as caught:
        lab.apply()
    assert caught.value.name == "after-cycle"
    assert any(
        f"{x} -> {y} -> {z} -> {x}" in caught.value.what for x, y, z in ("abc", "bca", "cab")
    )
    lab.pristine()
    lab.page("a", after=("a",))
    with pytest.raises(CppmegaError, match="a -> a"):
        lab.apply()


def test_pages_compose_in_their_declared_order(lab: Lab) -> None:
    """`two` first finds two x, then `one` its sum; the other way round neither would fit."""
    lab.wheel()
    lab.page("one", edit='replacing("(x + 1) + (x + 1)", "2 * (x + 1)")', after=("two",))
    lab.page("two", edit='replacing("x", "(x + 1)", times=2)')
    assert lab.apply().ok
    assert lab.value("double(4)") == 10
    for name in ("one", "two"):
        assert f'_cppmega_reached("{name}")' in lab.text()
    assert lab.revert("one").ok  # two alone still fits
    assert "return (x + 1) + (x + 1)" in lab.text()
    lab.applied("two")


@pytest.mark.parametrize("earlier", ["whole", "method"])
def test_class_and_its_method_are_one_symbol(lab: Lab, earlier: str) -> None:
    """A page on a class and one on its method conflict, and compose in either order."""
    lab.wheel()

    def whole(after: tuple[str, ...]) -> None:
        edit = 'replacing("return y", "return y + 1")'
        lab.page("whole", f"{A}:Layer", edit, more={"mark": "'forward'"}, after=after)

    def method(after: tuple[str, ...]) -> None:
        edit = 'replacing("double(x)", "double(double(x))")'
        lab.page("method", f"{A}:Layer.forward", edit, after=after)

    whole(())
    method(())
    assert lab.refused("whole").state == "conflict"
    if earlier == "whole":
        method(("whole",))
    else:
        whole(("method",))
    assert lab.apply().ok
    assert lab.value("Layer().forward(1)") == 5
    lab.revert()
    lab.pristine()


def test_page_order_holds_between_a_class_and_its_methods(lab: Lab) -> None:
    """method, class, method again: the third page must see what the second one wrote."""
    lab.wheel()
    forward = f"{A}:Layer.forward"
    lab.page("a", forward, 'replacing("double(x)", "double(x) + 1")')
    lab.page(
        "b",
        f"{A}:Layer",
        'replacing("double(x) + 1", "double(x) + 2")',
        after=("a",),
        more={"mark": "'forward'"},
    )
    lab.page("c", forward, 'replacing("double(x) + 2", "double(x) + 3")', after=("b",))
    assert lab.apply().ok
    assert lab.value("Layer().forward(1)") == 5


def test_class_swap_and_an_edit_below_it(lab: Lab) -> None:
    """A subclass that overrides the method makes the source edit of it dead text."""
    lab.wheel()
    data = FILES[A]
    swap = {"kind": "'class-swap'", "overrides": "('forward',)"}
    pins = {"1.0": _class_pin(data, "Layer", "forward")}
    lab.page("swap", f"{A}:Layer", "lambda c: c", pins=pins, more=swap)
    lab.page("source", f"{A}:Layer.backward", 'replacing("return g", "return -g")')
    assert lab.apply().ok
    lab.applied("swap", "source")
    lab.page("source", f"{A}:Layer.forward", 'replacing("return y", "return -y")')
    assert lab.refused("swap").state == "conflict"


def _class_pin(data: bytes, symbol: str, *methods: str) -> str:
    from cppmega.rewriting import source

    text = source.decode(data, "x")
    tree = source.parse(text, "x")
    where = source.span(tree, text, source.find(tree, symbol)[0])
    _, node = fingerprint.parse_definition("".join(text.lines[where.start : where.end]))
    return fingerprint.of_class(node, methods)


def test_second_catalogue_that_claims_our_symbol(lab: Lab, tmp_path: Path) -> None:
    """A team's page on a symbol of ours: refused until it declares an order."""
    lab.wheel()
    lab.page("ours")
    team = tmp_path / "team"
    lab.page("theirs", folder=team, edit='replacing("x", "(x + 1)", times=2)')
    outcome = lab.apply(team)
    assert {v.name: v.state for v in outcome.verdicts} == {"ours": "conflict", "theirs": "conflict"}
    lab.page("theirs", folder=team, edit='replacing("2 * x", "x * 2")', after=("ours",))
    assert lab.apply(team).ok
    lab.applied("ours", "theirs")  # the receipt remembers the catalogue
    assert any("team" in line for line in lab.said)


def test_second_catalogue_with_our_page_name(lab: Lab, tmp_path: Path) -> None:
    lab.wheel()
    lab.page("ours")
    lab.page("ours", folder=tmp_path / "team")
    with pytest.raises(CppmegaError) as caught:
        lab.apply(tmp_path / "team")
    assert caught.value.name == "duplicate-page"


# -- the active set ------------------------------------------------------------------------------


def test_a_patch_that_fails_can_be_left_out_of_the_first_apply(lab: Lab) -> None:
    """After an upgrade there is no receipt from which it could be removed by name."""
    lab.page("one")
    lab.page("two", f"{B}:single", 'replacing("x", "x + 1", times=1)')
    lab.files[A] = FILES[A].replace(b"return x + x", b"return x + x + 0")
    lab.wheel()
    assert lab.refused("one").state == "drifted"
    assert lab.apply(without=["one"]).ok
    lab.applied("two")
    assert lab.verdict("one").state == "off" and lab.receipt().excluded == ["one"]
    assert lab.refused("one").state == "drifted"  # the next apply wants every patch again
    with pytest.raises(CppmegaError, match="no page three"):
        lab.apply(without=["three"])


def test_only_then_revert_a_name_then_everything(lab: Lab) -> None:
    """The active set is what the receipt says, and files without an active page are pristine."""
    lab.wheel()
    lab.page("one")
    lab.page("two", f"{B}:single", 'replacing("x", "x + 1", times=1)')
    assert lab.apply(only=["one"]).ok
    lab.applied("one")
    assert lab.verdict("two").state == "off"
    assert (lab.root / B).read_bytes() == FILES[B]
    assert lab.apply(only=["two"]).ok
    lab.applied("two")
    assert (lab.root / A).read_bytes() == FILES[A]
    assert lab.apply().ok
    lab.applied("one", "two")
    assert lab.revert("two").ok
    lab.applied("one")
    assert (lab.root / B).read_bytes() == FILES[B]
    assert lab.apply().ok
    lab.applied("one", "two")
    assert lab.revert("one", "two").ok
    assert {p: d for p, d in snapshot(lab.root).items() if p in FILES} == FILES


def test_reverting_a_name_never_applies_the_others(lab: Lab) -> None:
    """On a tree that is not patched, `revert one` must not patch it with everything else."""
    lab.wheel()
    lab.page("one")
    lab.page("two", f"{B}:single", 'replacing("x", "x + 1", times=1)')
    lab.revert("one")
    lab.pristine()
    with pytest.raises(CppmegaError) as caught:
        lab.revert("on")
    assert caught.value.name == "unknown-page" and "one" in caught.value.what


def test_gate_is_read_at_apply_and_kept(lab: Lab) -> None:
    """A gate is stored in the receipt; status is about the files, not about today's shell."""
    lab.wheel()
    lab.page(gate="CPPMEGA_TWICE")
    assert lab.apply().ok
    assert lab.verdict().state == "off" and "CPPMEGA_TWICE" in lab.verdict().detail
    assert lab.apply(environment={"CPPMEGA_TWICE": "1"}).ok
    lab.applied("page")
    assert lab.receipt().gates == {"CPPMEGA_TWICE": "1"}
    assert lab.apply(environment={}).changed == [A]
    assert (lab.root / A).read_bytes() == FILES[A]


@pytest.mark.parametrize(
    ("environment", "name", "hint"),
    [
        ({"CPPMEGA_TWIC": "1"}, "unknown-variable", "CPPMEGA_TWICE"),
        ({"CPPMEGA_XYZZY": "1"}, "unknown-variable", "CPPMEGA_XYZZY"),
        ({"CPPMEGA_TWICE": "maybe"}, "bad-gate-value", "maybe"),
    ],
)
def test_typo_in_a_variable_stops_apply(
    lab: Lab, environment: dict[str, str], name: str, hint: str
) -> None:
    """A typing mistake would leave a patch off that its user believes to be on."""
    lab.wheel()
    lab.page(gate="CPPMEGA_TWICE")
    with pytest.raises(CppmegaError) as caught:
        lab.apply(environment=environment)
    assert caught.value.name == name and hint in caught.value.what
    lab.pristine()


def test_page_asked_for_by_name_with_its_gate_closed(lab: Lab) -> None:
    """What is asked for and not applied stops the run."""
    lab.wheel()
    lab.page(gate="CPPMEGA_TWICE")
    with pytest.raises(CppmegaError) as caught:
        lab.apply(only=["page"])
    assert caught.value.name == "gate-closed"


# -- the world changed over a patched tree ---------------------------------------------------------


def test_changed_page_starts_from_upstream_again(lab: Lab) -> None:
    lab.wheel()
    lab.page()
    lab.apply()
    lab.page(edit='replacing("x + x", "x * 2")')
    verdict = lab.verdict()
    assert verdict.state == "pending" and "changed" in verdict.detail
    assert lab.apply().ok
    assert "return x * 2" in lab.text() and "2 * x" not in lab.text()


def test_removed_page_is_taken_out(lab: Lab) -> None:
    lab.wheel()
    lab.page("one").rename(lab.pages / "gone.py")
    lab.page("stays", f"{B}:single", 'replacing("x", "x + 1", times=1)')
    lab.apply()
    (lab.pages / "gone.py").unlink()
    verdict = lab.verdict("gone")
    assert verdict.state == "pending" and not lab.status().ok
    assert lab.apply().ok
    lab.applied("stays")
    assert (lab.root / A).read_bytes() == FILES[A]


def test_another_engine_makes_everything_again(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new release of ours may write another text; and it must not believe old fingerprints."""
    lab.wheel()
    lab.page()
    lab.apply()
    monkeypatch.setattr(plan, "engine_revision", lambda: "other")
    assert lab.verdict().state == "pending" and "another version" in lab.verdict().detail
    path = lab.root / ".cppmega" / "receipt.json"
    raw = json.loads(path.read_bytes())
    raw["survey"] = dict.fromkeys(raw["survey"], "?2")
    path.write_text(json.dumps(raw))
    assert lab.verdict().state == "pending"


def test_reinstall_over_a_patched_tree(lab: Lab) -> None:
    """pip puts upstream's files back: pending, although the receipt says applied."""
    lab.wheel()
    lab.page()
    lab.apply()
    (lab.root / A).write_bytes(FILES[A])
    verdict = lab.verdict()
    assert verdict.state == "pending" and "reinstalled" in verdict.detail
    assert lab.apply().changed == [A]
    lab.applied("page")


def test_upgrade_over_a_patched_tree(lab: Lab, tmp_path: Path) -> None:
    """Another version in the same place: the old receipt speaks of other files, but the team's
    catalogue is not forgotten."""
    lab.wheel("1.0")
    lab.page()
    team = tmp_path / "team"
    lab.page("theirs", f"{B}:single", 'replacing("x", "x + 1", times=1)', folder=team)
    lab.apply(team)
    shutil.rmtree(lab.root / "megatron")
    shutil.rmtree(lab.root / "megatron_core-1.0.dist-info")
    lab.files[A] = FILES[A].replace(b"LIMIT = 1", b"LIMIT = 2")
    lab.wheel("1.1")
    outcome = lab.status()
    assert not outcome.ok and "1.0" in outcome.notes[0]
    assert {v.state for v in outcome.verdicts} == {"pending"}
    assert lab.apply().ok
    lab.applied("page", "theirs")
    lab.revert()
    lab.pristine()


def test_rewritten_record_forgets_nothing(lab: Lab) -> None:
    """Another installer writes RECORD anew, with the same hashes: the patch is still ours."""
    lab.wheel()
    lab.page()
    lab.apply()
    (record,) = lab.root.glob("*.dist-info/RECORD")
    record.write_text(record.read_text() + "megatron_core-1.0.dist-info/INSTALLER,,\n")
    assert "another installation" in lab.status().notes[0]
    assert lab.apply().ok
    lab.applied("page")
    record.write_text(record.read_text() + "megatron_core-1.0.dist-info/REQUESTED,,\n")
    assert lab.revert().ok
    lab.pristine()


def test_upgrade_of_another_package_forgets_nothing(lab: Lab) -> None:
    """`pip install -U liger-kernel` must not make our own patch look like a stranger's."""
    lab.wheel()
    lab.page()
    lab.apply()
    (lab.root / "liger_kernel").mkdir()
    (lab.root / "liger_kernel" / "x.py").write_text("def f(): ...\n")
    dist_info(lab.root, "0.8.0", "liger_kernel")
    lab.applied("page")
    lab.revert()
    assert (lab.root / A).read_bytes() == FILES[A]


def test_edit_of_a_patched_file_is_foreign(lab: Lab) -> None:
    """Somebody edits the file after us: neither apply nor revert may lose that edit."""
    lab.wheel()
    lab.page()
    lab.apply()
    lab.change(A, b"LIMIT = 1", b"LIMIT = 9")
    before = snapshot(lab.root)
    assert lab.refused().state == "foreign"
    with pytest.raises(CppmegaError) as caught:
        lab.revert()
    assert caught.value.name == "foreign-edit"
    assert snapshot(lab.root) == before


def test_edit_of_patched_text_is_drifted(lab: Lab) -> None:
    """Every page of the file says what happened, also one that upstream made needless there."""
    lab.wheel()
    lab.page()
    lab.page("fixed", f"{A}:Layer.forward", pins={"9.9": "0" * 16}, fixed="True")
    lab.apply()
    assert lab.verdict("fixed").state == "upstreamed"
    lab.change(A, b"2 * x", b"4 * x")
    assert lab.refused().state == "drifted"
    for name in ("page", "fixed"):
        assert "edited after cppmega patched it" in lab.verdict(name).detail


# -- the receipt ---------------------------------------------------------------------------------


def _lose(lab: Lab, how: str) -> None:
    path = lab.root / ".cppmega" / "receipt.json"
    if how == "deleted":
        path.unlink()
    elif how == "folder deleted":
        shutil.rmtree(path.parent)
    elif how == "truncated":
        path.write_bytes(path.read_bytes()[:100])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "odd":
        path.write_text('{"schema": 1, "pages": [], "files": {}}')
    else:
        path.write_text('{"schema": 99}')


_LOST = ["deleted", "truncated", "empty", "odd", "schema"]


@pytest.mark.parametrize("how", _LOST)
@pytest.mark.parametrize("verb", ["apply", "revert"])
def test_lost_receipt_is_made_again_from_the_originals(lab: Lab, how: str, verb: str) -> None:
    """RECORD says which kept original is upstream's, and the pages make of it what stands there."""
    lab.wheel()
    lab.page()
    digest = lab.apply().digest
    _lose(lab, how)
    assert not lab.status().ok
    if verb == "apply":
        assert lab.apply().digest == digest
        lab.applied("page")
    assert lab.revert().ok
    lab.pristine()


def test_lost_receipt_over_an_edit_claims_nothing(lab: Lab) -> None:
    lab.wheel()
    lab.page()
    lab.apply()
    lab.change(A, b"2 * x", b"4 * x")
    _lose(lab, "truncated")
    assert lab.refused().state == "drifted"
    with pytest.raises(CppmegaError, match="receipt-missing"):
        lab.revert()


def test_a_receipt_that_somebody_wrote_in_is_written_again(lab: Lab) -> None:
    """The preflight refuses it, and names the command that mends it."""
    lab.wheel()
    lab.page()
    digest = lab.apply().digest
    path = lab.root / ".cppmega" / "receipt.json"
    path.write_bytes(path.read_bytes().replace(digest.encode(), b"0" * 16))
    assert not lab.status().ok
    assert lab.apply().digest == digest
    assert lab.status().ok


def test_a_tree_without_a_receipt_has_none_that_was_changed(lab: Lab) -> None:
    lab.wheel()
    lab.page()
    assert not lab.status().notes


@pytest.mark.parametrize(
    ("vouched", "how"), [(True, "folder deleted"), *((False, how) for how in _LOST)]
)
@pytest.mark.parametrize("reached", ["forward", "never"])
def test_lost_receipt_is_never_already_patched(
    lab: Lab, vouched: bool, how: str, reached: str
) -> None:
    """Our text without our receipt, and nobody knows what is upstream's: every verb refuses, even
    though the code looks fixed and even for another page."""
    lab.wheel() if vouched else lab.export()
    lab.page(fixed='"2 * x" in source.file(FILE)', code=f"FILE = {A!r}", reached=reached)
    lab.page("other", f"{B}:single", 'replacing("x", "x + 1", times=1)')
    lab.apply(only=["page"])
    _lose(lab, how)
    assert not lab.status().ok
    verdict = lab.refused(only=["page"])
    assert verdict.state == "drifted" and "receipt" in verdict.detail
    before = snapshot(lab.root)
    for verb in (lambda: lab.apply(only=["other"]), lab.revert):
        with pytest.raises(CppmegaError) as caught:
            verb()
        assert caught.value.name == "receipt-missing"
    assert snapshot(lab.root) == before


@pytest.mark.parametrize("how", ["deleted", "truncated", "odd"])
def test_lost_receipt_over_a_pristine_tree(lab: Lab, how: str) -> None:
    """After a reinstall nothing is lost with the receipt: apply simply writes a new one."""
    lab.wheel()
    lab.page()
    lab.apply()
    (lab.root / A).write_bytes(FILES[A])
    _lose(lab, how)
    assert lab.verdict().state == "pending"
    assert lab.apply().ok
    lab.applied("page")
    lab.revert()
    lab.pristine()


def test_receipt_of_another_tree(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copied receipt proves nothing: the files of this tree are not what it says."""
    (tmp_path / "elsewhere").mkdir()
    other = Lab(tmp_path / "elsewhere", monkeypatch)
    other.files[A] = FILES[A].replace(b"LIMIT = 1", b"LIMIT = 2")
    other.wheel("2.0")
    other.page()
    other.apply()
    lab.wheel("1.0")
    lab.pages = other.pages
    shutil.copytree(other.root / ".cppmega", lab.root / ".cppmega")
    outcome = lab.status()
    assert not outcome.ok and outcome.plan.verdicts["page"].state == "pending"
    assert "2.0" in outcome.notes[0]
    assert lab.apply().ok
    lab.applied("page")
    lab.revert()
    lab.pristine()


def test_receipt_of_another_tree_of_the_same_version(lab: Lab) -> None:
    """Same version, same RECORD, but nothing was applied here."""
    lab.wheel()
    lab.page()
    lab.apply()
    lab.root.rename(lab.root.with_name("patched"))
    lab.wheel()
    shutil.copytree(lab.root.with_name("patched") / ".cppmega", lab.root / ".cppmega")
    assert lab.verdict().state == "pending"
    assert lab.apply().changed == [A]
    lab.applied("page")


def test_lost_original_is_said(lab: Lab) -> None:
    """Patched as it should be, but it could not be taken back: that is not `applied`."""
    lab.wheel()
    lab.page()
    lab.apply()
    shutil.rmtree(lab.root / ".cppmega" / "originals")
    verdict = lab.refused()
    assert verdict.state == "foreign" and "original" in verdict.detail
    with pytest.raises(CppmegaError) as caught:
        lab.revert()
    assert caught.value.name == "original-missing"


def test_damaged_original_is_not_put_back(lab: Lab) -> None:
    lab.wheel()
    lab.page()
    lab.apply()
    (kept,) = (lab.root / ".cppmega" / "originals").iterdir()
    kept.write_bytes(kept.read_bytes() + b"# damaged\n")
    before = snapshot(lab.root)
    with pytest.raises(CppmegaError):
        lab.revert()
    assert snapshot(lab.root) == before


def test_only_needed_originals_are_kept(lab: Lab) -> None:
    """What no page edits any more needs no original."""
    lab.wheel()
    lab.page("one")
    lab.page("two", f"{B}:single", 'replacing("x", "x + 1", times=1)')
    lab.apply()
    assert len(list((lab.root / ".cppmega" / "originals").iterdir())) == 2
    lab.revert("two")
    assert len(list((lab.root / ".cppmega" / "originals").iterdir())) == 1


def test_digest_names_the_code_and_nothing_else(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal on every machine with the same code, different as soon as the code differs."""
    lab.wheel()
    lab.page()
    first = lab.apply().digest
    (tmp_path / "elsewhere").mkdir()
    twin = Lab(tmp_path / "elsewhere", monkeypatch)
    twin.wheel()
    twin.page()
    assert twin.apply().digest == first
    twin.page(edit='replacing("x + x", "x * 2")')
    assert twin.apply().digest != first


# -- fingerprints --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n    return x\n",
        "def f(x):  # c\n\n    # c\n    return x  # c\n",
        'def f(x):\n    """Doc."""\n    return x\n',
        'def f(x):\n    "Doc" "string"\n\n    return x\n',
        "    def f(x):\n        # c\n        return x\n",
        "\tdef f(x):\n\t\treturn x\n",
        "def f(x):\r\n    return x\r\n",
        "def f(x):\n  return x",
    ],
)
def test_fingerprint_ignores_layout(text: str) -> None:
    assert fingerprint.of_source(text) == fingerprint.of_source("def f(x):\n    return x\n")


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("def f(x):\n    return x\n", "def f(x):\n    return y\n"),
        ("def f(x):\n    return x\n", "async def f(x):\n    return x\n"),
        ("def f(x):\n    return x\n", "@a\ndef f(x):\n    return x\n"),
        ("def f(x):\n    return '# a'\n", "def f(x):\n    return '# b'\n"),
        ("def f(x):\n    return '''\n\n'''\n", "def f(x):\n    return '''\n'''\n"),
        ('def f(x):\n    f"{g()}"\n    return x\n', "def f(x):\n    return x\n"),
        ('def f(x):\n    "a" f"{g()}"\n    return x\n', "def f(x):\n    return x\n"),
        ("def f(x):\n    x\n    'doc'\n", "def f(x):\n    x\n"),
    ],
)
def test_fingerprint_sees_code(one: str, two: str) -> None:
    """Also what looks like a docstring or a comment and is none."""
    assert fingerprint.of_source(one) != fingerprint.of_source(two)
