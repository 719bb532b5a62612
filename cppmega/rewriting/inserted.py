"""The text that an edit adds outside of its target: imports, helpers and marks, nothing else.

An import binds names that the file does not define; a helper is one definition that binds only its
own name. Code that runs when the file is imported could do what the page's header does not declare,
so it is checked here.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, NoReturn

from cppmega.errors import CppmegaError
from cppmega.page import Edit
from cppmega.rewriting import code_text, fingerprint, marks, undefined_names
from cppmega.rewriting.function_source import function_text
from cppmega.rewriting.source import Definition, blocks, in_scope, parse_silently

Binding = tuple[str, ...]
"""The object to which an import binds a name; equal for equal imports in any spelling."""

_RUNS_TEXT = {
    *("exec", "eval", "compile", "__import__", "globals", "locals", "vars", "setattr", "delattr"),
}
"""Builtins with which code reaches names that it does not spell out."""


class Inserted:
    """The imports and helpers of the pages that edit one file."""

    def __init__(self, tree: ast.Module, path: str) -> None:
        self.path = path
        self.defined = undefined_names.top_level(tree)
        imports = [s for s in tree.body if isinstance(s, ast.Import | ast.ImportFrom)]
        self.present = {ast.dump(statement) for statement in imports}
        # Not below `if TYPE_CHECKING`, where the name would be missing when the file is imported.
        self.has_torch = any(
            "torch" in undefined_names.imported(statement) for statement in imports
        )
        self.helpers: dict[str, str] = {}
        self.import_lines: list[str] = []
        self._tree = tree
        self._bound: dict[str, Binding] = {}

    def imports(self, steps: Iterable[tuple[str, Edit]]) -> list[str]:
        """The import lines that the file lacks.

        Args:
            steps: pages and their edits.
        """
        for page, edit in steps:
            for line in edit.imports:
                statement = self._import(page, line)
                if ast.dump(statement) in self.present or line in self.import_lines:
                    continue
                for name, binding in bindings(statement):
                    self._refuse_rebinding(page, line, name, binding)
                    self._bound[name] = binding
                self.import_lines.append(line)
        return self.import_lines

    def _import(self, page: str, line: str) -> ast.Import | ast.ImportFrom:
        """The one statement of an import line."""
        try:
            body = parse_silently(line).body
        except (SyntaxError, ValueError):
            self._bad_import(page, line, "is not valid Python")
        if "#" in line:  # imports hold no strings: a comment, perhaps an encoding
            self._bad_import(page, line, "carries a comment")
        if len(body) != 1 or not isinstance(body[0], ast.Import | ast.ImportFrom):
            self._bad_import(page, line, "is not exactly one import statement")
        statement = body[0]
        if any(alias.name == "*" for alias in statement.names):
            self._bad_import(page, line, "binds names that it does not spell out")
        if isinstance(statement, ast.ImportFrom) and statement.module == "__future__":
            self._bad_import(page, line, "changes the meaning of the whole file")
        return statement

    def _refuse_rebinding(self, page: str, line: str, name: str, binding: Binding) -> None:
        if _is_special(name):
            self._bad_import(page, line, f"binds {name}, a special or builtin name of Python")
        known = self._bound.get(name)
        if known is None and name in self.defined:
            others = {theirs for theirs in _module_bindings(self._tree) if theirs[0] == name}
            known = binding if others == {(name, binding)} else ("the file's own",)
        if known not in (None, binding):
            self._bad_import(page, line, f"rebinds {name}, which the file already defines")
        if name in self.helpers:
            self._bad_import(page, line, f"rebinds {name}, which is a helper")

    def _bad_import(self, page: str, line: str, what: str) -> NoReturn:
        raise CppmegaError(
            "bad-import",
            f"The import {line!r} of page {page} {what} ({self.path}).",
            "It could change code outside of the target, which no header declares.",
            "declare plain imports of new names: imports=('import math as _math',)",
        )

    def fingerprint(self) -> str:
        """Hash of everything that was inserted."""
        blocks = [code_text.bare(block) for block in self.helpers.values()]
        return fingerprint.of_text("\n".join([*self.import_lines, *blocks]))

    def helpers_before(self, group: Sequence[tuple[str, Edit]], marked: bool) -> list[str]:
        """Return the definitions to write before the top-level statement that holds the target."""
        blocks: list[str] = []
        wanted: list[tuple[str, str]] = []
        if marked:
            wanted.append((marks.FUNCTION, marks.helper(self.has_torch)))
        for page, edit in group:
            for helper in edit.helpers:
                wanted.append((helper.__name__, self._helper(page, helper)))
        for name, block in wanted:
            if self.helpers.get(name) == block:
                continue
            if name in self.defined or name in self.helpers or name == marks.FLAGS:
                raise CppmegaError(
                    "helper-name-taken",
                    f"{self.path} already defines {name}.",
                    "The patch would silently replace upstream's definition.",
                    "rename the helper in the page",
                )
            self.helpers[name] = block
            blocks.append(block)
        return blocks

    def _helper(self, page: str, helper: Callable[..., Any]) -> str:
        """Return the text of a helper, which must be one definition of its name, nothing else."""
        name = helper.__name__
        try:
            text = function_text(helper)
            body = parse_silently(text).body
        except (OSError, TypeError, SyntaxError, ValueError) as error:
            self._bad_helper(page, name, f"has no source of its own: {error}")
        node = body[0]
        if len(body) != 1 or not isinstance(node, Definition) or node.name != name:
            self._bad_helper(page, name, "is not written as one definition of that name")
        if _is_special(name) or hasattr(builtins, name):
            self._bad_helper(page, name, "has a special or builtin name of Python")
        beyond = sorted(reaches(node))
        if beyond:
            self._bad_helper(page, name, f"reaches beyond itself: {', '.join(beyond)}")
        return text

    def _bad_helper(self, page: str, name: str, what: str) -> NoReturn:
        raise CppmegaError(
            "bad-helper",
            f"The helper {name} of page {page} {what} ({self.path}).",
            "Only what a page declares may differ from upstream.",
            "write it as one plain function or class of the page",
        )


def _is_special(name: str) -> bool:
    return (name.startswith("__") and name.endswith("__")) or hasattr(builtins, name)


def bindings(statement: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, Binding]]:
    """Yield each name of an import and its binding."""
    for alias in statement.names:
        if isinstance(statement, ast.ImportFrom):
            module = "." * statement.level + (statement.module or "")
            yield alias.asname or alias.name, (module, alias.name)
        elif alias.asname:
            yield alias.asname, (alias.name,)
        else:
            package = alias.name.partition(".")[0]
            yield package, (package,)


def _module_bindings(tree: ast.Module) -> Iterator[tuple[str, Binding]]:
    """The bindings at the top level of a module; all but imports are the file's own."""
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from bindings(node)
        elif isinstance(node, Definition):
            yield node.name, ("the file's own",)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, ("the file's own",)
        else:
            pending.extend(ast.iter_child_nodes(node))


def reaches(target: ast.stmt, taken: Container[str] = ()) -> set[str]:
    """Return how a target reaches names outside of itself, each as a few words of code.

    Args:
        target: a definition, or a statement of a module or a class.
        taken: the names that a statement must not assign, unless upstream's does.
    """
    bound = undefined_names.top_level(ast.Module([target], [])) if taken else ()
    found = {f"{name} = ..." for name in bound if name in taken}
    if not isinstance(target, Definition):
        stored = (n for n in in_scope(target) if isinstance(n, ast.Attribute | ast.Subscript))
        found |= {f"{ast.unparse(n)} = ..." for n in stored if not isinstance(n.ctx, ast.Load)}
    pending: list[ast.AST] = [target]
    while pending:
        statement = pending.pop()
        pending += blocks(statement)
        if isinstance(statement, ast.Global):
            found |= {f"global {name}" for name in statement.names}
    for node in _evaluated(_header(target)):
        if isinstance(node, ast.NamedExpr):
            found.add(f"{node.target.id} := in its header")
    for node in _evaluated(_when_imported(target)):
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Name) and called.id in _RUNS_TEXT:
            found.add(f"{called.id}() when the file is imported")
    return found


def _header(definition: ast.stmt) -> list[ast.AST]:
    """The parts of a definition that are evaluated in the scope around it."""
    if not isinstance(definition, Definition):
        return []
    found: list[ast.AST | None] = [*definition.decorator_list]
    if isinstance(definition, ast.ClassDef):
        found += [*definition.bases, *definition.keywords]
    else:
        arguments = definition.args
        found += [*arguments.defaults, *arguments.kw_defaults, definition.returns]
        several = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        found += [
            argument.annotation
            for argument in (*several, arguments.vararg, arguments.kwarg)
            if argument
        ]
    return [node for node in found if node is not None]


def _when_imported(statement: ast.stmt) -> list[ast.AST]:
    """What runs when the file is imported: of a definition its header, and the body of a class."""
    if not isinstance(statement, Definition):
        return [statement]
    found = _header(statement)
    if isinstance(statement, ast.ClassDef):
        found += [node for inner in statement.body for node in _when_imported(inner)]
    return found


def _evaluated(nodes: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """Yield all nodes below, except in the bodies of functions."""
    pending = list(nodes)
    while pending:
        node = pending.pop()
        yield node
        if isinstance(node, Definition):
            pending += _when_imported(node)
        elif not isinstance(node, ast.Lambda):
            pending += ast.iter_child_nodes(node)
