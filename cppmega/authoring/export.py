"""`cppmega export`: a page's edit as a commit on a branch of a Megatron checkout, with a test.

The commit is made from the objects of the repository: the working tree, the index and the branch
that is checked out stay as they are, and no hook runs.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tempfile
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from difflib import SequenceMatcher
from pathlib import Path

import msgspec

from cppmega.authoring import proof_source
from cppmega.authoring.proof_source import refused
from cppmega.errors import CppmegaError
from cppmega.overlay import plan as planning
from cppmega.overlay import receipt
from cppmega.overlay.plan import Plan
from cppmega.overlay.verdict import NEEDED
from cppmega.page import Page
from cppmega.tree.installed import Tree

TESTS = "tests/unit_tests"
_MEASURED = re.compile(r"\s*\([^()]*\bbenchmarks/[^()]*\)")
_OURS = re.compile(r"cppmega|NAM56R|\bpages?\b|\bto patch\b", re.IGNORECASE)
"""What a message says of this project, and upstream has no use for."""
_HELPER = re.compile(r"\b_cppmega_(?=\w)")
_FORMATTED = ("megatron/core/", f"{TESTS}/")
"""What upstream's formatter covers."""
_FORMATTERS = (
    ("black", "-q", "--skip-magic-trailing-comma", "--skip-string-normalization"),
    ("isort", "-q", "--settings-path", "."),
)


class Exported(msgspec.Struct, frozen=True, rename={"files": "changed"}):
    """A commit in the checkout."""

    name: str
    branch: str
    commit: str
    files: tuple[str, ...]
    test: str
    """The path of the test in the commit."""


def export(page: Page, tree: Tree, branch: str = "") -> Exported:
    """Commit the edit and the test of a page on a new branch, which begins at HEAD.

    Raises:
        CppmegaError: `not-a-checkout`, `nothing-to-export`, `export-refused`, `branch-exists`,
            `formatter-missing`, `git-failed`.
    """
    if tree.checkout is None or not (tree.root / ".git").exists():
        raise CppmegaError(
            "not-a-checkout",
            f"{tree.root} is not the folder of a checkout of Megatron-LM.",
            "A commit needs a repository.",
            "git clone https://github.com/NVIDIA/Megatron-LM, and pass that folder as --tree",
        )
    branch = branch or f"fix/{page.name.replace('_', '-')}"
    reference = f"refs/heads/{branch}"
    if _git(tree, "for-each-ref", reference):
        raise CppmegaError(
            "branch-exists",
            f"{tree.root} has a branch {branch}.",
            "Its commits would be lost.",
            "the same command with --branch NAME",
        )
    files = edited(page, tree)
    where = test_path(page, tree, next(iter(files)))
    year = _git(tree, "log", "-1", "--format=%cd", "--date=format:%Y")
    header = f"# Copyright (c) {year}, NVIDIA CORPORATION. All rights reserved.\n\n"
    files[where] = formatted(tree, where, header + proof_source.test_module(page))
    for path, text in files.items():
        if re.search("cppmega", text, re.IGNORECASE):
            raise refused(page, f"{path} would name cppmega")
    commit = _commit(tree, files, _message(page))
    _git(tree, "update-ref", reference, commit, "0" * len(commit))
    return Exported(page.name, branch, commit, tuple(files), where)


def edited(page: Page, tree: Tree) -> dict[str, str]:
    """Return the files that a page changes, formatted, without marks and names of ours.

    Raises:
        CppmegaError: `nothing-to-export`, `export-refused`, `formatter-missing`.
    """
    from cppmega.rewriting.rewrite import Step, rewrite

    gates = {page.patch.gate: "1"} if page.patch.gate else {}
    plan = planning.make(tree, receipt.load(tree), {page.name: page}, environment=gates)
    _refuse_unneeded(page, plan)
    edits = plan.edits[page.name]
    if any(edit.kind != "source" for edit in edits):
        raise refused(page, "it replaces objects at run time instead of editing a file")
    files: dict[str, str] = {}
    for path in dict.fromkeys(edit.path for edit in edits):
        data = plan.views[path].pristine
        assert data is not None
        steps = [
            replace(Step.of(page, edit), marked=False, silent=True)
            for edit in edits
            if edit.path == path
        ]
        new = rewrite(data, path, steps, plan.survey.parse(data, path)).data.decode()
        text = _HELPER.sub("_", new)
        taken = {
            name for name in re.findall(r"\b_cppmega_(\w+)", new) if f"_{name}" in data.decode()
        }
        if taken:
            raise refused(page, f"{path} already uses the name _{min(taken)}")
        calls = re.findall(r"cppmega[\w.]*", text, re.IGNORECASE)
        if calls:
            raise refused(page, f"its edit of {path} calls {calls[0]}")
        files[path] = formatted(tree, path, text, data.decode())
    return files


def _refuse_unneeded(page: Page, plan: Plan) -> None:
    verdict = plan.verdicts[page.name]
    if verdict.state not in NEEDED:
        raise CppmegaError(
            "nothing-to-export",
            f"{page.name} is {verdict.state} in {plan.tree.root}: {verdict.detail}.",
            "There is no known text that it would change.",
            verdict.next or f"cppmega explain {page.name}",
        )


def test_path(page: Page, tree: Tree, target: str) -> str:
    """Where upstream would look for the test of a file."""
    folder = target.removeprefix("megatron/").removeprefix("core/").rpartition("/")[0]
    while folder and not (tree.root / TESTS / folder).is_dir():
        folder = folder.rpartition("/")[0]
    return "/".join(filter(None, (TESTS, folder, f"test_{page.name}.py")))


def formatted(tree: Tree, path: str, text: str, before: str = "") -> str:
    """Format a file as upstream does; of a file that upstream has, only the lines that change.

    Imports are sorted only where upstream's are.
    """
    if not path.startswith(_FORMATTED):
        return text
    black, isort = _FORMATTERS
    codes = SequenceMatcher(None, before.splitlines(), text.splitlines(), False).get_opcodes()
    changed = [
        f"--line-ranges={j + 1}-{m}" for tag, _, _, j, m in codes if tag != "equal" and m > j
    ]
    text = _run(tree, (*black, *(changed if before else ())), path, text)
    if not before or _run(tree, isort, path, before) == before:
        text = _run(tree, isort, path, text)
    return text


def _run(tree: Tree, command: tuple[str, ...], path: str, text: str) -> str:
    name, *options = command
    try:
        done = subprocess.run(
            [name, *options, "-"],
            input=text,
            capture_output=True,
            text=True,
            cwd=tree.root,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        said = (getattr(error, "stderr", "") or str(error)).strip()
        raise CppmegaError(
            "formatter-missing",
            f"{name}, which formats {path}, did not run: {said}.",
            "Upstream's checks would refuse the commit.",
            "install black and isort in the versions of the checkout's pyproject.toml",
        ) from None
    return done.stdout


def _message(page: Page) -> str:
    """The title of the page, what it does and why, without sentences about this project."""
    subject = page.title.rstrip(".")
    body = []
    for label in ("What", "Why"):
        text = _MEASURED.sub("", page.labels[label].strip())
        sentences = re.split(r"(?<=[.:;])\s+(?=[A-Z`])", text)
        text = " ".join(sentence for sentence in sentences if not _OURS.search(sentence))
        body += [textwrap.fill(text, 72)] if text else []
    return "\n\n".join([subject, *body]) + "\n"


def _commit(tree: Tree, files: Mapping[str, str], message: str) -> str:
    """Write a commit on HEAD with some files replaced, and return its name."""
    with tempfile.TemporaryDirectory(prefix="cppmega-export-") as scratch:
        index = {"GIT_INDEX_FILE": str(Path(scratch) / "index")}
        _git(tree, "read-tree", "HEAD", env=index)
        for path, text in files.items():
            blob = _git(tree, "hash-object", "-w", "--stdin", text=text)
            _git(tree, "update-index", "--add", "--cacheinfo", f"100644,{blob},{path}", env=index)
        written = _git(tree, "write-tree", env=index)
        return _git(tree, "commit-tree", written, "-p", "HEAD", text=message)


def _git(tree: Tree, *words: str, text: str = "", env: Mapping[str, str] | None = None) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(tree.root), *words],
            input=text,
            capture_output=True,
            text=True,
            env={**os.environ, **(env or {})},
            check=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        said = (getattr(error, "stderr", "") or str(error)).strip()
        raise CppmegaError(
            "git-failed",
            f"git {words[0]} in {tree.root}: {said}",
            "The branch was not created.",
            f"git -C {shlex.quote(str(tree.root))} status",
        ) from None
    return done.stdout.strip()
