"""References to the original of a runtime patch: whatever holds one runs unpatched code."""

from __future__ import annotations

import functools
import gc
import sys
import types
from typing import Any

from cppmega.errors import CppmegaError
from cppmega.guard.installed import REGISTRY, Installed
from cppmega.guard.objects import Pin


def refuse(item: Installed) -> None:
    """Refuse a replacement whose original is still held.

    Raises:
        CppmegaError: `stale-reference`.
    """
    holders = references(item)
    if holders:
        raise CppmegaError(
            "stale-reference",
            f"{item.page} replaced {item.edit.target}, but the original is still held by "
            + "; ".join(holders[:5]),
            "The holder runs unpatched code.",
            "rewrite the source instead (kind `source`), or import that module later",
        )


def references(item: Installed) -> list[str]:
    """The holders of the original object, other than the replacement.

    The garbage collector knows every container: module globals, defaults, closures, class
    attributes, dictionaries and dataclass fields.
    """
    original = item.original
    if isinstance(original, staticmethod | classmethod):
        original = original.__func__
    allowed = _allowed(item, original)
    found = []
    for holder in gc.get_referrers(original):
        if id(holder) in allowed or isinstance(holder, types.FrameType | Pin):
            continue
        text = _describe(holder, original, allowed)
        if text:
            found.append(text)
    return sorted(set(found))


def _allowed(item: Installed, original: Any) -> set[int]:
    """Objects that may hold the original: the registry, and the parts of the replacement."""
    allowed = {id(item), id(item.__dict__), id(REGISTRY.installed), id(item.original)}
    pending: list[Any] = [item.replacement, original]
    seen: set[int] = set()
    while pending:
        thing = pending.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        allowed.add(id(thing))
        if isinstance(thing, types.FunctionType):
            allowed.add(id(thing.__dict__))
            for cell in thing.__closure__ or ():
                allowed.add(id(cell))
                try:
                    content = cell.cell_contents
                except ValueError:
                    continue
                if isinstance(content, types.FunctionType):
                    pending.append(content)
        elif isinstance(thing, staticmethod | classmethod):
            pending.append(thing.__func__)
        elif isinstance(thing, type) and (thing is original or thing is item.replacement):
            allowed |= {id(thing.__mro__), id(thing.__bases__)}
            pending.extend(v for v in vars(thing).values() if isinstance(v, types.FunctionType))
            # getset descriptors such as __dict__ and __weakref__ point back at their class
            allowed |= {id(v) for v in vars(thing).values()}
    return allowed


def _describe(holder: Any, original: Any, allowed: set[int]) -> str:
    if isinstance(holder, dict):
        names = [str(key) for key, value in holder.items() if value is original]
        owner = _owner_of(holder)
        return f"{owner}[{', '.join(names)}]" if names else ""
    if isinstance(holder, types.CellType):
        owners = [f for f in gc.get_referrers(holder) if isinstance(f, tuple)]
        functions = [f for o in owners for f in gc.get_referrers(o)]
        named = [f for f in functions if isinstance(f, types.FunctionType) and id(f) not in allowed]
        return f"the closure of {_name(named[0])}" if named else ""
    if isinstance(holder, tuple | list):
        for owner in gc.get_referrers(holder):
            if id(owner) in allowed:
                continue
            if isinstance(owner, types.FunctionType):
                return f"the default arguments of {_name(owner)}"
            if isinstance(owner, type):
                return f"the base classes of {_name(owner)}"
            if isinstance(owner, dict):
                return f"a {type(holder).__name__} in {_owner_of(owner)}"
        return ""
    if isinstance(holder, types.FunctionType | types.MethodType | functools.partial):
        return _name(holder)
    if isinstance(holder, type):
        return f"the base classes of {_name(holder)}"
    return f"an object of type {_name(type(holder))}"


def _owner_of(mapping: dict[Any, Any]) -> str:
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", None) is mapping:
            return f"module {module.__name__}"
    for owner in gc.get_referrers(mapping):
        if isinstance(owner, type):
            return f"class {_name(owner)}"
        if isinstance(owner, types.FunctionType):
            return f"the keyword defaults of {_name(owner)}"
        if isinstance(owner, dict) and owner.get("__name__") in sys.modules:
            return f"a dictionary of module {owner['__name__']}"
        if not isinstance(owner, list | tuple | dict | types.FrameType):
            return f"an object of type {_name(type(owner))}"
    return "a dictionary"


def _name(thing: Any) -> str:
    module = getattr(thing, "__module__", "?")
    return f"{module}.{getattr(thing, '__qualname__', type(thing).__name__)}"
