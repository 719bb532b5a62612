"""`cppmega drift`: which trees it compares, however people name them."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from cppmega.authoring import drift, drift_report
from cppmega.catalogue import loader as catalogue
from cppmega.errors import CppmegaError
from cppmega.overlay import verbs as overlay
from cppmega.overlay.verbs import Session
from cppmega.tree import resolve as given
from cppmega.tree.installed import Tree
from tests.authoring.drifts import FILE, OLD, advised, command, only, page
from tests.support import made

pytestmark = pytest.mark.slow


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
    assert caught.value.name == "nothing-to-do"


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
    [("no/such/folder", "no-megatron"), ("{}/torn.whl", "no-wheel"), ("{}", "no-megatron")],
)
def test_what_is_no_megatron_is_refused(tmp_path: Path, name: str, error: str) -> None:
    (tmp_path / "torn.whl").write_bytes(b"PK")
    with pytest.raises(CppmegaError) as caught:
        given.tree_of(name.format(tmp_path), tmp_path / "scratch", print)
    assert caught.value.name == error


def test_a_version_is_not_a_path() -> None:
    assert given.is_version("0.19.2") and given.is_version("0.20.0rc1")
    assert not given.is_version("trees/0.19.2") and not given.is_version("main")


def test_the_command_answers_on_every_exit(tmp_path: Path) -> None:
    page(tmp_path / "pages")
    old = made.tree(tmp_path / "old", {FILE: OLD}, "1.0")
    new = made.tree(tmp_path / "new", {FILE: OLD.replace("size + 1", "size + 2")}, "2.0")
    brief = command(tmp_path / "pages", "drift", old, old)
    assert (brief.returncode, brief.stdout) == (0, "1 same\n") and "with -v" in brief.stderr
    brief = command(tmp_path / "pages", "drift", old, new)
    assert "changed         work_works" in brief.stdout and "to do" not in brief.stdout
    full = command(tmp_path / "pages", "drift", old, new, "-v")
    assert "to do: " in full.stdout and "size + 2" in full.stdout
    same = command(tmp_path / "pages", "drift", old, old, "-v")
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
    assert json.loads(wrong.stdout)["error"]["name"] == "no-megatron"
