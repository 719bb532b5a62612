"""A small Megatron whose definitions are of every kind that can be replaced."""

FILES = {
    "megatron/core/thing.py": """\
import functools

from megatron.core.decorators import announced
from megatron.core.tools import click

LIMIT = 3
STATE = {}
_COUNT = 0


def double(x):
    return x


def half(x):
    return x / 2


def helper(x):
    return len([x])


def bump():
    global _COUNT
    _COUNT += 1


def counter(function):
    calls = 0

    def counted(x):
        nonlocal calls
        calls += 1
        return function(x)

    return counted


@counter
def counted(x):
    return x


@announced
def decorated(x, by=1):
    return x * by


@functools.lru_cache
def cached(x):
    return x


@click.command()
def compiled():  # an object of another package, as the kernels of TileLang are
    return 1


@functools.singledispatch
def shown(x):
    return str(x)


class Layer:
    SCALE = 2
    calls = 0

    def forward(self, x, *, by=2):
        Layer.calls += 1
        return double(x) * by

    @staticmethod
    def fixed(x):
        return x

    @property
    def width(self):
        return 1


class Wide(Layer):
    pass
""",
    "megatron/core/decorators.py": """\
import functools


def announced(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        return function(*args, **kwargs)

    return inner
""",
    "megatron/core/tools.py": "import click\n",
    "megatron/core/blocks/__init__.py": "from ..thing import Layer\n",
    "megatron/core/user.py": """\
from megatron.core.blocks import Layer
from megatron.core.thing import double


def run(x):
    return double(x) + Layer().forward(x)
""",
    "megatron/core/late.py": "def third(x):\n    return x\n",
}
