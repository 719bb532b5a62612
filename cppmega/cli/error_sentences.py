"""The sentences of an error, from its source, with placeholders for run-time values."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, pairwise, product

Function = ast.FunctionDef | ast.AsyncFunctionDef
_TRANSPARENT = {"sorted", "list", "map", "str", "gib", "len", "set", "tuple", "type"}
"""Functions whose result is named after their argument."""
_CHANGING = {"replace", "strip", "rstrip", "lower", "resolve", "absolute", "as_posix", "readlink"}
"""Methods whose result is named after their owner."""
_GENERIC = {"name", "word", "__name__", "__qualname__", "path", "total", "first"}
"""Attributes whose names mean nothing without their owner's."""
_ENVIRONMENTS = {"environ", "environment"}
_DEPTH = 8
"""Limit for names that refer to other names: no message is nested more deeply."""
_FIELD = re.compile(r"<[^<>]+>")
_ALTERNATIVES = 8
"""Beyond this number, alternatives no longer describe anything."""


@dataclass(frozen=True, eq=False)
class Module:
    """One parsed file."""

    name: str
    tree: ast.Module
    texts: dict[str, tuple[Module, Function]] = field(default_factory=dict)
    """The functions of all modules that return a text, by dotted name."""

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node; parents precede their children."""
        return list(ast.walk(self.tree))

    @cached_property
    def title(self) -> str:
        """The first line of its docstring."""
        return (ast.get_docstring(self.tree) or "").partition("\n")[0]

    @cached_property
    def imported(self) -> dict[str, str]:
        """Local name -> dotted name of what is imported under it."""
        return {
            alias.asname or alias.name: f"{node.module}.{alias.name}"
            for node in self.nodes
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
        }

    def full_name(self, node: ast.expr) -> str:
        """The dotted name of a function that the module calls; empty for a method."""
        match node:
            case ast.Name(id=name):
                return self.imported.get(name, f"{self.name}.{name}")
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if owner in self.imported:
                return f"{self.imported[owner]}.{name}"
        return ""

    @cached_property
    def _above(self) -> dict[ast.AST, ast.AST]:
        return {below: node for node in self.nodes for below in ast.iter_child_nodes(node)}

    def around(self, node: ast.AST) -> list[ast.AST]:
        """The node and its ancestors, the innermost first."""
        found = [node]
        while (above := self._above.get(found[-1])) is not None:
            found.append(above)
        return found

    def function_of(self, node: ast.AST) -> Function | None:
        """The innermost function that contains a node."""
        return next((one for one in self.around(node) if isinstance(one, Function)), None)


@dataclass(frozen=True, eq=False)
class Scope:
    """The names visible to an expression: those of its place, and arguments of a call."""

    module: Module
    place: ast.AST
    """The call that the expression is part of."""
    arguments: Mapping[str, tuple[ast.expr, Scope]] = field(default_factory=dict)

    def values(self, name: str) -> Iterator[tuple[ast.expr, Scope]]:
        """The expressions that a name can stand for; none if it is known only at run time."""
        if name in self.arguments:
            yield self.arguments[name]
            return
        for value in self._assigned(name):
            yield value, self

    def _assigned(self, name: str) -> list[ast.expr]:
        """The values assigned to a name before the place, in its function or else in its module."""
        around = self.module.around(self.place)
        for inner, outer in pairwise(around):
            values: list[ast.expr] = []
            for block in _blocks(outer):
                if inner in block:
                    values = _after(block[: block.index(inner)], name)
            if values:
                return values
            if isinstance(outer, Function) and name in parameters(outer):
                return []
        return _after(self.module.tree.body, name)


def parameters(function: Function) -> list[str]:
    """The names of a function's parameters, in the order in which a call passes them."""
    return [one.arg for one in (*function.args.args, *function.args.kwonlyargs)]


def defaults(function: Function) -> Iterator[tuple[str, ast.expr]]:
    """The parameters that a call may leave out, and their values."""
    values = function.args.defaults
    yield from zip((one.arg for one in function.args.args[-len(values) :]), values, strict=False)
    for one, value in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True):
        if value is not None:
            yield one.arg, value


def text_functions(modules: Iterable[Module]) -> dict[str, tuple[Module, Function]]:
    """The functions of modules that return a text, by dotted name."""
    return {
        f"{module.name}.{node.name}": (module, node)
        for module in modules
        for node in module.tree.body
        if isinstance(node, Function)
        and isinstance(node.returns, ast.Name)
        and node.returns.id == "str"
    }


def sentences(node: ast.expr, scope: Scope, depth: int = 0) -> list[str]:
    """The texts that an expression can have, one for each alternative."""
    match node:
        case ast.IfExp():
            return _distinct(node.body, node.orelse, scope=scope, depth=depth)
        case ast.BoolOp(op=ast.Or()):
            fixed = [one for one in node.values if _is_text(one)]
            return _distinct(*(fixed or node.values[:1]), scope=scope, depth=depth)
    return _texts(node, scope, depth)


def _distinct(*nodes: ast.expr, scope: Scope, depth: int) -> list[str]:
    found = [text for node in nodes for text in sentences(node, scope, depth)]
    return list(dict.fromkeys(text for text in found if text))


def _texts(node: ast.expr, scope: Scope, depth: int) -> list[str]:
    """The texts of a part; an optional part of a sentence is included."""
    match node:
        case ast.Constant():
            return [str(node.value)]
        case ast.JoinedStr():
            return _joined(node.values, scope, depth)
        case ast.FormattedValue():
            return _texts(node.value, scope, depth)
        case ast.BinOp(op=ast.Add()) if _is_text(node):
            return _joined([node.left, node.right], scope, depth)
        case ast.BinOp(op=ast.Div(), right=ast.Constant(value=str(last))):
            return [f"{text}/{last}" for text in _texts(node.left, scope, depth)]
        case ast.IfExp():
            body = _texts(node.body, scope, depth)
            return body if any(body) else _texts(node.orelse, scope, depth)
        case ast.BoolOp():
            return _texts(node.values[0], scope, depth)
        case ast.Call(func=ast.Name(id="did_you_mean" | "suggestion")):
            return [""]
        case ast.Call(func=called) if depth < _DEPTH:
            return _returned(scope.module.full_name(called), scope, depth) or [_placeholder(node)]
        case ast.Name(id=name) if depth < _DEPTH:
            found = [
                text
                for value, there in scope.values(name)
                if _is_text(value)
                for text in sentences(value, there, depth + 1)
            ]
            return list(dict.fromkeys(found)) or [_placeholder(node)]
    return [_placeholder(node)]


def _returned(name: str, scope: Scope, depth: int) -> list[str]:
    """The texts that a function of the package returns; none unless all consist of words."""
    if name not in scope.module.texts or name.rpartition(".")[2] in _TRANSPARENT:
        return []
    module, function = scope.module.texts[name]
    returned = [node for node in ast.walk(function) if isinstance(node, ast.Return)]
    values = [(node.value, Scope(module, node)) for node in returned if node.value is not None]
    if not all(isinstance(value, ast.Call) or _is_text(value) for value, _ in values):
        return []
    found = [text for value, inner in values for text in sentences(value, inner, depth + 1)]
    return [] if any(_FIELD.fullmatch(text) for text in found) else list(dict.fromkeys(found))


def _joined(parts: list[ast.expr], scope: Scope, depth: int) -> list[str]:
    choices = product(*(_texts(part, scope, depth) for part in parts))
    return ["".join(choice) for choice in islice(choices, _ALTERNATIVES)]


def _is_text(node: ast.expr) -> bool:
    """Whether an expression consists of words; other values keep the name of their variable."""
    match node:
        case ast.Constant(value=value):
            return isinstance(value, str | int | float) and value not in ("", True, False)
        case ast.JoinedStr() | ast.Name():
            return True
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return any(isinstance(one, ast.JoinedStr) or _is_string(one) for one in (left, right))
        case ast.IfExp(body=one, orelse=other):
            return _is_text(one) or _is_text(other)
        case ast.BoolOp():
            return any(map(_is_text, node.values))
    return False


def _is_string(node: ast.expr) -> bool:
    match node:
        case ast.Constant(value=str()) | ast.JoinedStr():
            return True
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return _is_string(left) or _is_string(right)
        case ast.IfExp(body=one):
            return _is_string(one)
    return False


def _placeholder(node: ast.expr) -> str:
    return f"<{_word(node)}>"


def _word(node: ast.AST) -> str:
    """The name under which a reader knows the value of an expression."""
    match node:
        case ast.Name(id=name):
            return name.strip("_").lower().replace("_", " ")
        case ast.Attribute(attr=attr) if attr in _GENERIC:
            return _word(node.value)
        case ast.Attribute(attr=attr):
            return attr.strip("_").lower().replace("_", " ")
        case ast.Subscript(slice=ast.Constant(value=str(key))):
            return key.lower()
        case ast.Subscript(value=owner) if _word(owner) in _ENVIRONMENTS:
            return "value"
        case ast.Subscript() | ast.Starred():
            return _word(node.value)
        case ast.BoolOp(values=[first, *_]) | ast.IfExp(body=first) | ast.BinOp(left=first):
            return _word(first)
        case ast.GeneratorExp(generators=[first, *_]) | ast.ListComp(generators=[first, *_]):
            return _word(first.iter)
        case ast.Call():
            return _word(_named_by(node))
    return "value"


def _named_by(call: ast.Call) -> ast.expr:
    """The part of a call that its result is named after."""
    match call:
        case ast.Call(func=ast.Name(id=name), args=[*_, last]) if name in _TRANSPARENT:
            return last
        case ast.Call(func=ast.Attribute(attr="join" | "quote" | "fromkeys"), args=[last]):
            return last
        case ast.Call(func=ast.Attribute(value=owner, attr=attr)) if attr in _CHANGING:
            return owner
    return call.func


def _blocks(node: ast.AST) -> list[list[ast.AST]]:
    """The lists of statements that a statement contains."""
    return [
        value for _, value in ast.iter_fields(node) if isinstance(value, list) and len(value) > 1
    ]


def _after(body: list[ast.AST] | list[ast.stmt], name: str) -> list[ast.expr]:
    """The values that a name may have after some statements."""
    values: list[ast.expr] = []
    for node in body:
        match node:
            case ast.Assign(targets=[ast.Name(id=found)], value=value) if found == name:
                values = [value]
            case ast.AnnAssign(target=ast.Name(id=found), value=ast.expr() as value) if (
                found == name
            ):
                values = [value]
            case ast.If() | ast.For() | ast.With() | ast.Try():
                inside = (_after(block, name) for block in _inner(node))
                values = [*values, *(value for block in inside for value in block)]
    return values


def _inner(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for part in ("body", "orelse", "finalbody"):
        yield getattr(node, part, [])
    for handler in getattr(node, "handlers", []):
        yield handler.body
