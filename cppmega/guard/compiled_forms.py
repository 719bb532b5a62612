"""Functions as torch.compile and torch.jit return them: another object with the same code."""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

from cppmega.guard.expected import nested

_DYNAMO = "torch._dynamo.eval_frame"


def is_compiled(now: Any, then: Any) -> bool:
    """Whether an object is torch's compiled (or explicitly not compiled) form of a function.

    Attributes such as `_torchdynamo_orig_callable` are copied by functools.wraps and prove
    nothing: dynamo's wrapper is known by its code object and its closure, a scripted function by
    scripting the original again.
    """
    now, then = innermost(now), innermost(then)  # torch compiles below its own wrappers
    return now is then or _is_scripted(now, then)


def innermost(thing: Any) -> Any:
    """The function that torch.compile has wrapped; anything else is returned as it is."""
    while (inner := _inside_of_dynamo(thing)) is not None:
        thing = inner
    return thing


def _inside_of_dynamo(thing: Any) -> Any:
    module = sys.modules.get(_DYNAMO)
    if type(thing) is not types.FunctionType or module is None:
        return None
    if thing.__globals__ is not vars(module) or thing.__code__ not in _codes(module):
        return None
    held = dict(zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True))
    return held["fn"].cell_contents if "fn" in held else None


@functools.cache
def _codes(module: types.ModuleType) -> list[types.CodeType]:
    """The code of every function that a module defines."""
    codes: list[types.CodeType] = []
    for value in vars(module).values():
        if getattr(value, "__module__", None) != module.__name__:
            continue
        for member in [value, *(vars(value).values() if isinstance(value, type) else ())]:
            if type(member) is types.FunctionType:
                codes.extend(nested(member.__code__))
    return codes


def _is_scripted(now: Any, then: Any) -> bool:
    torch = sys.modules.get("torch")
    if torch is None or type(now) is not torch.jit.ScriptFunction:
        return False
    try:
        again = torch.jit.script(then)
    except (RuntimeError, OSError, TypeError):
        return False
    return bool(str(again.inlined_graph) == str(now.inlined_graph))
