"""Undefined names in the edited definitions of a module, found by pyflakes.

All other functions and classes are first reduced to their names, so that the check costs the same
for a file of five thousand lines as for a short one.
"""

from __future__ import annotations

import ast

from pyflakes import checker, messages


def top_level(tree: ast.Module | ast.ClassDef) -> set[str]:
    """Names bound at the top level of a module or class, including those below if and try."""
    bound: set[str] = set()
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound |= imported(node)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
        else:
            pending.extend(ast.iter_child_nodes(node))
    return bound


def imported(node: ast.Import | ast.ImportFrom) -> set[str]:
    """Names that an import statement binds."""
    return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}


def undefined(tree: ast.Module, keep: set[str], path: str) -> set[str]:
    """Names that the kept definitions use and nothing defines.

    Args:
        tree: the whole module; it is emptied in place.
        keep: qualified names of the definitions to check.
    """
    _empty(tree, "", keep)
    found = checker.Checker(tree, filename=path).messages
    kinds = (messages.UndefinedName, messages.UndefinedLocal)
    return {str(m.message_args[0]) for m in found if isinstance(m, kinds)}


def _empty(node: ast.AST, prefix: str, keep: set[str]) -> None:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = prefix + child.name
            if name in keep:
                continue
            if any(wanted.startswith(name + ".") for wanted in keep):
                _empty(child, name + ".", keep)
            else:
                _leave_the_name(child)
        elif isinstance(child, _WITH_BLOCKS):
            _empty(child, prefix, keep)


_WITH_BLOCKS = (ast.stmt, ast.excepthandler, ast.match_case)
_NO_ARGUMENTS = ast.arguments([], [], None, [], [], None, [])


def _leave_the_name(definition: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
    """Reduce a definition to binding its name, the only part that matters here."""
    definition.body = [ast.copy_location(ast.Pass(), definition.body[0])]
    definition.decorator_list = []
    if isinstance(definition, ast.ClassDef):
        definition.bases, definition.keywords = [], []
    else:
        definition.args, definition.returns = _NO_ARGUMENTS, None
