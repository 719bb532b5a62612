"""Looking at a tree runs nothing that lies there: no git, no module, no old catalogue."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cppmega.errors import CppmegaError
from cppmega.overlay import receipt
from cppmega.overlay import verbs as overlay
from cppmega.tree.installed import Tree
from tests.support import made
from tests.support.git import commit_all, run_git
from tests.support.lab import FILES, REPOSITORY, A, Lab
from tests.support.made import snapshot, write
from tests.tree.labs import checkout


def refused(name: str, lab: Lab) -> CppmegaError:
    with pytest.raises(CppmegaError) as caught:
        lab.status()
    assert caught.value.name == name
    return caught.value


# -- git ----------------------------------------------------------------------------------------


def test_a_checkout_runs_nothing_of_its_configuration(lab: Lab, tmp_path: Path) -> None:
    """A partial clone whose remote is a command: git fetches what it misses, whoever owns it."""
    checkout(lab)
    lab.page()
    ran = tmp_path / "ran"
    blob = run_git(lab.root, "rev-parse", f"HEAD:{A}").strip()
    (lab.root / ".git/objects" / blob[:2] / blob[2:]).unlink()
    for name, value in {
        "core.repositoryformatversion": "1",
        "extensions.partialClone": "origin",
        "remote.origin.promisor": "true",
        "remote.origin.url": f"ext::touch {ran}",
        "protocol.ext.allow": "always",
        "core.fsmonitor": f"touch {ran}",
        "core.pager": f"touch {ran}",
        "filter.x.smudge": f"touch {ran}",
    }.items():
        run_git(lab.root, "config", name, value)
    (lab.root / ".gitattributes").write_text("*.py filter=x\n")
    lab.change(A, b"# the sum", b"# edited")
    git = ["git", "-C", str(lab.root), "cat-file", "blob", blob]
    subprocess.run(git, check=False, capture_output=True)
    assert ran.exists(), "git itself must run it, or this shows nothing"
    ran.unlink()
    verdict = lab.refused()  # the commit names another text, wherever that text may be
    assert verdict.state == "foreign" and not ran.exists()


def test_a_checkout_with_the_line_ends_of_windows(lab: Lab) -> None:
    """`core.autocrlf` changes bytes and no code: applied, and reverted to the bytes there were."""
    lab.export()
    (lab.root / ".gitattributes").write_text("*.py text eol=crlf\n")
    commit_all(lab.root)
    (lab.root / A).unlink()
    run_git(lab.root, "checkout", "-q", "--", A)
    lab.page()
    before = snapshot(lab.root)
    assert b"\r\n" in before[A]
    assert lab.apply().ok and lab.receipt().files[A].origin == "git"
    assert b"2 * x\r\n" in (lab.root / A).read_bytes()
    lab.applied("page")
    assert not lab.apply().changed
    lab.revert()
    assert (lab.root / A).read_bytes() == before[A]
    lab.change(A, b"# the sum", b"# edited")
    assert lab.refused().state == "foreign"


def test_worktrees_packs_and_submodules_are_checkouts(lab: Lab, tmp_path: Path) -> None:
    checkout(lab)
    run_git(lab.root, "gc", "-q")
    run_git(lab.root, "worktree", "add", "-q", str(tmp_path / "second"))
    assert Tree(tmp_path / "second").pristine(A)[0] == "git"
    assert Tree(tmp_path / "second").git_blob(A) == FILES[A]
    with_sha256 = tmp_path / "third"
    write(with_sha256, FILES)
    commit_all(with_sha256, "--object-format=sha256")
    assert Tree(with_sha256).pristine(A)[0] == "git"
    assert Tree(with_sha256).git_blob(A) == FILES[A]


@pytest.mark.parametrize("damage", ["HEAD", "objects"])
def test_a_damaged_repository_vouches_for_nothing(lab: Lab, damage: str) -> None:
    checkout(lab)
    place = lab.root / ".git" / damage
    if place.is_dir():
        place.rename(lab.root / "moved")
    else:
        place.write_bytes(b"\xff[[[\n")
    assert Tree(lab.root).pristine(A) == ("unverified", None)


# -- the working directory ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("command", [["status"], ["verify"], ["apply_patches"]])
def test_modules_of_the_working_directory_are_not_imported(
    tmp_path: Path, command: list[str]
) -> None:
    """Standard modules, our dependencies, and what Megatron would only try."""
    pages, root, here, ran = (tmp_path / name for name in ("pages", "root", "here", "ran"))
    here.mkdir()
    made.page(pages, verify="try:\n    import apex\nexcept ImportError:\n    pass\nassert 0")
    made.tree(root)
    for name in ("json", "click", "tempfile", "__future__", "apex", "re", "dulwich", "libcst"):
        (here / f"{name}.py").write_text(
            f"open({str(ran)!r}, 'a').write({name!r})\nraise OSError\n"
        )
    module = ["cppmega.apply_patches"] if command == ["apply_patches"] else ["cppmega", *command]
    done = subprocess.run(
        [sys.executable, "-m", *module, "--megatron", str(root), "--patches", str(pages)],
        cwd=here,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    assert not ran.exists(), ran.read_text() + done.stderr
    assert "double_doubles" in done.stdout, done.stdout + done.stderr


# -- remembered catalogues ------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["made again", "another helper", "linked", "an older receipt"])
def test_a_remembered_catalogue_is_pinned(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The folder was named once; what is in it now is code of whoever made it."""
    lab.wheel()
    write(tmp_path / "site", {"canary.py": b""})  # imported where the page is executed
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setitem(sys.modules, "canary", None)
    monkeypatch.delitem(sys.modules, "canary")
    team = tmp_path / "team"
    page = lab.page("teams", folder=team)
    (team / "_helper.py").write_text("")
    assert lab.apply(team).ok
    assert lab.status().ok
    if how == "made again":
        page.write_text(page.read_text() + "\nimport canary\n")
    elif how == "another helper":
        (team / "_helper.py").write_text("X = 1\n")
    elif how == "linked":
        team.rename(tmp_path / "other")
        page = tmp_path / "other" / page.name
        page.write_text(page.read_text() + "\n")
        team.symlink_to(tmp_path / "other")
    else:
        place = lab.root / ".cppmega" / "receipt.json"
        kept = lab.receipt()
        kept.catalogue_hashes.clear()
        place.write_bytes(kept.dump())
    error = refused("catalogue-changed", lab)
    assert "--patches" in error.next
    with pytest.raises(CppmegaError):
        lab.apply()
    assert "canary" not in sys.modules
    assert lab.apply(team).ok  # named again
    assert lab.status().ok and ("canary" in sys.modules) == (how == "made again")


def test_a_changed_catalogue_does_not_keep_anybody_from_reverting(lab: Lab, tmp_path: Path) -> None:
    lab.wheel()
    page = lab.page("teams", folder=tmp_path / "team")
    assert lab.apply(tmp_path / "team").ok
    page.write_text("raise SystemExit\n")
    lab.revert()
    lab.pristine()


# -- links ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", ["", "receipt.json", "originals"])
def test_what_we_keep_is_not_followed_through_a_link(lab: Lab, tmp_path: Path, kept: str) -> None:
    lab.wheel()
    lab.page()
    assert lab.apply().ok
    place = lab.root / ".cppmega" / kept
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    before = snapshot(lab.root)
    refused("linked-receipt", lab)
    for verb in (lab.apply, lab.revert):
        with pytest.raises(CppmegaError, match="link"):
            verb()
    assert snapshot(lab.root) == before


def test_an_empty_link_is_not_written_through(lab: Lab, tmp_path: Path) -> None:
    lab.wheel()
    lab.page()
    (tmp_path / "elsewhere").mkdir()
    (lab.root / receipt.FOLDER).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CppmegaError) as caught:
        overlay.apply(lab.session(), environment={})
    assert caught.value.name == "linked-receipt"
    assert not list((tmp_path / "elsewhere").iterdir())
