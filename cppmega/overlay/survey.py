"""Questions about the code of a tree: where is a symbol, what is its fingerprint, is it fixed.

Answers depend on the bytes of a file alone, so they are kept by content hash in the receipt; a
second `apply` and `status` then hash files instead of parsing them.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cppmega.errors import CppmegaError
from cppmega.loading.containment import contained
from cppmega.page import Edit, Page, Source
from cppmega.rewriting.source import (
    Definition,
    Text,
    decode,
    find,
    parse,
    plain,
    shares_its_lines,
    span,
)
from cppmega.tree.installed import Tree, sha256

MISSING = ""


class UnreadableError(Exception):
    """A page asked about a file that is not Python: there is no answer."""


@dataclass
class Survey:
    """Cached answers about one tree."""

    tree: Tree
    cache: dict[str, str] = field(default_factory=dict)
    pristine: Mapping[str, bytes] = field(default_factory=dict)
    """The pristine bytes of patched files: questions are about upstream's text only."""
    used: dict[str, str] = field(default_factory=dict)
    """The answers of this run, which become the cache of the next one."""
    parsed: dict[str, tuple[Text, ast.Module]] = field(default_factory=dict)
    """By the hash of a file's bytes."""
    _reads: set[str] = field(default_factory=set)

    def fingerprint(self, data: bytes | None, edit: Edit) -> str:
        """Fingerprint of an edit's target in a file's bytes.

        Returns:
            the fingerprint; "" where the symbol is missing; `?N` where it is defined N times;
            `!reason` where the bytes cannot be read as Python.
        """
        if data is None:
            return MISSING
        methods = ",".join(edit.overrides) if edit.kind == "class-swap" else ""
        kind = "class" if edit.kind == "class-swap" else "text"
        key = f"{sha256(data)} {kind} {edit.symbol} {methods}"
        return self._answer(key, lambda: self._fingerprint(data, edit))

    def fixed(self, page: Page) -> bool:
        """Whether upstream has the fix, by the page's `fixed_upstream`."""
        if page.fixed_upstream is None:
            return False
        key = f"fixed {page.name} {page.revision}"
        answer, _, read = self.cache.get(key, "").partition(" ")
        if read and read == self._stamp(read.rpartition(" ")[0]):
            self.used[key] = f"{answer} {read}"
            return answer == "yes"
        self._reads = set()
        verdict = ask(page, self)
        self.used[key] = (
            f"{'yes' if verdict else 'no'} {self._stamp(','.join(sorted(self._reads)))}"
        )
        return verdict

    def _stamp(self, paths: str) -> str:
        """Paths and one hash of their contents, by which an answer is known to be current."""
        hashes = [sha256(self.read(path) or b"") for path in paths.split(",") if path]
        return f"{paths} {sha256(' '.join(hashes).encode())[:16]}"

    def exists(self, target: str) -> bool:
        """Whether the symbol is defined in the file that the target names.

        Unparsable files count as defining it: absence cannot be shown.
        """
        path, _, symbol = target.partition(":")
        data = self.read(path)
        return data is not None and (not symbol or self._count(data, path, symbol) != "")

    def _count(self, data: bytes, path: str, symbol: str) -> str:
        """How often a file defines a symbol; "" for never, "!" where the file is no Python."""

        def ask() -> str:
            try:
                return str(len(find(self.parse(data, path)[1], symbol)) or "")
            except CppmegaError:
                return "!"

        return self._answer(f"{sha256(data)} exists {symbol}", ask)

    def elsewhere(self, target: str) -> list[str]:
        """Files, other than the target's own, that define a symbol of this name."""
        path, _, symbol = target.partition(":")
        last = plain(symbol).rpartition(".")[2].encode()
        first = plain(symbol).partition(".")[0].encode()
        package = path.partition("/")[0] + "/"
        hits = []
        for other in self.tree.python_files:
            if other == path or not other.startswith(package):
                continue
            data = self.read(other) or b""
            words = (b"def " + last, b"class " + last)
            likely = first in data and any(word in data for word in words)
            if likely and self._count(data, other, symbol) not in ("", "!"):
                hits.append(other)
        return hits

    def source(self, target: str) -> str:
        """The lines of one definition as upstream's file has them; "" where there is not one."""
        path, _, symbol = target.partition(":")
        data = self.read(path)
        if data is None:
            return ""
        try:
            text, tree = self.parse(data, path)
        except CppmegaError:
            return ""
        found = find(tree, symbol)
        if len(found) != 1:
            return ""
        where = span(tree, text, found[0])
        return "".join(text.lines[where.start : where.end])

    def text(self, target: str) -> str:
        """For `fixed_upstream`: a symbol's code as `ast.unparse` writes it, docstrings dropped."""
        path, _, symbol = target.partition(":")
        self._reads.add(path)
        data = self.read(path)
        found = [] if data is None else find(self._readable(data, path)[1], symbol)
        return "\n".join(map(_unparsed, found))

    def file(self, path: str) -> str:
        """For `fixed_upstream`: the text of a file."""
        self._reads.add(path)
        data = self.read(path)
        return "" if data is None else self._readable(data, path)[0].body

    def read(self, path: str) -> bytes | None:
        """Upstream's bytes of a file."""
        kept = self.pristine.get(path)
        return kept if kept is not None else self.tree.read(path)

    def _answer(self, key: str, ask: Callable[[], str]) -> str:
        if key not in self.used:
            known = self.cache.get(key)
            self.used[key] = known if known is not None else ask()
        return self.used[key]

    def parse(self, data: bytes, path: str) -> tuple[Text, ast.Module]:
        """Text and syntax tree of a file's bytes; whoever changes the tree takes a copy."""
        key = sha256(data)
        if key not in self.parsed:
            text = decode(data, path)
            self.parsed[key] = text, parse(text, path)
        return self.parsed[key]

    def _readable(self, data: bytes, path: str) -> tuple[Text, ast.Module]:
        try:
            return self.parse(data, path)
        except CppmegaError:
            raise UnreadableError from None

    def _fingerprint(self, data: bytes, edit: Edit) -> str:
        try:
            text, tree = self.parse(data, edit.path)
        except CppmegaError as error:
            return f"!{error.what}"
        found = find(tree, edit.symbol)
        if len(found) != 1:
            return f"?{len(found)}" if found else MISSING
        where = span(tree, text, found[0])
        if shares_its_lines(text, found[0], where):
            return f"!{edit.target} shares a line with other code"
        from cppmega.rewriting import fingerprint

        source = "".join(text.lines[where.start : where.end])
        try:
            _, node = fingerprint.parse_definition(source, edit.target)
        except CppmegaError as error:
            return f"!{error.what}"
        if edit.kind == "class-swap":
            return fingerprint.of_class(node, edit.overrides)
        return fingerprint.of_node(node)


def ask(page: Page, source: Source) -> bool:
    """Ask the page's `fixed_upstream` about some code.

    Raises:
        CppmegaError: `page-failed`, where it answers with neither True nor False.
    """

    def failed(what: str) -> CppmegaError:
        return CppmegaError(
            "page-failed",
            f"fixed_upstream of {page.name} {what}.",
            "Without its answer a missing target cannot be told from a fixed one.",
            "correct the page",
        )

    assert page.fixed_upstream is not None
    with contained(failed):
        try:
            answer = page.fixed_upstream(source)
        except UnreadableError:
            return False
    if not isinstance(answer, bool):
        raise failed(f"answers with a {type(answer).__name__}, neither True nor False")
    return answer


def _unparsed(definition: Definition) -> str:
    """The code of a definition without its docstrings; the shared tree is left as it was."""
    inside = [node for node in ast.walk(definition) if isinstance(node, Definition)]
    bodies = [
        (node, node.body) for node in inside if ast.get_docstring(node, clean=False) is not None
    ]
    try:
        for node, body in bodies:
            node.body = body[1:] or [ast.copy_location(ast.Pass(), body[0])]
        return ast.unparse(definition)
    finally:
        for node, body in bodies:
            node.body = body
