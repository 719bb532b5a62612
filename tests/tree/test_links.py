"""Links in a tree, and what lies outside of it: nothing is written there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cppmega.edits import replacing
from cppmega.errors import CppmegaError
from cppmega.overlay import verbs as overlay
from cppmega.page import Edit, Page, Patch
from tests.support.lab import FILES, A, Lab
from tests.support.made import pin
from tests.tree.labs import checkout, fails


def test_hard_linked_file_keeps_its_bytes(lab: Lab, tmp_path: Path) -> None:
    """Package caches hard-link into site-packages: truncating the file would patch the cache."""
    lab.wheel()
    lab.page()
    cached = tmp_path / "cached.py"
    os.link(lab.root / A, cached)
    lab.apply()
    assert cached.read_bytes() == FILES[A]
    os.link(lab.root / A, tmp_path / "patched.py")
    patched = (tmp_path / "patched.py").read_bytes()
    lab.revert()
    assert cached.read_bytes() == FILES[A]
    assert (tmp_path / "patched.py").read_bytes() == patched
    lab.pristine()


def test_linked_file_is_replaced_and_not_written_through(lab: Lab, tmp_path: Path) -> None:
    """uv --link-mode=symlink: every file is a link into the cache."""
    lab.wheel()
    lab.page()
    cached = tmp_path / "cached.py"
    (lab.root / A).rename(cached)
    (lab.root / A).symlink_to(cached)
    assert lab.apply().ok
    assert cached.read_bytes() == FILES[A]
    lab.applied("page")
    lab.revert()
    assert (lab.root / A).read_bytes() == cached.read_bytes() == FILES[A]


@pytest.mark.parametrize("make", [Lab.export, checkout], ids=["export", "checkout"])
def test_linked_file_that_no_record_vouches_for_is_refused(
    lab: Lab, tmp_path: Path, make: Callable[[Lab], object]
) -> None:
    make(lab)
    lab.page()
    elsewhere = tmp_path / "elsewhere.py"
    (lab.root / A).rename(elsewhere)
    (lab.root / A).symlink_to(elsewhere)
    assert str(elsewhere) in fails(lab, "linked-tree").what
    assert (lab.root / A).is_symlink() and elsewhere.read_bytes() == FILES[A]


@pytest.mark.parametrize(
    "path", ["/{root}/outside.py", "../outside.py", "megatron/../../outside.py"]
)
def test_target_outside_of_root_is_refused(lab: Lab, tmp_path: Path, path: str) -> None:
    """An absolute path was patched: ROOT / path is the path."""
    outside = tmp_path / "outside.py"
    outside.write_bytes(FILES[A])
    lab.wheel()
    target = path.format(root=str(tmp_path)[1:]) + ":double"
    lab.page(target=target, pins={"1.0": pin(FILES[A], "double")})
    assert "target" in fails(lab, "bad-page").what
    session = lab.session()
    edit = Edit(target, {"1.0": pin(FILES[A], "double")}, replacing("x + x", "2 * x"))
    session.pages = {"page": Page("page", Patch((edit,), "forward"), "", "0", "", "")}
    with pytest.raises(CppmegaError) as caught:
        overlay.apply(session)
    assert caught.value.name == "outside-root"
    assert outside.read_bytes() == FILES[A]


def test_target_outside_of_its_package_is_refused(lab: Lab) -> None:
    """A page for one distribution edits no file of another one, nor of a package beside both."""
    lab.files["other/a.py"] = FILES[A]
    lab.files["mamba_ssm/a.py"] = FILES[A]
    lab.wheel()
    for path in ("other/a.py", "mamba_ssm/a.py"):
        lab.page(target=f"{path}:double")
        assert "not below megatron/" in fails(lab, "bad-page").what
    lab.page(more={"distribution": "'numpy'"})
    assert "'numpy' is not one of" in fails(lab, "bad-page").what


def test_question_about_a_file_outside_of_root_is_refused(lab: Lab, tmp_path: Path) -> None:
    lab.wheel()
    lab.page(pins={"1.0": "0" * 16}, fixed="bool(source.file('/etc/hostname'))")
    fails(lab, "outside-root")


@pytest.mark.parametrize("path", ["megatron", "megatron/core"])
def test_linked_megatron_is_refused(lab: Lab, tmp_path: Path, path: str) -> None:
    """Patching through the link would change every environment that shares the folder."""
    lab.wheel()
    lab.page()
    real = tmp_path / "shared"
    (lab.root / path).rename(real)
    (lab.root / path).symlink_to(real, target_is_directory=True)
    error = fails(lab, "linked-tree")
    assert str(real) in error.what
    assert (real / Path(A).relative_to(path)).read_bytes() == FILES[A]


def test_linked_folder_deeper_down_is_refused(lab: Lab, tmp_path: Path) -> None:
    deep = "megatron/core/deep/x.py"
    lab.files[deep] = FILES[A]
    lab.wheel()
    lab.page(target=f"{deep}:double")
    real = tmp_path / "shared"
    (lab.root / deep).parent.rename(real)
    (lab.root / deep).parent.symlink_to(real, target_is_directory=True)
    fails(lab, "linked-tree")
    assert not (lab.root / ".cppmega").exists()
    assert sorted(p.name for p in real.iterdir()) == ["x.py"]


def test_root_behind_a_link_is_fine(lab: Lab, tmp_path: Path) -> None:
    """/opt/env -> /opt/env-3: the environment is this one, whatever its path is called."""
    lab.wheel()
    lab.page()
    link = tmp_path / "link"
    link.symlink_to(lab.root, target_is_directory=True)
    real, lab.root = lab.root, link
    assert lab.apply().ok
    lab.root = real
    lab.applied("page")
