"""Functions whose decorators compile their source, such as Triton's: who launches them.

A statement that is added to such a function is compiled, too, and most compilers refuse it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from cppmega.rewriting.source import Definition, Text, blocks, definitions, plain

if TYPE_CHECKING:
    import libcst as cst

_COMPILERS = {"triton", "tilelang", "tvm", "numba", "cutlass", "warp", "helion", "taichi"}
"""Packages whose decorators compile what they decorate."""
_COMPILES = re.compile(r"(?:\w*_)?(?:n?jit|prim_func|script|script_method|(?:gu)?vectorize)\Z")
"""The last name of such a decorator, under which it may have been imported or wrapped."""


def compiles(decorator: str) -> bool:
    """Whether a decorator, as the code after its `@`, compiles the source of what it decorates."""
    tree = ast.parse(f"({decorator})", mode="eval").body
    called = tree.func if isinstance(tree, ast.Call) else tree
    if isinstance(called, ast.Attribute) and called.attr == "kernel":
        return True
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            name = ast.unparse(node)
            if name in _COMPILERS or _COMPILES.match(name.rpartition(".")[2]):
                return True
    return False


def around(tree: ast.Module, text: Text, symbol: str) -> str:
    """The outermost compiled function that is, or holds, a definition; "" if there is none."""
    parts = symbol.split(".")
    scopes: list[ast.AST] = [tree]
    for count, part in enumerate(parts, 1):
        name, _, nth = part.partition("#")
        found = [node for scope in scopes for node in definitions(scope) if node.name == name]
        scopes = [*found[int(nth) - 1 : int(nth)]] if nth else [*found]
        if any(_is_compiled(node, text) for node in scopes if isinstance(node, Definition)):
            return ".".join(parts[:count])
    return ""


def is_compiled_node(function: cst.FunctionDef) -> bool:
    """Whether the decorators of a libcst function compile its source."""
    import libcst as cst

    code = cst.Module([]).code_for_node
    return any(compiles(code(decorator.decorator)) for decorator in function.decorators)


def _is_compiled(definition: Definition, text: Text) -> bool:
    if isinstance(definition, ast.ClassDef):
        return False
    if any(compiles(ast.unparse(decorator)) for decorator in definition.decorator_list):
        return True
    if f"({definition.name}" not in text.body:
        return False
    called = rf"(\w+)\({definition.name}\s*[,)]"  # kernel = triton.jit(function)
    return any(_COMPILES.match(name) for name in re.findall(called, text.body))


def launchers(tree: ast.Module, text: Text, kernel: str) -> list[tuple[str, str]]:
    """The functions of a file whose statements name a kernel, each with the name that they use.

    A kernel that only other kernels call is launched by those who launch them.
    """
    found: dict[str, str] = {}
    functions = list(_functions(tree))
    inside = [(symbol, node) for symbol, node in functions if kernel.startswith(f"{symbol}.")]
    pending, seen = [plain(kernel).rpartition(".")[2]], set()
    while pending:
        name = pending.pop()
        seen.add(name)
        for symbol, function in inside or functions:
            if function.name not in seen and _names(function, name, text):
                if _is_compiled(function, text):
                    pending.append(function.name)
                else:
                    found.setdefault(symbol, name)
    return list(found.items())


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Functions and methods with their symbols; what is nested in a function belongs to it."""
    scope = list(definitions(tree))
    names = [definition.name for definition in scope]
    for at, definition in enumerate(scope):
        count = f"#{names[: at + 1].count(definition.name)}" * (names.count(definition.name) > 1)
        symbol = f"{prefix}{definition.name}{count}"
        if isinstance(definition, ast.ClassDef):
            yield from _functions(definition, f"{symbol}.")
        else:
            yield symbol, definition


def _names(function: ast.AST, name: str, text: Text) -> bool:
    """Whether a statement of a function names a kernel, outside of nested compiled functions."""
    pending = blocks(function)
    while pending:
        node = pending.pop()
        if isinstance(node, Definition) and (node.name == name or _is_compiled(node, text)):
            continue
        if name in (getattr(node, "id", ""), getattr(node, "attr", "")):
            return True
        pending += ast.iter_child_nodes(node)
    return False


def _names_node(node: Any, name: str) -> bool:
    """Whether a node of libcst names a kernel; its matchers take a tenth of a second to import."""
    pending = [node]
    while pending:
        inner = pending.pop()
        if type(inner).__name__ == "Name" and inner.value == name:
            return True
        pending += inner.children
    return False


def before_launches(kernel: str, statement: str) -> Callable[[Any], Any]:
    """An edit of a launcher: write a statement before every simple statement that names a kernel.

    If only the heads of compound statements do, it is written first.
    """

    def edit(node: Any) -> Any:
        import libcst as cst

        from cppmega.rewriting.codegen import first_in

        added = cst.parse_statement(f"{statement}\n")

        class Mark(cst.CSTTransformer):
            def visit_FunctionDef(self, inner: cst.FunctionDef) -> bool:  # noqa: N802
                return inner is node or not (inner.name.value == kernel or is_compiled_node(inner))

            def leave_SimpleStatementLine(  # noqa: N802
                self, original_node: Any, updated_node: Any
            ) -> Any:
                if not _names_node(updated_node, kernel):
                    return updated_node
                return cst.FlattenSentinel([added, updated_node])

        done = node.visit(Mark())
        return first_in(node, added) if done.deep_equals(node) else done

    return edit
