"""Runtime patches: installed when their module is imported, before the name can be copied.

`arm` registers a hook for each target, which installs the replacement every time the target's file
is executed: also when its module is reloaded, imported again or imported under another name. A
module that is already imported is `too-late`: other modules may hold the original. After the
replacement, anything that still refers to the original object is a `stale-reference`; both stop
the process.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import ModuleSpec
from typing import Any

from cppmega.errors import CppmegaError
from cppmega.guard import allowed, import_hook, imports, stale
from cppmega.guard.compiled_forms import is_compiled
from cppmega.guard.import_hook import Hook
from cppmega.guard.installed import REACHED, REGISTRY, Installed
from cppmega.page import Edit, Page


def module_name(path: str) -> str:
    """`megatron/core/x.py` -> `megatron.core.x`."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def runtime_edits(edits: Iterable[Edit]) -> list[Edit]:
    """The edits of a page that are not written to disk."""
    return [edit for edit in edits if edit.kind != "source"]


def arm(page: Page, edits: Iterable[Edit]) -> None:
    """Register the hooks of a page. Arming the same page again does nothing.

    Args:
        edits: the edits that fit the tree in use (`Plan.edits[page.name]`).

    Raises:
        CppmegaError: `too-late`, when a target's module is imported already.
    """
    for edit in runtime_edits(edits):
        key = (page.name, edit.target)
        if key in REGISTRY.armed:
            continue
        name = module_name(edit.path)
        if name in sys.modules:
            raise CppmegaError(
                "too-late",
                f"{name} was imported before {page.name} was armed.",
                "Modules that copied the name would keep the original.",
                "start the script with `python -m cppmega.run SCRIPT`, and import nothing first",
            )
        import_hook.add(_HOOK)
        REGISTRY.armed[key] = edit
        _targets.cache_clear()


def on_replacement(listener: Callable[[Any, str], None]) -> None:
    """Call a function with owner and name after every replacement from now on."""
    if listener not in REGISTRY.listeners:
        REGISTRY.listeners.append(listener)


@functools.cache
def _targets() -> tuple[frozenset[str], tuple[str, ...]]:
    """The modules that armed patches are for, by name, and the ends of their files' paths."""
    paths = {edit.path for edit in REGISTRY.armed.values()}
    return frozenset(map(module_name, paths)), tuple(f"/{path}" for path in paths)


def _is_target(spec: ModuleSpec) -> bool:
    names, ends = _targets()
    return spec.name in names or (isinstance(spec.origin, str) and spec.origin.endswith(ends))


def _install_all(module: types.ModuleType) -> None:
    spec = module.__spec__
    name, file = (spec.name, spec.origin) if spec is not None else (module.__name__, None)
    for (page, _), edit in [*REGISTRY.armed.items()]:
        if name == module_name(edit.path) or _is_file_of(edit, file):
            _install(page, edit, module)


def _is_file_of(edit: Edit, file: Any) -> bool:
    return isinstance(file, str) and file.endswith("/" + edit.path)


def check() -> None:
    """Check that every copy of a module has its replacements, and that no original is held.

    Raises:
        CppmegaError: `unpatched-copy`, `patch-undone`, `stale-reference`.
    """
    for error in _unpatched_copies():
        raise error
    for item in REGISTRY.installed:
        now = inspect.getattr_static(item.owner, item.name)
        if not _is_in_place(item, now):
            raise CppmegaError(
                "patch-undone",
                f"{item.edit.target} was replaced again after {item.page} had been installed, "
                f"by {allowed.describe(now)}.",
                "The page's replacement is no longer what is called.",
                f"find what assigns {item.name}; drop one of them, or, if it calls the page's "
                f"replacement, --allow-wrapper {allowed.key(now)}",
            )
        if not item.alone:  # nothing can take the original any more, and the search takes its time
            stale.refuse(item)
            item.alone = True


def _is_in_place(item: Installed, now: Any) -> bool:
    return (
        now is item.replacement
        or is_compiled(now, item.replacement)
        or allowed.is_allowed(now, item.edit.symbol)
    )


def _unpatched_copies() -> Iterator[CppmegaError]:
    """Errors for modules that were executed from a target's file without the import system."""
    done = {(id(item.edit), id(item.module)) for item in REGISTRY.installed}
    _, ends = _targets()
    for name, module in imports.in_question():
        file = getattr(module, "__dict__", {}).get("__file__")
        if not (isinstance(file, str) and file.endswith(ends)):
            continue
        for edit in REGISTRY.armed.values():
            if _is_file_of(edit, file) and (id(edit), id(module)) not in done:
                yield CppmegaError(
                    "unpatched-copy",
                    f"Module {name} was created from {file} and does not have the runtime patch of "
                    f"{edit.symbol}.",
                    "Code that uses this copy is unpatched.",
                    "import the file's module with `import` instead of loading the file by path",
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
    kept = [i for i in REGISTRY.installed if i.owner is not owner or i.edit is not edit]
    REGISTRY.installed[:] = [*kept, item]
    for listener in REGISTRY.listeners:
        listener(owner, name)
    del raw, original  # else this call holds it, and the heap has to be searched for others
    stale.refuse(item)


_HOOK = Hook(_is_target, after=_install_all)


def refuse_self_naming(original: type) -> None:
    """Refuse to swap a class that calls `super(Name, self)` for its subclass.

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
        raise _bad(page, edit, "is the original")
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
        "Callers would not notice until the numbers are wrong.",
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
