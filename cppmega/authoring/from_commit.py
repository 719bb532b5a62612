"""`cppmega new --from-commit`: the hunks of a commit as the edits of a page.

Each changed statement becomes one edit of `cppmega.edits`. The edits of a symbol are run on its old
text; if the result is not the code of the commit, the hunk is left to the author and named.
"""

from __future__ import annotations

import ast
import copy
import shlex
import subprocess
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import libcst as cst

from cppmega import edits
from cppmega.authoring.statements import of_source
from cppmega.errors import CppmegaError
from cppmega.rewriting import codegen, fingerprint
from cppmega.rewriting.errors import EditMismatchError
from cppmega.rewriting.source import (
    Definition,
    Text,
    decode,
    definitions,
    first_line,
    parse,
    parse_silently,
    span,
)
from cppmega.tree.installed import PACKAGES

_TAKEN = {*vars(edits), "Edit", "Patch", "Source", "PATCH", "verify", "fixed_upstream"}
_BLOCKS = ("body", "orelse", "finalbody", "handlers")


class _UnexpressedError(Exception):
    """A change that no edit makes."""


@dataclass
class Change:
    """One symbol that the commit changes."""

    target: str
    pin: str
    edits: list[str] = field(default_factory=list)
    """Code of calls of `cppmega.edits`; none if the author must write the edit."""
    helpers: list[str] = field(default_factory=list)
    imports: list[str] = field(default_factory=list)
    mark: str | None = None


@dataclass
class Commit:
    """What a page can take from a commit."""

    commit: str
    parent: str
    subject: str
    changes: list[Change] = field(default_factory=list)
    definitions: dict[str, str] = field(default_factory=dict)
    """Functions to write into the page, by name."""
    left: list[str] = field(default_factory=list)
    """The hunks that no edit expresses, each with its place and the reason."""


def read(root: Path, rev: str) -> Commit:
    """Read a commit of a checkout, compared with its first parent.

    Raises:
        CppmegaError: `git-failed`, `unreadable-file`, `nothing-in-commit`.
    """

    def git(*words: str) -> bytes:
        try:
            words_ = ["git", "-C", str(root), *words]
            return subprocess.run(words_, capture_output=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", b"").decode(errors="replace").strip() or str(error)
            raise CppmegaError(
                "git-failed",
                f"git {words[0]} in {root}: {said}",
                "Without the commit and its parent there are no hunks.",
                f"git -C {shlex.quote(str(root))} log; --megatron says which repository",
            ) from None

    def resolved(name: str) -> str:
        verify = ("rev-parse", "--verify", "--end-of-options", f"{name}^{{commit}}")
        return git(*verify).decode().split()[-1]

    commit = resolved(rev)
    parent = resolved(f"{commit}^1")
    subject = git("log", "-1", "--format=%s", commit).decode(errors="replace").strip()
    made = Commit(commit, parent, subject)
    listed = git("diff-tree", "-r", "-z", "--no-renames", "--name-status", parent, commit)
    words = listed.decode(errors="replace").split("\0")
    for status, path in zip(words[::2], words[1::2], strict=False):
        if status != "M" or not path.endswith(".py") or path.split("/")[0] not in PACKAGES.values():
            what = {"A": "adds the file", "D": "deletes the file"}.get(status, "changes the file")
            made.left.append(f"{path}: the commit {what}, and a page edits modules of Megatron")
            continue
        old, new = (decode(git("show", f"{side}:{path}"), path) for side in (parent, commit))
        _Reader(made, path, old, new).read()
    if not made.changes and not made.left:
        raise CppmegaError(
            "nothing-in-commit",
            f"{commit[:12]} changes no code of Megatron.",
            "A page without an edit does nothing.",
            f"git -C {shlex.quote(str(root))} show --stat {commit[:12]}",
        )
    return made


class _Reader:
    """Compares two texts of a file."""

    def __init__(self, made: Commit, path: str, old: Text, new: Text) -> None:
        self.made, self.path, self.old, self.new = made, path, old, new
        self.trees = parse(old, path), parse(new, path)
        self.texts = {
            id(node): text
            for tree, text in zip(self.trees, (old, new), strict=True)
            for node in ast.walk(tree)
            if isinstance(node, ast.stmt)
        }
        self.changes: list[Change] = []

    def read(self) -> None:
        old, new = self.trees
        added = self._definitions(old, new, "")
        imports = self._imports(old, new)
        before, after = (Counter(map(_outline, _others(tree))) for tree in self.trees)
        for node in [n for n in _others(old) if _outline(n) not in after]:
            self._leave(node, "", "a statement of the module is removed or changed")
        for node in [n for n in _others(new) if _outline(n) not in before]:
            self._leave(node, "", "a statement of the module is added or changed")
        for node in added:
            text = None
            with suppress(_UnexpressedError):
                text = _page_function(node, self._text([node]))
            known = self.made.definitions.setdefault(node.name, text or "")
            if text is None or known != text or node.name in _TAKEN or not self.changes:
                if not known:
                    del self.made.definitions[node.name]
                self._leave(node, node.name, "no edit of this page can carry it as a helper")
            else:
                self.changes[0].helpers.append(node.name)
        if imports and self.changes:
            self.changes[0].imports = imports
        elif imports:
            self.made.left.append(f"{self.path}: {'; '.join(imports)}: no edit needs the import")
        self.made.changes += self.changes

    def _leave(self, node: ast.stmt, symbol: str, why: str) -> None:
        place = f"{self.path}:{node.lineno}" + (f" {symbol}" if symbol else "")
        side = " before the commit" if self.texts[id(node)] is self.old else ""
        self.made.left.append(f"{place}{side}: {why}")

    def _imports(self, old: ast.Module, new: ast.Module) -> list[str]:
        before, after = (dict.fromkeys(_imported(tree)) for tree in (old, new))
        lost = [line for line in before if line not in after]
        self.made.left += [f"{self.path}: {line}: the import is removed" for line in lost]
        return [line for line in after if line not in before]

    def _definitions(self, old: ast.AST, new: ast.AST, prefix: str) -> list[Definition]:
        """Compare the definitions of a scope; return those that are added."""
        before, after = list(definitions(old)), list(definitions(new))
        times = Counter(d.name for d in before), Counter(d.name for d in after)
        olds = {d.name: d for d in before}
        for node in before:
            if node.name not in times[1] and not prefix:
                self._leave(node, node.name, "a page removes no definition of a module")
        for node in after:
            name = prefix + node.name
            if node.name not in olds:
                continue
            if max(times[0][node.name], times[1][node.name]) > 1:
                twins = [[ast.dump(d) for d in ds if d.name == node.name] for ds in (before, after)]
                if twins[0] != twins[1]:
                    self._leave(node, name, "the name is defined several times")
            elif _bare(olds[node.name]) != _bare(node):
                self._definition(olds[node.name], node, name)
        return [node for node in after if node.name not in olds]

    def _definition(self, old: Definition, new: Definition, symbol: str) -> None:
        where = span(self.trees[0], self.old, old)
        source = "".join(self.old.lines[where.start : where.end])
        change = Change(f"{self.path}:{symbol}", fingerprint.of_source(source))
        try:
            node = fingerprint.parse_definition(source)[1]
            if isinstance(old, ast.ClassDef) and isinstance(new, ast.ClassDef):
                self._class(change, old, new, node, symbol)
            elif type(old) is type(new):
                self.changes.append(change)
                self._function(change, old, new, node)
            else:
                raise _UnexpressedError("it becomes another kind of definition")
        except _UnexpressedError as error:
            change.edits = []
            self.changes += [] if change in self.changes else [change]
            self._leave(new, symbol, str(error) or "no edits make this change")

    def _class(
        self, change: Change, old: ast.ClassDef, new: ast.ClassDef, node: Any, symbol: str
    ) -> None:
        if _head(old) != _head(new):
            raise _UnexpressedError("the bases or decorators of the class change")
        names = [{d.name for d in definitions(side)} for side in (old, new)]
        both = names[0] & names[1]
        sides = [_body(side) for side in (old, new)]

        def key(member: ast.AST) -> str:
            shared = isinstance(member, Definition) and member.name in both
            return member.name if shared else ast.dump(member)  # type: ignore[attr-defined]

        if list(map(key, sides[0])) != list(map(key, sides[1])):
            change.edits, _ = self._each(sides[0], sides[1], node, key, top=True)
            added = [d.name for d in definitions(new) if d.name not in names[0]]
            change.mark = added[0] if added else ""
            self.changes.append(change)
        self._definitions(old, new, f"{symbol}.")

    def _function(self, change: Change, old: Any, new: Any, node: Any) -> None:
        if list(map(ast.dump, old.decorator_list)) != list(map(ast.dump, new.decorator_list)):
            raise _UnexpressedError("its decorators change")
        codes = list(_parameters(old.args, new.args))
        for code in codes:
            node = _run(code, node)
        more, node = self._block(_body(old), _body(new), node, top=True)
        change.edits = codes + more
        if of_source(codegen.text(node)) != of_source(self._text([new])):
            raise _UnexpressedError

    def _block(
        self, old: Sequence[Any], new: Sequence[Any], node: Any, *, top: bool = False
    ) -> tuple[list[str], Any]:
        """Return the edits that turn one list of statements into another, and the result."""
        try:
            return self._each(old, new, node, ast.dump, top=top)
        except _UnexpressedError:
            code = _call("replacing", self._text(old), self._text(new))
            return [code], _run(code, node)

    def _each(
        self, old: Sequence[Any], new: Sequence[Any], node: Any, key: Any, *, top: bool
    ) -> tuple[list[str], Any]:
        codes: list[str] = []
        keys = [list(map(key, side)) for side in (old, new)]
        matcher = SequenceMatcher(None, keys[0], keys[1], autojunk=False)
        for tag, i, k, j, m in matcher.get_opcodes():
            single = tag == "replace" and k - i == m - j
            ranges = [(i + n, i + n + 1, j + n, j + n + 1) for n in range(k - i)]
            for at in [] if tag == "equal" else ranges if single else [(i, k, j, m)]:
                more, node = self._one(old, new, keys, at, node, top, single)
                codes += more
        return codes, node

    def _one(
        self, old: Any, new: Any, keys: Any, at: Any, node: Any, top: bool, single: bool
    ) -> tuple[list[str], Any]:
        i, _, j, _ = at
        if single:
            try:
                return self._compound(old[i], new[j], node)
            except _UnexpressedError:
                pass
        for code in self._candidates(old, new, keys, at, top):
            try:
                return [code], _run(code, node)
            except _UnexpressedError:
                continue
        raise _UnexpressedError

    def _candidates(self, old: Any, new: Any, keys: Any, at: Any, top: bool) -> Iterator[str]:
        """Yield edits for one run of statements, those with the least context first."""
        i, k, j, m = at
        if i == k:
            added = self._text(new[j:m])
            if i:
                yield _call("inserting", added, after=self._anchor(old[i - 1]))
            if i < len(old):
                yield _call("inserting", added, before=self._anchor(old[i]))
            if top and i == len(old):
                yield _call("appending", added)
        for around in range(4):
            for b in range(around + 1):
                first, end = i - b, k + around - b
                left, right = j - b, m + around - b
                if min(first, left) < 0 or end > len(old) or right > len(new) or first == end:
                    continue
                same = keys[0][first:i] == keys[1][left:j] and keys[0][k:end] == keys[1][m:right]
                if same:
                    yield _call(
                        "replacing", self._text(old[first:end]), self._text(new[left:right])
                    )

    def _anchor(self, node: Any) -> str:
        return _head(node) if hasattr(node, "body") else self._text([node])

    def _compound(self, old: Any, new: Any, node: Any) -> tuple[list[str], Any]:
        """Change the head of a compound statement, and the statements in its blocks."""
        if type(old) is not type(new) or not hasattr(old, "body"):
            raise _UnexpressedError
        codes: list[str] = []
        if not isinstance(old, ast.ExceptHandler) and _head(old) != _head(new):
            codes = [_call("replacing", _head(old), _head(new))]
            node = _run(codes[0], node)
        for name in _BLOCKS:
            one, other = getattr(old, name, []), getattr(new, name, [])
            if bool(one) != bool(other):
                raise _UnexpressedError
            if name != "handlers":
                more, node = self._block(one, other, node)
                codes += more
                continue
            if [_head(h) for h in one] != [_head(h) for h in other]:
                raise _UnexpressedError
            for handler, its in zip(one, other, strict=True):
                more, node = self._block(handler.body, its.body, node)
                codes += more
        return codes, node

    def _text(self, nodes: Sequence[Any]) -> str:
        """The lines of statements, with the comments above the first."""
        if not nodes:
            return ""
        text = self.texts[id(nodes[0])]
        start, end = first_line(nodes[0], text) - 1, nodes[-1].end_lineno
        while start and text is self.new and text.lines[start - 1].lstrip().startswith("#"):
            start -= 1
        code = textwrap.dedent("".join(text.lines[start:end])).replace("\r\n", "\n").rstrip()
        try:
            same = _code(parse_silently(code).body) == _code(nodes)
        except SyntaxError:
            same = False  # an `elif`, or statements that share a line with others
        if not same:
            raise _UnexpressedError
        return code


def _code(nodes: Sequence[Any]) -> list[str]:
    """The syntax trees of statements; docstrings, which change with the margin, are left out."""
    module = copy.deepcopy(ast.Module(list(nodes), []))
    for node in ast.walk(module):
        if isinstance(node, Definition):
            node.body = _body(node) or [ast.Pass()]
    return list(map(ast.dump, module.body))


def _call(name: str, *texts: str, **named: str) -> str:
    """Code of a call whose arguments are texts."""
    arguments = [*map(_literal, texts), *(f"{key}={_literal(v)}" for key, v in named.items())]
    line = f"{name}({', '.join(arguments)})"
    if "\n" not in line and len(line) <= 80:
        return line
    return f"{name}(\n" + "".join(textwrap.indent(a, "    ") + ",\n" for a in arguments) + ")"


def _literal(text: str) -> str:
    """A string as source code; texts of several lines keep them, which the edits dedent."""
    quote = next((q for q in ('"""', "'''") if q not in text and not text.endswith(q[0])), "")
    if "\n" not in text or not quote:
        return '"' + repr("'" + text)[2:] if "'" not in text and '"' not in text else repr(text)
    raw = "r" if "\\" in text else ""
    return f"{raw}{quote}\n{text}\n{quote}"


def _run(code: str, node: Any) -> Any:
    """Run an edit on a definition."""
    try:
        return eval(code, dict(vars(edits)))(node)  # only calls of edits with literals
    except (EditMismatchError, cst.ParserSyntaxError, SyntaxError, ValueError):
        raise _UnexpressedError from None


def _parameters(old: ast.arguments, new: ast.arguments) -> Iterator[str]:
    """Edits that add the parameters that a signature gains."""
    sides = [
        [a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs)] for args in (old, new)
    ]
    defaults = [None] * (len(new.posonlyargs) + len(new.args) - len(new.defaults))
    values = [*defaults, *new.defaults, *new.kw_defaults]
    annotated = [*new.posonlyargs, *new.args, *new.kwonlyargs]
    for at, (argument, value) in enumerate(zip(annotated, values, strict=True)):
        if argument.arg in sides[0]:
            continue
        if not at:
            raise _UnexpressedError
        equals = " = " if argument.annotation else "="
        text = ast.unparse(argument) + (equals + ast.unparse(value) if value else "")
        yield _call("adding_parameter", text, after=sides[1][at - 1])


def _page_function(node: Any, text: str) -> str | None:
    """The text of a function if a page can hold it: nothing in its header needs its module."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.decorator_list:
        return None
    values = [*node.args.defaults, *filter(None, node.args.kw_defaults)]
    return text if all(isinstance(value, ast.Constant) for value in values) else None


def _body(node: Any) -> list[Any]:
    body: list[Any] = node.body
    return body[1:] if ast.get_docstring(node, clean=False) is not None else body


def _bare(node: Definition) -> str:
    return "\n".join(of_source(ast.unparse(node)))


def _head(node: Any) -> str:
    """The head of a compound statement, on one line for each decorator and one for itself."""
    plain = copy.copy(node)
    for name in _BLOCKS:
        if hasattr(plain, name):
            setattr(plain, name, [ast.Pass()] if name == "body" else [])
    return ast.unparse(plain).rpartition("\n")[0].strip()


def _others(tree: ast.Module) -> list[ast.stmt]:
    """Statements of a module that are neither definitions, nor imports, nor its docstring."""
    skipped = (Definition, ast.Import, ast.ImportFrom)
    return [node for node in _body(tree) if not isinstance(node, skipped)]  # type: ignore[arg-type]


class _Names(ast.NodeTransformer):
    """Reduces definitions to their names."""

    def visit(self, node: ast.AST) -> Any:
        return ast.Name(node.name) if isinstance(node, Definition) else self.generic_visit(node)


def _outline(node: ast.stmt) -> str:
    return ast.dump(_Names().visit(copy.deepcopy(node)))


def _imported(tree: ast.Module) -> Iterator[str]:
    """The imports at the top of a module, one line for each name."""
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                one = copy.copy(node)
                one.names = [alias]
                yield ast.unparse(one)
