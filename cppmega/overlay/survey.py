"""Answer questions about a tree's code: where a symbol is, its fingerprint, whether it is fixed.

Answers depend only on the bytes of a file, so the receipt keeps them by content hash, and a second
`apply` or `status` hashes files instead of parsing them.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cppmega.errors import CppmegaError
from cppmega.host.containment import contained
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
    """A page asked about a file that cannot be parsed as Python."""


@dataclass
class Survey:
    """Cached answers about one tree."""

    tree: Tree
    cache: dict[str, str] = field(default_factory=dict)
    pristine: Mapping[str, bytes] = field(default_factory=dict)
    """The pristine bytes of patched and edited files, since questions concern upstream's text."""
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
        """Whether upstream has the fix, according to the page's `fixed_upstream`."""
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

    def read_for_fixed(self, page: Page) -> set[str]:
        """The files on which the last answer of `fixed` depends."""
        _, paths, _ = self.used[f"fixed {page.name} {page.revision}"].split(" ")
        return set(paths.split(","))

    def _stamp(self, paths: str) -> str:
        """Paths and one hash of their contents, which shows whether an answer is current."""
        hashes = [sha256(self.read(path) or b"") for path in paths.split(",") if path]
        return f"{paths} {sha256(' '.join(hashes).encode())[:16]}"

    def exists(self, target: str) -> bool:
        """Whether the symbol is defined in the file that the target names.

        A file that cannot be parsed counts as defining it, since absence cannot be shown.
        """
        path, _, symbol = target.partition(":")
        data = self.read(path)
        return data is not None and (not symbol or self._count(data, path, symbol) != "")

    def _count(self, data: bytes, path: str, symbol: str) -> str:
        """Count the definitions of a symbol; "" if there are none, "!" if the file is invalid."""

        def ask() -> str:
            try:
                return str(len(find(self.parse(data, path)[1], symbol)) or "")
            except CppmegaError:
                return "!"

        return self._answer(f"{sha256(data)} exists {symbol}", ask)

    def elsewhere(self, target: str) -> list[str]:
        """Files, other than the target's own, that define a symbol of this name.

        The RECORD of a wheel vouches for the text of all of its files, so that the answer is kept.
        That of an editable installation does not, since it does not list them.
        """
        core = self.tree.distributions.get("megatron-core")
        files = (file for file in self.tree.python_files if file.startswith("megatron/"))
        listed = core is not None and all(map(core.record.__contains__, files))
        if core is None or not listed or not target.startswith("megatron/"):
            return self._search(target)
        key = f"{core.record_hash} elsewhere {target}"
        return [*filter(None, self._answer(key, lambda: ",".join(self._search(target))).split(","))]

    def _search(self, target: str) -> list[str]:
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
        """The lines of a symbol in upstream's file; "" unless there is exactly one."""
        path, _, symbol = target.partition(":")
        data = self.read(path)
        if data is None:
            return ""
        try:
            text, tree = self.parse(data, path)
        except CppmegaError:
            return ""
        definitions = find(tree, symbol)
        if len(definitions) != 1:
            return ""
        where = span(tree, text, definitions[0])
        return "".join(text.lines[where.start : where.end])

    def text(self, target: str) -> str:
        """For `fixed_upstream`: a symbol's code as `ast.unparse` writes it, without docstrings."""
        path, _, symbol = target.partition(":")
        self._reads.add(path)
        data = self.read(path)
        definitions = [] if data is None else find(self._readable(data, path)[1], symbol)
        return "\n".join(map(_unparsed, definitions))

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
        """Parse a file's bytes; the syntax tree is shared, so copy it before changing it."""
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
        definitions = find(tree, edit.symbol)
        if len(definitions) != 1:
            return f"?{len(definitions)}" if definitions else MISSING
        where = span(tree, text, definitions[0])
        if shares_its_lines(text, definitions[0], where):
            return f"!{edit.target} shares a line with other code"
        from cppmega.rewriting import fingerprint

        source = "".join(text.lines[where.start : where.end])
        try:
            if edit.kind == "class-swap":
                _, node = fingerprint.parse_definition(source, edit.target)
                return fingerprint.of_class(node, edit.overrides)
            return fingerprint.of_source(source)
        except CppmegaError as error:
            return f"!{error.what}"


def ask(page: Page, source: Source) -> bool:
    """Ask the page's `fixed_upstream` about some code.

    Raises:
        CppmegaError: `page-failed`, also if it does not return a bool.
    """

    def failed(what: str) -> CppmegaError:
        return CppmegaError(
            "page-failed",
            f"fixed_upstream of {page.name} {what}.",
            "Without its answer, a missing target cannot be distinguished from a fixed one.",
            "correct the page",
        )

    assert page.fixed_upstream is not None
    with contained(failed):
        try:
            answer = page.fixed_upstream(source)
        except UnreadableError:
            return False
    if not isinstance(answer, bool):
        raise failed(f"returns {type(answer).__name__}, not True or False")
    return answer


def _unparsed(definition: ast.stmt) -> str:
    """Unparse a symbol without its docstrings; leaves the shared tree unchanged."""
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
