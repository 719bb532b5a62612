"""The list of TileLang kernels: every form of decorator and call, and the value that arrives."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from cppmega.preflight.ask import ask
from cppmega.preflight.messages import TilelangAnswer, TilelangKernel, TilelangOrder

KEY = "TL_ENABLE_AGGRESSIVE_SHARED_MEMORY_MERGE"
ON = f"{{tilelang.PassConfigKey.{KEY}: True}}"
FAST = "{tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True}"
HEAD = "import os\nimport tilelang\nK = tilelang.PassConfigKey\nHAVE_TILELANG = BIG = True\n"


class Case(NamedTuple):
    """A module, and the (name, merged) of its kernels in the order of lines."""

    text: str
    kernels: list[tuple[str, bool]]


def listed(folder: Path, texts: dict[str, str]) -> dict[str, list[TilelangKernel]]:
    """The kernels of some modules of one package, by module; they share one process."""
    package = folder / "pkg"
    package.mkdir()
    for name, text in texts.items():
        (package / f"{name}.py").write_text(textwrap.dedent(text))
    order = TilelangOrder(root=str(folder), packages=[str(package)])
    worker = "cppmega.preflight.workers.tilelang_kernels"
    answer = ask(worker, order, TilelangAnswer, dict(os.environ))
    found: dict[str, list[TilelangKernel]] = {name: [] for name in texts}
    for kernel in answer.kernels:
        found[Path(kernel.path).stem].append(kernel)
    return found


FORMS = {
    "attribute": ("import tilelang", "@tilelang.jit({})"),
    "short name": ("import tilelang as tl, tilelang", "@tl.jit({})"),
    "from": ("import tilelang\nfrom tilelang import jit", "@jit({})"),
    "from, renamed": ("import tilelang\nfrom tilelang import jit as build", "@build({})"),
    "from its module": ("import tilelang\nfrom tilelang.jit import jit", "@jit({})"),
    "other name": ("import tilelang\nbuild = tilelang.jit", "@build({})"),
    "guarded import": ("try:\n    import tilelang\nexcept ImportError: pass", "@tilelang.jit({})"),
    "handed on": ("from .tl_helpers import tilelang as tl\nimport tilelang", "@tl.jit({})"),
    "keys from their module": (
        "import tilelang\nfrom tilelang.transform.pass_config import PassConfigKey",
        "@tilelang.jit({})",
    ),
    "with other arguments": ("import tilelang", "@tilelang.jit(out_idx=[-1], target='cuda', {})"),
}


def decorators() -> Iterator[Case]:
    """Every form of decorator, with the flag, with another key, and bare."""
    for head, decorator in FORMS.values():
        on = ON.replace("tilelang.", "") if "import PassConfigKey" in head else ON
        uses = [decorator.format(f"pass_configs={on}"), decorator.format(f"pass_configs={FAST}")]
        uses += [decorator.format(""), *([decorator[:-4]] if decorator.endswith("({})") else [])]
        text = "\n".join(f"{use}\ndef kernel(n):\n    return n" for use in uses)
        yield Case(f"{head}\n{text}\n", [("kernel", at == 0) for at in range(len(uses))])


VALUES = {
    ON: True,
    f"{{'tl.{KEY[3:].lower()}': True}}": True,
    f"{{tilelang.PassConfigKey.{KEY}.value: True}}": True,
    f"{{tilelang.transform.PassConfigKey.{KEY}: True}}": True,
    f"{{K.{KEY}: True, **{{}}}}": True,
    f"{{**{FAST}, K.{KEY}: True}}": True,
    f"{FAST} | {ON}": True,
    f"dict({ON})": True,
    f"{ON} if HAVE_TILELANG else {{}}": True,
    f"{ON} if os.environ else {{}}": True,  # the environment is that of the launch
    f"{{tilelang.PassConfigKey.{KEY}: os.name == 'posix'}}": True,
    # The key is there, and it is not True.
    f"{{tilelang.PassConfigKey.{KEY}: False}}": False,
    f"{{tilelang.PassConfigKey.{KEY}: None}}": False,
    f"{{tilelang.PassConfigKey.{KEY}: 1}}": False,
    f"{{tilelang.PassConfigKey.{KEY}: 'True'}}": False,
    f"{{tilelang.PassConfigKey.{KEY}: os.name == 'nt'}}": False,
    f"{{**{ON}, K.{KEY}: False}}": False,
    f"{{K.{KEY}: True, **{{K.{KEY}: False}}}}": False,
    f"{ON} | {{K.{KEY}: False}}": False,
    f"{{}} if os.environ else {ON}": False,
    f"os.not_there({ON})": False,
    "{}": False,
    "None": False,
    f"{{tilelang.PassConfigKey.{KEY}_DEBUG: True}}": False,
}
CONSTANTS = {
    f"C = {FAST}\nC[K.{KEY}] = True": True,
    f"C = {{}}\nC.update({ON})": True,
    f"C = {{}}\nC |= {ON}": True,
    f"FLAG = K.{KEY}\nC = {{FLAG: True}}": True,
    f"BASE = {ON}\nC = {{**BASE, **{FAST}}}": True,
    f"YES = True\nC = {{K.{KEY}: YES}}": True,
    f"if HAVE_TILELANG:\n    C = {ON}\nelse:\n    C = {{}}": True,
    f"if tilelang is not None:\n    C = {ON}\nelse:\n    C = {{}}": True,
    f"C = {{}}\nif BIG:\n    C[K.{KEY}] = True": True,
    f"C = {ON}\nC[K.{KEY}] = False": False,
    f"C = {ON}\ndel C[K.{KEY}]": False,
    f"if not BIG:\n    C = {ON}\nelse:\n    C = {{}}": False,
    f"YES = False\nC = {{K.{KEY}: YES}}": False,
    "from nowhere_installed import C": False,
}


def values() -> Iterator[Case]:
    """Every spelling of the pass configs: inline, by name, unpacked."""
    for configs, merged in VALUES.items():
        text = f"""
def options():
    return {configs}

@tilelang.jit(pass_configs={configs})
def inline(n): ...

@tilelang.jit(pass_configs=options())
def called(n): ...

@tilelang.jit(**{{"out_idx": [-1], "pass_configs": {configs}}})
def unpacked(n): ...
"""
        names = ("inline", "called", "unpacked")
        broken = "not_there" in configs
        yield Case(
            HEAD + text, [("a kernel", False)] if broken else [(name, merged) for name in names]
        )
    for before, merged in CONSTANTS.items():
        text = f"{HEAD}{before}\n@tilelang.jit(pass_configs=C)\ndef kernel(n): ...\n"
        yield Case(text, [("kernel", merged)])


CALLS = f"""
import functools
import tilelang
from functools import partial

def one(n): ...
a = tilelang.jit(one, pass_configs={ON})
def two(n): ...
b = tilelang.jit(two)
def three(n): ...
c = tilelang.jit(pass_configs={ON})(three)
d = tilelang.compile(one(1) or object(), pass_configs={FAST})
merging = functools.partial(tilelang.jit, pass_configs={ON})
kept = tilelang.jit(pass_configs={ON})
def four(n): ...
e = merging(four)

@merging
def five(n): ...

@merging(pass_configs={FAST})
def six(n): ...

@kept
def seven(n): ...
"""
IN_FUNCTIONS = f"""
import tilelang

def build(configs):
    import tilelang as tl
    ours = {{tl.PassConfigKey.{KEY}: True}}

    @tl.jit(pass_configs=ours)
    def inner(m): ...

    @tl.jit(pass_configs=configs)
    def unknown(m): ...

build({FAST})

def late(n):
    return tilelang.compile(n, pass_configs={ON})

merging = tilelang.jit(pass_configs={ON})

def later(n):
    return merging(n)

class Kernels:
    from tilelang import jit

    @tilelang.jit
    def method(self): ...
"""
HELPER = """
import tilelang

def {name}(*args, **kwargs):
    if tilelang is not None:
        {put}
        return tilelang.jit(*args, **kwargs)
    return lambda f: f
"""
FLAG = f"tilelang.PassConfigKey.{KEY}: True"
SETS = f'kwargs["pass_configs"] = {{**(kwargs.get("pass_configs") or {{}}), {FLAG}}}'
LOSES = f'kwargs["pass_configs"] = {{{FLAG}, **(kwargs.get("pass_configs") or {{}})}}'
HELPED = """
from .{file} import tilelang, {name}

@{name}
def bare(n): ...

@{name}(out_idx=[-1], pass_configs={on})
def own(n): ...

@{name}(pass_configs={off})
def refused(n): ...
"""
"""Megatron builds all its kernels through one function, which may set the flag for them."""
NO_KERNEL = """
import tilelang.language as T
import triton
from triton import jit

@triton.jit
def a(n): ...

@jit
def b(n): ...

@T.prim_func
def c(n): ...
"""


def helpers() -> dict[str, tuple[str, tuple[int, int, int]]]:
    """Name -> what the helper puts, and which of the three kernels are merged."""
    return {
        "plain_jit": ("pass", (0, 1, 0)),
        "setting_jit": (SETS, (1, 1, 1)),
        "off_jit": (SETS.replace("True", "False"), (0, 0, 0)),
        "losing_jit": (LOSES, (1, 1, 0)),
    }


def cases() -> dict[str, Case]:
    """Every module of the package, by name."""
    found = {f"case_{at:03}": case for at, case in enumerate([*decorators(), *values()])}
    found["tl_helpers"] = Case("import tilelang\n", [])
    found["calls"] = Case(
        CALLS,
        [
            *(("one", True), ("two", False), ("three", True), ("a kernel", False)),
            *(("four", True), ("five", True), ("six", False), ("seven", True)),
        ],
    )
    late = [("a kernel of late()", False), ("a kernel of later()", False)]
    inside = [("inner", True), ("unknown", False), *late, ("method", False)]
    found["inside"] = Case(IN_FUNCTIONS, inside)
    for name, (put, merged) in helpers().items():
        file = f"helper_{name}"
        found[file] = Case(HELPER.format(name=name, put=put), [])
        text = HELPED.format(name=name, file=file, on=ON, off=ON.replace("True", "False"))
        kernels = zip(("bare", "own", "refused"), map(bool, merged), strict=True)
        found[f"helped_{name}"] = Case(text, list(kernels))
    through = "from .helper_setting_jit import setting_jit, tilelang\n"
    through += "def wait():\n    @setting_jit\n    def kernel(n): ...\n"
    found["through_a_helper"] = Case(through, [("a kernel of wait()", False)])
    found["no_kernel"] = Case(NO_KERNEL, [])
    found["unrelated"] = Case("raise RuntimeError('imported')", [])
    return found


CASES = cases()


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[TilelangKernel]]:
    """What one process lists of all the modules."""
    folder = tmp_path_factory.mktemp("kernels")
    return listed(folder, {name: case.text for name, case in CASES.items()})


@pytest.mark.parametrize("name", CASES)
def test_kernels_and_their_flag(name: str, kernels: dict[str, list[TilelangKernel]]) -> None:
    found = [(kernel.name, not kernel.reason) for kernel in kernels[name]]
    assert found == CASES[name].kernels, CASES[name].text


def test_reasons_say_what_is_there(tmp_path: Path) -> None:
    text = "import tilelang\n@tilelang.jit\ndef a(): ..."
    text += f"\n@tilelang.jit(pass_configs={FAST})\ndef b(): ..."
    text += f"\n@tilelang.jit(pass_configs={{tilelang.PassConfigKey.{KEY}: False}})\ndef c(): ..."
    text += "\n@tilelang.jit(pass_configs=7)\ndef d(): ...\n"
    broken = "import tilelang\nbuild = tilelang.jit\nraise OSError('libcuda')\n"
    found = listed(tmp_path, {"good": text, "broken": broken})
    a, b, c, d = found["good"]
    assert (a.line, Path(a.path).name) == (2, "good.py")
    assert "without pass_configs" in a.reason and "lack" in b.reason
    assert "False" in c.reason and "7" in d.reason
    (lost,) = found["broken"]
    assert "pkg.broken cannot be imported: OSError: libcuda" in lost.reason


def test_a_file_that_is_not_python_counts_as_lacking(tmp_path: Path) -> None:
    found = listed(tmp_path, {"torn": "import tilelang\ndef (", "other": "this is not Python"})
    (torn,) = found["torn"]
    assert "cannot be imported: SyntaxError" in torn.reason and not found["other"]
