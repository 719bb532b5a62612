"""A patch that applied before and finds nothing now is a failure until somebody drops it."""

from __future__ import annotations

import shutil

import pytest

from cppmega.catalogue import loader as catalogue
from cppmega.errors import CppmegaError
from tests.support.lab import FILES, TARGET, A, B, Lab
from tests.support.made import dist_info, pin, snapshot, write

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
    lab.wheel()
    theirs = lab.pages / "theirs"
    lab.page("theirs", target, pins={"1.0": "0" * 16}, feature=(LAYER, feature), folder=theirs)
    before = snapshot(lab.root)
    with pytest.raises(CppmegaError, match=f"theirs .* feature '{feature}'") as caught:
        lab.apply(theirs)
    assert caught.value.name == "bad-page" and snapshot(lab.root) == before


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
