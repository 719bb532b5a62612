"""List the TileLang kernels of some packages, and whether each merges its shared memory.

Every module that imports TileLang is imported with a stand-in for TileLang, which records what a
kernel is built with: the value passed counts, however it was written. Neither TileLang nor a GPU is
needed. A kernel that no import builds counts as not merged, since nothing shows what it would be
built with.
"""

from __future__ import annotations

import dis
import functools
import importlib
import inspect as inspect_code
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any
from unittest.mock import MagicMock

from cppmega.guard.expected import nested
from cppmega.guard.files import only_from
from cppmega.preflight.ask import serve
from cppmega.preflight.messages import TilelangAnswer, TilelangKernel, TilelangOrder
from cppmega.proof import stand_ins

_FLAG = "tl.enable_aggressive_shared_memory_merge"
_BUILDERS = ("jit", "lazy_jit", "compile")
_BARE = "mamba_ssm"
"""Its `__init__` imports compiled extensions, which need a GPU's driver."""

_IMPORT = re.compile(rb"^[ \t]*(?:import|from)[ \t][^\n]*\btilelang", re.MULTILINE)

Place = tuple[str, int]


def inspect(order: TilelangOrder) -> TilelangAnswer:
    """Import what imports TileLang below the packages."""
    only_from(Path(order.root))
    recorder = Recorder()
    kernels: list[TilelangKernel] = []
    for path, name in _sources(map(Path, order.packages)):
        try:
            recorder.modules[name] = recorder.load(name)
        except BaseException as error:
            reason = f"{name} cannot be imported: {type(error).__name__}: {error}"[:300]
            kernels.append(TilelangKernel(path, 1, "a kernel", reason))
    kernels += recorder.kernels
    for module in recorder.modules.values():
        kernels += recorder.unseen(module)
    return TilelangAnswer(sorted(kernels, key=lambda kernel: (kernel.path, kernel.line)))


def _sources(packages: Iterable[Path]) -> Iterator[tuple[str, str]]:
    """Path and module name of every file that imports TileLang, or a module named after it."""
    for package in packages:
        if str(package.parent) not in sys.path:
            sys.path.append(str(package.parent))
        for path in sorted(package.rglob("*.py")):
            if _IMPORT.search(path.read_bytes()):
                parts = path.relative_to(package.parent).with_suffix("").parts
                yield str(path), ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


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
        self.modules: dict[str, ModuleType] = {}
        """Those that import TileLang, by name."""
        self.known: dict[CodeType, bool] = {}
        """Code -> whether it names a builder."""
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

    def load(self, name: str) -> ModuleType:
        """Import a module, standing in for every package that it finds missing."""
        package = name.partition(".")[0]
        if package == _BARE:
            _without_init(name.rpartition(".")[0])
        while True:
            try:
                return importlib.import_module(name)
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

    def unseen(self, module: ModuleType) -> Iterator[TilelangKernel]:
        """The functions of a file that build a kernel when they are called, which none has been."""
        path = str(module.__file__)
        for code in nested(compile(Path(path).read_bytes(), path, "exec")):
            is_function = code.co_flags & inspect_code.CO_OPTIMIZED
            line = code.co_firstlineno
            if is_function and (path, line) not in self.callers and self._refers(code, module):
                reason = "it is built when that function is called, and no import calls it"
                yield TilelangKernel(path, line, f"a kernel of {code.co_name}()", reason)

    def _refers(self, code: CodeType, module: ModuleType) -> bool:
        """Whether code names a builder itself: `tilelang.jit`, or what passes something to it."""
        if code not in self.known:
            self.known[code] = False  # if it is asked about itself
            self.known[code] = self._names_builder(code, vars(module))
        return self.known[code]

    def _names_builder(self, code: CodeType, names: Mapping[str, Any]) -> bool:
        steps = [*dis.get_instructions(code)]
        if any(s.opname == "LOAD_GLOBAL" and self._builds(names.get(s.argval)) for s in steps):
            return True
        for before, step in pairwise(steps):
            if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and step.argval in _BUILDERS:
                local = before.opname.startswith("LOAD_FAST") and "tilelang" in code.co_names
                if local or names.get(before.argval) is self.tilelang:
                    return True
        return False

    def _builds(self, value: Any) -> bool:
        """Whether a value is a builder, or wraps one."""
        while isinstance(value, functools.partial):
            value = value.func
        if not isinstance(value, FunctionType):
            return bool(value == self.build)
        if value.__code__.co_filename == __file__:  # what `build` has returned
            return True
        home = self.modules.get(value.__module__)
        return home is not None and self._refers(value.__code__, home)


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


if __name__ == "__main__":
    serve(TilelangOrder, inspect)
