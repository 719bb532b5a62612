"""TileLang kernels in source files, and whether each asks for its shared memory to be merged.

On sm_120 and sm_121 a block has 99 KiB of dynamic shared memory, so every kernel must be built
with `TL_ENABLE_AGGRESSIVE_SHARED_MEMORY_MERGE: True`. The key alone says nothing: its value may be
False, or a later entry may win. Files are read, never imported; what cannot be read counts as
lacking, with the reason.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cppmega.preflight.smem_values import NOTHING, Function, Scope, Value
from cppmega.rewriting.source import decode, parse

_BUILDERS = {"tilelang.jit", "tilelang.jit.jit", "tilelang.lazy_jit", "tilelang.compile"}
"""What makes a kernel of a function: `tilelang.jit` as a decorator or a call, and so on."""

_WORDS = {name.rpartition(".")[2] for name in _BUILDERS}
_DEPTH = 12
"""Names that stand for names: as far as anybody would follow them."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One TileLang kernel."""

    path: str
    line: int
    name: str
    merged: bool
    """Whether it is built with the flag set to True."""
    reason: str
    """What stands there instead; empty for a kernel that is as it must be."""


def scan(paths: Iterable[Path]) -> list[Kernel]:
    """Every TileLang kernel below some files and folders, in the order of paths and lines.

    Raises:
        CppmegaError: `unreadable-python`, when a file that may hold kernels is none.
    """
    data: dict[str, bytes] = {}
    for path in paths:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            data[str(file)] = file.read_bytes()
    words = {b"tilelang"}
    texts: dict[str, str] = {}
    found: list[Kernel] = []
    while True:  # a file may get its kernels' decorator from a helper that has another name
        chosen = {path for path, text in data.items() if any(word in text for word in words)}
        if chosen <= texts.keys():
            return found
        texts = {path: "".join(decode(data[path], path).lines) for path in sorted(chosen)}
        found, helpers = _look(texts)
        words |= helpers


def kernels(texts: Mapping[str, str]) -> list[Kernel]:
    """Every TileLang kernel of some source texts.

    Args:
        texts: path -> text. A helper or a constant that one of them imports from another is
            followed; one that is imported from elsewhere cannot be.

    Raises:
        CppmegaError: `unreadable-python`.
    """
    return _look(texts)[0]


def _look(texts: Mapping[str, str]) -> tuple[list[Kernel], set[bytes]]:
    """The kernels, and the modules that hold helpers which make kernels of others' functions."""
    files = {}
    for path, text in texts.items():
        files[path] = _File(path, parse(decode(text.encode(), path), path))
    for file in files.values():
        file.bind(files)
    found = [kernel for file in files.values() for kernel in file.kernels()]
    helpers = {file.module.encode() for file in files.values() if file.helps}
    return sorted(found, key=lambda kernel: (kernel.path, kernel.line)), helpers


@dataclass(frozen=True, slots=True)
class _Builder:
    """Something that makes kernels: tilelang's own, or a function or name that leads to it."""

    value: Value = NOTHING
    """What it sets by itself."""
    wins: bool = False
    """Whether that counts more than what a kernel gives."""

    def given(self, value: Value) -> Value:
        """What a kernel is built with that gives these pass configs; as keywords they replace."""
        if self.wins:
            return value.then(self.value)
        return value if value.present else self.value


class _File:
    """One file: what its names stand for, and the kernels in it."""

    def __init__(self, path: str, tree: ast.Module) -> None:
        self.path, self.tree = path, tree
        self.scope = Scope.of(tree)
        place = Path(path)
        self.module = place.parent.name if place.stem == "__init__" else place.stem
        self.files: Mapping[str, _File] = {}
        self.helps = False
        """Whether a function of this file makes kernels of other functions."""
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        names = [alias for node in imports for alias in node.names if alias.name in _WORDS]
        self._short = {alias.asname or alias.name for alias in names}
        self._done: set[int] = set()

    def bind(self, files: Mapping[str, _File]) -> None:
        """Let names that are imported from the other files be followed."""
        self.files = files
        for module, name, here in self.scope.imported:
            other = self._other(module)
            if other is not None and name in other.scope.values:
                self.scope.values.setdefault(here, other.scope.values[name])

    def _other(self, module: str) -> _File | None:
        """The file that an import means: by the end of its path, so that packages need no root."""
        tail = module.lstrip(".").replace(".", "/")
        ends = (f"/{tail}.py", f"/{tail}/__init__.py")
        hits = [f for path, f in self.files.items() if f"/{path}".endswith(ends) and f is not self]
        near = [f for f in hits if Path(f.path).parent == Path(self.path).parent]
        return next(iter(near or hits), None)

    # -- what makes kernels --------------------------------------------------------------------

    def builder(self, node: ast.expr, scope: Scope, depth: int = 0) -> _Builder | None:
        """What an expression makes kernels with; None: it makes none."""
        if depth > _DEPTH:
            return None
        if scope.dotted(node) in _BUILDERS:
            return _Builder()
        if isinstance(node, ast.Name):
            return self._named(node.id, scope, depth + 1)
        if isinstance(node, ast.Attribute):  # `helpers.jit` of another file
            other = self._other(scope.dotted(node.value) or ast.unparse(node.value))
            return None if other is None else other._named(node.attr, other.scope, depth + 1)
        if isinstance(node, ast.Call):
            return self._called(node, scope, depth + 1)
        return None

    def _named(self, name: str, scope: Scope, depth: int) -> _Builder | None:
        made: _Builder | None = None
        for around in scope.chain():
            for function in around.functions.get(name, ()):
                made = made or self._wrapper(function, around)
            for where, value in around.values.get(name, ()):
                made = made or self.builder(value, where, depth)
            for module, original, here in around.imported:
                if here == name:
                    made = made or self._imported(module, original, depth)
        return made

    def _imported(self, module: str, name: str, depth: int) -> _Builder | None:
        other = self._other(module)
        if other is not None:
            return other._named(name, other.scope, depth)
        # A helper of a file that we were not given: what it sets is not known.
        return _Builder() if "tilelang" in module + name and "jit" in name else None

    def _called(self, node: ast.Call, scope: Scope, depth: int) -> _Builder | None:
        """`partial(jit, pass_configs=...)`, and `jit(pass_configs=...)` kept under a name."""
        if scope.dotted(node.func) == "functools.partial" and node.args:
            base = self.builder(node.args[0], scope, depth)
        else:
            base = None if node.args else self.builder(node.func, scope, depth)
        if base is None:
            return None
        return _Builder(base.given(scope.keyword(node)), base.wins)

    def _may_build(self, call: ast.Call) -> bool:
        """Whether the last word of what is called is that of a builder: most calls end here."""
        if isinstance(call.func, ast.Attribute):
            return call.func.attr in _WORDS
        return isinstance(call.func, ast.Name) and call.func.id in self._short

    def _wrapper(self, function: Function, around: Scope) -> _Builder | None:
        """A function that hands its own parameters to a builder, such as Megatron's."""
        likely = [n for n in ast.walk(function) if isinstance(n, ast.Call) and self._may_build(n)]
        inside = Scope.of(function, around) if likely else around
        for node in likely:
            if inside.dotted(node.func) not in _BUILDERS:
                continue
            positional = [a.value if isinstance(a, ast.Starred) else a for a in node.args]
            unpacked = [k.value for k in node.keywords if k.arg is None]
            handed = {a.id for a in positional if isinstance(a, ast.Name)} & inside.parameters
            handed |= {a.id for a in unpacked if isinstance(a, ast.Name)} & {inside.handed_on}
            if handed:
                value = inside.keyword(node).then(inside.put())
                return _Builder(value, value.present)
        return None

    # -- kernels -------------------------------------------------------------------------------

    def kernels(self) -> Iterator[Kernel]:
        """The kernels of this file."""
        yield from self._below(self.tree, self.scope)

    def _below(self, node: ast.AST, scope: Scope) -> Iterator[Kernel]:
        for child in ast.iter_child_nodes(node):
            inner = scope
            if isinstance(child, Function):
                yield from self._decorated(child, scope)
                inner = Scope.of(child, scope)
                if self._wrapper(child, scope) is not None:
                    self.helps = True
                    continue  # what it calls makes the kernels of others
            elif isinstance(child, ast.Call) and id(child) not in self._done:
                yield from self._by_call(child, scope)
            yield from self._below(child, inner)

    def _decorated(self, function: Function, scope: Scope) -> Iterator[Kernel]:
        for decorator in function.decorator_list:
            self._done.add(id(decorator))
            made, given = decorator, NOTHING
            if isinstance(decorator, ast.Call):
                made, given = decorator.func, scope.keyword(decorator)
            base = self.builder(made, scope)
            if base is not None:
                yield self._kernel(function.name, decorator, base.given(given))

    def _by_call(self, call: ast.Call, scope: Scope) -> Iterator[Kernel]:
        """`tilelang.jit(function, ...)` and `tilelang.jit(...)(function)`."""
        base = self.builder(call.func, scope)
        if base is not None and call.args:
            yield self._kernel(ast.unparse(call.args[0]), call, base.given(scope.keyword(call)))

    def _kernel(self, name: str, node: ast.expr, value: Value) -> Kernel:
        merged = value.state is True
        reason = "" if merged else value.reason or "it is built without pass_configs"
        return Kernel(self.path, node.lineno, name, merged, reason)
