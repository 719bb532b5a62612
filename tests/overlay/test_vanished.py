"""A patch that applied before and finds nothing now is a failure until somebody drops it."""

from __future__ import annotations

import shutil

import pytest

from cppmega.catalogue import loader as catalogue
from cppmega.errors import CppmegaError
from tests.support.git import commit_all
from tests.support.lab import FILES, TARGET, A, B, Lab
from tests.support.made import dist_info, pin, write

LAYER = f"{A}:Layer"


@pytest.mark.parametrize(
    ("target", "feature"),
    [
        (TARGET, TARGET),
        (f"{A}:double#1", TARGET),
        (TARGET, f"{TARGET}#2"),
        (TARGET, f"{TARGET}.inner"),
        (LAYER, f"{LAYER}.forward"),
    ],
)
def test_a_target_is_no_feature(lab: Lab, target: str, feature: str) -> None:
    """If upstream renamed it, the patch would be `not-applicable`, and the bug would train on."""
    lab.files[A] = FILES[A].replace(b"double", b"treble").replace(b"Layer", b"Block")
    lab.wheel()
    lab.page(target=target, pins={"0.9": "0" * 16}, feature=(feature,))
    assert lab.refused().state == "absent"


def test_a_class_around_a_target_is_a_feature(lab: Lab) -> None:
    lab.page("theirs", f"{LAYER}.forward", "str", pins={"1.0": "0" * 16}, feature=(LAYER,))
    assert list(catalogue.load()) == ["theirs"]


def _upgrade(lab: Lab, text: bytes, version: str = "2.0") -> None:
    """What pip does: it replaces the files that its RECORD lists, and leaves ours."""
    for old in lab.root.glob("megatron_core-*"):
        shutil.rmtree(old)
    lab.files[A] = text
    lab.wheel(version)


@pytest.fixture
def upgraded(lab: Lab) -> Lab:
    """A tree whose next release calls the class of the feature, and the target, something else."""
    lab.wheel("1.0")
    lab.page(feature=(LAYER,))
    lab.page("other", f"{B}:single", 'replacing("x", "x + 1", times=1)')
    assert lab.apply().ok
    _upgrade(lab, FILES[A].replace(b"double", b"treble").replace(b"Layer", b"Block"))
    return lab


def test_a_patch_that_vanishes_in_an_upgrade_is_a_failure(upgraded: Lab) -> None:
    verdict = upgraded.refused()
    assert verdict.state == "unported"
    assert f"{LAYER} does not exist" in verdict.detail and "megatron-core 1.0" in verdict.detail
    assert verdict.next.endswith("python -m cppmega.apply_patches --without page")
    assert upgraded.verdict().state == "unported" and not upgraded.status().ok
    # To apply another patch says nothing about this one.
    assert upgraded.apply(only=("other",)).ok
    assert upgraded.refused().state == "unported"


def test_a_vanished_patch_is_dropped_by_name_once(upgraded: Lab) -> None:
    assert upgraded.apply(without=("page",)).ok
    assert upgraded.verdict().state == "off"
    assert upgraded.apply().ok
    assert upgraded.verdict().state == "not-applicable"


def test_a_vanished_patch_that_is_ported_is_applied(upgraded: Lab) -> None:
    upgraded.refused()
    known = {"2.0": pin(upgraded.files[A], "treble")}
    upgraded.page(target=f"{A}:treble", pins=known, feature=(f"{A}:Block",))
    assert upgraded.apply().ok
    upgraded.applied("page", "other")


def test_a_package_that_was_removed_takes_no_patch_with_it(lab: Lab) -> None:
    lab.wheel()
    write(lab.root, {"liger_kernel/x.py": FILES[A]})
    dist_info(lab.root, "0.8.5", "liger_kernel")
    more = {"distribution": "'liger-kernel'"}
    lab.page(target="liger_kernel/x.py:double", pins={"0.8.5": pin(FILES[A], "double")}, more=more)
    assert lab.apply().ok
    for installed in lab.root.glob("liger_kernel*"):
        shutil.rmtree(installed)
    verdict = lab.refused()
    assert verdict.state == "unported" and "liger-kernel is not installed" in verdict.detail
    assert lab.apply(without=("page",)).ok


# -- a page that nobody has ported ---------------------------------------------------------------


def _unported(lab: Lab) -> None:
    lab.page(pins={"0.9": "0" * 16}, builds_on=(f"{B}:later",))
    lab.page("other", f"{B}:single", 'replacing("x", "x + 1", times=1)')


def test_an_unported_page_stops_nothing(lab: Lab) -> None:
    """Neither is there nothing to fix, nor does anybody miss it."""
    lab.wheel()
    _unported(lab)
    assert lab.apply().ok
    lab.applied("other")
    verdict = lab.verdict()
    assert (verdict.state, verdict.failed, verdict.next) == ("unported", False, "")
    assert f"{B}:later does not exist" in verdict.detail


@pytest.mark.parametrize("how", ["only", "asked"])
def test_an_unported_page_that_is_asked_for_stops_the_apply(lab: Lab, how: str) -> None:
    lab.wheel()
    _unported(lab)
    with pytest.raises(CppmegaError, match="nobody has ported it") as caught:
        lab.apply(**{how: ("page",)})
    assert caught.value.name == "patch-unported"


def test_upstreams_fix_makes_an_unported_page_unnecessary(lab: Lab) -> None:
    lab.wheel()
    lab.page(pins={"0.9": "0" * 16}, builds_on=(f"{B}:later",), fixed="True")
    assert lab.verdict().state == "upstreamed"


def test_a_page_that_applied_and_is_not_ported_is_a_failure(lab: Lab) -> None:
    lab.files[B] = FILES[B] + b"\n\ndef later(x):\n    return x\n"
    lab.wheel("1.0")
    lab.page(builds_on=(f"{B}:later",))
    assert lab.apply().ok
    lab.files[B] = FILES[B]
    _upgrade(lab, FILES[A].replace(b"double", b"treble"))
    verdict = lab.refused()
    assert (verdict.state, verdict.failed) == ("unported", True)
    assert "megatron-core 1.0" in verdict.detail and "--without page" in verdict.next


def test_an_edited_file_does_not_show_that_a_page_is_unported(lab: Lab) -> None:
    lab.wheel()
    _unported(lab)
    (lab.root / B).write_bytes(FILES[B] + b"\n# a note\n")
    verdict = lab.refused()
    assert (verdict.state, verdict.target) == ("foreign", f"{B}:later")


# -- whose text a text is ------------------------------------------------------------------------


def test_an_unknown_commit_is_not_edited_by_hand(lab: Lab) -> None:
    """A comment in a file makes none of its texts edited: they are those of the commit."""
    lab.files[A] = FILES[A].replace(b"return x + x", b"return x + x + 0")
    commit_all(lab.export())
    lab.page(pins={lab.root.name: pin(FILES[A], "double")})
    (lab.root / A).write_bytes(lab.files[A] + b"\n# a note\n")
    verdict = lab.refused()
    assert verdict.state == "drifted" and "matches no known version" in verdict.detail
    lab.page(pins={"0.9": pin(lab.files[A], "double")})
    lab.change(A, b"x + x + 0", b"x + x + 1")
    verdict = lab.refused()
    assert verdict.state == "drifted" and "differs from the commit: it was edited by hand" in (
        verdict.detail
    )


def test_a_newer_export_over_a_patched_one_is_upstreams(lab: Lab) -> None:
    """Nothing vouches for either: the text without any patch in it counts as pristine."""
    lab.export()
    lab.page(pins={"1.0": pin(FILES[A], "double")})
    assert lab.apply().ok
    lab.files[A] = FILES[A].replace(b"LIMIT = 1", b"LIMIT = 2")
    lab.export()
    assert lab.apply().ok
    assert "LIMIT = 2" in lab.text() and "2 * x" in lab.text()
    assert lab.revert().ok
    lab.pristine()
