"""`cppmega verify` believes values only: what passes on stock or on a mutant is no proof."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from cppmega import catalogue, overlay, receipt, verify
from cppmega.errors import CppmegaError
from cppmega.overlay import Session
from tests import made


@pytest.fixture
def prove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Make a tree and a catalogue of one page, apply it, prove it."""
    pages = tmp_path / "pages"
    monkeypatch.setattr(catalogue, "builtin_folder", lambda: pages)

    def go(apply: bool = True, files: dict[str, str] | None = None, **page: str) -> verify.Proved:
        root = made.tree(tmp_path / "root", files)
        made.page(pages, **page)
        session = Session(root)
        if apply:
            assert overlay.apply(session).ok
        (proved,) = verify.verify(session)
        return proved

    return go


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
    assert proved.proof == "failed" and "stock" in proved.detail


def test_an_edit_that_changes_nothing_is_refused_before_it_is_written(prove) -> None:
    with pytest.raises(CppmegaError) as caught:
        prove(edit="lambda node: node")
    assert caught.value.name == "bad-edit"


def test_a_wrong_edit_fails_on_patched_code(prove) -> None:
    proved = prove(edit='replacing("return x", "return 3 * x")')
    assert proved.proof == "failed" and "patched" in proved.detail


def test_a_missing_package_is_no_evidence(prove) -> None:
    """An ImportError on stock must not count as `fails on stock`."""
    proved = prove(verify="import no_such_package")
    assert proved.proof == "failed" and "no_such_package" in proved.detail


def test_a_proof_that_kills_its_process_fails(prove) -> None:
    proved = prove(verify="import os\nos._exit(3)")
    assert proved.proof == "failed" and "status 3" in proved.detail


_ENDS = """\
import os, sys
if "verify_worker" in sys.argv[0]:
    print("no luck", file=sys.stderr, flush=True)
    os._exit(3)
"""


def test_a_worker_that_ends_is_quoted(prove) -> None:
    assert "ended with status 3: no luck" in prove(more=_ENDS).detail


_NOISY = """\
from megatron.core.thing import double
print("noise")
assert double(2) == 4
"""


def test_what_libraries_say_meanwhile_is_not_shown(prove, capfd) -> None:
    assert prove(verify=_NOISY).proof == "passed"
    assert "noise" not in "".join(capfd.readouterr())


_SEES = """\
import os
from megatron.core import thing
assert os.environ.get("CUDA_VISIBLE_DEVICES") == {sees!r}
assert (os.getppid() != {pid}) == {forked}
assert thing.double(4) == 8
"""


def test_a_proof_on_cpu_sees_no_gpu(prove, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one in sight Megatron would take its other paths, in a fork that cannot use it."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert prove(verify=_SEES.format(sees="", pid=os.getpid(), forked=True)).proof == "passed"


def test_a_proof_on_a_gpu_sees_it_and_is_no_fork(prove, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(verify, "_gpu", lambda need: True)
    proved = prove(
        patch='reached="forward", needs=("cuda",)',
        verify=_SEES.format(sees="0", pid=os.getpid(), forked=False),
    )
    assert proved.proof == "passed"


def test_what_a_gpu_page_needs_is_said(prove) -> None:
    proved = prove(patch='reached="forward", needs=("no_such_accelerator",)')
    assert (proved.proof, proved.detail) == ("unverified", "needs no_such_accelerator")


@pytest.mark.parametrize(
    ("changed", "proof"), [(False, "passed"), (True, "stale")], ids=["fresh", "page changed"]
)
def test_a_committed_gpu_proof_counts_until_its_page_changes(
    prove, tmp_path: Path, changed: bool, proof: str
) -> None:
    given = {"patch": 'reached="forward", needs=("no_such_accelerator",)'}
    path = made.page(tmp_path / "pages", **given)
    revision = catalogue.load_page(path.stem, path, "builtin").revision
    known = {"revision": "old" if changed else revision, "proof": "passed", "gpu": "H200"}
    answer = {path.stem: {**known, "date": "2026-11-21"}}
    (tmp_path / "pages" / verify.PROOFS).write_text(json.dumps(answer))
    assert prove(**given).proof == proof


def test_a_changed_page_makes_a_recorded_proof_stale(prove, tmp_path: Path) -> None:
    prove()
    made.page(tmp_path / "pages", edit='replacing("return x", "return x * 2")')
    session = Session(tmp_path / "root")
    (verdict,) = overlay.status(session).verdicts
    assert (verdict.state, verdict.proof) == ("pending", "stale")
    assert overlay.apply(session).verdicts[0].proof == "stale"


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
