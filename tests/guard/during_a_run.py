"""A script that puts other code in place of the proved one, each time in another way.

Started by `cppmega.run` on the tree of `test_during_a_run.py`. A scene changes something, says
so with `yield`, and puts it back; the guard looks in between and afterwards. Prints what it said.
"""

from __future__ import annotations

import builtins
import copy
import functools
import gc
import importlib
import importlib.util
import os
import sys
import types
from contextlib import contextmanager
from pathlib import Path

from megatron.core import thing, user

from cppmega import guard
from cppmega.host import env
from tests.guard.scenes import Scene, play_all

SCENES: dict[str, Scene] = {}


def scene(function: Scene) -> Scene:
    SCENES[function.__name__] = function
    return function


def stock(x):
    return x


def fresh():
    """functools.wraps changes what it wraps with: each scene has its own."""
    return lambda x: x


@contextmanager
def changed(owner, name, new):
    old = vars(owner)[name]
    setattr(owner, name, new)
    yield
    setattr(owner, name, old)


def replacing(label, owner, name, new):
    def play():
        with changed(owner, name, new() if isinstance(new, types.FunctionType) else new):
            yield

    SCENES[label] = play


def timed(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def named_like(function):
    def double(x):
        return x

    double.__module__, double.__qualname__ = function.__module__, function.__qualname__
    return double


class Called:
    def __call__(self, x):
        return x


# -- the name means another object -----------------------------------------------------------------

replacing("wraps_of_stock", thing, "double", lambda: functools.wraps(thing.double)(fresh()))
replacing("honest_wrapper", thing, "double", lambda: timed(thing.double))
replacing("its_own_name", thing, "double", lambda: named_like(thing.double))
replacing("partial", thing, "double", lambda: functools.partial(stock))
replacing("callable_object", thing, "double", lambda: functools.wraps(thing.double)(Called()))
replacing("builtin", thing, "double", lambda: abs)
replacing("method", thing.Layer, "forward", lambda: lambda self, x, *, by=2: x)
replacing("static_method", thing.Layer, "fixed", lambda: staticmethod(stock))
replacing("property_of_a_class", thing.Layer, "width", lambda: property(lambda self: 9))
replacing("class_constant", thing.Layer, "SCALE", 3)
replacing("module_constant", thing, "LIMIT", 4)
replacing("helper_in_the_file", thing, "helper", lambda: stock)
replacing("imported_helper", thing, "announced", lambda: stock)
replacing("imported_module", thing, "functools", lambda: types.ModuleType("functools"))
replacing("whole_class", thing, "Layer", lambda: type("Layer", (thing.Layer,), {}))
replacing("below_its_decorator", thing, "decorated", lambda: thing.decorated.__wrapped__)
replacing("copy_in_an_importer", user, "double", lambda: stock)
replacing("copy_through_a_package", user, "Layer", lambda: Called)


@scene
def deleted():
    old = thing.helper
    del thing.helper
    yield
    thing.helper = old


@scene
def method_added_to_a_class():
    thing.Layer.__getattribute__ = lambda self, name: object.__getattribute__(self, name)
    yield
    del thing.Layer.__getattribute__


@scene
def builtin_shadowed_in_the_module():
    thing.len = stock
    yield
    del thing.len


@scene
def builtins_of_the_module():
    with changed(thing, "__builtins__", dict(vars(builtins))):
        yield


@scene
def wrapper_kept_by_another_module():
    sys.modules["helpers_of_mine"] = holder = types.ModuleType("helpers_of_mine")
    holder.faster = functools.wraps(thing.double)(fresh())
    yield
    del sys.modules["helpers_of_mine"]


# -- the same object, changed inside ---------------------------------------------------------------


@contextmanager
def attribute(owner, name, new):
    old = getattr(owner, name)
    setattr(owner, name, new)
    yield
    setattr(owner, name, old)


def inside(label, owner, name, new):
    def play():
        with attribute(owner, name, new):
            yield

    SCENES[label] = play


inside("code_object", thing.double, "__code__", stock.__code__)
inside("code_of_a_constant", thing.double, "__code__", thing.double.__code__.replace(co_consts=()))
inside("defaults", thing.decorated.__wrapped__, "__defaults__", (7,))
inside("keyword_defaults", thing.Layer.forward, "__kwdefaults__", {"by": 9})
inside("code_below_a_decorator", thing.decorated.__wrapped__, "__code__", stock.__code__)
inside("bases", thing.Wide, "__bases__", (type("Other", (thing.Layer,), {}),))


@scene
def closure():
    (cell,) = (c for c in thing.decorated.__closure__ if callable(c.cell_contents))
    old, cell.cell_contents = cell.cell_contents, stock
    yield
    cell.cell_contents = old


@scene
def implementation_of_a_generic_function():
    (registry,) = gc.get_referents(thing.shown.registry)
    old, registry[object] = registry[object], stock
    thing.shown._clear_cache()
    yield
    registry[object] = old
    thing.shown._clear_cache()


# -- another module --------------------------------------------------------------------------------


@scene
def module_made_in_memory():
    old = sys.modules[thing.__name__]
    sys.modules[thing.__name__] = types.ModuleType(thing.__name__)
    yield
    sys.modules[thing.__name__] = old


@scene
def attribute_of_the_package():
    import megatron.core

    with changed(megatron.core, "thing", types.ModuleType("thing")):
        yield


@scene
def class_of_the_module():
    thing.__class__ = type("Answers", (types.ModuleType,), {"double": property(lambda self: stock)})
    yield
    thing.__class__ = types.ModuleType


@scene
def copy_of_the_module():
    twin = types.ModuleType(thing.__name__)
    vars(twin).update(vars(thing))
    sys.modules["twin"] = twin
    yield
    del sys.modules["twin"]


@scene
def loaded_by_path():
    spec = importlib.util.spec_from_file_location("second_thing", thing.__file__)
    sys.modules["second_thing"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield
    del sys.modules["second_thing"]


@scene
def file_changed_on_disk():
    file = Path(thing.__file__)
    text = file.read_text()
    file.unlink()
    file.write_text(text.replace("2 * x", "3 * x"))
    yield
    file.write_text(text)


# -- what is no attack -----------------------------------------------------------------------------


@scene
def fine_imported_again():
    import megatron.core

    old = sys.modules.pop(thing.__name__)
    new = importlib.import_module(thing.__name__)
    assert new is not old and (new.double(2), new.half(20)) == (4, 2), "the runtime patch is lost"
    yield
    sys.modules[thing.__name__] = megatron.core.thing = old


@scene
def fine_reloaded():
    importlib.reload(thing)
    assert (thing.double(2), thing.half(20)) == (4, 2), "the runtime patch is lost"
    yield


@scene
def fine_under_another_name():
    sys.path.insert(0, str(Path(thing.__file__).parent))
    second = importlib.import_module("thing")
    assert second is not thing and (second.double(2), second.half(20)) == (4, 2)
    yield
    del sys.path[0], sys.modules["thing"]


@scene
def fine_state():
    thing.bump()
    thing.Layer.calls += 1
    thing.Layer().forward(3)
    thing.STATE["x"] = stock
    thing.cached(2)
    thing.counted(1)
    yield


@scene
def fine_vouched():
    os.environ[env.ALLOW_WRAPPER.name] = "__main__:timed.<locals>.wrapper"
    with changed(thing, "double", timed(thing.double)):
        yield
    del os.environ[env.ALLOW_WRAPPER.name]


@scene
def fine_subclass():
    class Mine(thing.Layer):
        def forward(self, x, *, by=2):
            return 0

    copy.deepcopy(Mine())
    yield


if __name__ == "__main__":
    for _ in guard.steps([1]):
        user.run(1)
    play_all(SCENES)
