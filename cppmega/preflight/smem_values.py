"""What an expression in a source text says about one pass config: true, false, nothing, unreadable.

For `cppmega.preflight.smem`. Names are followed to what is assigned to them in the same scope or
outside of it. Nothing is run: what would have to be run to be known is unreadable, which does not
count as true.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import reduce

FLAG = "TL_ENABLE_AGGRESSIVE_SHARED_MEMORY_MERGE"
_VALUE = "tl.enable_aggressive_shared_memory_merge"
"""What the key is behind its name; TileLang takes both."""
_DEPTH = 12
_LACKS = "its pass_configs lack the flag"

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Value:
    """What is known of the flag in some pass configs."""

    state: bool | None = None
    """What it is set to; None: nothing sets it, or nobody can tell."""
    reason: str = ""
    """Why the state is not True."""
    present: bool = False
    """Whether there are pass configs at all."""
    readable: bool = True

    def then(self, later: Value) -> Value:
        """Both, where the later one wins."""
        if later.state is not None or not later.readable:
            return later
        if not later.present:
            return self
        return Value(self.state, self.reason or later.reason, True, self.readable)


NOTHING = Value()
"""There are no pass configs."""


def _unreadable(node: ast.AST, what: str = "its pass_configs cannot be read") -> Value:
    return Value(None, f"{what}: {ast.unparse(node)[:80]}", True, False)


@dataclass
class Scope:
    """The names of a module or of a function."""

    parent: Scope | None = None
    values: dict[str, list[tuple[Scope, ast.expr]]] = field(default_factory=dict)
    """Name -> what is assigned to it, with the scope to read that in."""
    changes: list[tuple[ast.stmt, bool]] = field(default_factory=list)
    """Statements that may change a dictionary, and whether a condition guards them."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Name -> what it is called in full, such as `tilelang.jit`."""
    imported: list[tuple[str, str, str]] = field(default_factory=list)
    """(module, name there, name here) of imports that are not tilelang's."""
    functions: dict[str, list[Function]] = field(default_factory=dict)
    parameters: frozenset[str] = frozenset()
    handed_on: str = ""
    """The function's own `**name`."""

    @classmethod
    def of(cls, node: ast.Module | Function, parent: Scope | None = None) -> Scope:
        """The scope that a module or a function opens."""
        scope = cls(parent)
        if not isinstance(node, ast.Module):
            scope.parameters = frozenset(
                a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg)
            )
            scope.handed_on = node.args.kwarg.arg if node.args.kwarg is not None else ""
        for statement, guarded in _statements(node.body):
            scope._learn(statement, guarded)
        return scope

    def _learn(self, node: ast.stmt, guarded: bool) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                self.aliases[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom):
            self._learn_import(node)
        elif isinstance(node, Function):
            self.functions.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    self.values.setdefault(target.id, []).append((self, node.value))
        self.changes.append((node, guarded))

    def _learn_import(self, node: ast.ImportFrom) -> None:
        module = "." * node.level + (node.module or "")
        for alias in node.names:
            here = alias.asname or alias.name
            if module.partition(".")[0] in ("tilelang", "functools"):
                self.aliases[here] = f"{module}.{alias.name}"
            elif alias.name == "tilelang":  # handed on by a module that looks whether it is there
                self.aliases[here] = "tilelang"
            else:
                self.imported.append((module, alias.name, here))

    def chain(self) -> Iterator[Scope]:
        """This scope and those around it."""
        scope: Scope | None = self
        while scope is not None:
            yield scope
            scope = scope.parent

    def dotted(self, node: ast.expr) -> str:
        """The full name of what a dotted expression means; "" where it means nothing imported."""
        if isinstance(node, ast.Attribute):
            outer = self.dotted(node.value)
            return f"{outer}.{node.attr}" if outer else ""
        if isinstance(node, ast.Name):
            return next((s.aliases[node.id] for s in self.chain() if node.id in s.aliases), "")
        return ""

    def assigned(self, name: str) -> tuple[Scope, list[tuple[Scope, ast.expr]]]:
        """The scope that holds a name, and what is assigned to it."""
        for scope in self.chain():
            if name in scope.values:
                return scope, scope.values[name]
            if name in scope.parameters:
                break
        return self, []

    # -- the flag ------------------------------------------------------------------------------

    def flag(self, node: ast.expr, depth: int = 0) -> Value:
        """What some pass configs say."""
        if depth > _DEPTH:
            return _unreadable(node)
        if isinstance(node, ast.Constant) and node.value is None:
            return NOTHING
        if isinstance(node, ast.Dict):
            return self._of_dict(node, depth)
        if isinstance(node, ast.Name):
            return self._of_name(node, depth)
        if isinstance(node, ast.IfExp):
            sides = [side for side in (node.body, node.orelse) if not _stands_in(side, node.test)]
            return _worst(self.flag(side, depth + 1) for side in sides)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            return self.flag(node.left, depth + 1).then(self.flag(node.right, depth + 1))
        if isinstance(node, ast.Call):
            return self._of_call(node, depth)
        return _unreadable(node)

    def _of_dict(self, node: ast.Dict, depth: int) -> Value:
        found = Value(None, _LACKS, True)
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                found = found.then(self.flag(value, depth + 1))
            elif self.is_flag(key):
                found = self._setting(value)
        return found

    def _of_name(self, node: ast.Name, depth: int) -> Value:
        scope, given = self.assigned(node.id)
        if not given:
            return _unreadable(node)
        found = _worst(where.flag(value, depth + 1) for where, value in given)
        for statement, guarded in scope.changes:
            later = scope._change(statement, node.id, depth)
            if later is not None and guarded:
                later = _unreadable(statement, "its pass_configs change under a condition")
            found = found if later is None else found.then(later)
        return found

    def _of_call(self, node: ast.Call, depth: int) -> Value:
        if isinstance(node.func, ast.Attribute) and node.func.attr == "copy" and not node.args:
            return self.flag(node.func.value, depth + 1)
        if isinstance(node.func, ast.Name) and node.func.id == "dict":
            parts = [*node.args, *(k.value for k in node.keywords if k.arg is None)]
            values = [self.flag(part, depth + 1) for part in parts]
            return reduce(Value.then, values, Value(None, _LACKS, True))
        return _unreadable(node)

    def _change(self, node: ast.stmt, name: str, depth: int) -> Value | None:
        """What a statement does to the flag in the dictionary of that name; None: nothing."""
        if isinstance(node, ast.Assign | ast.Delete):
            keys = [_key(target, name) for target in node.targets]
            if any(key is not None and self.is_flag(key) for key in keys):
                if isinstance(node, ast.Assign):
                    return self._setting(node.value)
                return _unreadable(node, "the flag is taken out again")
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.BitOr):
            if _is_name(node.target, name):
                return self.flag(node.value, depth + 1)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            call = node.value
            updates = isinstance(call.func, ast.Attribute) and call.func.attr == "update"
            if updates and call.args and _is_name(call.func.value, name):  # type: ignore[attr-defined]
                return self.flag(call.args[0], depth + 1)
        return None

    def is_flag(self, key: ast.expr) -> bool:
        """Whether a key of a dictionary is the flag, by whatever name."""
        if isinstance(key, ast.Attribute):
            return key.attr == FLAG or (key.attr == "value" and self.is_flag(key.value))
        if isinstance(key, ast.Constant):
            return key.value == _VALUE
        if isinstance(key, ast.Name):
            given = self.assigned(key.id)[1]
            named = [n for s in self.chain() for _, n, here in s.imported if here == key.id]
            return FLAG in named or any(
                not isinstance(value, ast.Name) and where.is_flag(value) for where, value in given
            )
        return False

    def _setting(self, node: ast.expr) -> Value:
        """What the flag is set to."""
        if isinstance(node, ast.Name):
            given = self.assigned(node.id)[1]
            if len(given) == 1 and isinstance(given[0][1], ast.Constant):
                node = given[0][1]
        if isinstance(node, ast.Constant):
            good = node.value is True
            return Value(good, "" if good else f"the flag is {node.value!r}", True)
        return _unreadable(node, "the value of the flag cannot be read")

    # -- keywords ------------------------------------------------------------------------------

    def keyword(self, call: ast.Call) -> Value:
        """What the `pass_configs` of a call say about the flag."""
        found = NOTHING
        for keyword in call.keywords:
            if keyword.arg == "pass_configs":
                found = self.flag(keyword.value)
            elif keyword.arg is None:
                found = found.then(self._unpacked(keyword.value))
        return found

    def _unpacked(self, node: ast.expr) -> Value:
        """`**options`: what stands there under `pass_configs`."""
        where, value = self, node
        if isinstance(node, ast.Name):
            if node.id == self.handed_on:
                return NOTHING
            given = self.assigned(node.id)[1]
            if len(given) != 1:
                return _unreadable(node)
            where, value = given[0]
        if not isinstance(value, ast.Dict) or None in value.keys:
            return _unreadable(node)
        for key, entry in zip(value.keys, value.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == "pass_configs":
                return where.flag(entry)
        return NOTHING

    def put(self) -> Value:
        """What a function puts under `pass_configs` into its own `**name`."""
        found = NOTHING
        for node, guarded in self.changes:
            if not isinstance(node, ast.Assign):
                continue
            keys = [_key(target, self.handed_on) for target in node.targets]
            if any(isinstance(key, ast.Constant) and key.value == "pass_configs" for key in keys):
                found = self.flag(node.value)
                if guarded:
                    found = _unreadable(node, "its pass_configs are given under a condition")
        return found


def _statements(body: Iterable[ast.stmt], guarded: bool = False) -> Iterator[tuple[ast.stmt, bool]]:
    """Every statement of a scope, and whether a condition stands above it.

    A look whether TileLang is installed is no condition: without it no kernel is built, and what
    stands in for it does not matter.
    """
    for node in body:
        yield node, guarded
        if isinstance(node, ast.If):
            asks = _asks_for_tilelang(node.test)
            yield from _statements(node.body, guarded or not asks)
            if not asks:
                yield from _statements(node.orelse, True)
        elif isinstance(node, ast.Try):
            yield from _statements([*node.body, *node.orelse, *node.finalbody], guarded)
        elif isinstance(node, ast.With):
            yield from _statements(node.body, guarded)
        elif isinstance(node, ast.For | ast.While):
            yield from _statements([*node.body, *node.orelse], True)


def _asks_for_tilelang(test: ast.expr) -> bool:
    """`HAVE_TILELANG` or `tilelang is not None`; other forms are taken for any condition."""
    named = isinstance(test, ast.Name | ast.Attribute)
    there = isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.IsNot)
    return (named or there) and "tilelang" in ast.unparse(test).lower()


def _stands_in(side: ast.expr, test: ast.expr) -> bool:
    """The empty dictionary where TileLang is missing."""
    empty = isinstance(side, ast.Dict) and not side.keys
    return empty and "tilelang" in ast.unparse(test).lower()


def _is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _key(target: ast.expr, name: str) -> ast.expr | None:
    """The key in `name[key]`."""
    if isinstance(target, ast.Subscript) and _is_name(target.value, name):
        return target.slice
    return None


def _worst(values: Iterable[Value]) -> Value:
    """Of several values that a name may have, the one that says least."""
    return min(values, key=lambda v: (v.readable, v.state is not None, bool(v.state)))
