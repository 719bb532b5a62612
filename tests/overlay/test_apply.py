"""What an apply does: with one page, with several, and with those that are chosen."""

from __future__ import annotations

from pathlib import Path

import pytest

from cppmega.errors import CppmegaError
from cppmega.rewriting import fingerprint
from tests.support.lab import FILES, A, B, Lab
from tests.support.made import leftovers, snapshot

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
