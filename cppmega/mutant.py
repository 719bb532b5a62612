"""Do-nothing mutants: the text of a patch with the behaviour of stock.

A mutant has the patched signature, every helper, import and name, and the patched body as code
that is never run; what runs is upstream's body. A `verify` that passes on it reads text or names
instead of calling the code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, cast

import libcst as cst

from cppmega.fingerprint import is_docstring
from cppmega.page import Edit


def of_sources(edits: Sequence[Edit]) -> Edit:
    """The source edits that several pages make to one symbol, in order, as one that does nothing.

    Later edits are written for the text that earlier ones leave, so they are merged as a whole.
    """

    def nothing(stock: Any) -> Any:
        return merged(stock, reduce(lambda node, edit: edit.edit(node), edits, stock))

    helpers = dict.fromkeys(helper for edit in edits for helper in edit.helpers)
    imports = dict.fromkeys(line for edit in edits for line in edit.imports)
    return replace(edits[0], edit=nothing, helpers=tuple(helpers), imports=tuple(imports))


def of_runtime(edit: Edit) -> Edit:
    """A runtime edit that puts the original's behaviour under the replacement's name."""
    if edit.kind == "class-swap":
        return replace(edit, edit=_class_mutant(edit.edit))
    return replace(edit, edit=_function_mutant)


def merged(stock: cst.CSTNode, patched: cst.CSTNode) -> cst.CSTNode:
    """Stock's behaviour inside the patched text, for a function or for every method of a class."""
    if isinstance(stock, cst.FunctionDef):
        return _merged_function(stock, cast(cst.FunctionDef, patched))
    holder, new = cast(cst.ClassDef, stock), cast(cst.ClassDef, patched)
    before = {s.name.value: s for s in holder.body.body if isinstance(s, cst.FunctionDef)}
    body = [
        _merged_function(before[s.name.value], s)
        if isinstance(s, cst.FunctionDef) and s.name.value in before
        else s
        for s in new.body.body
    ]
    return new.with_changes(body=new.body.with_changes(body=body))


def _merged_function(stock: cst.FunctionDef, patched: cst.FunctionDef) -> cst.FunctionDef:
    if stock.deep_equals(patched):
        return patched
    names = {p.name.value for p in _parameters(patched)}
    keeps = names >= {p.name.value for p in _parameters(stock)}
    dead = cst.parse_statement("if not __name__:\n    pass\n")
    # Another name: the target's own would become a local one and break stock's recursion.
    inner = patched.with_changes(
        name=cst.Name(f"patched_{patched.name.value}"),
        decorators=(),
        leading_lines=(),
        lines_after_decorators=(),
    )
    dead = cast(cst.If, dead).with_changes(body=cst.IndentedBlock([inner]))
    body = stock.body
    if not isinstance(body, cst.IndentedBlock):
        line = cst.SimpleStatementLine(list(cast(cst.SimpleStatementSuite, body).body))
        body = cst.IndentedBlock([line])
    statements = list(body.body)
    at = 1 if statements and is_docstring(statements[0]) else 0
    return stock.with_changes(
        params=patched.params if keeps else stock.params,
        body=body.with_changes(body=[*statements[:at], dead, *statements[at:]]),
    )


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
