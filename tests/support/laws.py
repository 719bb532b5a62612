"""What the laws ask about: pages applied in memory to the trees of every version."""

from __future__ import annotations

import ast
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from cppmega.catalogue import loader as catalogue
from cppmega.overlay import plan
from cppmega.overlay import verbs as overlay
from cppmega.overlay.compute import changes_of
from cppmega.overlay.plan import Plan
from cppmega.overlay.receipt import Loaded, Receipt
from cppmega.overlay.survey import Survey
from cppmega.page import left_alone
from cppmega.rewriting import marks
from cppmega.rewriting import source as sources
from cppmega.rewriting.source import Text
from cppmega.tree.installed import Tree, sha256
from tests.support import (
    BRANCHES,
    OTHERS,
    RELEASES,
    REPOSITORY,
    VERSIONS,
    branches,
    pages,
    pristine,
)

SUPPORTED = (*VERSIONS, *BRANCHES)
EVERY = (*RELEASES, *BRANCHES)
RECORDED = (*SUPPORTED, "0.15.3", *OTHERS)
GOLDEN = REPOSITORY / "tests" / "golden"
TOGETHER = "_together"
"""The file with the hashes of all pages together; no page's name begins with `_`."""


def names() -> list[str]:
    """Every page of the catalogue; nothing is loaded."""
    return [name for name, _ in catalogue.page_files(catalogue.builtin_folder())]


@cache
def pages_of(release: str) -> tuple[str, ...]:
    """The pages that target the package of a release such as `liger-kernel==0.8.5`."""
    distribution = release.partition("==")[0]
    return tuple(n for n, page in pages().items() if distribution in page.patch.distributions)


class _Session(overlay.Session):
    """A session on a tree that nobody changes, so that each file of it is read once."""

    @cached_property
    def _tree(self) -> Tree:
        return super().read_tree()

    def read_tree(self) -> Tree:
        return self._tree


@cache
def session(version: str) -> overlay.Session:
    """A session on the shared, pristine wheel of a version: for plans, never for writing."""
    made = _Session(pristine(version), ())
    made.pages = pages()  # loaded once for all versions
    made._survey = Survey(made.read_tree(), parsed=_parsed)
    return made


_parsed: dict[str, tuple[Text, ast.Module]] = {}
"""Files of all versions by the hash of their bytes: releases have most of them in common."""


def gates(release: str = "") -> dict[str, str]:
    """An environment with every gate open, or those of the pages that target another package."""
    chosen = pages_of(release) if release else tuple(pages())
    return {gate: "1" for name in chosen if (gate := pages()[name].patch.gate)}


@cache
def planned(version: str, *only: str) -> Plan:
    """The plan of some pages, or of all, with every gate open.

    On another package's release, "all" are the pages that target that package.
    """
    only = only or (pages_of(version) if version in OTHERS else ())
    excluded = dict.fromkeys(set(pages()) - set(only) if only else (), "another page is asked")
    return session(version).plan(excluded, gates())


@cache
def result(version: str, *only: str) -> dict[str, bytes]:
    """What the files become with some pages, or with all."""
    made = planned(version, *only)
    assert not made.failures, made.failures
    changes, _ = changes_of(made, ())
    return {path: change.data for path, change in changes.items()}


def needed(version: str) -> list[str]:
    """Pages that a version needs."""
    verdicts = planned(version).verdicts.values()
    return [verdict.name for verdict in verdicts if verdict.state == "pending"]


def hashes(files: Mapping[str, bytes]) -> dict[str, str]:
    """What is recorded of a result: hashes, never upstream's text."""
    return {path: sha256(data) for path, data in sorted(files.items())}


def recorded(name: str) -> dict[str, dict[str, str]]:
    """The recorded hashes of a page's results by version."""
    file = GOLDEN / f"{name}.json"
    content: dict[str, dict[str, str]] = json.loads(file.read_text()) if file.exists() else {}
    return content


def golden(name: str, versions: Sequence[str] = RECORDED) -> dict[str, dict[str, str]]:
    """The hashes of a page's results by version, as they are now; of other trees, as recorded."""
    others = {v for v in RECORDED if v not in versions or _is_missing(v)}
    out = {v: h for v, h in recorded(name).items() if v in others}
    for version in there(*versions):
        if name == TOGETHER and _whole(version):
            out[version] = hashes(result(version))
        elif name != TOGETHER and name in needed(version):
            out[version] = hashes(result(version, name))
    return out


def there(*versions: str) -> list[str]:
    """The versions without those branches that cannot be fetched, whose own tests are skipped."""
    return [*itertools.filterfalse(_is_missing, versions)]


def _is_missing(version: str) -> bool:
    return version in BRANCHES and bool(branches.missing(version, BRANCHES[version]))


def _whole(version: str) -> bool:
    return not planned(version).failures


def pairs() -> list[tuple[str, str]]:
    """Every declared (earlier, later)."""
    return [(earlier, name) for name, page in pages().items() for earlier in page.patch.after]


def foreign_code(before: bytes, after: bytes, targets: Iterable[str], helpers: set[str]) -> str:
    """Code outside of the targets that differs, computed without the engine's own check."""
    old, new = ast.parse(before), ast.parse(after)
    for symbol in targets:
        _without_statement(old, new, symbol)
    for tree in (old, new):
        for symbol in targets:
            for node in sources.find(tree, symbol):
                node.name, node.body, node.decorator_list = "target", [], []
                if isinstance(node, ast.ClassDef):
                    node.bases, node.keywords = [], []
                else:
                    node.args, node.returns = ast.arguments(), None
    left = _by_text(old.body, before.splitlines())
    right = _by_text([s for s in new.body if not _ours(s, helpers)], after.splitlines())
    for text in left.keys() & right.keys():  # equal text is equal code
        common = min(len(left[text]), len(right[text]))
        del left[text][:common], right[text][:common]
    gone, added = map(_dumped, (left, right))
    for word, rest in (("gone", gone - added), ("new", added - gone)):
        if rest:
            return f"{word}: {str(next(iter(rest)))[:200]}"
    return ""


_Texts = dict[tuple[str, bytes], list[ast.AST]]


def _by_text(body: Iterable[ast.stmt], lines: list[bytes], holder: str = "") -> _Texts:
    """Statements by the class that holds them and their complete lines; a class by its head."""
    found: _Texts = {}
    for one in body:
        first = min((d.lineno for d in getattr(one, "decorator_list", ())), default=one.lineno)
        text = b"\n".join(lines[first - 1 : one.end_lineno])
        if isinstance(one, ast.ClassDef):
            for key, inner in _by_text(one.body, lines, f"{holder}.{one.name}").items():
                found.setdefault(key, []).extend(inner)
            one.body = []
            text = ast.dump(one).encode()
        found.setdefault((holder, text), []).append(one)
    return found


def _dumped(side: _Texts) -> Counter[tuple[str, str]]:
    nodes = (
        (holder, _Unmarked().visit(one)) for (holder, _), group in side.items() for one in group
    )
    return Counter((holder, ast.dump(node)) for holder, node in nodes if node)


def _without_statement(old: ast.Module, new: ast.Module, symbol: str) -> None:
    """Take out a target that is a statement, and what is new on both sides of it."""
    holder = symbol.rpartition(".")[0].removesuffix(sources.IMPORT)
    scopes: list[Any] = [sources.find(t, holder)[0] if holder else t for t in (old, new)]
    if isinstance(sources.find(old, symbol)[0], sources.Definition):
        return
    known = {ast.dump(statement) for statement in scopes[0].body}
    for tree, scope in zip((old, new), scopes, strict=True):
        (node,) = sources.find(tree, symbol)
        if not isinstance(node, sources.Definition):
            at = end = scope.body.index(node)
            while at and ast.dump(scope.body[at - 1]) not in known:
                at -= 1
            while end + 1 < len(scope.body) and ast.dump(scope.body[end + 1]) not in known:
                end += 1
            scope.body[at : end + 1] = [ast.Pass(lineno=1, end_lineno=0)]  # has no text


class _Unmarked(ast.NodeTransformer):
    """Takes out marks, which functions that launch an edited kernel carry for it."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        called = getattr(node.value, "func", None)
        return None if getattr(called, "id", "") == marks.FUNCTION else node


def _ours(statement: ast.stmt, helpers: set[str]) -> bool:
    known = {marks.FUNCTION, marks.FLAGS, *helpers}
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id in known
    return getattr(statement, "name", None) in known


def exported(version: str, path: str, data: bytes) -> Tree:
    """The tree of a version for which nobody vouches, with one file changed."""
    tree = Tree(pristine(version))
    tree.__dict__["distributions"] = tree.__dict__["_others"] = {}
    tree.__dict__["_checkout"] = None
    tree._bytes[path] = data
    return tree


def verdict_on(tree: Tree, name: str, like: str) -> str:
    """The state of one page on a tree, most of whose files are those of a version."""
    known = planned(like).survey
    # A copy, since what is parsed of this tree is of no use to another one.
    earlier = Survey(tree, known.cache | known.used, parsed=dict(_parsed))
    asked = {name: pages()[name]}
    made = plan.make(tree, Loaded(Receipt()), asked, environment=gates(), earlier=earlier)
    return made.verdicts[name].state


@cache
def texts(root: Path, package: str) -> dict[Path, bytes]:
    """Every Python file of a package in a tree that nobody changes."""
    return {file: file.read_bytes() for file in (root / package).rglob("*.py")}


def targets(name: str, version: str) -> dict[str, list[str]]:
    """path -> symbols that a page edits in a version."""
    found: dict[str, list[str]] = {}
    for edit in planned(version, name).edits.get(name, ()):
        assert edit.edit is not left_alone
        found.setdefault(edit.path, []).append(edit.symbol)
    return found


class Nothing:
    """A tree in which there is nothing at all, for `fixed_upstream`."""

    def text(self, target: str) -> str:
        return ""

    def file(self, path: str) -> str:
        return ""
