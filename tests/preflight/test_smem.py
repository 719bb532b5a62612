"""The scan for TileLang kernels: every form of decorator and call, and the value behind the key."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from cppmega.errors import CppmegaError
from cppmega.preflight import smem

KEY = "TL_ENABLE_AGGRESSIVE_SHARED_MEMORY_MERGE"
ON = f"{{tilelang.PassConfigKey.{KEY}: True}}"
FAST = "{tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True}"


def look(text: str, **others: str) -> list[tuple[str, bool]]:
    """(name, merged) of the kernels of a text; `others` are files beside it."""
    files = {f"pkg/{name}.py": textwrap.dedent(t) for name, t in others.items()}
    found = smem.kernels({"pkg/here.py": textwrap.dedent(text), **files})
    assert all(bool(kernel.reason) != kernel.merged for kernel in found)
    return [(kernel.name, kernel.merged) for kernel in found]


FORMS = {
    "attribute": ("import tilelang", "@tilelang.jit({})"),
    "short name": ("import tilelang as tl, tilelang", "@tl.jit({})"),
    "from": ("import tilelang\nfrom tilelang import jit", "@jit({})"),
    "from, renamed": ("import tilelang\nfrom tilelang import jit as build", "@build({})"),
    "from its module": ("import tilelang\nfrom tilelang.jit import jit", "@jit({})"),
    "other name": ("import tilelang\nbuild = tilelang.jit", "@build({})"),
    "guarded import": ("try:\n    import tilelang\nexcept ImportError: pass", "@tilelang.jit({})"),
    "handed on": ("from .helpers import tilelang as tl\nimport tilelang", "@tl.jit({})"),
    "with other arguments": ("import tilelang", "@tilelang.jit(out_idx=[-1], target='cuda', {})"),
}


@pytest.mark.parametrize("form", FORMS)
def test_decorator_forms(form: str) -> None:
    head, decorator = FORMS[form]
    text = f"{head}\n{decorator}\ndef kernel(n):\n    return n\n"
    assert look(text.format(f"pass_configs={ON}")) == [("kernel", True)]
    assert look(text.format(f"pass_configs={FAST}")) == [("kernel", False)]
    assert look(text.format("")) == [("kernel", False)]
    if decorator.endswith("({})"):
        bare = f"{head}\n{decorator[:-4]}\ndef kernel(n):\n    return n\n"
        assert look(bare) == [("kernel", False)]


@pytest.mark.parametrize(
    ("configs", "merged"),
    [
        (ON, True),
        (f"{{'tl.{KEY[3:].lower()}': True}}", True),
        (f"{{tilelang.PassConfigKey.{KEY}.value: True}}", True),
        (f"{{K.{KEY}: True, **{{}}}}", True),
        (f"{{**{FAST}, K.{KEY}: True}}", True),
        (f"{FAST} | {ON}", True),
        (f"dict({ON})", True),
        (f"{ON} if HAVE_TILELANG else {{}}", True),
        # The key is there, and it is not True.
        (f"{{tilelang.PassConfigKey.{KEY}: False}}", False),
        (f"{{tilelang.PassConfigKey.{KEY}: None}}", False),
        (f"{{tilelang.PassConfigKey.{KEY}: 1}}", False),
        (f"{{tilelang.PassConfigKey.{KEY}: 'True'}}", False),
        (f"{{tilelang.PassConfigKey.{KEY}: os.name == 'posix'}}", False),
        (f"{{**{ON}, K.{KEY}: False}}", False),
        (f"{{K.{KEY}: True, **{{K.{KEY}: False}}}}", False),
        (f"{{K.{KEY}: True, **configs()}}", False),
        (f"{ON} | {{K.{KEY}: False}}", False),
        (f"{ON} if os.environ else {{}}", False),
        (f"configs({ON})", False),
        ("{}", False),
        ("None", False),
        (f"{{tilelang.PassConfigKey.{KEY}_DEBUG: True}}", False),
    ],
)
def test_values(configs: str, merged: bool) -> None:
    text = f"""
    import os
    import tilelang
    K = tilelang.PassConfigKey
    CONFIGS = {configs}

    @tilelang.jit(pass_configs={configs})
    def inline(n): ...

    @tilelang.jit(pass_configs=CONFIGS)
    def by_name(n): ...

    @tilelang.jit(**{{"out_idx": [-1], "pass_configs": CONFIGS}})
    def unpacked(n): ...
    """
    assert look(text) == [("inline", merged), ("by_name", merged), ("unpacked", merged)]


@pytest.mark.parametrize(
    ("before", "merged"),
    [
        (f"C = {FAST}\nC[K.{KEY}] = True", True),
        (f"C = {{}}\nC.update({ON})", True),
        (f"C = {{}}\nC |= {ON}", True),
        (f"FLAG = K.{KEY}\nC = {{FLAG: True}}", True),
        (f"BASE = {ON}\nC = {{**BASE, **{FAST}}}", True),
        (f"YES = True\nC = {{K.{KEY}: YES}}", True),
        (f"if HAVE_TILELANG:\n    C = {ON}\nelse:\n    C = {{}}", True),
        (f"if tilelang is not None:\n    C = {ON}\nelse:\n    C = {{}}", True),
        (f"C = {ON}\nC[K.{KEY}] = False", False),
        (f"C = {ON}\ndel C[K.{KEY}]", False),
        (f"C = {{}}\nif BIG:\n    C[K.{KEY}] = True", False),
        (f"if BIG:\n    C = {ON}\nelse:\n    C = {{}}", False),
        (f"YES = False\nC = {{K.{KEY}: YES}}", False),
        ("C = C", False),
        ("from elsewhere import C", False),
    ],
)
def test_constants(before: str, merged: bool) -> None:
    text = "import tilelang\nK = tilelang.PassConfigKey\n" + before
    text += "\n@tilelang.jit(pass_configs=C)\ndef kernel(n): ...\n"
    assert look(text) == [("kernel", merged)]


def test_calls() -> None:
    text = f"""
    import functools
    import tilelang
    from functools import partial

    def one(n): ...
    a = tilelang.jit(one, pass_configs={ON})
    b = tilelang.jit(one)
    c = tilelang.jit(pass_configs={ON})(one)
    d = tilelang.compile(one(1), pass_configs={FAST})
    merging = functools.partial(tilelang.jit, pass_configs={ON})
    kept = tilelang.jit(pass_configs={ON})
    e = merging(one)

    @merging
    def two(n): ...

    @merging(pass_configs={FAST})
    def three(n): ...

    @kept
    def four(n): ...
    """
    assert look(text) == [
        ("one", True),
        ("one", False),
        ("one", True),
        ("one(1)", False),
        ("one", True),
        ("two", True),
        ("three", False),
        ("four", True),
    ]


def test_kernels_inside_functions_and_classes() -> None:
    text = f"""
    def build(n, configs):
        import tilelang as tl
        ours = {{tl.PassConfigKey.{KEY}: True}}

        @tl.jit(pass_configs=ours)
        def inner(m): ...

        @tl.jit(pass_configs=configs)
        def unknown(m): ...

        return tl.compile(inner, pass_configs=ours)

    class Kernels:
        from tilelang import jit

        import tilelang

        @tilelang.jit
        def method(self): ...
    """
    found = look("import tilelang\n" + textwrap.dedent(text))
    assert found == [("inner", True), ("unknown", False), ("inner", True), ("method", False)]


def test_helpers_that_hand_on() -> None:
    """Megatron builds all its kernels through one function, which may set the flag for them."""
    helpers = """
    import tilelang

    def tilelang_jit(*args, **kwargs):
        if HAVE_TILELANG:
            {}
            return tilelang.jit(*args, **kwargs)
        return lambda f: f
    """
    text = f"""
    from .helpers import tilelang, tilelang_jit

    @tilelang_jit
    def bare(n): ...

    @tilelang_jit(out_idx=[-1], pass_configs={ON})
    def given(n): ...

    @tilelang_jit(pass_configs={{tilelang.PassConfigKey.{KEY}: False}})
    def refused(n): ...
    """
    flag = f"tilelang.PassConfigKey.{KEY}: True"
    sets = f'kwargs["pass_configs"] = {{**(kwargs.get("pass_configs") or {{}}), {flag}}}'
    off = sets.replace("True", "False")
    loses = f'kwargs["pass_configs"] = {{{flag}, **kwargs.get("pass_configs")}}'
    names = ("bare", "given", "refused")
    for put, wanted in (
        ("pass", (0, 1, 0)),
        (sets, (1, 1, 1)),
        (off, (0, 0, 0)),
        (loses, (0, 0, 0)),
    ):
        found = look(text, helpers=helpers.format(put))
        assert found == list(zip(names, map(bool, wanted), strict=True)), put
    # A helper of a file that was not given: only what the kernel itself says is known.
    text = text.replace("from .helpers import", "from .tilelang_utils import")
    assert look(text) == [("bare", False), ("given", True), ("refused", False)]


def test_what_is_no_kernel() -> None:
    text = """
    import tilelang.language as T
    import torch
    import triton
    from numba import jit

    @triton.jit
    def a(n): ...

    @torch.jit.script
    def b(n): ...

    @jit
    def c(n): ...

    @T.prim_func
    def d(n): ...
    """
    assert look(text) == []


def test_reasons_say_what_stands_there() -> None:
    text = "import tilelang\n@tilelang.jit\ndef a(): ..."
    text += f"\n@tilelang.jit(pass_configs={FAST})\ndef b(): ..."
    text += f"\n@tilelang.jit(pass_configs={{tilelang.PassConfigKey.{KEY}: False}})\ndef c(): ..."
    text += "\n@tilelang.jit(pass_configs=make())\ndef d(): ...\n"
    a, b, c, d = smem.kernels({"k.py": text})
    assert (a.line, a.path) == (2, "k.py")
    assert "without pass_configs" in a.reason and "lack" in b.reason
    assert "False" in c.reason and "make()" in d.reason


def test_folders_and_broken_files(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "here.py").write_text("from .helpers import build\n@build\ndef k(): ...\n")
    (tmp_path / "sub" / "helpers.py").write_text(
        "import tilelang\ndef build(f):\n    return tilelang.jit(f)\n"
    )
    (tmp_path / "other.py").write_text("this is no python")
    (kernel,) = smem.scan([tmp_path])
    assert (kernel.name, kernel.merged) == ("k", False) and kernel.path.endswith("here.py")
    assert smem.scan([tmp_path / "other.py"]) == []
    (tmp_path / "torn.py").write_text("import tilelang\ndef (")
    with pytest.raises(CppmegaError, match="torn") as caught:
        smem.scan([tmp_path])
    assert caught.value.name == "unreadable-python"
