"""A script in which torch hands back other objects for the same code, and some that are not.

Started by `cppmega.run` on the tree of `test_live_torch.py`.
"""

from __future__ import annotations

import functools
import sys

import torch
from megatron.core import net

from cppmega import guard
from tests.guard.scenes import Scene, play_all

SCENES: dict[str, Scene] = {}
ONES = torch.ones(2)


def stock(x: torch.Tensor) -> torch.Tensor:
    return x


def broken(x: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    return net.plain(x)


def changing(label, owner, name, make):
    def play():
        old = vars(owner)[name]
        setattr(owner, name, make(old))
        net.Net()(ONES)
        yield
        setattr(owner, name, old)

    SCENES[label] = play


def compiled(function):
    return torch.compile(function, backend="eager")


def scene(function: Scene) -> Scene:
    SCENES[function.__name__] = function
    return function


changing("fine_function_compiled", net, "plain", compiled)
changing("fine_compiled_twice", net, "plain", lambda f: compiled(torch.compiler.disable(f)))
changing("fine_method_compiled", net.Net, "forward", compiled)
changing("fine_scripted", net, "plain", torch.jit.script)
changing("compiled_stock", net, "plain", lambda f: compiled(stock))
changing("scripted_stock", net, "plain", lambda f: torch.jit.script(stock))
changing("wraps_of_a_compiled", net, "plain", lambda f: functools.wraps(compiled(f))(stock_as()))
changing("without_gradients", net, "plain", torch.no_grad())


def stock_as():
    return lambda x: x


@scene
def code_below_compile():
    old, code = net.plain, net.plain.__code__
    net.plain = compiled(old)
    old.__code__ = stock.__code__
    yield
    old.__code__, net.plain = code, old


@scene
def fine_model_compiled():
    model = compiled(net.Net())
    model(ONES)
    again = net.Net()
    again.compile(backend="eager")
    again(ONES)
    yield


@scene
def fine_graph_break():
    compiled(broken)(ONES)
    torch.compile(net.breaking, backend="eager")(ONES)
    yield


@scene
def fine_backward():
    net.Double.apply(torch.ones(2, requires_grad=True)).sum().backward()
    torch.func.vmap(net.plain)(ONES)
    yield


@scene
def fine_profiler():
    with torch.profiler.profile(with_stack=True, record_shapes=True):
        net.Net()(ONES)
        yield


@scene
def fine_traced_by_python():
    sys.settrace(lambda *_: None)
    sys.setprofile(lambda *_: None)
    net.Net()(ONES)
    yield
    sys.settrace(None)
    sys.setprofile(None)


if __name__ == "__main__":
    for _ in guard.steps([1]):
        net.Net()(ONES)
    play_all(SCENES)
