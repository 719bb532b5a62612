"""Where a megatron can lie, and who vouches for its files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

from cppmega.errors import CppmegaError
from cppmega.tree import installed as tree
from cppmega.tree.installed import Tree
from tests.support import PATIENCE
from tests.support.git import run_git
from tests.support.lab import FILES, REPOSITORY, A, B, Lab
from tests.support.made import dist_info, pin, write
from tests.tree.labs import checkout, fails

# -- which tree -------------------------------------------------------------------------------


def _found(
    lab: Lab, *path: Path, site: Path | None = None, before: str = ""
) -> subprocess.CompletedProcess[str]:
    """`status --json` of a process with these folders on its path, without --megatron.

    Args:
        before: code that the process runs first.
    """
    # Whatever this machine has installed is off the path once our own code is imported.
    prelude = """
    import cppmega.cli.main, cppmega.overlay.verbs, cppmega.host.console, cppmega.rewriting.rewrite
    import cppmega.guard.session, dulwich.object_store, dulwich.refs
    sys.path[:] = [path for path in sys.path if "site-packages" not in path]
    """
    prelude = textwrap.dedent(prelude) + (
        f"import site; site.addsitedir({str(site)!r})" if site else ""
    )
    prelude += "\n" + before
    return subprocess.run(
        lab.command("status", "--json", prelude=prelude),
        env=lab.environment(PYTHONPATH=os.pathsep.join(map(str, [REPOSITORY, *path]))),
        cwd=lab.pages,
        capture_output=True,
        text=True,
        check=False,
    )


def test_root_is_the_one_that_python_would_import(lab: Lab) -> None:
    lab.wheel()
    lab.page()
    answer = json.loads(_found(lab, lab.root).stdout)
    assert answer["megatron"]["root"] == str(lab.root)


def test_two_megatron_roots_are_refused(lab: Lab, tmp_path: Path) -> None:
    """megatron has no __init__.py: Python merges every folder of that name on the path, and the
    patches would go into one of them while parts of the other train."""
    lab.wheel()
    lab.page()
    other = tmp_path / "checkout"
    write(other, {"megatron/training/__init__.py": b"", "megatron/core/new.py": b""})
    done = _found(lab, other, lab.root)
    assert done.returncode == 1
    error = json.loads(done.stdout)["error"]
    assert error["name"] == "several-megatrons"
    for said in (f"megatron.core from {lab.root}", f"megatron.core from {other}", "training"):
        assert said in error["what"]


def test_foreign_portions_of_the_namespace_do_not_matter(lab: Lab, tmp_path: Path) -> None:
    """megatron-energon and others share the name `megatron` and nothing else."""
    lab.wheel()
    lab.page()
    write(tmp_path / "energon", {"megatron/energon/__init__.py": b""})
    answer = json.loads(_found(lab, tmp_path / "energon", lab.root).stdout)
    assert answer["megatron"]["root"] == str(lab.root)


def test_no_megatron_at_all(lab: Lab, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    code = (
        "from cppmega.tree import installed\ninstalled.importlib.util.find_spec = lambda name: None"
    )
    done = subprocess.run(
        lab.command("status", "--json", prelude=code),
        env=lab.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert json.loads(done.stdout)["error"]["name"] == "no-megatron"
    with pytest.raises(CppmegaError) as caught:
        Tree(empty).check({})
    assert caught.value.name == "no-megatron"


_DECORATED = b"""
from megatron.core.b import traced


class Kept:
    @traced
    def forward(self, x):
        return x


def double(x):
    return x + x
"""
_DECORATOR = b"""
def traced(function):
    def wrapper(*args):
        return function(*args)

    return wrapper
"""
_PROJECT = b"""
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "megatron-core"
version = "1.0"
[tool.setuptools.packages.find]
include = ["megatron.core", "megatron.core.*"]
"""
_GUARDED = """
from cppmega.guard import files, modules, session

guard = session.start()
import megatron.core.a, megatron.core.parts.c

modules.check()
problems = files.look(guard.session.root, guard.receipt).problems
assert not problems, problems
"""


@pytest.mark.parametrize(
    ("mode", "on_path"), [("lenient", False), ("lenient", True), ("compat", False)]
)
def test_editable_install_by_setuptools(lab: Lab, tmp_path: Path, mode: str, on_path: bool) -> None:
    """What `pip install -e` writes: a finder with a mapping, or a path file; and a run accepts it.

    The checkout may be on PYTHONPATH, too.
    """
    lab.files |= {A: _DECORATED, B: _DECORATOR, "megatron/core/parts/c.py": b"VALUE = 1\n"}
    lab.files["pyproject.toml"] = _PROJECT
    checkout(lab)
    lab.page()
    site = tmp_path / "site-packages"
    build = "import sys; from setuptools.build_meta import build_editable as build;"
    build += "build(sys.argv[1], {'editable_mode': sys.argv[2]})"
    subprocess.run(
        [sys.executable, "-c", build, str(tmp_path), mode],
        cwd=lab.root, capture_output=True, check=True, timeout=PATIENCE,
    )  # fmt: skip
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(site)
    lab.apply()
    path = [lab.root] if on_path else []
    done = _found(lab, *path, site=site, before=_GUARDED)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["megatron"]["root"] == str(lab.root)
    assert answer["patches"][0]["state"] == "applied"


def test_editable_install_of_another_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cppmega as a tool: the active environment's Megatron may be a checkout, by PEP 610."""
    (tmp_path / "clone of mine/megatron/core").mkdir(parents=True)
    info = tmp_path / "lib/python3.12/site-packages/megatron_core-1.0.dist-info"
    info.mkdir(parents=True)
    url = (tmp_path / "clone of mine").as_uri()
    (info / "direct_url.json").write_text(json.dumps({"url": url, "dir_info": {"editable": True}}))
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(tree, "_mapped", lambda places: [])
    with pytest.raises(CppmegaError) as caught:
        tree.find_root()
    assert caught.value.next.endswith(f"--megatron '{tmp_path}/clone of mine'")


def test_virtual_environment_inside_an_unrelated_repository(lab: Lab, tmp_path: Path) -> None:
    """`git apply` changes nothing there and exits 0; and that repository vouches for nothing."""
    run_git(tmp_path, "init", "-q")
    (tmp_path / "project.py").write_text("print()\n")
    run_git(tmp_path, "add", "project.py")
    run_git(tmp_path, "commit", "-qm", "a project")
    lab.wheel()
    lab.page()
    assert lab.apply().ok
    assert lab.receipt().files[A].origin == "record"
    lab.applied("page")
    lab.revert()
    lab.pristine()
    for info in lab.root.glob("*.dist-info/*"):
        info.unlink()
    next(lab.root.glob("*.dist-info")).rmdir()
    lab.apply()
    assert lab.receipt().files[A].origin == "unverified"


# -- checkouts --------------------------------------------------------------------------------


def test_checkout_round_trip(lab: Lab) -> None:
    """The commit vouches; a hand edit is foreign; revert leaves no difference to the commit."""
    checkout(lab)
    lab.page()
    assert lab.apply().ok
    assert lab.receipt().files[A].origin == "git"
    lab.applied("page")
    lab.revert()
    assert run_git(lab.root, "status", "--porcelain") == ""
    lab.change(A, b"# the sum", b"# edited")
    verdict = lab.refused()
    assert verdict.state == "foreign" and "commit" in verdict.detail
    assert "checkout HEAD" in verdict.next
    run_git(lab.root, "commit", "-qam", "our own")
    assert lab.apply().ok


def test_checkout_below_another_repository(lab: Lab, tmp_path: Path) -> None:
    """Megatron vendored into a project: the project's commit vouches for its files."""
    lab.export()
    run_git(tmp_path, "init", "-q")
    run_git(tmp_path, "add", "site")
    run_git(tmp_path, "commit", "-qm", "vendored")
    lab.page()
    assert lab.apply().ok
    assert lab.receipt().files[A].origin == "git"


def test_checkout_of_another_user(lab: Lab) -> None:
    """Containers run as root on a user's checkout, where git by itself refuses to answer."""
    checkout(lab)
    lab.page()
    if os.geteuid() == 0:
        for path in [lab.root, *lab.root.rglob("*")]:
            os.chown(path, 12345, 12345, follow_symlinks=False)
    assert Tree(lab.root).pristine(A)[0] == "git"
    assert lab.apply().ok
    if os.geteuid() == 0:
        assert (lab.root / A).stat().st_uid == 12345


def test_checkout_of_another_version_over_a_patched_tree(lab: Lab) -> None:
    checkout(lab)
    lab.page()
    lab.files[A] = FILES[A].replace(b"LIMIT = 1", b"LIMIT = 2")
    lab.export()
    run_git(lab.root, "commit", "-qam", "next")
    lab.apply()
    run_git(lab.root, "checkout", "-qf", "HEAD~1")
    assert lab.verdict().state == "pending"
    assert lab.apply().ok
    lab.applied("page")
    lab.revert()
    assert (lab.root / A).read_bytes() == FILES[A]


def test_git_variables_do_not_lead_astray(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIT_DIR is set inside hooks: it names another repository than the tree's."""
    checkout(lab)
    (lab.root / ".git").rename(lab.root.with_name("elsewhere"))
    lab.page()
    monkeypatch.setenv("GIT_DIR", str(lab.root.with_name("elsewhere")))
    monkeypatch.setenv("GIT_WORK_TREE", str(lab.root))
    lab.apply()
    assert lab.receipt().files[A].origin == "unverified"


# -- distributions ----------------------------------------------------------------------------


def _training(lab: Lab, text: bytes) -> dict[str, bytes]:
    names = ("__init__", "arguments", "training", "utils", "checkpointing", "initialize")
    return {f"megatron/training/{name}.py": text for name in names}


@pytest.mark.parametrize("how", ["other files", "other bytes"])
@pytest.mark.parametrize("vouched", ["record", "git"])
def test_training_of_another_version_is_refused(lab: Lab, how: str, vouched: str) -> None:
    """core 0.16 with training 0.19 in one root: they call each other with wrong arguments."""
    other = _training(lab, b"VERSION = 2\n")
    if how == "other bytes":
        lab.files |= _training(lab, b"VERSION = 1\n")
    if vouched == "record":
        lab.wheel()
    else:
        checkout(lab)
    lab.page()
    write(lab.root, other)
    error = fails(lab, "mixed-versions")
    assert "6 of its 6" in error.what


def test_one_hand_edit_in_training_is_no_other_version(lab: Lab) -> None:
    lab.files |= _training(lab, b"VERSION = 1\n")
    lab.wheel()
    lab.page()
    (lab.root / "megatron/training/utils.py").write_bytes(b"VERSION = 3\n")
    assert lab.apply().ok


def test_our_own_patches_in_training_are_no_other_version(lab: Lab) -> None:
    lab.files |= _training(lab, b"def f(x):\n    return x\n")
    lab.wheel()
    for path in _training(lab, b""):
        lab.page(
            f"p_{Path(path).stem.strip('_')}", f"{path}:f", 'replacing("return x", "return -x")'
        )
    assert lab.apply().ok
    assert lab.status().ok
    assert lab.revert().ok


def test_two_installed_versions_are_refused(lab: Lab) -> None:
    lab.wheel("1.0")
    dist_info(lab.root, "2.0")
    lab.page()
    assert "1.0" in fails(lab, "two-distributions").what


@pytest.mark.parametrize("record", ["", "garbage,\0,", f"{A},sha256=***,3", f"{A},sha256=AAAA,3"])
def test_torn_record(lab: Lab, record: str) -> None:
    """Without a readable hash nobody vouches for the file, or the file counts as edited."""
    folder = lab.wheel() and next(lab.root.glob("*.dist-info"))
    (folder / "RECORD").write_text(record)
    lab.page()
    if A in record:
        assert lab.refused().state == "foreign"
    else:
        assert lab.apply().ok
        assert lab.receipt().files[A].origin == "unverified"


def test_version_for_messages(lab: Lab) -> None:
    lab.files["megatron/core/package_info.py"] = (
        b"MAJOR = 0\nMINOR = 20\nPATCH = 1\nPRE_RELEASE = 'rc0'\n"
    )
    lab.export()
    assert Tree(lab.root).version == "0.20.1rc0"
    (lab.root / "megatron/core/package_info.py").write_bytes(b"MAJOR = (")
    assert Tree(lab.root).version == "unknown"


@pytest.mark.parametrize("patched", [False, True])
def test_what_a_checkout_loses_by_the_next_command_is_kept(
    lab: Lab, tmp_path: Path, patched: bool
) -> None:
    """The command is run as it is printed, twice: each edit is in a file of its own."""
    checkout(lab)
    lab.page()
    if patched:
        assert lab.apply().ok
    here = tmp_path / "here"
    here.mkdir()
    for edit in (b"LIMIT = 2", b"LIMIT = 3"):
        lab.change(A, b"LIMIT = 1", edit)
        subprocess.run(lab.refused().next, shell=True, cwd=here, check=True, timeout=PATIENCE)
        assert (lab.root / A).read_bytes() == FILES[A]
    kept = [file.read_bytes() for file in sorted(here.iterdir())]
    assert [b"LIMIT = 3" in data for data in kept] == [True, False]
    assert [b"LIMIT = 2" in data for data in kept] == [False, True]


def test_what_a_reinstall_loses_is_kept(lab: Lab, tmp_path: Path) -> None:
    """pip replaces every file of the package, so all of them are copied before it runs."""
    lab.wheel()
    lab.page()
    lab.change(A, b"LIMIT = 1", b"LIMIT = 2")
    lab.change(B, b"import os", b"import os  # an edit of a file without a patch")
    save, _, reinstall = lab.refused().next.partition(" && ")
    assert reinstall.startswith("pip install --force-reinstall")
    subprocess.run(save, shell=True, cwd=tmp_path, check=True, timeout=PATIENCE)
    for path in (A, B):
        copy = tmp_path / path.replace("megatron/", "megatron.edited/")
        assert copy.read_bytes() == (lab.root / path).read_bytes() != FILES[path]


def test_a_missing_file_needs_no_copy(lab: Lab, tmp_path: Path) -> None:
    checkout(lab)
    (lab.root / A).unlink()
    subprocess.run(Tree(lab.root).restore(A), shell=True, cwd=tmp_path, check=True)
    assert (lab.root / A).read_bytes() == FILES[A]


def test_unpinned_place_says_what_there_is(lab: Lab) -> None:
    """`reinstall` names the installed version, so that the command can be pasted."""
    lab.wheel("0.42")
    lab.page(pins={"1.0": "0" * 16})
    lab.change(A, b"x + x", b"x - x")
    assert lab.refused().next == tree.reinstall(lab.root, "0.42")


def test_file_outside_of_the_record(lab: Lab) -> None:
    """A file that the wheel did not bring: nobody vouches, known text counts as pristine."""
    lab.wheel()
    (lab.root / "megatron/core/new.py").write_bytes(FILES[B])
    lab.page(
        target="megatron/core/new.py:single",
        edit='replacing("x", "x + 1", times=1)',
        pins={"1.0": pin(FILES[B], "single")},
    )
    assert lab.apply().ok
    assert lab.receipt().files["megatron/core/new.py"].origin == "unverified"
