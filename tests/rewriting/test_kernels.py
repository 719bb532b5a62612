"""Marks stay outside of functions that are compiled from their source."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from cppmega.edits import replacing
from cppmega.errors import CppmegaError
from cppmega.page import Edit
from cppmega.rewriting import kernels, marks, rewrite, source
from cppmega.rewriting.rewrite import Step
from tests.support.lab import A

HALVES = replacing("x * 2", "x * 3")


def marked(text: str, symbol: str = "kernel", mark: str | None = None) -> str:
    """The text with an edit of one marked definition."""
    step = Step("page", Edit(f"{A}:{symbol}", {}, HALVES, mark=mark), marked=True)
    return rewrite.rewrite(text.encode(), A, [step]).data.decode()


@pytest.mark.parametrize(
    ("decorator", "compiled"),
    [
        ("triton.jit", True),
        ("triton.jit(do_not_specialize=['x'])", True),
        ("triton.autotune(configs=[], key=['x'])", True),
        ("jit", True),
        ("gluon.jit", True),
        ("tilelang_jit(pass_configs=CONFIGS)", True),
        ("T.prim_func", True),
        ("njit(cache=True)", True),
        ("numba.cuda.jit", True),
        ("numba.vectorize", True),
        ("torch.jit.script", True),
        ("cute.kernel", True),
        ("ct.kernel(opt_level=3)", True),
        ("functools.partial(jax.jit, static_argnums=0)", True),
        ("jit_fuser", False),  # torch.compile, which traces the mark away
        ("torch.compile", False),
        ("torch.no_grad()", False),
        ("staticmethod", False),
        ("register_kernel('x')", False),
        ("nvtx_decorator(message='kernel')", False),
    ],
)
def test_a_mark_is_inside_what_python_runs_and_outside_of_what_is_compiled(
    decorator: str, compiled: bool
) -> None:
    text = (
        f"@{decorator}\ndef kernel(x):\n    return x * 2\n\n\n"
        "def launch(x):\n    grid = (1,)\n    kernel[grid](x)\n"
    )
    done = marked(text)
    inside = 'def kernel(x):\n    _cppmega_reached("page")\n    return x * 3'
    before = '    grid = (1,)\n    _cppmega_reached("page")\n    kernel[grid](x)'
    assert (before in done, inside in done) == (compiled, not compiled)
    assert done.count('_cppmega_reached("page")') == 1
    assert done.index(f"def {marks.FUNCTION}") < done.index('_cppmega_reached("page")')


KERNEL = "@triton.jit\ndef kernel(x):\n    return x * 2\n\n\n"
CALL = '_cppmega_reached("page")'


@pytest.mark.parametrize(
    ("symbol", "text", "expected"),
    [
        (  # a kernel that only another one calls
            "kernel",
            KERNEL
            + "@triton.jit\ndef outer(x):\n    kernel(x)\n\n\ndef launch(x):\n    outer[1](x)\n",
            f"def launch(x):\n    {CALL}\n    outer[1](x)\n",
        ),
        (  # in the branch that launches it, and in a method
            "kernel",
            KERNEL + "class Op:\n    def go(self, x):\n        if x:\n            kernel[1](x)\n",
            f"        if x:\n            {CALL}\n            kernel[1](x)\n",
        ),
        (  # on the line of the condition
            "kernel",
            KERNEL + "def launch(x):\n    if x: kernel[1](x)\n",
            f"def launch(x):\n    {CALL}\n    if x: kernel[1](x)\n",
        ),
        (  # compiled by a call
            "kernel",
            "def kernel(x):\n    return x * 2\n\n\ndef launch(x):\n    return njit(kernel)(x)\n",
            f"def launch(x):\n    {CALL}\n    return njit(kernel)(x)\n",
        ),
        (  # defined in the function that returns it; the other `kernel` is another one
            "build.kernel",
            "def build(n):\n    @T.prim_func\n    def kernel(x):\n        return x * 2\n\n"
            "    return kernel\n\n\ndef other(kernel):\n    return kernel\n",
            f"        return x * 3\n    {CALL}\n\n    return kernel\n\n\ndef other(kernel):\n",
        ),
        (  # launched by both definitions of a function
            "kernel",
            KERNEL
            + "if HAVE:\n    def launch(x):\n        kernel[1](x)\n"
            + "else:\n    def launch(x):\n        return kernel[2](x)\n",
            f"        {CALL}\n        kernel[1](x)\nelse:\n    def launch(x):\n        {CALL}\n",
        ),
    ],
)
def test_the_functions_that_launch_a_kernel_carry_its_mark(
    symbol: str, text: str, expected: str
) -> None:
    done = marked(text, symbol)
    assert expected in done, done
    (kernel,) = source.find(ast.parse(done), symbol)
    assert CALL.split("(")[0] not in ast.unparse(kernel)


@pytest.mark.parametrize(
    ("symbol", "mark", "text"),
    [
        ("kernel", None, KERNEL),
        ("kernel", None, KERNEL + "TABLE = {1: kernel}\n"),
        (
            "f",
            "inner",
            "@njit\ndef f(x):\n    def inner():\n        return x * 2\n    return inner()\n",
        ),
        ("C", "go", "class C:\n    @cute.jit\n    def go(self, x):\n        return x * 2\n"),
    ],
)
def test_a_kernel_without_a_launcher_is_refused(symbol: str, mark: str | None, text: str) -> None:
    with pytest.raises(CppmegaError) as caught:
        marked(text, symbol, mark)
    assert caught.value.name == "mark-in-kernel" and "page" in caught.value.what


SCALE = """\
import torch
import triton
import triton.language as tl


@triton.jit
def kernel(out, values, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(values + at, mask=at < size)
    tl.store(out + at, x * 2, mask=at < size)


def launch(values):
    out = torch.empty_like(values)
    kernel[(1,)](out, values, values.numel(), BLOCK=16)
    return out
"""


def test_a_patched_triton_kernel_compiles(tmp_path: Path) -> None:
    """With the mark in its body it does not: the name is undefined there."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    def compiled(name: str, text: str) -> Any:
        (tmp_path / f"{name}.py").write_text(text)
        spec = importlib.util.spec_from_file_location(name, tmp_path / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        types = {"out": "*fp32", "values": "*fp32", "size": "i32", "BLOCK": "constexpr"}
        built = ASTSource(module.kernel, types, {(3,): 16})
        return module, triton.compile(built, target=GPUTarget("cuda", 90, 32)).asm["ptx"]

    module, code = compiled("scale_patched", marked(SCALE))
    assert code and not module._CPPMEGA_REACHED
    with pytest.raises(Exception, match="_cppmega_reached"):
        compiled(
            "scale_marked",
            marked(SCALE.replace("@triton.jit", "@triton_jit_as")).replace(
                "@triton_jit_as", "@triton.jit"
            ),
        )


def test_decorators_are_judged_by_their_names_alone() -> None:
    assert kernels.compiles("triton.jit") and not kernels.compiles("triton_free.wraps(f)")
