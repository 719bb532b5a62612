"""Mutations: the small changes of the code in some lines of a text."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from cppmega.rewriting import marks

FOR_HUMANS = ("warn", "warning", "info", "debug", "log", "print", "log_single_rank")
"""Calls whose absence changes what a run says, but not what it computes."""
Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    file: str
    line: int
    kind: str
    before: str
    """What changes."""
    tree: Callable[[], ast.Module]
    """Builds the syntax tree of the changed file; a process can call it for one mutant only."""

    def __str__(self) -> str:
        place = f"{'/'.join(Path(self.file).parts[-2:])}:{self.line}"
        return f"{place}: {self.kind}: {' '.join(self.before.split())[:150]}"


@dataclass(frozen=True)
class Source:
    """A file, and the lines of it that a page brings."""

    file: str
    text: str
    lines: frozenset[int]
    stock: str = ""
    """Upstream's text, if it is a file of upstream."""
    dropped: frozenset[str] = frozenset()
    """Lines of it that the page removes, without indentation."""

    def mutants(self) -> Iterator[Mutant]:
        """Yield the mutants of these lines."""
        tree = ast.parse(self.text)
        for parent in ast.walk(tree):
            for child in ast.iter_child_nodes(parent):
                child.parent = parent  # type: ignore[attr-defined]
        for function in _functions(tree):
            if function.name == marks.FUNCTION:
                continue
            for node in _inside(function):
                if _line(node) in self.lines:
                    for kind, new in _changes(node):
                        yield self._mutant(tree, node, kind, new)
            if self._brings(function) and _is_procedure(function):
                yield self._mutant(tree, function, "emptied", _with(function, body=[ast.Pass()]))
        if self.stock:
            yield from self._taken_back()

    def _brings(self, function: Function) -> bool:
        return {function.lineno, function.body[-1].lineno} <= self.lines

    def _mutant(self, tree: ast.Module, node: Any, kind: str, new: ast.AST) -> Mutant:
        def build() -> ast.Module:
            new_node = ast.fix_missing_locations(ast.copy_location(new, node))
            for name, value in ast.iter_fields(node.parent):
                if value is node:
                    setattr(node.parent, name, new_node)
                elif isinstance(value, list):
                    value[:] = [new_node if one is node else one for one in value]
            return tree

        before = f"def {node.name}" if isinstance(node, Function) else ast.unparse(node)
        return Mutant(self.file, _line(node), kind, before, build)

    def _taken_back(self) -> Iterator[Mutant]:
        """Yield the text with one block of the page's lines as upstream has it."""
        old, new = self.stock.splitlines(keepends=True), self.text.splitlines(keepends=True)
        for how, i, j, start, end in matched(self.stock, self.text):
            lines = range(start + 1, end + 1)
            dropped = {line.strip() for line in old[i:j]}
            mine = self.lines.issuperset(lines) and (lines or self.dropped.issuperset(dropped))
            marks_only = lines and all(marks.COMMENT in line for line in new[start:end])
            if how != "equal" and mine and not marks_only and "".join(dropped):
                text = "".join([*new[:start], *old[i:j], *new[end:]])
                try:
                    tree = ast.parse(text)
                except SyntaxError:
                    continue
                before = "".join(new[start:end]) or f"without {''.join(old[i:j])}"
                yield Mutant(self.file, start + 1, "taken back", before, lambda tree=tree: tree)


def _line(node: Any) -> int:
    return _line(node.target) if isinstance(node, ast.comprehension) else getattr(node, "lineno", 0)


def _functions(node: ast.AST) -> Iterator[Function]:
    """Yield the outermost functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            yield child
        elif not isinstance(child, ast.expr):
            yield from _functions(child)


def _inside(function: ast.AST) -> Iterator[ast.AST]:
    """Yield what runs when a function is called: no annotations, messages or marks."""
    skipped: list[ast.AST | None] = []
    if isinstance(function, Function):
        skipped = [function.args, function.returns, *function.decorator_list]
    elif isinstance(function, ast.AnnAssign):
        skipped = [function.annotation]
    for child in ast.iter_child_nodes(function):
        if any(child is one for one in skipped) or isinstance(child, ast.Raise | ast.JoinedStr):
            continue
        if isinstance(child, ast.Expr) and _called(child.value) in (marks.FUNCTION, *FOR_HUMANS):
            continue
        if isinstance(child, ast.Assert):
            continue
        yield child
        yield from _inside(child)


def _called(node: ast.expr) -> str:
    function = node.func if isinstance(node, ast.Call) else None
    return getattr(function, "id", getattr(function, "attr", ""))


OTHER: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield the changes of one node, each with its kind."""
    tests = [node.test] if isinstance(node, ast.If | ast.IfExp | ast.While) else []
    for test in tests:
        yield "negated", _with(node, test=ast.UnaryOp(ast.Not(), test))
    if isinstance(node, ast.comprehension) and node.ifs:
        yield "negated", _with(node, ifs=[ast.UnaryOp(ast.Not(), node.ifs[0]), *node.ifs[1:]])
    if isinstance(node, ast.BoolOp):
        for at, value in enumerate(node.values):
            left = [one for i, one in enumerate(node.values) if i != at]
            what = f"without `{ast.unparse(value)}`"
            yield what, left[0] if len(left) == 1 else _with(node, values=left)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield "compared otherwise", _with(node, ops=[OTHER[type(node.ops[0])]()])
    if isinstance(node, ast.AugAssign):
        yield "dropped", ast.Pass()
    if isinstance(node, ast.Assign) and all(
        isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets
    ):
        yield "dropped", ast.Pass()
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "dropped", ast.Pass()
    if isinstance(node, ast.BinOp) and not isinstance(node.op, ast.Mod):
        yield f"without `{ast.unparse(node.right)}`", node.left
    if isinstance(node, ast.Call) and _called(node) == "getattr" and len(node.args) == 3:
        yield "state ignored", node.args[2]
    if isinstance(node, ast.Call | ast.keyword | ast.Assign):
        yield from _ignored(node)
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "the other", ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield "one more", ast.Constant(node.value + 1)


def _ignored(node: ast.Call | ast.keyword | ast.Assign) -> Iterator[tuple[str, ast.AST]]:
    """Pass None, which is False for most that read it, in place of an attribute of an argument."""

    def is_state(value: ast.AST) -> bool:
        return isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name)

    if not isinstance(node, ast.Call):
        # A CPU's tensors show nothing of devices.
        if is_state(node.value) and getattr(node, "arg", None) != "device":
            yield "state ignored", _with(node, value=ast.Constant(None))
        return
    for at, value in enumerate(node.args):
        if is_state(value) and not _names_a_module(value):
            args: list[ast.expr] = [*node.args]
            args[at] = ast.Constant(None)
            yield f"without `{ast.unparse(value)}`", _with(node, args=args)


def _names_a_module(value: ast.AST) -> bool:
    return isinstance(value, ast.Attribute) and ast.unparse(value.value) in ("torch", "ast", "math")


def _with(node: ast.AST, **changed: Any) -> Any:
    new = copy.copy(node)
    for name, value in changed.items():
        setattr(new, name, value)
    return new


def _is_procedure(function: Function) -> bool:
    """Whether a function returns nothing, so that an empty one could be in its place."""
    below = [*ast.walk(function)]
    values = [n for n in below if isinstance(n, ast.Return) and n.value is not None]
    yields = [n for n in below if isinstance(n, ast.Yield | ast.YieldFrom)]
    return not values and not yields and function.name != "__init__"


def matched(before: str, after: str) -> list[tuple[str, int, int, int, int]]:
    """Compare the lines of two texts, without indentation; see `SequenceMatcher.get_opcodes`."""
    old, new = ([line.strip() for line in text.splitlines()] for text in (before, after))
    return SequenceMatcher(None, old, new).get_opcodes()
