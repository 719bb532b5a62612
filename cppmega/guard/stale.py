"""References to the original of a runtime patch: whatever holds one runs unpatched code."""

from __future__ import annotations

import functools
import gc
import sys
import types
from typing import Any

from cppmega.errors import CppmegaError
from cppmega.guard import imports
from cppmega.guard.installed import REGISTRY, Installed
from cppmega.guard.objects import Pin

_NAMED = (types.FunctionType, type, types.MethodType, functools.partial)


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
    original = getattr(item.original, "__func__", item.original)
    parts = _parts(item, original)
    known = imports.times_pinned(original)
    known += sum(one is original for part in parts.values() for one in gc.get_referents(part))
    mine = 2 + (id(original) in parts)  # this variable and the argument of the call; `parts`
    if sys.getrefcount(original) <= known + mine:
        return []  # most often; the search takes a tenth of a second
    gc.collect()  # garbage runs nothing
    holders = gc.get_referrers(original)
    known_here = {*parts, id(parts), id(holders)}
    texts = [_described(one, known_here) for one in holders if id(one) not in known_here]
    return sorted({text for text in texts if text})


def _parts(item: Installed, original: Any) -> dict[int, Any]:
    """Objects that may hold the original: the registry, and the parts of the replacement."""
    ids: dict[int, Any] = {id(REGISTRY.installed): REGISTRY.installed}
    pending: list[Any] = [item, item.original, item.replacement]
    while pending:
        thing = pending.pop()
        if id(thing) in ids:
            continue
        ids[id(thing)] = thing
        if isinstance(thing, types.FunctionType):
            pending += [vars(thing), *(thing.__closure__ or ())]
        elif isinstance(thing, type) and (thing is original or thing is item.replacement):
            # getset descriptors such as __dict__ and __weakref__ point back at their class
            pending += [thing.__mro__, thing.__bases__, *vars(thing).values()]
        elif isinstance(thing, types.CellType | staticmethod | classmethod):
            pending += gc.get_referents(thing)
    return ids


def _described(holder: Any, parts: set[int], above: int = 3) -> str:
    """The nearest thing with a name that holds something, and the containers between; or ""."""
    if isinstance(holder, types.FrameType | types.GeneratorType | Pin):
        return ""
    for module in list(sys.modules.values()) if isinstance(holder, dict) else ():
        if getattr(module, "__dict__", None) is holder:
            return f"module {module.__name__}"
    kind = type(holder).__name__
    if isinstance(holder, _NAMED):
        thing = holder.func if isinstance(holder, functools.partial) else holder
        name = getattr(thing, "__qualname__", type(thing).__name__)
        return f"{kind} {getattr(thing, '__module__', '?')}.{name}"
    if not isinstance(holder, types.CellType | tuple | list | dict):
        return f"an object of type {type(holder).__module__}.{type(holder).__qualname__}"
    owners = gc.get_referrers(holder)
    parts |= {id(owners)}  # the list itself holds what is asked about next
    for owner in owners if above else ():
        if id(owner) not in parts and (text := _described(owner, parts, above - 1)):
            return f"{kind} of {text}"
    return "a dictionary" if isinstance(holder, dict) else ""
