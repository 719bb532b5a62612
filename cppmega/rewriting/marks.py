"""Reached marks, which record that a run passed through a patched function.

A mark is a flag, not a count. The patched file carries its own set and its own function, so a
patched tree runs where cppmega is not installed; `cppmega.run` reads the sets after the first step.
Under torch.compile the function runs once while tracing and leaves nothing in the graph; under CUDA
graphs it runs during capture. A function that is compiled from its source, such as a Triton kernel,
carries none: the functions of its file that launch it do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from cppmega.errors import CppmegaError

if TYPE_CHECKING:
    import libcst as cst

    from cppmega.page import Edit

FUNCTION = "_cppmega_reached"
FLAGS = "_CPPMEGA_REACHED"
COMMENT = "patched by cppmega: "
"""Precedes the page's name in a comment, on the header of a target that carries no mark."""

_HELPER = f"""\
{FLAGS} = set()  # pages of the cppmega overlay that this process went through


def {FUNCTION}(page):
    {FLAGS}.add(page)
"""
_TRACED = f"""

# Dynamo calls it while tracing and leaves no trace of it in the graph.
{FUNCTION} = torch.compiler.assume_constant_result({FUNCTION})
"""


def helper(has_torch: bool) -> str:
    """The definitions that a marked file carries."""
    return _HELPER + _TRACED if has_torch else _HELPER


def with_mark(node: cst.CSTNode, page: str, edit: Edit) -> cst.CSTNode:
    """The definition with a mark as the first statement of the function that carries it."""
    import libcst as cst

    if isinstance(node, cst.Module):
        raise CppmegaError(
            "mark-has-no-place",
            f"Page {page} marks {edit.target}, which is a statement.",
            "It runs when the file is imported, which does not show that a run used its result.",
            "give its Edit mark='', and let another edit carry the mark, or declare "
            "reached='never'",
        )
    if edit.mark is None and isinstance(node, cst.FunctionDef):
        return _marked(node, page)
    return _descend(node, (edit.mark or "__init__").split("."), page, edit)


def with_comment(node: cst.CSTNode, page: str) -> cst.CSTNode:
    """The target with the page's name in a comment after its header, or after its line."""
    import libcst as cst

    if isinstance(node, cst.Module):
        first, *rest = node.body
        return node.with_changes(body=[with_comment(first, page), *rest])
    is_line = isinstance(node, cst.SimpleStatementLine)
    body: cst.CSTNode = node if is_line else cast(cst.FunctionDef, node).body
    place = "header" if isinstance(body, cst.IndentedBlock) else "trailing_whitespace"
    line = cast(cst.TrailingWhitespace, getattr(body, place))
    if line.comment is None:
        line = line.with_changes(whitespace=cst.SimpleWhitespace("  "), comment=cst.Comment("#"))
    text = cast(cst.Comment, line.comment).value.removesuffix(";") or "#"
    text += " " if text == "#" else "; "
    new = line.with_changes(comment=cst.Comment(f"{text}{COMMENT}{page}"))
    done = body.with_changes(**{place: new})
    return done if is_line else node.with_changes(body=done)


def _descend(node: cst.CSTNode, path: list[str], page: str, edit: Edit) -> cst.CSTNode:
    import libcst as cst

    holder = cast(cst.ClassDef | cst.FunctionDef, node)
    body = list(holder.body.body)
    for at, statement in enumerate(body):
        named = isinstance(statement, cst.FunctionDef | cst.ClassDef)
        if named and cast(cst.FunctionDef, statement).name.value == path[0]:
            inner = cast(cst.FunctionDef, statement)
            done = _descend(inner, path[1:], page, edit) if path[1:] else _marked(inner, page)
            body[at] = cast(cst.FunctionDef, done)
            return holder.with_changes(body=holder.body.with_changes(body=body))
    raise CppmegaError(
        "mark-has-no-place",
        f"Page {page} marks {'.'.join(path)} in {edit.target}, which does not exist.",
        "A run could not determine whether it reached the patch.",
        "name another function in `Edit.mark`, or declare `reached='never'`",
    )


def call(page: str) -> str:
    """The statement that is a mark."""
    return f'{FUNCTION}("{page}")'


def in_kernel(page: str, kernel: str) -> CppmegaError:
    """The error for a mark in a kernel that no function of its file launches."""
    return CppmegaError(
        "mark-in-kernel",
        f"Page {page} marks {kernel}, which is compiled from its source, and no function of its "
        "file launches it.",
        "The mark would be compiled, too, and the kernel would fail.",
        "edit the function that launches it, too, and give the kernel's Edit mark=''; or declare "
        "reached='never'",
    )


def _marked(function: cst.FunctionDef, page: str) -> cst.FunctionDef:
    import libcst as cst

    from cppmega.rewriting.codegen import first_in
    from cppmega.rewriting.kernels import is_compiled_node

    if is_compiled_node(function):
        raise in_kernel(page, function.name.value)
    return first_in(function, cst.parse_statement(f"{call(page)}\n"))
