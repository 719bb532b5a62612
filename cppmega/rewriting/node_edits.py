"""The transformers behind `cppmega.edits`; imported when an edit runs, because libcst is slow."""

from __future__ import annotations

import ast
import difflib
import operator
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import cache
from typing import Any, cast

import libcst as cst

from cppmega.errors import CppmegaError
from cppmega.rewriting import codegen
from cppmega.rewriting.codegen import is_docstring
from cppmega.rewriting.errors import EditMismatchError
from cppmega.rewriting.source import parse_silently


def function(node: cst.CSTNode) -> cst.FunctionDef:
    if not isinstance(node, cst.FunctionDef):
        kind = "class" if isinstance(node, cst.ClassDef) else "statement"
        raise mismatch(f"the target is a {kind}, not a function")
    return node


def parsed_function(text: str) -> cst.FunctionDef:
    """Parse a text that holds one function."""
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
    code = codegen.text(node)
    try:
        return ast.dump(parse_silently(textwrap.dedent(code)))
    except SyntaxError:  # an expression that spans lines is not code by itself
        pass
    try:
        return ast.dump(parse_silently(f"({code.strip()})"))
    except SyntaxError:
        return code  # not code by itself: equal only to the same text


def gist(node: cst.CSTNode) -> Any:
    """A cheap summary of a node, equal for equal code in any layout."""
    kind = type(node)
    this: Any = node
    if kind is cst.Name:
        return this.value
    if kind is cst.Attribute:
        return kind, this.attr.value
    if kind is cst.Call:
        return kind, gist(this.func), len(this.args)
    if kind is cst.SimpleStatementLine:
        return kind, *map(gist, this.body)
    if kind is cst.Assign:
        return kind, gist(this.targets[0].target), gist(this.value)
    if kind in (cst.Expr, cst.Return, cst.AugAssign, cst.Await):
        value = getattr(this, "value", None) or getattr(this, "expression", None)
        return kind, value and gist(value)
    if kind in (cst.FunctionDef, cst.ClassDef):
        return kind, this.name.value
    if kind in (cst.If, cst.While):
        return kind, gist(this.test)
    if kind in (cst.SimpleString, cst.ConcatenatedString):
        return str
    return kind


_LAYOUT = (
    *("lpar", "rpar", "lbracket", "rbracket", "lbrace", "rbrace", "comma", "semicolon", "equal"),
    *("colon", "first_colon", "second_colon", "dot", "operator", "leading_lines", "header"),
    *("lines_after_decorators", "trailing_whitespace", "footer", "asynchronous"),
)


@cache
def _parts(kind: Any) -> list[str]:
    """Fields of a node that may hold code, not only layout."""
    names = [field.name for field in fields(kind)]
    return [name for name in names if name not in _LAYOUT and not name.startswith("whitespace")]


def differ(one: Any, other: Any) -> bool:
    """Whether two nodes are certainly different code, regardless of layout.

    Fast, but False proves nothing: different trees may print the same text.
    """
    if one is other:
        return False
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if not one or not other:
            return False  # an empty block prints as `pass`
        return len(one) != len(other) or any(map(differ, one, other))
    if not isinstance(one, cst.CSTNode | None) or not isinstance(other, cst.CSTNode | None):
        return isinstance(one, str) and isinstance(other, str) and one != other
    if type(one) is not type(other):
        return True
    if isinstance(one, cst.IndentedBlock) and isinstance(other, cst.IndentedBlock):
        return differ(_without_docstring(one), _without_docstring(other))
    return any(
        differ(getattr(one, name), getattr(other, name))
        for name in _parts(cast(Any, one).__class__)
    )


def _without_docstring(block: cst.IndentedBlock) -> Sequence[cst.BaseStatement]:
    return block.body[1:] if block.body and is_docstring(block.body[0]) else block.body


class Swap:
    """Replaces every node that matches, and counts them."""

    found = 0
    of_statements = False
    """Whether only statements and blocks change, so that expressions need not be visited."""

    def leave(self, before: Any, now: Any, place: str) -> Any:
        """Return the replacement of a node, or the node itself.

        Args:
            before: the node as it was.
            now: the same node, with its parts replaced.
            place: the field of its parent that holds it.
        """
        raise NotImplementedError


def swapped(node: Any, swap: Swap, place: str = "") -> Any:
    """Apply a swap everywhere in a node; parts without a change stay the same objects.

    A libcst transformer would rebuild every node, which takes ten times as long.
    """
    changes = {}
    visits = _holds_statements if swap.of_statements else _is_node
    kind: Any = type(node)
    for name in _parts(kind):
        old = getattr(node, name)
        if isinstance(old, list | tuple):
            items = [swapped(one, swap, name) if visits(one.__class__) else one for one in old]
            if not all(map(operator.is_, items, old)):
                changes[name] = items
        elif visits(old.__class__):
            new = swapped(old, swap, name)
            if new is not old:
                changes[name] = new
    return swap.leave(node, node.with_changes(**changes) if changes else node, place)


@cache
def _is_node(kind: Any) -> bool:
    return issubclass(kind, cst.CSTNode)


@cache
def _holds_statements(kind: Any) -> bool:
    return issubclass(kind, _WITH_BLOCKS)


_WITH_BLOCKS = (
    *(cst.BaseCompoundStatement, cst.IndentedBlock, cst.Else, cst.Finally, cst.MatchCase),
    *(cst.ExceptHandler, cst.ExceptStarHandler),
)


class ExpressionSwap(Swap):
    def __init__(self, old: str, new: str) -> None:
        self.old = cst.parse_expression(old)
        self.new = cst.parse_expression(new)
        self.texts = old, new
        self.gist, self.shape = gist(self.old), shape(self.old)

    def leave(self, before: Any, now: Any, place: str) -> Any:
        if type(before) is not type(self.old) or gist(before) != self.gist:
            return now
        if isinstance(before, cst.Name) and place in ("attr", "keyword", "name"):
            return now  # the name of an attribute, keyword, parameter or definition
        if shape(before) != self.shape:
            return now
        self.found += 1
        if before.lpar and not self.new.lpar:
            return self.new.with_changes(lpar=before.lpar, rpar=before.rpar)
        return self.new

    def check(self, before: cst.CSTNode, after: cst.CSTNode) -> None:
        """Refuse a replacement that lacks parentheses, such as `a + b` for `x` in `x * 2`.

        The result must equal that of replacing with a name first, and then substituting the
        expression for that name in the syntax tree.
        """
        if isinstance(self.new, _ATOMS) or self.new.lpar:
            return
        old, new = self.texts
        hole = "_cppmega_hole"
        marked = swapped(before, ExpressionSwap(old, hole))
        wanted = parse_silently(codegen.text(marked))
        filled = _Fill(hole, ast.parse(f"({new})", mode="eval").body).visit(wanted)
        if ast.dump(filled) != ast.dump(parse_silently(codegen.text(after))):
            raise mismatch(
                f"`{new}` does not stay one expression in place of `{old}`; put it in parentheses"
            )


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
"""Expressions that never need parentheses."""


class _Fill(ast.NodeTransformer):
    def __init__(self, hole: str, expression: ast.expr) -> None:
        self.hole, self.expression = hole, expression

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.expression if node.id == self.hole else node


class HeadSwap(Swap):
    """Replaces a head, as in `with a and b:` -> `with a, b:`, and keeps the block below."""

    of_statements = True

    def __init__(self, old: str, new: str) -> None:
        self.old: Any = cst.parse_statement(old + " pass\n")
        self.new: Any = cst.parse_statement(new + " pass\n")
        self.gist, self.shape = gist(self.old), shape(self.old)

    def leave(self, before: Any, now: Any, place: str) -> Any:
        if type(before) is not type(self.old) or gist(before) != self.gist:
            return now
        rest = ("orelse",) if hasattr(before, "orelse") else ()
        if shape(_head_of(before)) != self.shape:
            return now
        self.found += 1
        kept = {name: getattr(now, name) for name in ("body", "leading_lines", *rest)}
        return self.new.with_changes(**kept)


class StatementSwap(Swap):
    """Replaces consecutive statements with the result of `make`."""

    of_statements = True

    def __init__(
        self,
        old: str,
        make: Callable[[Sequence[cst.BaseStatement]], list[cst.BaseStatement]],
    ) -> None:
        self.headed = is_head(old)
        rest = " pass\nfinally: pass" if old.startswith("try") else " pass"
        self.gists, self.shapes = _parsed_pattern(old + rest if self.headed else old)
        self.make = make

    def leave(self, before: Any, now: Any, place: str) -> Any:
        if not isinstance(before, cst.IndentedBlock | cst.Module):
            return now
        gists = [gist(statement) for statement in before.body]
        body, width = list(now.body), len(self.shapes)
        at = len(gists) - width
        while at >= 0:
            if gists[at : at + width] == self.gists and self._fits(before.body[at : at + width]):
                self.found += 1
                body[at : at + width] = self.make(body[at : at + width])
                at -= width
            else:
                at -= 1
        if len(body) == len(now.body) and all(map(operator.is_, body, now.body)):
            return now
        return now.with_changes(body=body or [cst.SimpleStatementLine([cst.Pass()])])

    def _fits(self, found: Sequence[cst.BaseStatement]) -> bool:
        *first, last = found
        last = _head_of(last) if self.headed else last
        return [shape(statement) for statement in (*first, last)] == self.shapes


def _head_of(statement: Any) -> Any:
    """A compound statement with `pass` as its block, and without what follows the block."""
    body = cst.SimpleStatementSuite([cst.Pass()])
    rest: dict[str, Any] = {
        name: None for name in ("orelse", "finalbody") if hasattr(statement, name)
    }
    if isinstance(statement, cst.Try | cst.TryStar):  # it needs something after its block
        rest |= {"handlers": (), "finalbody": cst.Finally(body)}
    return statement.with_changes(body=body, leading_lines=(), **rest)


@cache
def _parsed_pattern(text: str) -> tuple[list[Any], list[str]]:
    """Gists and shapes of the statements of a text; none of its nodes ends up in a result."""
    try:
        old = statements(text)
    except cst.ParserSyntaxError:
        place = text.removesuffix(" pass")
        raise mismatch(
            f"`{place}` is not a statement, nor the head of one; name one next to it"
        ) from None
    return [gist(statement) for statement in old], [shape(statement) for statement in old]


def exactly(swap: Swap, node: cst.CSTNode, what: str, times: int) -> cst.CSTNode:
    """Apply a swap, which must match exactly as often as the page declares."""
    done = swapped(node, swap)
    if swap.found != times:
        near = "" if swap.found else _nearest(node, what)
        raise mismatch(f"`{what}` occurs {swap.found} times, but the page declares {times}{near}")
    if isinstance(swap, ExpressionSwap):
        swap.check(node, done)
    return cast(cst.CSTNode, done)


def _nearest(node: cst.CSTNode, what: str) -> str:
    """Name the code that is most like the first line that is missing, and what differs."""
    lines = [line.strip() for line in codegen.text(node).splitlines()]
    missing = [line.strip() for line in what.splitlines()]
    missing = [wanted for wanted in missing if not any(wanted in line for line in lines)]
    if not missing:
        return "; its lines are there, but not as one piece of code" if "\n" in what else ""
    matches = difflib.get_close_matches(missing[0], [*lines, *_pieces(node)], 1)
    if not matches:
        return ""
    old, new = ([*_TOKEN.findall(text)] for text in (missing[0], matches[0]))
    parts = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    changes = [
        ("".join(old[i:j]), "".join(new[k:m])) for how, i, j, k, m in parts if how != "equal"
    ]
    differs = ", ".join(
        f"`{there.strip()}` instead of `{wanted.strip()}`"
        if wanted.strip() and there.strip()
        else f"`{there.strip()}` added"
        if there.strip()
        else f"no `{wanted.strip()}`"
        for wanted, there in changes
        if wanted.strip() or there.strip()
    )
    return f"; the nearest is `{matches[0]}`, with {differs}" if differs else ""


_TOKEN = re.compile(r"\w+|\s+|[^\w\s]")


def _pieces(node: cst.CSTNode) -> Iterator[str]:
    """Yield the texts of the arguments and expressions of a node that fit on one line."""
    for child in node.children:
        if isinstance(child, cst.Arg | cst.BaseExpression):
            text = cst.Module([]).code_for_node(child).strip().rstrip(", ")
            if "\n" not in text:
                yield text
        yield from _pieces(child)


def below(node: cst.CSTNode, symbol: str) -> cst.CSTNode:
    """Return the one definition with that dotted name in a definition; "" is the definition."""
    found = [node]
    for part in symbol.split(".") if symbol else ():
        found = [d for scope in found for d in _definitions(scope) if d.name.value == part]
    if len(found) != 1:
        raise mismatch(f"{symbol} is defined {len(found)} times after the preceding edits")
    return found[0]


def _definitions(scope: cst.CSTNode) -> Iterator[cst.FunctionDef | cst.ClassDef]:
    for child in scope.children:
        if isinstance(child, cst.FunctionDef | cst.ClassDef):
            yield child
        elif not isinstance(child, cst.BaseExpression):
            yield from _definitions(child)


def mismatch(what: str) -> CppmegaError:
    return EditMismatchError(what)


def with_body(target: cst.FunctionDef, replacement: cst.FunctionDef) -> cst.FunctionDef:
    """Return the target with the body of the replacement below its own docstring."""
    body = cast(cst.IndentedBlock, replacement.body)
    old, new = list(target.body.body), list(body.body)
    if new and is_docstring(new[0]):
        new = new[1:]
    if isinstance(target.body, cst.IndentedBlock) and old and is_docstring(old[0]):
        new = [cast(cst.SimpleStatementLine, old[0]), *new]
        return target.with_changes(body=target.body.with_changes(body=new, footer=()))
    return target.with_changes(body=body.with_changes(body=new, footer=()))


def with_last(target: cst.CSTNode, added: Sequence[cst.BaseStatement]) -> cst.CSTNode:
    """Append statements to the body of a function, or methods and statements to that of a class."""
    target = target if isinstance(target, cst.ClassDef) else function(target)
    body = target.body
    if not isinstance(body, cst.IndentedBlock):
        raise mismatch(f"the body of {target.name.value} is not on lines of its own")
    if isinstance(target, cst.ClassDef) and added:
        head: Any = added[0]
        apart = (cst.EmptyLine(indent=False), *head.leading_lines)
        added = [head.with_changes(leading_lines=apart), *added[1:]]
    return target.with_changes(body=body.with_changes(body=[*body.body, *added]))


def with_parameter(
    target: cst.FunctionDef, parameter: str, before: str = "", after: str = ""
) -> cst.FunctionDef:
    """Add a parameter to the signature of the target, at the end or next to another one."""
    added = cast(cst.FunctionDef, cst.parse_statement(f"def f({parameter}): ...")).params.params
    place = "kwonly_params" if target.params.kwonly_params else "params"
    at = len(getattr(target.params, place))
    if wanted := before or after:
        names = {
            one: [param.name.value for param in getattr(target.params, one)]
            for one in ("posonly_params", "params", "kwonly_params")
        }
        place = next((one for one in names if wanted in names[one]), "")
        if not place:
            known = [name for group in names.values() for name in group]
            raise mismatch(f"it has no parameter `{wanted}`; it has {', '.join(known)}")
        at = names[place].index(wanted) + bool(after)
    kept = list(getattr(target.params, place))
    return target.with_changes(
        params=target.params.with_changes(**{place: _joined(kept, added, at, "param")})
    )


def _joined(kept: Sequence[Any], added: Sequence[Any], at: int, kind: str) -> list[Any]:
    """Insert into a list with commas; the last item of the result keeps what was there."""
    comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    apart = {"comma": comma, f"whitespace_after_{kind}": cst.SimpleWhitespace("")}
    if at < len(kept):
        added = [one.with_changes(**apart) for one in added]
    elif kept:
        kept = [*kept[:-1], kept[-1].with_changes(**apart)]
    return [*kept[:at], *added, *kept[at:]]


def swap_for(old: str, new: str) -> Swap:
    """Choose the swap that replaces one text with another by the kind of the texts."""
    if is_head(old):
        return HeadSwap(old, new)
    if is_expression(old) and is_expression(new):
        return ExpressionSwap(old, new)
    return StatementSwap(old, lambda found: statements(new))


class KeywordSwap(Swap):
    """Replaces a keyword argument, as in `keep_graph=True` -> `keep_graph=False`, in every call.

    An empty text deletes it.
    """

    def __init__(self, old: str, new: str) -> None:
        calls = [cast(cst.Call, cst.parse_expression(f"f({text})")) for text in (old, new)]
        (self.old,), self.new = (call.args for call in calls)
        self.shape = shape(self.old.value)

    def leave(self, before: Any, now: Any, place: str) -> Any:
        if self.new and isinstance(before, cst.Arg) and self._fits(before):
            self.found += 1
            return now.with_changes(keyword=self.new[0].keyword, value=self.new[0].value)
        if not self.new and isinstance(before, cst.Call):
            pairs = zip(before.args, now.args, strict=True)
            kept = [arg for old, arg in pairs if not self._fits(old)]
            self.found += len(now.args) - len(kept)
            if kept and len(kept) < len(now.args):
                kept[-1] = kept[-1].with_changes(comma=now.args[-1].comma)
            return now if len(kept) == len(now.args) else now.with_changes(args=kept)
        return now

    def _fits(self, arg: cst.Arg) -> bool:
        keyword = cast(cst.Name, self.old.keyword).value
        named = arg.keyword is not None and arg.keyword.value == keyword
        return named and shape(arg.value) == self.shape


def is_keyword(text: str) -> bool:
    """Whether a text can be one keyword argument of a call."""
    try:
        call: Any = ast.parse(f"f({text})", mode="eval").body
    except SyntaxError:
        return False
    return not call.args and len(call.keywords) == 1 and call.keywords[0].arg is not None


def replaced(old: str, new: str, node: cst.CSTNode, times: int) -> cst.CSTNode:
    """Replace one text with another; `name=value` is a keyword where no statement is like it."""
    swap = swap_for(old, new)
    if is_keyword(old) and (is_keyword(new) or not new):
        swapped(node, swap)
        swap = swap_for(old, new) if swap.found else KeywordSwap(old, new)
    return exactly(swap, node, old, times)


class ArgumentSwap(Swap):
    """Adds an argument to every call of one callee, at the end or next to another argument."""

    def __init__(self, callee: str, argument: str, before: str = "", after: str = "") -> None:
        self.callee: Any = cst.parse_expression(callee)
        self.shape = shape(self.callee)
        self.added = cast(cst.Call, cst.parse_expression(f"f({argument})")).args
        self.beside, self.follows = before or after, bool(after)

    def leave(self, before: Any, now: Any, place: str) -> Any:
        if not isinstance(before, cst.Call) or gist(before.func) != gist(self.callee):
            return now
        if shape(before.func) != self.shape:
            return now
        self.found += 1
        at = self._place(now) if self.beside else len(now.args)
        return now.with_changes(args=_joined(now.args, self.added, at, "arg"))

    def _place(self, call: cst.Call) -> int:
        names = [
            arg.keyword.value if arg.keyword else codegen.text(arg.value).strip()
            for arg in call.args
        ]
        if names.count(self.beside) != 1:
            raise mismatch(
                f"a call of `{codegen.text(self.callee).strip()}` has {names.count(self.beside)} "
                f"arguments `{self.beside}`; it has {', '.join(names)}"
            )
        return names.index(self.beside) + self.follows
