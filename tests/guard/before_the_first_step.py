"""A script that puts other code in place of the proved one before its first step.

Started by `cppmega.run` on the tree of `test_before_the_first_step.py`. Every scene runs in a fork,
which imports Megatron anew, and prints what the guard says of the fork's first step.
"""

from __future__ import annotations

import dis
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cppmega import guard
from cppmega.errors import CppmegaError
from cppmega.host import env

SCENES: dict[str, Callable[[], object]] = {}


def scene(function: Callable[[], object]) -> Callable[[], object]:
    SCENES[function.__name__] = function
    return function


def thing() -> Any:
    return importlib.import_module("megatron.core.thing")


def stock(x):
    return x


def stand_in(text: str) -> bool:
    return True


# -- code of this package that patched text calls --------------------------------------------------


@scene
def ours_replaced():
    env.is_on = stand_in


@scene
def ours_code_swapped():
    env.is_on.__code__ = stand_in.__code__


@scene
def ours_stub_in_sys_modules():
    stub = types.ModuleType(env.__name__)
    stub.is_on = stand_in
    sys.modules[env.__name__] = stub


@scene
def ours_stub_with_the_name_of_its_file():
    stub = types.ModuleType(env.__name__)
    stub.is_on, stub.__file__ = stand_in, env.__file__
    sys.modules[env.__name__] = stub


# -- patched code ----------------------------------------------------------------------------------


@scene
def replaced():
    thing().double = stock


@scene
def wrapped():
    thing().double = functools.wraps(thing().double)(lambda x: x)


@scene
def code_of_another_function_of_the_file():
    thing().double.__code__ = thing().helper.__code__


@scene
def method_replaced():
    thing().Layer.forward = lambda self, x, *, by=2: x


@scene
def code_of_a_method():
    thing().Layer.forward.__code__ = (lambda self, x, *, by=2: x).__code__


@scene
def keyword_defaults():
    thing().Layer.forward.__kwdefaults__ = {"by": 9}


@scene
def below_its_decorator():
    thing().decorated = thing().decorated.__wrapped__


@scene
def decorator_of_the_script():
    decorators = importlib.import_module("megatron.core.decorators")
    decorators.announced = lambda function: functools.wraps(function)(lambda x, by=1: x)
    thing()


@scene
def alias_of_an_import():
    importlib.import_module("megatron.core.aliases").d = stock


@scene
def alias_of_an_attribute():
    importlib.import_module("megatron.core.aliases").e = stock


@scene
def code_in_a_file_without_a_patch():
    importlib.import_module("megatron.core.decorators").announced.__code__ = stock.__code__


KERNELS = """
class Kernel:
    def __init__(self, fn):
        self.fn = fn

    def __call__(self, *given, **named):
        return self.fn(*given, **named)
"""


# -- what is no attack -----------------------------------------------------------------------------


class Finder(importlib.abc.MetaPathFinder):
    """Gives one module another loader, as import hooks of tools do."""

    def __init__(self, wrap: Callable[[Any], Any]) -> None:
        self.wrap = wrap

    def find_spec(self, name, path, target=None):
        if name != "megatron.core.thing":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        spec.loader = self.wrap(spec.loader)
        return spec


class Chained:
    """A loader that knows only how to call another one."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def create_module(self, spec):
        return self.inner.create_module(spec)

    def exec_module(self, module):
        self.inner.exec_module(module)


@scene
def fine_lazy_loader():
    sys.meta_path.insert(0, Finder(importlib.util.LazyLoader))
    thing()


@scene
def fine_chained_loader():
    sys.meta_path.insert(0, Finder(Chained))
    thing()


@scene
def fine_loaded_by_its_path():
    spec = importlib.util.spec_from_file_location("second_thing", thing().__file__)
    sys.modules["second_thing"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


@scene
def fine_copies_by_value():
    """As cloudpickle's: other objects with equal code, which claim to be what they copy."""
    double, layer = thing().double, thing().Layer
    copy = types.FunctionType(double.__code__.replace(), dict(vars(thing())), "double")
    copy.__module__, copy.__qualname__ = double.__module__, "double"
    forward = types.FunctionType(layer.forward.__code__.replace(), {}, "forward")
    forward.__kwdefaults__ = {**layer.forward.__kwdefaults__}
    members = {**vars(layer), "forward": forward}
    for name in ("__dict__", "__weakref__"):
        members.pop(name)
    main = sys.modules["__main__"]
    main.copy, main.Copy = copy, type("Layer", (), members)


@scene
def fine_decorator_of_a_package_elsewhere():
    """As TileLang's, from a folder of packages that `pip install --target` has filled."""
    folder = Path(tempfile.mkdtemp())
    (folder / "kernels-1.0.dist-info").mkdir()
    (folder / "kernels.py").write_text(KERNELS)
    sys.path.append(str(folder))
    decorators = importlib.import_module("megatron.core.decorators")
    decorators.announced = importlib.import_module("kernels").Kernel
    thing()


@scene
def fine_profiled_by_line():
    """A line profiler lengthens the code of a function that has a twin."""
    code = thing().double.__code__
    thing().double.__code__ = code.replace(co_code=code.co_code + bytes((dis.opmap["NOP"], 0)) * 2)


@scene
def fine_used():
    thing().Layer().forward(2)
    thing().cached(2)
    thing().counted(1)


def look(play: Callable[[], object]) -> str:
    try:
        play()
        for _ in guard.steps([1]):
            assert thing().double(2) == 4 or play.__name__.startswith(("re", "wr", "code", "ours"))
        return ""
    except CppmegaError as error:
        return error.render()
    except BaseException as error:
        return repr(error)


if __name__ == "__main__":
    found = {}
    for name, play in SCENES.items():
        reads, writes = os.pipe()
        if os.fork() == 0:
            os.write(writes, look(play).encode())
            os._exit(0)
        os.close(writes)
        with os.fdopen(reads) as answer:
            found[name] = answer.read()
        os.wait()
    print("FOUND", json.dumps(found))
    for _ in guard.steps([1]):
        thing().double(1)
