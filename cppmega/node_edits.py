"""The transformers behind `cppmega.edits`; imported when an edit runs, because libcst is slow."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import libcst as cst

from cppmega.errors import CppmegaError
from cppmega.fingerprint import is_docstring
from cppmega.source import parse_silently

_EMPTY = cst.Module([], default_indent="    ")


def function(node: cst.CSTNode) -> cst.FunctionDef:
    if not isinstance(node, cst.FunctionDef):
        raise mismatch(f"the target is a {type(node).__name__}, not a function")
    return node


def parsed_function(text: str) -> cst.FunctionDef:
    """The one function that a text holds."""
    return function(cst.parse_module(text).body[0])


def statements(text: str) -> list[cst.BaseStatement]:
    module = cst.parse_module(text + "\n" if text else "")
    body = list(module.body)
    if body and module.header:  # comments above the first statement belong to it
        body[0] = body[0].with_changes(leading_lines=(*module.header, *body[0].leading_lines))
    return cast(list[cst.BaseStatement], body)


def is_head(text: str) -> bool:
    return text.endswith(":") and "\n    " not in text


def is_expression(text: str) -> bool:
    try:
        ast.parse(text, mode="eval")
    except SyntaxError:
        return False
    return True


def shape(node: cst.CSTNode) -> str:
    """The syntax tree of a node as text: equal for equal code in any layout."""
    code = _EMPTY.code_for_node(node)
    try:
        return ast.dump(parse_silently(textwrap.dedent(code)))
    except SyntaxError:  # parts of a line that stretch over several are not code by themselves
        pass
    try:
        return ast.dump(parse_silently(f"({code.strip()})"))
    except SyntaxError:
        return code  # no code by itself at all: equal to nothing


class Swap(cst.CSTTransformer):
    found = 0


class ExpressionSwap(Swap):
    def __init__(self, old: str, new: str) -> None:
        super().__init__()
        self.old = cst.parse_expression(old)
        self.new = cst.parse_expression(new)
        self.texts = old, new
        self.shape = shape(self.old)
        self.names: set[int] = set()
        """Names that are no expressions: of attributes, keywords, parameters, definitions."""

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(self.old, cst.Name):
            self.names |= {id(getattr(node, at, None)) for at in ("attr", "keyword", "name")}
        return super().on_visit(node)

    def on_leave(self, original_node: cst.CSTNodeT, updated_node: cst.CSTNodeT) -> Any:
        if type(original_node) is not type(self.old) or shape(original_node) != self.shape:
            return super().on_leave(original_node, updated_node)
        if id(original_node) in self.names:
            return super().on_leave(original_node, updated_node)
        self.found += 1
        around: Any = original_node
        if around.lpar and not self.new.lpar:
            return self.new.with_changes(lpar=around.lpar, rpar=around.rpar)
        return self.new

    def check(self, before: cst.CSTNode, after: cst.CSTNode) -> None:
        """Refuse a result in which the new expression has come apart: `a + b` for `x` in `x * 2`.

        The same with a name in place of the expression, and the expression put in for the name
        in the syntax tree, must be the same code.
        """
        if isinstance(self.new, _ATOMS) or self.new.lpar:
            return
        old, new = self.texts
        hole = "_cppmega_hole"
        marked = cast(cst.CSTNode, before.visit(ExpressionSwap(old, hole)))
        wanted = parse_silently(_EMPTY.code_for_node(marked))
        filled = _Fill(hole, ast.parse(f"({new})", mode="eval").body).visit(wanted)
        if ast.dump(filled) != ast.dump(parse_silently(_EMPTY.code_for_node(after))):
            raise mismatch(f"`{new}` comes apart where `{old}` stands; put it in parentheses")


_ATOMS = (
    cst.Name,
    cst.Attribute,
    cst.Call,
    cst.Subscript,
    cst.SimpleString,
    cst.List,
    cst.Dict,
    cst.Set,
)
"""Expressions that stay in one piece wherever they stand."""


class _Fill(ast.NodeTransformer):
    def __init__(self, hole: str, expression: ast.expr) -> None:
        self.hole, self.expression = hole, expression

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.expression if node.id == self.hole else node


class HeadSwap(Swap):
    """`with a and b:` -> `with a, b:`, the block below untouched."""

    def __init__(self, old: str, new: str) -> None:
        super().__init__()
        self.old = cst.parse_statement(old + " pass\n")
        self.new = cst.parse_statement(new + " pass\n")
        self.shape = shape(self.old)

    def on_leave(self, original_node: cst.CSTNodeT, updated_node: cst.CSTNodeT) -> Any:
        old: Any = self.old
        before: Any = original_node
        if type(before) is not type(old):
            return super().on_leave(original_node, updated_node)
        rest = ("orelse",) if hasattr(before, "orelse") else ()
        head = before.with_changes(body=old.body, leading_lines=(), **dict.fromkeys(rest))
        if shape(head) != self.shape:
            return super().on_leave(original_node, updated_node)
        self.found += 1
        kept = {name: getattr(updated_node, name) for name in ("body", "leading_lines", *rest)}
        return self.new.with_changes(**kept)


class StatementSwap(Swap):
    def __init__(
        self,
        old: Sequence[cst.BaseStatement],
        make: Callable[[Sequence[cst.BaseStatement]], list[cst.BaseStatement]],
    ) -> None:
        super().__init__()
        self.shapes = [shape(statement) for statement in old]
        self.make = make

    def leave_IndentedBlock(  # noqa: N802
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.IndentedBlock:
        shapes = [shape(statement) for statement in original_node.body]
        body, width = list(updated_node.body), len(self.shapes)
        for at in range(len(shapes) - width, -1, -1):
            if shapes[at : at + width] == self.shapes:
                self.found += 1
                body[at : at + width] = self.make(body[at : at + width])
        return updated_node.with_changes(body=body or [cst.SimpleStatementLine([cst.Pass()])])


def exactly(swap: Swap, node: cst.CSTNode, what: str, times: int) -> cst.CSTNode:
    done = node.visit(swap)
    if swap.found != times:
        raise mismatch(f"`{what}` stands there {swap.found} times, the page says {times}")
    if isinstance(swap, ExpressionSwap):
        swap.check(node, cast(cst.CSTNode, done))
    return cast(cst.CSTNode, done)


def below(node: cst.CSTNode, symbol: str) -> cst.CSTNode:
    """The one definition with that dotted name inside a definition; "" is the definition itself."""
    found = [node]
    for part in symbol.split(".") if symbol else ():
        found = [d for scope in found for d in _definitions(scope) if d.name.value == part]
    if len(found) != 1:
        raise mismatch(f"{symbol} is defined {len(found)} times after the edits before it")
    return found[0]


def _definitions(scope: cst.CSTNode) -> Iterator[cst.FunctionDef | cst.ClassDef]:
    for child in scope.children:
        if isinstance(child, cst.FunctionDef | cst.ClassDef):
            yield child
        elif not isinstance(child, cst.BaseExpression):
            yield from _definitions(child)


def mismatch(what: str) -> CppmegaError:
    return CppmegaError(
        "edit-mismatch",
        f"An edit does not fit its target: {what}.",
        "A patch that changes the wrong place, or none, trains the wrong model.",
        "correct the page; `cppmega diff NAME` shows the result",
    )


def with_body(target: cst.FunctionDef, ours: cst.FunctionDef) -> cst.FunctionDef:
    """The target with our body below its own docstring."""
    body = cast(cst.IndentedBlock, ours.body)
    old, new = list(target.body.body), list(body.body)
    if new and is_docstring(new[0]):
        new = new[1:]
    if isinstance(target.body, cst.IndentedBlock) and old and is_docstring(old[0]):
        new = [cast(cst.SimpleStatementLine, old[0]), *new]
        return target.with_changes(body=target.body.with_changes(body=new, footer=()))
    return target.with_changes(body=body.with_changes(body=new, footer=()))


def with_parameter(target: cst.FunctionDef, parameter: str) -> cst.FunctionDef:
    """The target with one more parameter at the end of its signature."""
    added = cast(cst.FunctionDef, cst.parse_statement(f"def f({parameter}): ...")).params.params
    place = "kwonly_params" if target.params.kwonly_params else "params"
    kept = list(getattr(target.params, place))
    if kept:
        kept[-1] = kept[-1].with_changes(
            comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")),
            whitespace_after_param=cst.SimpleWhitespace(""),
        )
    return target.with_changes(params=target.params.with_changes(**{place: [*kept, *added]}))


def swap_for(old: str, new: str) -> Swap:
    """The transformer that replaces one text by another, chosen by what the texts are."""
    if is_head(old):
        return HeadSwap(old, new)
    if is_expression(old) and is_expression(new):
        return ExpressionSwap(old, new)
    return StatementSwap(statements(old), lambda found: statements(new))


class ArgumentSwap(Swap):
    """Append an argument to every call of one callee."""

    def __init__(self, callee: str, argument: str) -> None:
        super().__init__()
        self.callee = shape(cst.parse_expression(callee))
        self.added = cast(cst.Call, cst.parse_expression(f"f({argument})")).args

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:  # noqa: N802
        if shape(original_node.func) != self.callee:
            return updated_node
        self.found += 1
        arguments = list(updated_node.args)
        if arguments:
            arguments[-1] = arguments[-1].with_changes(
                comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")),
                whitespace_after_arg=cst.SimpleWhitespace(""),
            )
        return updated_node.with_changes(args=[*arguments, *self.added])
