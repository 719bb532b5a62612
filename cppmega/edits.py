"""Ready-made edits for pages of kind `source`: each returns a function from node to node.

All of them compare code by its syntax tree, so upstream's layout and comments do not matter, and
raise `edit-mismatch` unless the place occurs exactly as often as declared. libcst is imported only
when an edit runs.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

from cppmega.rewriting.function_source import function_text

if TYPE_CHECKING:
    import libcst as cst

    NodeEdit = Callable[[cst.CSTNode], cst.CSTNode]


def in_order(*edits: NodeEdit) -> NodeEdit:
    """Apply several edits to one target, in order."""

    def edit(node: cst.CSTNode) -> cst.CSTNode:
        return reduce(lambda done, edit: edit(done), edits, node)

    # With a page's function in it, it is a page's own, which is called twice to compare results.
    edit.__module__ = next((e.__module__ for e in edits if e.__module__ != __name__), __name__)
    return edit


def body_of(page_function: Callable[..., Any]) -> NodeEdit:
    """Replace the target's body with that of a page's function; the rest stays upstream's."""

    def edit(node: cst.CSTNode) -> cst.CSTNode:
        from cppmega.rewriting import node_edits

        replacement = node_edits.parsed_function(function_text(page_function))
        return node_edits.with_body(node_edits.function(node), replacement)

    return edit


def definition_of(page_function: Callable[..., Any]) -> NodeEdit:
    """Replace the target's signature, docstring and body with those of a page's function.

    Its name and decorators stay upstream's.
    """

    def edit(node: cst.CSTNode) -> cst.CSTNode:
        from cppmega.rewriting import node_edits

        new = node_edits.parsed_function(function_text(page_function))
        return node_edits.function(node).with_changes(
            params=new.params, returns=new.returns, body=new.body
        )

    return edit


def replacing(old: str, new: str, times: int = 1) -> NodeEdit:
    """Replace an expression, statements, or the head of a compound statement (`with a, b:`).

    `name=value` is a statement, or a keyword argument of calls if the target has no such statement.

    Args:
        old: the code to replace, in any layout.
        new: the replacement; "" deletes statements, or a keyword argument.
        times: how often `old` must occur.
    """
    old, new = textwrap.dedent(old).strip(), textwrap.dedent(new).strip()

    def edit(node: cst.CSTNode) -> cst.CSTNode:
        from cppmega.rewriting import node_edits

        return node_edits.replaced(old, new, node, times)

    return edit


def inserting(text: str, *, before: str = "", after: str = "") -> NodeEdit:
    """Insert statements before or after one statement (or consecutive statements) of the target.

    Of a compound statement, the head is enough: `if x is None:`.
    """
    anchor = textwrap.dedent(before or after).strip()
    added = textwrap.dedent(text).strip()

    def edit(node: cst.CSTNode) -> cst.CSTNode:
        from cppmega.rewriting import node_edits

        def join(found: Sequence[cst.BaseStatement]) -> list[cst.BaseStatement]:
            new = node_edits.statements(added)
            return [*new, *found] if before else [*found, *new]

        swap = node_edits.StatementSwap(anchor, join)
        return node_edits.exactly(swap, node, anchor, 1)

    return edit


def appending(text: str) -> NodeEdit:
    """Add statements at the end of the target's body, or a method at the end of a class."""
    added = textwrap.dedent(text).strip()

    def edit(node: cst.CSTNode) -> cst.CSTNode:
        from cppmega.rewriting import node_edits

        return node_edits.with_last(node, node_edits.statements(added))

    return edit


def adding_argument(
    callee: str, argument: str, times: int = 1, *, before: str = "", after: str = ""
) -> NodeEdit:
    """Add an argument to the calls of `callee` (`self.mtp`, `build_module`...), by default last.

    Args:
        argument: `name=value`, or a value that is passed by its position.
        times: how often `callee` must be called.
        before: the argument, as it is written, or the name of the keyword that follows.
        after: the one that precedes.
    """

    def edit(node: cst.CSTNode) -> cst.CSTNode:
        from cppmega.rewriting import node_edits

        swap = node_edits.ArgumentSwap(callee, argument, before, after)
        return node_edits.exactly(swap, node, f"{callee}(...)", times)

    return edit


def adding_parameter(parameter: str, *, before: str = "", after: str = "") -> NodeEdit:
    """Add a parameter (`padding_mask=None`) to the target's signature, by default as the last.

    Args:
        before: the name of the parameter that follows.
        after: the name of the one that precedes.
    """

    def edit(node: cst.CSTNode) -> cst.CSTNode:
        from cppmega.rewriting import node_edits

        target = node_edits.function(node)
        return node_edits.with_parameter(target, parameter, before, after)

    return edit
