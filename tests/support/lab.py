"""One small tree, one small catalogue, and every verb of the overlay on them."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cppmega.catalogue import loader as catalogue
from cppmega.guard import files, imports
from cppmega.overlay import receipt
from cppmega.overlay import verbs as overlay
from cppmega.overlay.verbs import Outcome, Session
from cppmega.overlay.verdict import Verdict
from cppmega.rewriting import source
from tests.support import PATIENCE, REPOSITORY, made
from tests.support.made import dist_info, edit_text, leftovers, snapshot, write

A, B = "megatron/core/a.py", "megatron/core/b.py"
FILES = {
    "megatron/core/__init__.py": b"",
    A: b'''\
"""A module."""

import os

LIMIT = 1


def double(x):
    """Twice."""
    # the sum
    return x + x


class Layer:
    """A layer."""

    def forward(self, x):
        y = double(x)  # twice
        return y

    def backward(self, g):
        return g


def tail(x):
    return os.path.join(str(x), str(LIMIT))
''',
    B: b"""\
import os


def single(x):
    return x


def other(x):
    return os.sep + x
""",
}
TARGET = f"{A}:double"


class Lab:
    """One made tree and one made catalogue, which takes the place of ours."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = folder / "site"
        self.pages = folder / "pages"
        self.pages.mkdir()
        (self.pages / "not.toml").touch()  # a catalogue that has decided nothing
        self.files: dict[str, bytes] = dict(FILES)
        self.said: list[str] = []
        self.monkeypatch = monkeypatch
        for name in os.environ:
            if name.startswith("CPPMEGA_"):
                monkeypatch.delenv(name)
        monkeypatch.setattr(catalogue, "builtin_folder", lambda: self.pages)
        # A kill loses nothing that was written; only a power cut would. It saves half the time.
        monkeypatch.setattr(os, "fsync", lambda handle: None)

    # -- making ------------------------------------------------------------------------------

    def wheel(self, version: str = "1.0", **files: bytes) -> Path:
        """A tree as pip leaves it: a RECORD vouches for every file."""
        self.export()
        dist_info(self.root, version)
        return self.root

    def export(self) -> Path:
        """A tree for which nobody vouches."""
        write(self.root, self.files)
        return self.root

    def page(
        self,
        name: str = "page",
        target: str = TARGET,
        edit: str = 'replacing("x + x", "2 * x")',
        *,
        edits: str | None = None,
        folder: Path | None = None,
        fixed: str = "False",
        code: str = "",
        what: str = "something",
        reached: str = "forward",
        pins: Mapping[str, str] | None = None,
        more: Mapping[str, str] | None = None,
        **header: Any,
    ) -> Path:
        """Write a page; by default it makes `double` multiply."""
        path = target.partition(":")[0]
        if edits is None:
            edits = edit_text(target, edit, self.files.get(path, b""), pins, **(more or {}))
        text = made.page_text(
            name,
            edits,
            header={"reached": reached, **header},
            code=code,
            fixed=f"return {fixed}",
            what=what,
        )
        file = (folder or self.pages) / f"{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        return file

    # -- using -------------------------------------------------------------------------------

    def session(self, *catalogues: Path) -> Session:
        """A fresh session, as every command has one."""
        return Session(self.root, catalogues or None, self.said.append)

    def apply(self, *catalogues: Path, **how: Any) -> Outcome:
        """`cppmega apply`."""
        how.setdefault("environment", dict(os.environ))
        return overlay.apply(self.session(*catalogues), **how)

    def status(self) -> Outcome:
        """`cppmega status`."""
        return overlay.status(self.session())

    def revert(self, *names: str) -> Outcome:
        """`cppmega revert`."""
        return overlay.revert(self.session(), names)

    def verdict(self, name: str = "page") -> Verdict:
        """The state of a page, as `status` says it."""
        return self.status().plan.verdicts[name]

    def refused(self, name: str = "page", **how: Any) -> Verdict:
        """Apply, which must change no byte and exit with 1; the page's verdict."""
        before = snapshot(self.root)
        outcome = self.apply(**how)
        assert not outcome.ok
        assert outcome.plan.failures
        assert not outcome.changed
        assert snapshot(self.root) == before
        return outcome.plan.verdicts[name]

    def applied(self, *names: str) -> None:
        """Exactly these pages are applied, and everything is as it must be."""
        outcome = self.status()
        done = {v.name for v in outcome.verdicts if v.state in ("applied", "armed")}
        assert outcome.ok, (outcome.notes, outcome.verdicts)
        assert done == set(names)

    def change(self, path: str, old: bytes, new: bytes) -> None:
        """Edit a file of the tree by hand."""
        data = (self.root / path).read_bytes()
        assert data.count(old) == 1, (path, old)
        (self.root / path).write_bytes(data.replace(old, new))

    def text(self, path: str = A) -> str:
        """A file of the tree."""
        return (self.root / path).read_bytes().decode()

    def value(self, expression: str, path: str = A) -> Any:
        """The value of an expression in a module of the tree, run from its present text."""
        scope: dict[str, Any] = {"__name__": "made"}
        exec(compile(self.text(path), path, "exec"), scope)
        return eval(expression, scope)

    def watched(self, name: str) -> Any:
        """Import a module of the tree as a guarded process does."""
        for one in [n for n in sys.modules if n.partition(".")[0] in imports.PACKAGES]:
            self.monkeypatch.delitem(sys.modules, one)  # another test's megatron is not this tree's
        self.monkeypatch.setattr(sys, "path", list(sys.path))
        self.monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
        self.monkeypatch.setattr(imports, "WATCHED", imports.Watched())
        files.only_from(self.root)
        files.watch(self.root, self.receipt(), {})
        return importlib.import_module(name)

    def receipt(self) -> receipt.Receipt:
        """The receipt on disk."""
        return receipt.parse((self.root / ".cppmega" / "receipt.json").read_bytes())

    def pristine(self) -> None:
        """Every byte is upstream's and nothing of ours is left."""
        here = snapshot(self.root)
        ours = [path for path in here if path.startswith(".cppmega")]
        assert not ours
        assert {p: d for p, d in here.items() if p in self.files} == self.files
        assert not leftovers(self.root)

    # -- as another process ------------------------------------------------------------------

    def command(self, *arguments: str, prelude: str = "") -> list[str]:
        """The command line of a process that runs the console on the made catalogue."""
        code = f"""
import sys
from pathlib import Path
from cppmega.catalogue import loader as catalogue
from cppmega.overlay import transaction
catalogue.builtin_folder = lambda: Path({str(self.pages)!r})
{textwrap.dedent(prelude)}
from cppmega.cli.main import main
main(sys.argv[1:])
"""
        return [sys.executable, "-c", code, *arguments]

    def environment(self, **more: str) -> dict[str, str]:
        """The environment of such a process."""
        return {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(REPOSITORY),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HOME": str(self.pages.parent),
            **more,
        }

    def run(
        self, *arguments: str, prelude: str = "", env: Mapping[str, str] | None = None, **how: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run the console as a process; `--megatron` is added to commands that know it."""
        given = list(arguments)
        if given and given[0] in ("apply", "status", "diff", "revert"):
            given += ["--megatron", str(self.root)]
        return subprocess.run(
            self.command(*given, prelude=prelude),
            env=self.environment(**(env or {})),
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
            **how,
        )


def same_but(old: bytes, new: bytes, symbol: str) -> bool:
    """Whether two modules have equal syntax trees outside of one symbol."""
    return _without(old, symbol) == _without(new, symbol)


def _without(data: bytes, symbol: str) -> str:
    tree = ast.parse(data)
    for node in source.find(tree, symbol):
        node.body = [ast.Pass()]
        node.decorator_list = []
    return ast.dump(tree)
