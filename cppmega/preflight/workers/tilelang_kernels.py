"""List the TileLang kernels of some packages, and whether each merges its shared memory.

Every module that builds kernels is imported with a stand-in for TileLang, which records what a
kernel is built with: the value passed counts, however it was written. Neither TileLang nor a GPU is
needed. A kernel that no import builds counts as not merged, since nothing shows what it would be
built with.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any
from unittest.mock import MagicMock

from cppmega.guard.files import only_from
from cppmega.preflight.ask import serve
from cppmega.preflight.messages import TilelangAnswer, TilelangKernel, TilelangOrder
from cppmega.proof import stand_ins

_FLAG = "tl.enable_aggressive_shared_memory_merge"
_BUILDERS = ("jit", "lazy_jit", "compile")
_BARE = "mamba_ssm"
"""Its `__init__` imports compiled extensions, which need a GPU's driver."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Place = tuple[str, int]


def inspect(order: TilelangOrder) -> TilelangAnswer:
    """Import what builds kernels below the packages."""
    only_from(Path(order.root))
    recorder = Recorder()
    kernels: list[TilelangKernel] = []
    sources = list(_sources(map(Path, order.packages)))
    for path, name, _ in sources:
        try:
            recorder.load(name)
        except BaseException as error:
            reason = f"{name} cannot be imported: {type(error).__name__}: {error}"[:300]
            kernels.append(TilelangKernel(path, 1, "a kernel", reason))
    kernels += recorder.kernels
    for path, _, late in sources:
        kernels += [kernel for kernel in late if (path, kernel.line) not in recorder.callers]
    return TilelangAnswer(sorted(kernels, key=lambda kernel: (kernel.path, kernel.line)))


# -- what is built ---------------------------------------------------------------------------------


class _Keys:
    """Stands in for `PassConfigKey`, whose members are their own values."""

    def __getattr__(self, name: str) -> str:
        return _Key(f"tl.{name.removeprefix('TL_').lower()}")


class _Key(str):
    @property
    def value(self) -> str:
        return str(self)


class Recorder(MetaPathFinder, Loader):
    """Stands in for TileLang, and for other packages that are not installed."""

    def __init__(self) -> None:
        self.kernels: list[TilelangKernel] = []
        self.callers: set[Place] = set()
        """Functions in which a kernel was built: path and first line."""
        self.names: dict[str, Any] = dict.fromkeys(_BUILDERS, self.build)
        self.names["PassConfigKey"] = _Keys()
        self.tilelang = MagicMock(**self.names, transform=MagicMock(**self.names))
        self.absent = {"tilelang"}
        stand_ins.forget("tilelang")
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Find a package that has a stand-in, or a module of one."""
        if name.partition(".")[0] in self.absent:
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> Any:
        """Create a stand-in that has every attribute."""
        if spec.name == "tilelang":
            return self.tilelang
        if spec.name.startswith("tilelang."):  # as in `from tilelang.jit import jit`
            return MagicMock(side_effect=self.build, **self.names)
        return MagicMock()

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the stand-in is complete."""

    def load(self, name: str) -> None:
        """Import a module, standing in for every package that it finds missing."""
        package = name.partition(".")[0]
        if package == _BARE:
            _without_init(name.rpartition(".")[0])
        while True:
            try:
                importlib.import_module(name)
                return
            except ModuleNotFoundError as error:
                missing = (error.name or package).partition(".")[0]
                if missing == package or missing in self.absent:
                    raise
                self.absent.add(missing)

    def build(self, kernel: Any = None, *_: Any, pass_configs: Any = None, **__: Any) -> Any:
        """Record a kernel, in the place of `tilelang.jit`; without one, return the decorator."""
        if kernel is None:
            return lambda function: self.build(function, pass_configs=pass_configs)
        frame = _caller()
        path, line = frame.f_code.co_filename, frame.f_lineno
        code = getattr(kernel, "__code__", None)
        if code is not None:
            path, line = code.co_filename, code.co_firstlineno
        name = getattr(kernel, "__name__", "a kernel")
        self.kernels.append(TilelangKernel(path, line, name, _lacking(pass_configs)))
        while frame.f_back is not None:
            self.callers.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))
            frame = frame.f_back
        return kernel


def _caller() -> FrameType:
    frame = sys._getframe()
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _lacking(configs: object) -> str:
    """Why a kernel with these pass configs does not merge its shared memory; empty if it does."""
    if configs is None:
        return "it is built without pass_configs"
    if not isinstance(configs, Mapping):
        return f"its pass_configs are {configs!r}"[:100]
    if _FLAG not in configs:
        return "its pass_configs lack the flag"
    return "" if configs[_FLAG] is True else f"the flag is {configs[_FLAG]!r}"


def _without_init(package: str) -> None:
    """Make a package and those around it importable without running any `__init__`."""
    parts = package.split(".")
    for end in range(1, len(parts) + 1):
        name, folder = ".".join(parts[:end]), Path(*parts[:end])
        if name not in sys.modules:
            places = (Path(entry) / folder for entry in sys.path)
            stand_ins.package(name, str(next(place for place in places if place.is_dir())))


# -- where it is built -----------------------------------------------------------------------------


def _sources(packages: Iterable[Path]) -> Iterator[tuple[str, str, list[TilelangKernel]]]:
    """Path and module name of every file that builds kernels, and the functions that do so."""
    trees: dict[Path, tuple[str, ast.Module | None]] = {}
    for package in packages:
        if str(package.parent) not in sys.path:
            sys.path.append(str(package.parent))
        for path in sorted(package.rglob("*.py")):
            if b"tilelang" in path.read_bytes():
                trees[path] = _module_name(path, package.parent), _parsed(path)
    builders = _named_builders(tree for _, tree in trees.values() if tree is not None)
    for path, (name, tree) in trees.items():
        if tree is None:
            yield str(path), name, []
            continue
        refers = _references(tree, builders)
        if any(map(refers, ast.walk(tree))):
            yield str(path), name, [_unseen(path, function) for function in _inside(tree, refers)]


def _module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _parsed(path: Path) -> ast.Module | None:
    """A file's syntax tree; None where it is not Python, which its import will report."""
    try:
        return ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError):
        return None


def _unseen(path: Path, function: Function) -> TilelangKernel:
    first = min([function.lineno, *(one.lineno for one in function.decorator_list)])
    reason = "it is built when that function is called, and no import calls it"
    return TilelangKernel(str(path), first, f"a kernel of {function.name}()", reason)


def _named_builders(trees: Iterable[ast.Module]) -> set[str]:
    """Names of functions and variables, in any file, that pass something to a builder."""
    every, names = list(trees), set[str]()
    while True:
        found = set(names)
        for tree in every:
            refers = _references(tree, names)
            found |= {function.name for function in _inside(tree, refers)}
            for node in ast.walk(tree):
                if isinstance(node, ast.Assign) and _is_builder(node.value, refers):
                    found |= {one.id for one in node.targets if isinstance(one, ast.Name)}
        if found == names:
            return names
        names = found


def _is_builder(value: ast.expr, refers: Callable[[ast.AST], bool]) -> bool:
    """Whether a value is, or wraps, a builder, as opposed to the kernel that one has built."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Call):
        return False
    if isinstance(value, ast.Call) and value.args and refers(value.func):
        return False
    return any(map(refers, ast.walk(value)))


def _references(tree: ast.Module, names: set[str]) -> Callable[[ast.AST], bool]:
    """Whether a node of this file names a builder of TileLang's, or one of `names`."""
    modules, direct = set[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            mine = [alias for alias in node.names if alias.name.partition(".")[0] == "tilelang"]
            modules |= {alias.asname or "tilelang" for alias in mine}
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if alias.name == "tilelang":  # passed on by a module that tries the import
                    modules.add(alias.asname or "tilelang")
                elif (node.module or "").partition(".")[0] == "tilelang":
                    direct |= {alias.asname or alias.name} if alias.name in _BUILDERS else set()

    def refers(node: ast.AST) -> bool:
        if isinstance(node, ast.Attribute):
            root = node.value.id if isinstance(node.value, ast.Name) else ""
            return node.attr in names or (node.attr in _BUILDERS and root in modules)
        return isinstance(node, ast.Name) and node.id in names | direct

    return refers


def _inside(tree: ast.Module, refers: Callable[[ast.AST], bool]) -> Iterator[Function]:
    """Functions that name a builder in their body: the innermost ones."""

    def visit(node: ast.AST, function: Function | None) -> Iterator[Function]:
        if function is not None and refers(node):
            yield function
        for name, value in ast.iter_fields(node):
            inner = function
            if isinstance(node, Function) and name == "body":
                inner = node
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from visit(child, inner)

    yield from dict.fromkeys(visit(tree, None))


if __name__ == "__main__":
    serve(TilelangOrder, inspect)
