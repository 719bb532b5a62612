"""Runtime patches: every order of import, patch and unpatch, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support import REPOSITORY

pytestmark = pytest.mark.slow

TARGET = """
import dataclasses, functools

def scale(x, factor=2):
    return x * factor

class Mixer:
    def __init__(self, width):
        super().__init__()
        self.width = width
    def forward(self, x):
        return x + self.width
    @staticmethod
    def fixed(x):
        return x

class SelfNaming:
    def __init__(self):
        super(SelfNaming, self).__init__()
"""
USER = """
from pkg.target import Mixer, scale
def run(x):
    return Mixer(1).forward(scale(x))
"""
PRELUDE = """
import sys
from cppmega.guard import import_hook
from cppmega.guard import installed, installed, swaps
from cppmega.errors import CppmegaError
from cppmega.page import Edit, Page, Patch

def page(name, **given):
    kind = given.pop("kind")
    edit = Edit(target=given.pop("target"), pins={"1": "0" * 16}, kind=kind, **given)
    return Page(name, Patch((edit,), "forward"), "", "r", "", "")

def arm(one):
    swaps.arm(one, one.patch.edits)

def disarm():
    for done in reversed(installed.REGISTRY.installed):
        setattr(done.owner, done.name, done.original)
    import_hook._HOOKS.clear()
    installed.REGISTRY.installed.clear()
    installed.REGISTRY.armed.clear()

def triple(original):
    def scale(x, factor=2):
        return 3 * original(x, factor)
    return scale

def louder(original):
    class Mixer(original):
        def forward(self, x):
            return 10 * super().forward(x)
    return Mixer

def ten_more(original):
    def forward(self, x):
        return original(self, x) + 10
    return forward

FUNCTION = page("f", target="pkg/target.py:scale", kind="function-swap", edit=triple)
CLASS = page("c", target="pkg/target.py:Mixer", kind="class-swap", edit=louder,
             overrides=("forward",))
METHOD = page("m", target="pkg/target.py:Mixer.forward", kind="method-wrap", edit=ten_more)

def refused(name, do):
    try:
        do()
    except CppmegaError as error:
        assert error.name == name, (error.name, error.what)
        return error
    raise AssertionError(f"{name} was not raised")
"""


@pytest.fixture
def run(tmp_path: Path):
    """Run code in a fresh process that can import the made package `pkg`."""

    def go(code: str, **modules: str) -> None:
        package = tmp_path / "pkg"
        package.mkdir()
        (package / "__init__.py").write_text("")
        for name, text in {"target": TARGET, "user": USER, **modules}.items():
            (package / f"{name}.py").write_text(textwrap.dedent(text))
        text = PRELUDE + textwrap.dedent(code)
        done = subprocess.run(
            [sys.executable, "-c", text],
            env={"PYTHONPATH": f"{tmp_path}:{REPOSITORY}", "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr

    return go


def test_a_copy_of_the_name_gets_the_replacement(run) -> None:
    run("""
    arm(FUNCTION); arm(METHOD)
    from pkg import user
    assert user.run(1) == 3 * 2 + 1 + 10
    """)


def test_a_swapped_class_is_what_importers_see(run) -> None:
    run("""
    arm(CLASS)
    from pkg import user, target
    assert user.Mixer is target.Mixer and user.run(1) == 10 * (2 + 1)
    """)


def test_import_then_patch_is_too_late(run) -> None:
    run("""
    import pkg.user
    error = refused("too-late", lambda: arm(FUNCTION))
    assert "pkg.target" in error.what and "f" in error.what
    """)


def test_patch_import_unpatch_restores_identity(run) -> None:
    run("""
    arm(FUNCTION); arm(METHOD)
    import pkg.target as t
    before = [(i.owner, i.name, i.original) for i in installed.entries()]
    assert len(before) == 2 and t.scale is not before[0][2]
    disarm()
    for owner, name, original in before:
        assert vars(owner)[name] is original
    assert t.scale(1) == 2 and t.Mixer(1).forward(1) == 2
    """)


def test_patch_patch_import_patches_once(run) -> None:
    run("""
    arm(FUNCTION); arm(FUNCTION)
    import pkg.target as t
    assert t.scale(1) == 6 and len(installed.entries()) == 1
    """)


def test_patch_unpatch_import_leaves_the_original(run) -> None:
    run("""
    arm(FUNCTION); disarm()
    import pkg.target as t
    assert t.scale(1) == 2 and not installed.entries()
    """)


def test_patch_unpatch_patch_import_patches_once(run) -> None:
    run("""
    arm(FUNCTION); disarm(); arm(FUNCTION)
    import pkg.target as t
    assert t.scale(1) == 6 and len(installed.entries()) == 1
    """)


def test_every_copy_of_a_module_is_patched(run) -> None:
    """Reloaded, imported again, and under another name."""
    run("""
    import importlib, os
    arm(FUNCTION); arm(METHOD)
    import pkg.target as first
    importlib.reload(first)
    del sys.modules["pkg.target"]
    second = importlib.import_module("pkg.target")
    sys.path.insert(0, os.path.dirname(first.__file__))
    third = importlib.import_module("target")
    for module in (first, second, third):
        assert module.scale(1) == 6 and module.Mixer(1).forward(1) == 12
    assert len({first, second, third}) == 3
    swaps.check()
    """)


def test_a_copy_that_was_not_imported_is_refused(run) -> None:
    run("""
    import importlib.util
    arm(FUNCTION)
    import pkg.target as first
    spec = importlib.util.spec_from_file_location("copied", first.__file__)
    sys.modules["copied"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.scale(1) == 2
    error = refused("unpatched-copy", swaps.check)
    assert "copied" in error.what and "scale" in error.what
    """)


def test_armed_targets_wait_for_their_import(run) -> None:
    run("""
    arm(FUNCTION)
    assert installed.waiting() == ["pkg/target.py:scale"]
    import pkg.target
    assert installed.waiting() == []
    """)


@pytest.mark.parametrize(
    ("tail", "said"),
    [
        ("def build(kind=Mixer): return kind", "tuple of function pkg.target.build"),
        ("def build(*, kind=Mixer): return kind", "dict of function pkg.target.build"),
        ("SPEC = {'mixer': Mixer}", "dict of module pkg.target"),
        ("SPECS = [Mixer]", "list of module pkg.target"),
        ("class Layer:\n    mixer = Mixer", "pkg.target.Layer"),
        ("@dataclasses.dataclass\nclass Spec:\n    mixer: type = Mixer", "pkg.target.Spec"),
        ("MAKE = functools.partial(Mixer, 3)", "partial"),
        ("def outer(kind):\n    return lambda: kind\nMAKE = outer(Mixer)", "pkg.target.outer"),
        ("class Wide(Mixer): pass", "pkg.target.Wide"),
    ],
)
def test_whoever_holds_the_original_stops_the_import(run, tail: str, said: str) -> None:
    run(
        f"""
        arm(CLASS)
        def load():
            import pkg.target
        error = refused("stale-reference", load)
        assert {said!r} in error.what, error.what
        """,
        target=TARGET.split("class SelfNaming")[0] + tail + "\n",
    )


def test_originals_held_by_nobody_need_no_search(run) -> None:
    run("""
        from cppmega.guard import stale
        stale.gc.get_referrers = lambda *things: refused("a search of the heap", swaps.check)
        for one in (FUNCTION, METHOD):
            arm(one)
        import pkg.user
        swaps.check()
        """)


def test_garbage_that_holds_an_original_runs_nothing(run) -> None:
    run(
        """
        arm(CLASS)
        import pkg.user
        swaps.check()
        """,
        target=TARGET + "def leave():\n    kept = [Mixer]\n    kept.append(kept)\nleave()\n",
    )


def test_a_copy_made_in_a_circular_import_is_found(run) -> None:
    run(
        """
        arm(FUNCTION)
        def load():
            import pkg.target
        error = refused("stale-reference", load)
        assert "pkg.early" in error.what, error.what
        """,
        target=TARGET + "\nimport pkg.early\n",
        early="from pkg.target import scale\n",
    )


def test_a_late_setattr_is_found(run) -> None:
    run("""
    arm(FUNCTION)
    import pkg.target as t
    swaps.check()
    t.scale = lambda x, factor=2: x
    refused("patch-undone", swaps.check)
    """)


def test_a_class_that_names_itself_is_not_swapped(run) -> None:
    run("""
    arm(page("s", target="pkg/target.py:SelfNaming", kind="class-swap",
             edit=lambda original: type("SelfNaming", (original,), {})))
    def load():
        import pkg.target
    refused("class-names-itself", load)
    """)


@pytest.mark.parametrize(
    "edit",
    [
        "lambda original: (lambda x: original(x))",
        "lambda original: (lambda x, factor=3: original(x))",
        "lambda original: (lambda x, **kwargs: original(x, **kwargs))",
        "lambda original: original",
    ],
)
def test_a_replacement_with_another_signature_is_refused(run, edit: str) -> None:
    """Accident 13: **kwargs swallowed a new argument, and the numbers were wrong."""
    run(f"""
    arm(page("f", target="pkg/target.py:scale", kind="function-swap", edit={edit}))
    def load():
        import pkg.target
    refused("bad-replacement", load)
    """)


def test_a_class_swap_overrides_only_what_it_pins(run) -> None:
    run("""
    arm(page("c", target="pkg/target.py:Mixer", kind="class-swap", edit=louder))
    def load():
        import pkg.target
    error = refused("bad-replacement", load)
    assert "forward" in error.what
    """)


def test_static_methods_stay_static(run) -> None:
    run("""
    def twice(original):
        def fixed(x):
            return 2 * original(x)
        return fixed
    arm(page("s", target="pkg/target.py:Mixer.fixed", kind="method-wrap", edit=twice))
    import pkg.target as t
    assert t.Mixer.fixed(4) == 8 and t.Mixer(1).fixed(4) == 8
    """)


def test_a_mark_is_set_by_the_call_and_not_by_the_import(run) -> None:
    run("""
    arm(FUNCTION); arm(METHOD)
    import pkg.target as t
    assert installed.reached() == set()
    t.scale(1)
    assert installed.reached() == {"f"}
    t.Mixer(1).forward(1)
    assert installed.reached() == {"f", "m"}
    """)


def test_marks_cost_no_torch_compile_graph(run) -> None:
    """One graph, no break, no recompilation, and the mark is set: on disk and at run time."""
    run(
        """
        import torch
        from torch._dynamo.testing import CompileCounter
        arm(FUNCTION)
        import pkg.target as t
        from pkg import marked
        counter = CompileCounter()
        both = torch.compile(lambda x: marked.double(t.scale(x)), backend=counter, fullgraph=True)
        for _ in range(3):
            assert torch.equal(both(torch.ones(2)), torch.full((2,), 12.0))
        assert counter.frame_count == 1, counter.frame_count
        assert installed.reached() == {"f", "on_disk"}, installed.reached()
        """,
        marked=_marked_module(),
    )


def _marked_module() -> str:
    """A file as the engine writes it."""
    from cppmega.edits import replacing
    from cppmega.page import Edit
    from cppmega.rewriting.rewrite import Step, rewrite

    text = b"import torch\n\n\ndef double(x):\n    return x\n"
    edit = Edit("pkg/marked.py:double", {"1": "0" * 16}, replacing("return x", "return 2 * x"))
    return rewrite(text, "pkg/marked.py", [Step("on_disk", edit, marked=True)]).data.decode()
