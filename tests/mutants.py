"""Mutants of pages: small changes of the code that a page brings, which its proof must notice.

usage: python -m tests.mutants [--until N] [PAGE ...]

What a page brings is the text that its edits insert, and the functions of this package which that
text names, with those of the same modules that they call. A mutant negates a condition, drops a
part of it, an accumulation, an assignment to an object or a call, moves a bound, ignores a state,
empties a procedure, or takes one change of upstream's text back.

The process imports the patched tree once and forks for each mutant. The fork replaces the code of
the functions that exist, and of modules that the proof imports anew; then it runs the proof, which
has to fail.
"""

from __future__ import annotations

import argparse
import ast
import gc
import importlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any
from unittest import mock

from cppmega.guard import swaps
from cppmega.host import console, process
from cppmega.overlay.plan import Plan
from cppmega.page import Page
from cppmega.proof import worker
from cppmega.proof.messages import Order, PageOrder
from cppmega.proof.needs import missing_needs
from cppmega.proof.proof_process import stated_environment
from cppmega.proof.scratch_tree import build
from cppmega.rewriting.rewrite import Step, rewrite
from tests.support import NEWEST, REPOSITORY, VERSIONS, laws
from tests.support.mutations import Definition, Mutant, Source, matched

LIMIT = 20.0
"""Seconds after which a mutant that hangs counts as noticed."""


# -- what a page brings ---------------------------------------------------------------------------


def sources_of(made: Plan, page: Page, root: Path) -> Iterator[Source]:
    """Yield the files with the code that a page brings to a tree with the edits of every page."""
    wanted: dict[str, set[int]] = {}
    edits = made.edits[page.name]
    for path in dict.fromkeys(edit.path for edit in edits if edit.kind == "source"):
        pristine, text = made.views[path].pristine or b"", (root / path).read_text()
        steps = [Step.of(page, edit) for edit in edits if edit.path == path]
        stock = pristine.decode()
        alone = rewrite(pristine, path, steps).data.decode()
        brought = {line for _, line in _added(stock, alone)}
        dropped = frozenset(line for _, line in _added(alone, stock))
        own = {at for at, line in _added(stock, text) if line in brought}
        yield Source(str(root / path), text, frozenset(own), stock, dropped)
        imports = [line for edit in edits if edit.path == path for line in edit.imports]
        for file, lines in _helpers(ast.parse(text), own, imports):
            wanted.setdefault(file, set()).update(lines)
    for edit in swaps.runtime_edits(edits):
        module = ast.parse(Path(page.path).read_text())
        names = _closure(module, {edit.edit.__name__})
        wanted.setdefault(page.path, set()).update(_lines_of(module, names))
    for file, lines in wanted.items():
        yield Source(file, Path(file).read_text(), frozenset(lines))


def _added(before: str, after: str) -> list[tuple[int, str]]:
    """Return the lines that only the second text has."""
    lines = after.splitlines()
    return [
        (at + 1, lines[at].strip())
        for how, _, _, start, end in matched(before, after)
        if how != "equal"
        for at in range(start, end)
    ]


def _helpers(
    tree: ast.Module, own: set[int], imports: Sequence[str]
) -> Iterator[tuple[str, set[int]]]:
    """Yield the lines of the functions of this package that a page's lines name."""
    named = [node for node in ast.walk(tree) if getattr(node, "lineno", None) in own]
    local = [node for node in named if isinstance(node, ast.ImportFrom)]
    declared = [ast.parse(line).body[0] for line in imports]
    for statement in [*local, *declared]:
        if not isinstance(statement, ast.ImportFrom) or statement.level:
            continue
        for alias in statement.names:
            name = alias.asname or alias.name
            attributes = {
                node.attr
                for node in named
                if isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == name
            }
            yield from _resolved(f"{statement.module}.{alias.name}", attributes)
            yield from _resolved(str(statement.module), {alias.name})


def _resolved(module: str, names: set[str]) -> Iterator[tuple[str, set[int]]]:
    """Yield the lines of some definitions of a module, wherever it has them from."""
    below = REPOSITORY.joinpath(*module.split("."))
    file = next(filter(Path.is_file, (below.with_suffix(".py"), below / "__init__.py")), None)
    if file is None or not module.startswith("cppmega."):
        return
    tree = ast.parse(file.read_text())
    here = _closure(tree, names)
    if here:
        yield str(file), _lines_of(tree, here)
    for statement in tree.body:
        if isinstance(statement, ast.ImportFrom) and statement.module:
            given = {a.name for a in statement.names if (a.asname or a.name) in names}
            if given:
                yield from _resolved(statement.module, given)


def _closure(tree: ast.Module, names: set[str]) -> set[str]:
    """Return the definitions of a module that these names reach."""
    defined = {node.name: node for node in tree.body if isinstance(node, Definition)}
    found: set[str] = set()
    pending = [name for name in names if name in defined]
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            used = {n.id for n in ast.walk(defined[name]) if isinstance(n, ast.Name)}
            pending += used & set(defined)
    return found


def _lines_of(tree: ast.Module, names: set[str]) -> set[int]:
    chosen = [n for n in tree.body if isinstance(n, Definition) and n.name in names]
    return {line for n in chosen for line in range(n.lineno, (n.end_lineno or 0) + 1)}


# -- whether the proof notices --------------------------------------------------------------------


@dataclass
class Found:
    """What became of the mutants of one page."""

    page: str
    killed: list[str] = field(default_factory=list)
    survived: list[str] = field(default_factory=list)
    problem: str = ""
    seconds: float = 0.0


def run(
    version: str, names: Sequence[str], until: int | None = None, seconds: float | None = None
) -> Iterator[Found]:
    """Prove the mutants of pages on one release, in this process, which imports its tree.

    Args:
        until: stop each page after so many killed mutants; None: run all of them.
        seconds: begin no page after so much time of the CPU.
    """
    made = laws.planned(version)
    with tempfile.TemporaryDirectory(prefix="cppmega-mutants-") as scratch:
        root = Path(scratch) / "tree"
        build(made, root, "patched")
        process.adopt_orphans()
        warnings.simplefilter("ignore")
        pages = worker._imported(
            Order(
                root=str(root),
                side="patched",
                forks=True,
                pages=tuple(_ordered(made, page) for page in made.pages.values()),
                limit=LIMIT,
                answers=-1,
                code={},
            )
        )
        chosen = [page for page in pages if page.name in names]
        gc.collect()
        gc.freeze()
        gc.enable()
        for page in sorted(chosen, key=lambda page: names.index(page.name)):
            if seconds is not None and sum(os.times()[:4]) > seconds:
                break
            sources = list(sources_of(made, page, root))
            yield _judged(page, [m for source in sources for m in source.mutants()], until)


def _ordered(made: Plan, page: Page) -> PageOrder:
    edits = tuple(page.patch.edits.index(edit) for edit in made.edits.get(page.name, ()))
    return PageOrder(page.name, page.path, page.catalogue, edits)


class _Original:
    """A file as it was imported, and the functions of it that exist."""

    def __init__(self, file: str) -> None:
        _import(file)
        self.codes = _codes(compile(Path(file).read_text(), file, "exec", dont_inherit=True))
        gc.unfreeze()
        self.functions = [
            one
            for one in gc.get_objects()
            if isinstance(one, types.FunctionType) and one.__code__.co_filename == file
        ]
        gc.freeze()

    def becomes(self, code: types.CodeType) -> None:
        """Give the functions the code of the same names in another text of the file."""
        new = _codes(code)
        of = {
            (name, before.co_firstlineno): after
            for name, group in self.codes.items()
            if len(group) == len(new.get(name, ()))
            for before, after in zip(group, new[name], strict=True)
        }
        for function in self.functions:
            known = function.__code__
            after = of.get((known.co_qualname, known.co_firstlineno))
            if after is not None and after.co_freevars == known.co_freevars:
                function.__code__ = after


def _import(file: str) -> None:
    """Import the module of a helper, which a function may import when it is called."""
    if Path(file).is_relative_to(REPOSITORY / "cppmega"):
        importlib.import_module(
            swaps.module_name(str(Path(file).relative_to(REPOSITORY).as_posix()))
        )


def _judged(page: Page, mutants: list[Mutant], until: int | None) -> Found:
    started = time.monotonic()
    found = Found(page.name)
    originals = {file: _Original(file) for file in {mutant.file for mutant in mutants}}
    first = _prove(page)
    if first != "passed":
        found.problem = f"its proof does not pass without a change: {first}"
        return found
    if until is not None:
        random.Random(page.name).shuffle(mutants)
    for mutant in mutants:
        if until is not None and len(found.killed) >= until:
            break
        result = _prove(page, mutant, originals[mutant.file])
        text = f"{mutant}  [{result}]"
        (found.survived if result == "passed" else found.killed).append(text)
    found.seconds = time.monotonic() - started
    return found


def _prove(page: Page, mutant: Mutant | None = None, original: _Original | None = None) -> str:
    def changed() -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        assert page.verify is not None
        with _running(mutant, original) if mutant and original else nullcontext():
            page.verify()

    answers = os.open(os.devnull, os.O_RDONLY)
    try:
        run = worker._forked(replace(page, verify=changed), answers, LIMIT)
    finally:
        os.close(answers)
    return "passed" if run.result == "passed" else f"{run.result}: {run.detail[:100]}"


def _running(mutant: Mutant, original: _Original) -> Any:
    """Run the code of a mutant from here on in this process."""
    code = compile(mutant.tree(), mutant.file, "exec", dont_inherit=True)
    original.becomes(code)
    theirs = SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, name: str) -> Any:
        return code if self.path == mutant.file else theirs(self, name)

    return mock.patch.object(SourceFileLoader, "get_code", get_code)


def _codes(code: types.CodeType) -> dict[str, list[types.CodeType]]:
    """Qualified name -> the code objects of that name, in the order of the file."""
    found: dict[str, list[types.CodeType]] = {}
    pending = [code]
    while pending:
        for inner in pending.pop().co_consts:
            if isinstance(inner, types.CodeType):
                found.setdefault(inner.co_qualname, []).append(inner)
                pending.append(inner)
    return {n: sorted(group, key=lambda one: one.co_firstlineno) for n, group in found.items()}


# -- the command ----------------------------------------------------------------------------------


def releases(names: Sequence[str] = ()) -> dict[str, list[str]]:
    """Return the newest release that needs a page -> the pages; all pages that have proofs here."""
    found: dict[str, list[str]] = {}
    for name in names or laws.names():
        if missing_needs(laws.pages()[name].patch.needs):
            continue
        of_others = [release for release in NEWEST if name in laws.pages_of(release)]
        for version in of_others or [*reversed(VERSIONS), "0.15.3"]:
            if name in laws.needed(version):
                found.setdefault(version, []).append(name)
                break
    return found


def prove(version: str, names: Sequence[str], *options: str, python: str = "") -> Iterator[Found]:
    """Prove the mutants of pages on one release, in a process with the environment of proofs."""
    command = [
        python or sys.executable,
        "-m",
        "tests.mutants",
        "--version",
        version,
        *options,
        *names,
    ]
    environment = stated_environment(
        {"CUDA_VISIBLE_DEVICES": "", "TESTS_SCRATCH": os.environ["TESTS_SCRATCH"]}
    )
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env=environment, cwd=REPOSITORY
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            yield Found(**json.loads(line))
    assert child.returncode == 0, f"{version}: status {child.returncode}"


def main() -> None:
    """Prove the mutants of pages, and print those that no proof notices."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pages", nargs="*")
    parser.add_argument("--until", type=int, help="stop a page after so many noticed mutants")
    parser.add_argument("--seconds", type=float, help="begin no page after so much time of the CPU")
    parser.add_argument("--version", help="a release, in one process; prints JSON")
    given = parser.parse_args()
    if given.version:
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")  # 0.15 compiles on import
        for found in run(given.version, given.pages, given.until, given.seconds):
            print(json.dumps(vars(found)), flush=True)
        return
    os.environ.setdefault("TESTS_SCRATCH", tempfile.mkdtemp(prefix="cppmega-tests-"))
    options = [] if given.until is None else ["--until", str(given.until)]
    for version, names in releases(given.pages).items():
        for number, found in enumerate(prove(version, names, *options), 1):
            total = len(found.killed) + len(found.survived)
            counts = f"{len(found.killed):>4} of {total:>3} killed in {found.seconds:5.1f} s"
            at = console.position(number, len(names))
            print(f"{at} {counts}  {found.page} ({version}) {found.problem}", flush=True)
            for text in found.survived:
                print(f"       survives: {text}", flush=True)


if __name__ == "__main__":
    main()
