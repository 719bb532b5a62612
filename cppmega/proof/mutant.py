"""Do-nothing mutants: the text of a patch with the behavior of stock.

A mutant has the patched signature, every helper, import and name, and the patched body as code
that is never run; what runs is upstream's body. A `verify` that passes on it reads text or names
instead of calling the code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from functools import reduce
from typing import Any, cast

import libcst as cst

from cppmega.page import Edit
from cppmega.rewriting.codegen import is_docstring
from cppmega.rewriting.node_edits import shape


def of_sources(edits: Sequence[Edit]) -> Edit:
    """Combine the source edits of several pages to one symbol into one that does nothing.

    Later edits are written for the text that earlier ones leave, so they are merged together.
    """

    def nothing(stock: Any) -> Any:
        done = merged(stock, reduce(lambda node, edit: edit.edit(node), edits, stock))
        return _with_place_for(edits[0].mark, done)

    helpers = dict.fromkeys(helper for edit in edits for helper in edit.helpers)
    imports = dict.fromkeys(line for edit in edits for line in edit.imports)
    return replace(edits[0], edit=nothing, helpers=tuple(helpers), imports=tuple(imports))


def of_runtime(edit: Edit) -> Edit:
    """Return a runtime edit with the original's behavior under the replacement's name."""
    if edit.kind == "class-swap":
        return replace(edit, edit=_class_mutant(edit.edit))
    return replace(edit, edit=_function_mutant)


def merged(stock: cst.CSTNode, patched: cst.CSTNode) -> cst.CSTNode:
    """Return the patched text with stock's behavior, for a function, a class or a statement."""
    if isinstance(stock, cst.Module):
        never = [_dead(cast(cst.BaseStatement, one)) for one in cast(cst.Module, patched).body]
        return stock.with_changes(body=[*stock.body, *never])
    if isinstance(stock, cst.FunctionDef):
        return _merged_function(stock, cast(cst.FunctionDef, patched))
    holder, new = cast(cst.ClassDef, stock), cast(cst.ClassDef, patched)
    # Bases and decorators are behavior too, so those of stock stay.
    return holder.with_changes(body=cst.IndentedBlock(_merged_body(holder, new)))


def _with_place_for(mark: str | None, mutant: cst.CSTNode) -> cst.CSTNode:
    """Define the inner function that carries a mark if only the patch defines it; never called."""
    if not mark or not isinstance(mutant, cst.FunctionDef):
        return mutant
    statements = _statements(mutant.body)
    if any(isinstance(s, cst.FunctionDef) and s.name.value == mark for s in statements):
        return mutant
    inner = cst.parse_statement(f"def {mark}():\n    pass\n")
    at = 1 if statements and is_docstring(statements[0]) else 0
    return mutant.with_changes(body=cst.IndentedBlock([*statements[:at], inner, *statements[at:]]))


def _merged_body(stock: cst.ClassDef, patched: cst.ClassDef) -> list[cst.BaseStatement]:
    """Merge two class bodies; statements that only the patch has become code that never runs."""
    old, new = _statements(stock.body), _statements(patched.body)
    names = {s.name.value for s in old if isinstance(s, cst.FunctionDef)}
    found: list[cst.BaseStatement] = []
    matcher = SequenceMatcher(None, [*map(_key, old)], [*map(_key, new)], autojunk=False)
    for how, i, j, k, m in matcher.get_opcodes():
        if how == "equal":
            found += map(_merged_statement, old[i:j], new[k:m])
            continue
        found += old[i:j]
        for statement in new[k:m]:
            if not isinstance(statement, cst.FunctionDef):
                found.append(_dead(statement))
            elif statement.name.value not in names:
                found.append(statement)  # a new method is only a name, which proves nothing
    # If the patch only removes code, this alone distinguishes the mutant from stock.
    return [*found, _dead(cst.SimpleStatementLine([cst.Pass()]))]


def _merged_statement(old: cst.BaseStatement, new: cst.BaseStatement) -> cst.BaseStatement:
    if isinstance(old, cst.FunctionDef):
        return _merged_function(old, cast(cst.FunctionDef, new))
    return old


def _key(statement: cst.BaseStatement) -> str:
    """Return a key to match statements: the name of a method, the code of others."""
    if isinstance(statement, cst.FunctionDef):
        return f"def {statement.name.value}"
    return shape(statement)


def _dead(statement: cst.BaseStatement) -> cst.If:
    """Return code that is present and never runs."""
    return cst.If(cst.parse_expression("not __name__"), cst.IndentedBlock([statement]))


def _statements(body: cst.BaseSuite) -> list[cst.BaseStatement]:
    if isinstance(body, cst.IndentedBlock):
        return list(body.body)
    return [cst.SimpleStatementLine(list(cast(cst.SimpleStatementSuite, body).body))]


def _merged_function(stock: cst.FunctionDef, patched: cst.FunctionDef) -> cst.FunctionDef:
    if stock.deep_equals(patched):
        return patched
    names = {p.name.value for p in _parameters(patched)}
    keeps = names >= {p.name.value for p in _parameters(stock)}
    # Renamed, because the target's name would become local and break stock's recursion.
    inner = patched.with_changes(
        name=cst.Name(f"patched_{patched.name.value}"),
        decorators=(),
        leading_lines=(),
        lines_after_decorators=(),
    )
    statements = _statements(stock.body)
    at = 1 if statements and is_docstring(statements[0]) else 0
    body = stock.body if isinstance(stock.body, cst.IndentedBlock) else cst.IndentedBlock(())
    return stock.with_changes(
        params=_with_defaults(patched.params, stock) if keeps else stock.params,
        body=body.with_changes(body=[*statements[:at], _dead(inner), *statements[at:]]),
    )


def _with_defaults(params: cst.Parameters, stock: cst.FunctionDef) -> cst.Parameters:
    """Return the patched parameters, with stock's defaults for those that stock has."""
    known = {p.name.value: p for p in _parameters(stock) if p.default is not None}

    def restored(param: cst.Param) -> cst.Param:
        old = known.get(param.name.value)
        if old is None:
            return param
        equal = param.equal if param.default is not None else old.equal
        return param.with_changes(default=old.default, equal=equal)

    places = ("posonly_params", "params", "kwonly_params")
    return params.with_changes(**{p: [*map(restored, getattr(params, p))] for p in places})


def _parameters(function: cst.FunctionDef) -> list[cst.Param]:
    params = function.params
    return [*params.posonly_params, *params.params, *params.kwonly_params]


def _function_mutant(original: Any) -> Any:
    @functools.wraps(original)
    def same(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    return same


def _class_mutant(edit: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def make(original: type) -> type:
        new = edit(original)
        extra = {k: v for k, v in vars(new).items() if not hasattr(original, k)}
        return type(new.__name__, (original,), {"__doc__": new.__doc__, **extra})

    return make
