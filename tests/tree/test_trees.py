"""Where a megatron can lie, and who else uses its files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cppmega.edits import replacing
from cppmega.errors import CppmegaError
from cppmega.overlay import verbs as overlay
from cppmega.page import Edit, Page, Patch
from cppmega.tree import installed as tree
from cppmega.tree.installed import Tree
from tests.support.lab import FILES, REPOSITORY, A, B, Lab
from tests.support.made import dist_info, pin, snapshot, write


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    return Lab(tmp_path, monkeypatch)


def _git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "gc.auto=0"]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    done = subprocess.run(
        ["git", *identity, "-C", str(folder), *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={**clean, "GIT_CONFIG_GLOBAL": os.devnull},
    )
    return done.stdout


def _checkout(lab: Lab) -> None:
    """A clone of upstream: git vouches for every file."""
    lab.export()
    _git(lab.root, "init", "-q")
    _git(lab.root, "add", ".")
    _git(lab.root, "commit", "-qm", "upstream")


def _fails(lab: Lab, name: str) -> CppmegaError:
    before = snapshot(lab.root)
    with pytest.raises(CppmegaError) as caught:
        lab.apply()
    assert caught.value.name == name
    assert snapshot(lab.root) == before
    return caught.value


# -- links ------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("make", [Lab.export, _checkout], ids=["export", "checkout"])
def test_linked_file_that_no_record_vouches_for_is_refused(
    lab: Lab, tmp_path: Path, make: Callable[[Lab], object]
) -> None:
    make(lab)
    lab.page()
    elsewhere = tmp_path / "elsewhere.py"
    (lab.root / A).rename(elsewhere)
    (lab.root / A).symlink_to(elsewhere)
    assert str(elsewhere) in _fails(lab, "linked-tree").what
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
    assert "target" in _fails(lab, "bad-page").what
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
        assert "not below megatron/" in _fails(lab, "bad-page").what
    lab.page(more={"distribution": "'numpy'"})
    assert "'numpy' is not one of" in _fails(lab, "bad-page").what


def test_question_about_a_file_outside_of_root_is_refused(lab: Lab, tmp_path: Path) -> None:
    lab.wheel()
    lab.page(pins={"1.0": "0" * 16}, fixed="bool(source.file('/etc/hostname'))")
    _fails(lab, "outside-root")


@pytest.mark.parametrize("path", ["megatron", "megatron/core"])
def test_linked_megatron_is_refused(lab: Lab, tmp_path: Path, path: str) -> None:
    """Patching through the link would change every environment that shares the folder."""
    lab.wheel()
    lab.page()
    real = tmp_path / "shared"
    (lab.root / path).rename(real)
    (lab.root / path).symlink_to(real, target_is_directory=True)
    error = _fails(lab, "linked-tree")
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
    _fails(lab, "linked-tree")
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


# -- which tree -------------------------------------------------------------------------------


def _found(lab: Lab, *path: Path, site: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`status --json` of a process with these folders on its path, without --megatron."""
    # Whatever this machine has installed is off the path once our own code is imported.
    prelude = """
    import cppmega.cli.main, cppmega.overlay.verbs, cppmega.host.console, cppmega.rewriting.rewrite
    import dulwich.object_store, dulwich.refs
    sys.path[:] = [path for path in sys.path if "site-packages" not in path]
    """
    prelude = textwrap.dedent(prelude) + (
        f"import site; site.addsitedir({str(site)!r})" if site else ""
    )
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


def test_editable_install_by_path_file(lab: Lab, tmp_path: Path) -> None:
    """`pip install -e`: a .pth file in site-packages names the checkout."""
    _checkout(lab)
    lab.page()
    site = tmp_path / "site-packages"
    site.mkdir()
    (site / "__editable__.megatron_core-1.0.pth").write_text(f"{lab.root}\n")
    (site / "megatron_core-1.0.dist-info").mkdir()
    answer = json.loads(_found(lab, site=site).stdout)
    assert answer["megatron"]["root"] == str(lab.root)
    assert answer["patches"][0]["state"] == "pending"


_FINDER = """
import sys
from importlib.machinery import PathFinder

NAMESPACES = {{"megatron": [{folder!r}]}}  # as setuptools writes it
HOOK = "__editable__.megatron_core-1.0.finder.__path_hook__"


class Finder:
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        return None

    @classmethod
    def find_module(cls, name):
        return None


class Namespaces:
    @classmethod
    def _path_hook(cls, path):
        if path == HOOK:
            return cls
        raise ImportError

    @classmethod
    def find_spec(cls, fullname, target=None):
        if fullname in NAMESPACES:
            (folder,) = NAMESPACES[fullname]
            return PathFinder.find_spec(fullname, [folder.removesuffix("/megatron")])
        return None


def install():
    sys.meta_path.append(Finder)
    sys.path_hooks.append(Namespaces._path_hook)
    sys.path.append(HOOK)
"""


def test_editable_install_by_finder(lab: Lab, tmp_path: Path) -> None:
    """setuptools' other way: a path hook that knows the namespace's folders."""
    _checkout(lab)
    lab.page()
    site = tmp_path / "site-packages"
    site.mkdir()
    folder = str(lab.root / "megatron")
    (site / "_editable_finder.py").write_text(_FINDER.format(folder=folder))
    (site / "editable.pth").write_text("import _editable_finder; _editable_finder.install()\n")
    done = _found(lab, site=site)
    answer = json.loads(done.stdout)
    assert answer["megatron"] is not None, answer
    assert answer["megatron"]["root"] == str(lab.root)


def test_virtual_environment_inside_an_unrelated_repository(lab: Lab, tmp_path: Path) -> None:
    """`git apply` changes nothing there and exits 0; and that repository vouches for nothing."""
    _git(tmp_path, "init", "-q")
    (tmp_path / "project.py").write_text("print()\n")
    _git(tmp_path, "add", "project.py")
    _git(tmp_path, "commit", "-qm", "a project")
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
    _checkout(lab)
    lab.page()
    assert lab.apply().ok
    assert lab.receipt().files[A].origin == "git"
    lab.applied("page")
    lab.revert()
    assert _git(lab.root, "status", "--porcelain") == ""
    lab.change(A, b"# the sum", b"# edited")
    verdict = lab.refused()
    assert verdict.state == "foreign" and "commit" in verdict.detail
    assert "checkout HEAD" in verdict.next
    _git(lab.root, "commit", "-qam", "our own")
    assert lab.apply().ok


def test_checkout_below_another_repository(lab: Lab, tmp_path: Path) -> None:
    """Megatron vendored into a project: the project's commit vouches for its files."""
    lab.export()
    _git(tmp_path, "init", "-q")
    _git(tmp_path, "add", "site")
    _git(tmp_path, "commit", "-qm", "vendored")
    lab.page()
    assert lab.apply().ok
    assert lab.receipt().files[A].origin == "git"


def test_checkout_of_another_user(lab: Lab) -> None:
    """Containers run as root on a user's checkout, where git by itself refuses to answer."""
    _checkout(lab)
    lab.page()
    if os.geteuid() == 0:
        for path in [lab.root, *lab.root.rglob("*")]:
            os.chown(path, 12345, 12345, follow_symlinks=False)
    assert Tree(lab.root).pristine(A)[0] == "git"
    assert lab.apply().ok
    if os.geteuid() == 0:
        assert (lab.root / A).stat().st_uid == 12345


def test_checkout_of_another_version_over_a_patched_tree(lab: Lab) -> None:
    _checkout(lab)
    lab.page()
    lab.files[A] = FILES[A].replace(b"LIMIT = 1", b"LIMIT = 2")
    lab.export()
    _git(lab.root, "commit", "-qam", "next")
    lab.apply()
    _git(lab.root, "checkout", "-qf", "HEAD~1")
    assert lab.verdict().state == "pending"
    assert lab.apply().ok
    lab.applied("page")
    lab.revert()
    assert (lab.root / A).read_bytes() == FILES[A]


def test_git_variables_do_not_lead_astray(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIT_DIR is set inside hooks: it names another repository than the tree's."""
    _checkout(lab)
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
        _checkout(lab)
    lab.page()
    write(lab.root, other)
    error = _fails(lab, "mixed-versions")
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
    assert "1.0" in _fails(lab, "two-distributions").what


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


# -- permissions ------------------------------------------------------------------------------


@pytest.fixture
def stranger(lab: Lab, tmp_path: Path) -> Iterator[dict[str, object]]:
    """How to start a process that owns nothing of the tree; root sees no permissions at all."""
    folders = [Path(part) for part in tmp_path.parents if part != Path("/")] + [tmp_path, lab.pages]
    old = {folder: folder.stat().st_mode for folder in folders}
    for folder in folders:
        if folder.stat().st_uid == os.geteuid():
            folder.chmod(old[folder] & 0o7777 | 0o055)
    yield {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
    for path in lab.root.rglob("*"):
        path.chmod(0o755)
    for folder, mode in old.items():
        if folder.stat().st_uid == os.geteuid():
            folder.chmod(mode & 0o7777)


def _read_only(lab: Lab) -> None:
    for path in [*lab.root.rglob("*"), lab.root]:
        path.chmod(0o555 if path.is_dir() else 0o444)


def _as_stranger(lab: Lab, how: dict[str, object], *arguments: str) -> dict[str, object]:
    """Its answer; everything is imported before the rights are given up, because the interpreter
    itself may lie where the stranger may not read."""
    twin = lab.pages.parent / "twin"
    shutil.rmtree(twin, ignore_errors=True)
    write(twin, FILES)
    code = f"""
import io, os, shutil, sys
from contextlib import redirect_stdout
from pathlib import Path
from cppmega.catalogue import loader as catalogue
from cppmega import cli
catalogue.builtin_folder = lambda: Path({str(lab.pages)!r})
for verb in ("apply", "status", "revert"):
    try:
        with redirect_stdout(io.StringIO()):
            cli.main([verb, "--json", "--megatron", {str(twin)!r}])
    except SystemExit:
        pass
if {bool(how)!r}:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
cli.main(sys.argv[1:])
"""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments, "--megatron", str(lab.root)],
        env=lab.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    answer: dict[str, object] = json.loads(done.stdout)
    answer["code"] = done.returncode
    return answer


@pytest.mark.slow
@pytest.mark.parametrize("patched", [False, True])
def test_read_only_tree(lab: Lab, stranger: dict[str, object], patched: bool) -> None:
    """A system-wide installation: everything can be looked at, and a write is refused by name."""
    lab.wheel()
    lab.page()
    if patched:
        lab.apply()
        lab.page(edit='replacing("x + x", "x * 2")')
    _read_only(lab)
    before = snapshot(lab.root)
    status = _as_stranger(lab, stranger, "status", "--json")
    assert status["patches"][0]["state"] == "pending"  # type: ignore[index]
    for verb in ["apply", "revert"] if patched else ["apply"]:
        answer = _as_stranger(lab, stranger, verb, "--json")
        assert answer["code"] == 1
        assert answer["error"]["name"] == "read-only-tree"  # type: ignore[index]
        assert snapshot(lab.root) == before
    assert _as_stranger(lab, stranger, "apply", "--check", "--json")["changed"] == [A]


def test_writable_folder_with_a_read_only_package(lab: Lab, stranger: dict[str, object]) -> None:
    """Our folder can be made, the files cannot be replaced: nothing may stay behind."""
    lab.wheel()
    lab.page()
    _read_only(lab)
    lab.root.chmod(0o777)
    answer = _as_stranger(lab, stranger, "apply", "--json")
    assert answer["error"]["name"] == "read-only-tree"  # type: ignore[index]
    assert not (lab.root / ".cppmega").exists()


@pytest.mark.parametrize("path", [A, ".cppmega/receipt.json", ".cppmega"])
def test_file_that_may_not_be_read(lab: Lab, stranger: dict[str, object], path: str) -> None:
    """Also when root patched the tree and left its receipt to itself."""
    lab.wheel()
    lab.page()
    lab.apply()
    (lab.root / path).chmod(0o000)
    answer = _as_stranger(lab, stranger, "status", "--json")
    assert answer["error"]["name"] == "unreadable-file"  # type: ignore[index]


def test_read_only_file_in_a_writable_tree(lab: Lab) -> None:
    """Package managers ship 0444: the file is replaced and keeps its permissions."""
    lab.wheel()
    lab.page()
    (lab.root / A).chmod(0o444)
    assert lab.apply().ok
    assert (lab.root / A).stat().st_mode & 0o777 == 0o444
    lab.revert()
    assert (lab.root / A).stat().st_mode & 0o777 == 0o444
    lab.pristine()


# -- texts ------------------------------------------------------------------------------------

_LATIN = b"# -*- coding: latin-1 -*-\n" + FILES[A].replace(b"# the sum", b"# die Gr\xf6\xdfe")
_TEXTS = {
    "crlf": FILES[A].replace(b"\n", b"\r\n"),
    "cr": FILES[A].replace(b"\n", b"\r"),
    "mixed": FILES[A].replace(b"\n", b"\r\n", 9),
    "latin-1": _LATIN,
    "bom": b"\xef\xbb\xbf" + FILES[A],
    "no newline at the end": FILES[A][: FILES[A].index(b"\n\n\nclass Layer")],
    "tabs": FILES[A].replace(b"    ", b"\t"),
    "two spaces": FILES[A].replace(b"    ", b"  "),
    "form feed": FILES[A].replace(b"\n\ndef double", b"\n\f\ndef double"),
    "utf-8": FILES[A].replace(b"# the sum", "# 中文 ö \U0001f600".encode()),
}


@pytest.mark.parametrize("name", _TEXTS)
def test_odd_texts_keep_every_other_byte(lab: Lab, name: str) -> None:
    """Line ends, encodings and indentation stay what they are; revert restores the bytes."""
    lab.files[A] = data = _TEXTS[name]
    lab.wheel()
    lab.page(pins={"1.0": pin(FILES[A], "double")})
    assert lab.apply().ok
    patched = (lab.root / A).read_bytes()
    encoding = "latin-1" if name == "latin-1" else "utf-8"
    scope: dict[str, object] = {}
    exec(compile(patched, A, "exec"), scope)
    assert scope["double"](4) == 8  # type: ignore[operator]
    start, end = data.index(b"def double"), data.index(b"x + x") + len(b"x + x")
    assert patched.endswith(data[end:])
    assert patched.startswith(data[: data.index(b"LIMIT = 1")])
    assert data[start:].split(b"# ")[1][:6] in patched
    lines = patched.decode(encoding).splitlines(keepends=True)
    if name in ("crlf", "cr"):
        end_of_line = {"crlf": "\r\n", "cr": "\r"}[name]
        assert all(line.endswith(end_of_line) for line in lines if line.strip())
    assert lab.revert().ok
    lab.pristine()


def test_text_that_the_encoding_cannot_hold(lab: Lab) -> None:
    """The page writes a sign that latin-1 lacks: refused, rather than the file re-encoded."""
    lab.files[A] = _LATIN
    lab.wheel()
    lab.page(
        edit="""replacing("x + x", "x + x + len('中')")""", pins={"1.0": pin(FILES[A], "double")}
    )
    _fails(lab, "text-not-encodable")


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
