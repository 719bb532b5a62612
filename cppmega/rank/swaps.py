"""Runtime patches: installed when their module is imported, before anyone copies the name.

`arm` registers a hook per target, which installs the replacement every time the target's file is
executed: also when its module is reloaded, imported again or imported under another name. A module
that is imported already is `too-late`: other modules may hold the original. After the replacement,
whatever still refers to the original object is a `stale-reference`; both stop the process.
"""

from __future__ import annotations

import ast
import functools
import gc
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from typing import Any

from cppmega.errors import CppmegaError
from cppmega.live import import_hook, vouched
from cppmega.live.compiled import is_compiled
from cppmega.live.import_hook import Hook
from cppmega.live.pinned import Pin
from cppmega.page import Edit, Page
from cppmega.rank.reached_marks import REACHED


@dataclass
class Installed:
    """One replacement in this process."""

    page: str
    edit: Edit
    module: types.ModuleType
    owner: Any
    name: str
    original: Any
    """What stood in the owner's `__dict__`, descriptors included."""
    replacement: Any


@dataclass
class _State:
    armed: dict[tuple[str, str], tuple[Edit, Hook]] = field(default_factory=dict)
    installed: list[Installed] = field(default_factory=list)
    told: list[Callable[[Any, str], None]] = field(default_factory=list)
    """Who wants to know of every name that is replaced."""


_STATE = _State()


def module_name(path: str) -> str:
    """`megatron/core/x.py` -> `megatron.core.x`."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def runtime_edits(page: Page, edits: Iterable[Edit]) -> list[Edit]:
    """Those edits of a page that are not written to disk."""
    return [edit for edit in edits if edit.kind != "source"]


def arm(page: Page, edits: Iterable[Edit]) -> None:
    """Register the hooks of a page. Arming the same page again does nothing.

    Args:
        edits: the edits that fit the tree in use (`Plan.edits[page.name]`).

    Raises:
        CppmegaError: `too-late`, when a target's module is imported already.
    """
    for edit in runtime_edits(page, edits):
        key = (page.name, edit.target)
        if key in _STATE.armed:
            continue
        name = module_name(edit.path)
        if name in sys.modules:
            raise CppmegaError(
                "too-late",
                f"{name} was imported before {page.name} was armed.",
                "Modules that copied the name would keep the original.",
                "start the script with `python -m cppmega.run SCRIPT`, and import nothing first",
            )
        install = functools.partial(_install, page.name, edit)
        hook = Hook(functools.partial(_is_target, edit), after=install)
        _STATE.armed[key] = (edit, hook)
        import_hook.add(hook)


def tell(listener: Callable[[Any, str], None]) -> None:
    """Call a function with owner and name after every replacement from now on."""
    if listener not in _STATE.told:
        _STATE.told.append(listener)


def _is_target(edit: Edit, spec: ModuleSpec) -> bool:
    return spec.name == module_name(edit.path) or _is_file_of(edit, spec.origin)


def _is_file_of(edit: Edit, file: Any) -> bool:
    return isinstance(file, str) and file.endswith("/" + edit.path)


def disarm() -> None:
    """Put every original back and forget what was armed; identities are restored."""
    for done in reversed(_STATE.installed):
        setattr(done.owner, done.name, done.original)
    for _, hook in _STATE.armed.values():
        import_hook.remove(hook)
    _STATE.installed.clear()
    _STATE.armed.clear()


def installed() -> list[Installed]:
    """What has been replaced in this process so far."""
    return list(_STATE.installed)


def waiting() -> list[str]:
    """Targets that are armed and whose module has not been imported."""
    done = {(item.page, item.edit.target) for item in _STATE.installed}
    return [target for page, target in _STATE.armed if (page, target) not in done]


def check() -> None:
    """Every replacement is in place, in every copy of its module, and nothing holds an original.

    Raises:
        CppmegaError: `unpatched-copy`, `patch-undone`, `stale-reference`.
    """
    for error in _unpatched_copies():
        raise error
    for item in _STATE.installed:
        now = inspect.getattr_static(item.owner, item.name)
        if not _is_in_place(item, now):
            raise CppmegaError(
                "patch-undone",
                f"{item.edit.target} was replaced again after {item.page} had been installed, "
                f"by {vouched.describe(now)}.",
                "The page's replacement is no longer what is called.",
                f"find what assigns {item.name}; drop one of them, or, if it calls the page's "
                f"replacement, --allow-wrapper {vouched.key(now)}",
            )
        refuse_stale(item)


def _is_in_place(item: Installed, now: Any) -> bool:
    return (
        now is item.replacement
        or is_compiled(now, item.replacement)
        or vouched.is_allowed(now, item.edit.symbol)
    )


def _unpatched_copies() -> Iterator[CppmegaError]:
    """A module of a target's file that was executed without the import system."""
    done = {(id(item.edit), id(item.module)) for item in _STATE.installed}
    edits = [edit for edit, _ in _STATE.armed.values()]
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__dict__", {}).get("__file__")
        for edit in edits:
            if _is_file_of(edit, file) and (id(edit), id(module)) not in done:
                yield CppmegaError(
                    "unpatched-copy",
                    f"Module {name} was made from {file} and does not have the runtime patch of "
                    f"{edit.symbol}.",
                    "Whoever uses that copy runs unpatched code.",
                    "import the file's module with `import` instead of loading the file by path",
                )


def refuse_stale(item: Installed) -> None:
    """Raise `stale-reference` when something still holds the original."""
    found = stale_references(item)
    if found:
        raise CppmegaError(
            "stale-reference",
            f"{item.page} replaced {item.edit.target}, but the original is still held by "
            + "; ".join(found[:5]),
            "Whoever holds the original runs unpatched code.",
            "rewrite the source instead (kind `source`), or import that module later",
        )


def _install(page: str, edit: Edit, module: types.ModuleType) -> None:
    owner: Any = module
    *outer, name = edit.symbol.split(".")
    for part in outer:
        owner = getattr(owner, part)
    raw = inspect.getattr_static(owner, name)
    original: Any = raw.__func__ if isinstance(raw, staticmethod | classmethod) else raw
    if edit.kind == "class-swap":
        refuse_self_naming(original)
    new = edit.edit(original)
    _check_replacement(page, edit, original, new)
    replacement = _with_mark(page, edit, new)
    if isinstance(raw, staticmethod | classmethod):
        replacement = type(raw)(replacement)
    setattr(owner, name, replacement)
    item = Installed(page, edit, module, owner, name, raw, replacement)
    # A reload has executed the file in the same module: what was installed there is gone.
    kept = [i for i in _STATE.installed if i.owner is not owner or i.edit is not edit]
    _STATE.installed[:] = [*kept, item]
    for listener in _STATE.told:
        listener(owner, name)
    refuse_stale(item)


def refuse_self_naming(original: type) -> None:
    """A class that says `super(Name, self)` must not be swapped for its subclass.

    Raises:
        CppmegaError: `class-names-itself`.
    """
    import textwrap

    tree = ast.parse(textwrap.dedent(inspect.getsource(original)))
    for node in ast.walk(tree):
        named = (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "super"
            and node.args
            and isinstance(node.args[0], ast.Name)
            and node.args[0].id == original.__name__
        )
        if named:
            raise CppmegaError(
                "class-names-itself",
                f"{original.__qualname__} calls super({original.__name__}, ...).",
                "After a swap that name is the subclass: a TypeError, or endless recursion.",
                "use kind `method-wrap` on the methods you need",
            )


def _check_replacement(page: str, edit: Edit, original: Any, new: Any) -> None:
    if new is original or new is None:
        raise _bad(page, edit, "gives back the original")
    if edit.kind == "class-swap":
        if not (isinstance(new, type) and issubclass(new, original)):
            raise _bad(page, edit, "is not a subclass of the original")
        changed = [m for m in new.__dict__ if m in original.__dict__ and callable(new.__dict__[m])]
        strange = sorted(set(changed) - {"__init__", *edit.overrides})
        if strange:
            raise _bad(page, edit, f"overrides {', '.join(strange)}, which the page does not pin")
        return
    if parameters(new) != parameters(original):
        raise _bad(page, edit, f"has the signature {parameters(new)}, not {parameters(original)}")


def _bad(page: str, edit: Edit, what: str) -> CppmegaError:
    return CppmegaError(
        "bad-replacement",
        f"{page}: the replacement of {edit.target} {what}.",
        "Callers would not notice, until the numbers are wrong.",
        "correct the page",
    )


def parameters(function: Callable[..., Any]) -> list[tuple[str, str, str]]:
    """Name, kind and default of every parameter: what callers can depend on."""
    signature = inspect.signature(function)
    return [(p.name, p.kind.name, repr(p.default)) for p in signature.parameters.values()]


def _with_mark(page: str, edit: Edit, new: Any) -> Any:
    if edit.kind != "class-swap":
        return _marked(page, new)
    method = edit.mark or "__init__"
    setattr(new, method, _marked(page, getattr(new, method)))
    return new


def _marked(page: str, function: Any) -> Any:
    mark = _mark_function(page)

    @functools.wraps(function)
    def reached(*args: Any, **kwargs: Any) -> Any:
        mark()
        return function(*args, **kwargs)

    return reached


def _mark_function(page: str) -> Callable[[], None]:
    def mark() -> None:
        REACHED.add(page)

    torch = sys.modules.get("torch")
    if torch is None:
        return mark
    # Dynamo calls it while tracing and leaves no trace of it in the graph.
    traced: Callable[[], None] = torch.compiler.assume_constant_result(mark)
    return traced


def stale_references(item: Installed) -> list[str]:
    """Who, besides our replacement, still refers to the original object.

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
        said = _describe(holder, original, allowed)
        if said:
            found.append(said)
    return sorted(set(found))


def _allowed(item: Installed, original: Any) -> set[int]:
    """Objects that may hold the original: our books, and what the replacement is made of."""
    allowed = {id(item), id(item.__dict__), id(_STATE.installed), id(item.original)}
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
