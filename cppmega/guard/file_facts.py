"""Facts about the names in a module, from the code of its file.

They are read from the code objects, which exist anyway; parsing the file would double the cost.
"""

from __future__ import annotations

import ast
import dis
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

_OPCODES = {dis.opmap[name]: name for name in ("STORE_GLOBAL", "STORE_ATTR", "IMPORT_NAME")}


@dataclass(slots=True)
class Facts:
    """The facts of one file."""

    defined: set[str] = field(default_factory=set)
    """Functions and classes at the top level."""
    packages: set[str] = field(default_factory=set)
    """The top-level packages that the file imports from, and its own."""
    declared_global: set[str] = field(default_factory=set)
    """Module variables that functions of the file assign: state, regardless of their value."""
    assigned_attributes: set[str] = field(default_factory=set)
    """Names of attributes that the file assigns: state if a class has them."""


def facts_of(codes: Iterable[types.CodeType], package: str) -> Facts:
    """Read the facts of a file from its code.

    Args:
        codes: every code object of the file.
        package: its own top-level package.
    """
    facts = Facts(packages={package})
    for code in codes:
        if code.co_qualname.isidentifier():  # neither nested nor a lambda
            facts.defined.add(code.co_name)
        for kind, name in _stores_and_imports(code):
            if kind == "STORE_GLOBAL":
                facts.declared_global.add(name)
            elif kind == "STORE_ATTR":
                facts.assigned_attributes.add(name)
            else:
                facts.packages.add(name.partition(".")[0])
    return facts


def _stores_and_imports(code: types.CodeType) -> Iterator[tuple[str, str]]:
    if not _OPCODES.keys() & set(code.co_code[::2]):
        return
    before: list[object] = [None, None]
    for step in dis.get_instructions(code):
        if step.opcode in _OPCODES and not (step.opname == "IMPORT_NAME" and before[0]):
            yield step.opname, step.argval
        before = [before[1], step.argval]  # of an import: its level and its names


def imports_of(tree: ast.Module, module: str, is_package: bool) -> dict[str, tuple[str, str]]:
    """Names that a file binds with `from M import NAME`: bound name -> (absolute M, NAME)."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            source = _absolute(node, module, is_package)
            found.update({a.asname or a.name: (source, a.name) for a in node.names})
    return found


def _absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    base = parts[: len(parts) - node.level + is_package]
    return ".".join([*base, *([node.module] if node.module else [])])
