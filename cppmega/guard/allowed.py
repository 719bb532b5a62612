"""Wrappers that the owner of a run has allowed: `cppmega.run --allow-wrapper MODULE:QUALNAME`.

A pattern such as `framework.*:*` allows all that it matches. Each one that is encountered is
recorded with the name that it wraps, for the run's log.
"""

from __future__ import annotations

import functools
import os
import types
from fnmatch import fnmatchcase
from typing import Any

from cppmega.guard.objects import MISSING
from cppmega.host import env

_MET: dict[str, str] = {}


def allow(keys: tuple[str, ...]) -> None:
    """Add keys for this process and, through its environment, for its children."""
    if keys:
        known = env.ALLOW_WRAPPER.read()
        os.environ[env.ALLOW_WRAPPER.name] = ",".join(dict.fromkeys([*known, *keys]))


def is_allowed(thing: Any, name: str) -> bool:
    """Whether the wrapper that a name means is allowed; if so, it is recorded."""
    wanted = key(thing)
    if not wanted or not any(fnmatchcase(wanted, one) for one in env.ALLOW_WRAPPER.read()):
        return False
    _MET[name] = wanted
    return True


def met() -> dict[str, str]:
    """Allowed wrappers encountered so far: the name that is wrapped -> the wrapper's key."""
    return dict(_MET)


def key(thing: Any) -> str:
    """The `module:qualname` of the code that runs, which functools.wraps does not copy, or ""."""
    thing = _below_descriptor(thing)
    if isinstance(thing, functools.partial):
        return key(thing.func)
    if type(thing) is types.FunctionType:
        return f"{thing.__globals__.get('__name__', '?')}:{thing.__code__.co_qualname}"
    if isinstance(thing, type):
        return f"{thing.__module__}:{thing.__qualname__}"
    if thing is MISSING or not callable(thing):
        return ""
    return f"{type(thing).__module__}:{type(thing).__qualname__}"


def describe(thing: Any) -> str:
    """An object in words, with the file and line of its code."""
    inner = _below_descriptor(thing)
    if isinstance(inner, functools.partial):
        return f"a functools.partial of {describe(inner.func)}"
    code = inner if isinstance(inner, types.CodeType) else getattr(inner, "__code__", None)
    if isinstance(code, types.CodeType):
        place = f"{code.co_filename}:{code.co_firstlineno}"
        return f"{key(inner) or code.co_qualname} ({place})"
    if isinstance(inner, type):
        return f"class {key(inner)}"
    return f"an object of type {key(inner)}" if callable(inner) else repr(inner)[:80]


def _below_descriptor(thing: Any) -> Any:
    while isinstance(thing, staticmethod | classmethod | types.MethodType):
        thing = thing.__func__
    return thing.fget if isinstance(thing, property) else thing
