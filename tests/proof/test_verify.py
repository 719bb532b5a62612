"""`cppmega verify` believes values only: what passes on stock or on a mutant is no proof."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cppmega.catalogue import loader as catalogue
from cppmega.errors import CppmegaError
from cppmega.overlay import receipt
from cppmega.overlay import verbs as overlay
from cppmega.overlay.verbs import Session
from cppmega.proof import verify, worker
from tests.proof.proving import THING, WITH_ITS_OWN_SERVER
from tests.support import made

pytestmark = pytest.mark.slow


def test_a_right_page_passes_and_the_receipt_says_so(prove, tmp_path: Path) -> None:
    assert prove().proof == "passed"
    session = Session(tmp_path / "root")
    (verdict,) = overlay.status(session).verdicts
    assert (verdict.state, verdict.proof) == ("applied", "passed")


def test_a_pending_page_is_proved_on_a_copy_and_nothing_is_recorded(prove, tmp_path: Path) -> None:
    assert prove(apply=False).proof == "passed"
    assert not (tmp_path / "root" / receipt.FOLDER).exists()


def test_a_page_that_reads_names_only_is_caught(prove) -> None:
    proved = prove(
        verify="import inspect\nfrom megatron.core import thing\n"
        'assert "2 * x" in inspect.getsource(thing.double)'
    )
    assert proved.proof == "failed" and "does nothing" in proved.detail


def test_a_page_that_looks_for_its_helper_is_caught(prove) -> None:
    proved = prove(
        more="def twice(x):\n    return 2 * x\n",
        edit='replacing("return x", "return twice(x)"), helpers=(twice,)',
        verify='from megatron.core import thing\nassert hasattr(thing, "twice")',
    )
    assert proved.proof == "failed" and "does nothing" in proved.detail


def test_a_page_that_looks_at_the_signature_is_caught(prove) -> None:
    proved = prove(
        edit='adding_parameter("factor=2")',
        verify="import inspect\nfrom megatron.core.thing import double\n"
        'assert "factor" in inspect.signature(double).parameters',
    )
    assert proved.proof == "failed" and "does nothing" in proved.detail


def test_an_edit_without_effect_is_caught(prove) -> None:
    proved = prove(
        edit='replacing("return x", "return x + 0")',
        verify="from megatron.core.thing import double\nassert double(2) == 2",
    )
    assert proved.proof == "failed" and "not needed, or the proof does not" in proved.detail


def test_an_edit_that_changes_nothing_is_refused_before_it_is_written(prove) -> None:
    with pytest.raises(CppmegaError) as caught:
        prove(edit="lambda node: node")
    assert caught.value.name == "bad-edit"


def test_a_wrong_edit_fails_on_patched_code(prove) -> None:
    proved = prove(edit='replacing("return x", "return 3 * x")')
    assert proved.proof == "failed" and "patched" in proved.detail


def test_a_proof_that_cannot_run_is_unverified(prove) -> None:
    """An ImportError on stock must not count as `fails on stock`."""
    proved = prove(verify="import no_such_package")
    assert proved.proof == "unverified" and "no_such_package" in proved.detail


def _broken_code() -> None:
    raise NotImplementedError("of the code")


@pytest.mark.parametrize(
    ("proof", "result"),
    [
        (lambda: torch.no_such_function(), "unable"),
        (lambda: torch.ops.aten.no_such_operator(), "unable"),
        (lambda: torch.ones(1, device="meta").unique(), "unable"),
        (lambda: importlib.import_module("megatron.no_such_module"), "failed"),
        (lambda: worker.no_such_function(), "failed"),
        (lambda: torch.ones(1).main_grad, "failed"),
        (_broken_code, "failed"),
        (sys.exit, "not-run"),
    ],
)
def test_only_what_packages_lack_is_no_failure(proof, result: str) -> None:
    assert worker._prove(SimpleNamespace(verify=proof)).result == result


def test_an_assertion_without_a_text_shows_its_line(prove) -> None:
    proved = prove(verify="from megatron.core.thing import double\nassert double(2) == 5")
    assert "`assert double(2) == 5` (double_doubles.py:" in proved.detail


def test_what_a_gpu_page_needs_is_said(prove) -> None:
    proved = prove(patch='reached="forward", needs=("no_such_accelerator",)')
    assert (proved.proof, proved.detail) == ("unverified", "needs no_such_accelerator")


# -- pages in other states -------------------------------------------------------------------------


_FIXED = made.THING.replace("    return x\n", "    return x + x\n")


@pytest.mark.parametrize(
    ("text", "check", "proof", "said"),
    [
        (_FIXED, "", "passed", "the unpatched code passes"),
        (made.THING + "\nFIXED = 1\n", "", "failed", "declares itself upstreamed"),
        (_FIXED, "import no_such_package\n", "unverified", "no_such_package"),
    ],
    ids=["right", "wrong", "cannot run"],
)
def test_what_says_upstreamed_must_pass_on_stock(
    prove, text: str, check: str, proof: str, said: str
) -> None:
    proved = prove(
        files={THING: text},
        source="def double(x):\n    return 5\n",
        fixed="return bool(source.file('megatron/core/thing.py'))",
        verify=check + "from megatron.core.thing import double\nassert double(2) == 4",
    )
    assert proved.proof == proof and said in proved.detail
    assert list(proved.runs) == ["stock"]


def test_a_retired_page_that_needs_more_says_so(prove) -> None:
    proved = prove(
        source="def double(x):\n    return 5\n",
        fixed="return bool(source.file('megatron/core/thing.py'))",
        patch='reached="forward", needs=("no_such_accelerator",)',
    )
    assert proved.proof == "unverified" and "needs no_such_accelerator" in proved.detail


def test_a_drifted_page_fails_here_too(prove, tmp_path: Path) -> None:
    """Exit status 0 of `verify` means that the whole tree is proved; of one name, that page."""
    made.page(tmp_path / "pages", "other", source="def double(x):\n    return 7\n")
    session = Session(made.tree(tmp_path / "root"))
    made.page(tmp_path / "pages")
    proved = {one.name: one for one in verify.verify(session)}
    assert proved["other"].proof == "failed" and "drifted" in proved["other"].detail
    assert proved["double_doubles"].proof == "passed"
    (one,) = verify.verify(session, ["double_doubles"])
    assert one.proof == "passed"
    with pytest.raises(CppmegaError, match="drifted"):
        verify.verify(session, ["other"])


def test_an_unfinished_page_of_the_folder_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: str
) -> None:
    """Unless it is named itself, or the named page comes after it."""
    shipped, own = tmp_path / "shipped", tmp_path / "own"
    monkeypatch.setattr(catalogue, "builtin_folder", lambda: shipped)
    made.page(shipped, "half_halves", target=f"{THING}:half", edit='replacing("2", "4")')
    made.page(own)
    made.page(own, "unfinished", edit='replacing("TODO", "0")', patch='reached="never"')
    root = made.tree(tmp_path / "root")
    (one,) = verify.verify(Session(root, [own]), ["double_doubles"])
    assert one.proof == "passed"
    with pytest.raises(CppmegaError, match="unfinished"):
        verify.verify(Session(root, [own]), ["unfinished"])


@pytest.mark.parametrize("follows", [False, True])
def test_a_pending_page_is_proved_without_pages_of_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: str, follows: bool
) -> None:
    """Unless it follows one: the copy of the tree needs its edits, too."""
    shipped, layer = tmp_path / "shipped", "megatron/core/layer.py"
    monkeypatch.setattr(catalogue, "builtin_folder", lambda: shipped)
    made.page(shipped, patch=f'reached="forward", after=("misfit",)[:{follows:d}]')
    source = "def f():\n    return 1\n"
    made.page(shipped, "misfit", target=f"{layer}:f", source=source, edit='replacing("2", "3")')
    session = Session(made.tree(tmp_path / "root", {layer: source}))
    if follows:
        with pytest.raises(CppmegaError, match="misfit"):
            verify.verify(session, ["double_doubles"])
    else:
        (one,) = verify.verify(session, ["double_doubles"])
        assert one.proof == "passed"


def test_a_page_that_cannot_be_loaded_stops_no_other(tmp_path: Path, server: str) -> None:
    """It stops what is about the whole folder, about itself, or about a page that follows it."""
    own, remarks = tmp_path / "own", list[str]()
    made.page(own)
    (own / "unparsed.py").write_text("def (")
    (own / "unimported.py").write_text("import no_such_module")
    made.page(own, "headless", patch='reached="sometimes"')
    made.page(own, "follower", patch='reached="never", after=("unparsed",)')
    root = made.tree(tmp_path / "root")

    def session() -> Session:
        return Session(root, [own], remarks.append)

    (one,) = verify.verify(session(), ["double_doubles"])
    assert one.proof == "passed"
    left_out = [line.split()[0] for line in remarks if "is left out" in line]
    assert left_out == ["headless", "unimported", "unparsed", "follower"]
    assert "2 * x" in overlay.diff(session(), "double_doubles", {})
    for name, reason in (("headless", "sometimes"), ("follower", "unparsed")):
        with pytest.raises(CppmegaError, match=reason):
            verify.verify(session(), [name])
    for act in (verify.verify, overlay.apply, overlay.status):
        with pytest.raises(CppmegaError, match=r"headless .*sometimes"):
            act(session())


def test_an_applied_page_that_cannot_be_loaded_any_more(prove, tmp_path: Path) -> None:
    """Without it, the text of its file is not known to be right."""
    made.second_page(tmp_path / "own", "forward")
    prove()
    session = Session(tmp_path / "root", [tmp_path / "own"])
    assert overlay.apply(session, kinds=("fix",)).ok
    (tmp_path / "own" / "half_halves.py").write_text("def (")
    with pytest.raises(CppmegaError, match="half_halves"):
        verify.verify(Session(tmp_path / "root", [tmp_path / "own"]), ["double_doubles"])


def test_a_changed_page_makes_a_recorded_proof_stale(prove, tmp_path: Path) -> None:
    prove()
    made.page(tmp_path / "pages", edit='replacing("return x", "return x * 2")')
    session = Session(tmp_path / "root")
    (verdict,) = overlay.status(session).verdicts
    assert (verdict.state, verdict.proof) == ("pending", "stale")
    assert overlay.apply(session).verdicts[0].proof == "stale"


_SETS = """\
def act(node):
    words = "".join({"one", "two", "three", "four", "five", "six"})
    return replacing("return x", f"return 2 * x + 0 * len({words!r})")(node)
"""


@WITH_ITS_OWN_SERVER
def test_an_edit_that_depends_on_the_order_of_a_set(prove) -> None:
    """Twice the same in one process, and another text in the next one."""
    proved = prove(edit="act", more=_SETS)
    assert proved.proof == "failed" and "PYTHONHASHSEED" in proved.detail


@WITH_ITS_OWN_SERVER
def test_its_text_is_compared_where_its_proof_cannot_run(prove) -> None:
    patch = 'reached="forward", needs=("no_such_accelerator",)'
    proved = prove(edit="act", more=_SETS, patch=patch)
    assert proved.proof == "failed" and "PYTHONHASHSEED" in proved.detail


_LAYER = """\
import dataclasses

try:
    import no_such_module

    HAVE_NONE = True
except ImportError:
    HAVE_NONE = False


class Layer:
    width = 1
    depth = 1

    def forward(self, x, by=1):
        return x * self.width * by


@dataclasses.dataclass
class Sizes:
    a: int = 1
"""


def _class(symbol: str) -> str:
    (text,) = (t for t in _LAYER.split("\n\n\n") if f"class {symbol}:" in t)
    return text.rstrip() + "\n"


_SOURCES = {
    "Layer.forward": "def forward(self, x, by=1):\n    return x * self.width * by\n",
    "Layer.depth": "depth = 1\n",
    "HAVE_NONE": _LAYER[_LAYER.index("try:") : _LAYER.index("\n\nclass")],
}


@pytest.mark.parametrize(
    ("symbol", "edit", "verify"),
    [
        ("Layer", 'replacing("width = 1", "width = 2")', "assert layer.Layer().forward(1) == 2"),
        (
            "Layer",
            'inserting("height = 3", after="depth = 1")',
            'assert getattr(layer.Layer, "height", 0) == 3',
        ),
        ("Layer", 'replacing("depth = 1", "")', 'assert not hasattr(layer.Layer, "depth")'),
        ("Sizes", 'replacing("a: int = 1", "a: int = 2\\nb: int = 3")', "layer.Sizes(2, b=3)"),
        (
            "Sizes",
            "lambda node: node.with_changes(decorators=())",
            "assert not hasattr(layer.Sizes, '__dataclass_fields__')",
        ),
        (
            "Layer.forward",
            "lambda node: definition_of(forward)(node)",
            "assert layer.Layer().forward(1) == 2",
        ),
        (
            "Layer.depth",
            'inserting("height = 3", after="depth = 1")',
            'assert getattr(layer.Layer, "height", 0) == 3',
        ),
        ("HAVE_NONE", 'replacing("False", "None")', "assert layer.HAVE_NONE is None"),
    ],
    ids=["changed", "added", "removed", "field", "decorator", "default", "beside", "block"],
)
def test_what_a_class_holds_can_be_proved(prove, symbol: str, edit: str, verify: str) -> None:
    """The mutant must lose it: it had the patched constant, and every proof of one failed."""
    proved = prove(
        files={"megatron/core/layer.py": _LAYER},
        target=f"megatron/core/layer.py:{symbol}",
        source=_SOURCES.get(symbol) or _class(symbol),
        edit=edit,
        patch='reached="never"',
        more="from cppmega.edits import definition_of\n\n"
        "def forward(self, x, by=2):\n    return x * self.width * by\n",
        verify=f"from megatron.core import layer\n{verify}",
    )
    assert proved.proof == "passed", proved.detail


def test_class_targets_have_mutants_too(prove) -> None:
    source = "class Layer:\n    def forward(self, x):\n        return x\n"
    proved = prove(
        files={"megatron/core/layer.py": source},
        target="megatron/core/layer.py:Layer",
        source=source,
        patch='reached="never"',
        verify="from megatron.core.layer import Layer\nassert Layer().forward(1) == 2",
    )
    assert proved.proof == "passed"
