"""Ready-made edits for pages of kind `source`: each returns a function from node to node.

All of them compare code by its syntax tree, so layout and comments upstream do not matter, and all
of them raise when the place is not found exactly as often as said: an edit that matches nothing,
or one place too many, never returns a text. libcst is imported when an edit runs, not before.
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
    """Several edits of one target, one after the other."""
    return lambda node: reduce(lambda done, edit: edit(done), edits, node)


def body_of(page_function: Callable[..., Any]) -> NodeEdit:
    """Give the target the body of a page's function; signature and docstring stay upstream's."""

    def edit(node: cst.CSTNode) -> cst.CSTNode:
        from cppmega.rewriting import node_edits

        ours = node_edits.parsed_function(function_text(page_function))
        return node_edits.with_body(node_edits.function(node), ours)

    return edit


def definition_of(page_function: Callable[..., Any]) -> NodeEdit:
    """Give the target signature, docstring and body of a function of the page.

    Name and decorators stay upstream's.
    """

    def edit(node: cst.CSTNode) -> cst.CSTNode:
        from cppmega.rewriting import node_edits

        ours = node_edits.parsed_function(function_text(page_function))
        return node_edits.function(node).with_changes(
            params=ours.params, returns=ours.returns, body=ours.body
        )

    return edit


def replacing(old: str, new: str, times: int = 1) -> NodeEdit:
    """Replace an expression, statements, or the head of a compound statement (`with a, b:`).

    Args:
        old: the code to replace, in any layout.
        new: the replacement; "" deletes statements.
        times: how often `old` must be found.
    """
    old, new = textwrap.dedent(old).strip(), textwrap.dedent(new).strip()

    def edit(node: cst.CSTNode) -> cst.CSTNode:
        from cppmega.rewriting import node_edits

        return node_edits.exactly(node_edits.swap_for(old, new), node, old, times)

    return edit


def inserting(text: str, *, before: str = "", after: str = "") -> NodeEdit:
    """Insert statements next to one statement (or run of statements) of the target."""
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
    """Add statements at the end of the target's body."""
    added = textwrap.dedent(text).strip()

    def edit(node: cst.CSTNode) -> cst.CSTNode:
        from cppmega.rewriting import node_edits

        return node_edits.with_last(node_edits.function(node), node_edits.statements(added))

    return edit


def adding_argument(callee: str, argument: str, times: int = 1) -> NodeEdit:
    """Append `name=value` to the calls of `callee` (`self.mtp`, `build_module`...)."""

    def edit(node: cst.CSTNode) -> cst.CSTNode:
        from cppmega.rewriting import node_edits

        swap = node_edits.ArgumentSwap(callee, argument)
        return node_edits.exactly(swap, node, f"{callee}(...)", times)

    return edit


def adding_parameter(parameter: str) -> NodeEdit:
    """Append a parameter with a default (`padding_mask=None`) to the target's signature."""

    def edit(node: cst.CSTNode) -> cst.CSTNode:
        from cppmega.rewriting import node_edits

        return node_edits.with_parameter(node_edits.function(node), parameter)

    return edit
