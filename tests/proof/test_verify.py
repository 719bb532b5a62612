"""`cppmega verify` believes values only: what passes on stock or on a mutant is no proof."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

import pytest

from cppmega.catalogue import loader as catalogue
from cppmega.catalogue import revision
from cppmega.errors import CppmegaError
from cppmega.host import paths, process
from cppmega.overlay import receipt
from cppmega.overlay import verbs as overlay
from cppmega.overlay.verbs import Session
from cppmega.proof import needs, proof_file, proof_process, verify
from cppmega.rewriting import fingerprint
from tests import forkserver
from tests.support import made

pytestmark = pytest.mark.slow

_THING = "megatron/core/thing.py"
_DOUBLE = "def double(x):\n    # upstream forgot to double\n    return x\n"


IN_NEW_INTERPRETERS = pytest.mark.parametrize("python", ["new"])
"""For what a fork does not show: a hash seed of its own, and the end of all that a worker began."""


@pytest.fixture
def python(monkeypatch: pytest.MonkeyPatch) -> str:
    """What proves: by default a fork, which need not import the engine again."""
    monkeypatch.setattr(sys, "executable", forkserver.executable())
    return "fork"


@pytest.fixture
def prove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: str):
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
    assert proved.proof == "failed" and "not needed, or the proof does not" in proved.detail


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


_ENDS = """
import os, sys
print("no luck", file=sys.stderr, flush=True)
os._exit(3)
"""


@IN_NEW_INTERPRETERS
def test_a_worker_that_ends_is_quoted(prove) -> None:
    """The patched module ends its process when it is imported."""
    proved = prove(files={"megatron/core/thing.py": made.THING + _ENDS})
    assert "ended with status 3: no luck" in proved.detail


_UNPATCHED = "from megatron.core.thing import double\nif double(2) != 4:\n    "


@pytest.mark.parametrize(
    ("act", "said"),
    [
        ("raise SystemExit(0)", "SystemExit"),
        ("import os; os._exit(0)", "status 0"),
        ("import os; os._exit(1)", "status 1"),
        ("import os; os.kill(os.getpid(), 9)", "signal 9"),
        ("import no_such_package", "no_such_package"),
    ],
)
def test_an_end_of_the_process_is_no_failed_proof(prove, act: str, said: str) -> None:
    """Stock must fail the proof; a process that is gone has shown nothing of its values."""
    proved = prove(verify=_UNPATCHED + act)
    assert proved.proof == "failed"
    assert proved.detail.startswith("stock: ") and said in proved.detail


_DEAF = """\
import os, signal, subprocess, sys, time
signal.signal(signal.SIGALRM, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
here, there = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        with open({left!r}, "a") as left:
            left.write(str(os.getpid()) + "\\n")
        os.write(there, b"!")
        time.sleep(600)
    os._exit(0)
os.read(here, 1)  # else the proof may end before its grandchild has begun
{then}
"""


def living(file: Path) -> list[int]:
    """Those of the processes in a file that still run."""
    return [pid for pid in map(int, file.read_text().split()) if process.started(pid)]


@IN_NEW_INTERPRETERS
def test_a_proof_that_hears_nothing_is_ended(
    prove, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No alarm in the proof's own process can be relied on, and its children end with it."""
    monkeypatch.setattr(proof_process, "LIMIT", 1.0)
    left = tmp_path / "left"
    left.touch()
    proved = prove(verify=_DEAF.format(left=str(left), then="while True: time.sleep(1)"))
    for limit in (10.0, 60.0):
        if left.read_text().count("\n") == 3:
            break  # a machine under load takes longer to come to three endless waits
        monkeypatch.setattr(proof_process, "LIMIT", limit)
        left.write_text("")
        (proved,) = verify.verify(Session(tmp_path / "root"))
    said = f"did not end within {proof_process.LIMIT:g} seconds"
    assert proved.proof == "failed" and said in proved.detail
    assert left.read_text().count("\n") == 3 and not living(left)


@IN_NEW_INTERPRETERS
def test_a_grandchild_that_holds_the_pipe_is_not_waited_for(prove, tmp_path: Path) -> None:
    left = tmp_path / "left"
    then = "from megatron.core.thing import double\nassert double(2) == 4"
    assert prove(verify=_DEAF.format(left=str(left), then=then)).proof == "passed"
    assert not living(left)


@IN_NEW_INTERPRETERS
def test_a_proof_in_the_worker_itself_is_ended_with_it(
    prove, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proof on a GPU is no fork: whoever started the worker ends it."""
    monkeypatch.setattr(needs, "_is_here", lambda need: True)
    monkeypatch.setattr(proof_process, "LIMIT", 0.5)
    monkeypatch.setattr(proof_process, "MARGIN", 0.5)
    left = tmp_path / "left"
    proved = prove(
        patch='reached="forward", needs=("cuda",)',
        verify=_DEAF.format(left=str(left), then="while True: time.sleep(1)"),
    )
    assert proved.proof == "failed" and "no answer in time" in proved.detail


_FORGED = """
import json, os, struct
from pathlib import Path
answer = {"name": "double_doubles", "run": {"result": "passed", "detail": ""}}
data = json.dumps(answer).encode()
for fd in map(int, os.listdir("/proc/self/fd")):
    if fd > 2:
        try:
            os.write(fd, struct.pack("!I", len(data)) + data)
        except OSError:
            pass
"""


@IN_NEW_INTERPRETERS
def test_an_answer_out_of_order_is_none(prove) -> None:
    proved = prove(files={"megatron/core/thing.py": made.THING + _FORGED})
    assert proved.proof == "failed" and "not the expected one" in proved.detail


def test_an_assertion_without_a_text_shows_its_line(prove) -> None:
    proved = prove(verify="from megatron.core.thing import double\nassert double(2) == 5")
    assert "`assert double(2) == 5` (double_doubles.py:" in proved.detail


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


@IN_NEW_INTERPRETERS
def test_a_proof_on_a_gpu_sees_it_and_is_no_fork(prove, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(needs, "_is_here", lambda need: True)
    proved = prove(
        patch='reached="forward", needs=("cuda",)',
        verify=_SEES.format(sees="0", pid=os.getpid(), forked=False),
    )
    assert proved.proof == "passed"


def test_what_a_gpu_page_needs_is_said(prove) -> None:
    proved = prove(patch='reached="forward", needs=("no_such_accelerator",)')
    assert (proved.proof, proved.detail) == ("unverified", "needs no_such_accelerator")


_NEEDS = 'reached="forward", needs=("made_accelerator",)'


@pytest.fixture
def accelerator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What the page needs: there until the test takes it away."""
    place = tmp_path / "packages"
    place.mkdir()
    (place / "made_accelerator.py").write_text("")
    monkeypatch.syspath_prepend(place)

    def take_away() -> None:
        (place / "made_accelerator.py").unlink()
        importlib.invalidate_caches()

    return take_away


def _record(tmp_path: Path) -> list[Path]:
    written: list[Path] = []
    verify.verify(Session(tmp_path / "root"), record=written)
    return written


def test_a_recorded_proof_counts_elsewhere_until_its_page_changes(
    prove, tmp_path: Path, accelerator
) -> None:
    assert prove(patch=_NEEDS).proof == "passed"
    (path,) = _record(tmp_path)
    assert path == tmp_path / "pages" / proof_file.NAME
    (row,) = json.loads(path.read_text())["proofs"]["double_doubles"]
    assert row["megatron"] == "0.19.2" and row["date"] and row["gpu"] == "no GPU"
    accelerator()
    session = Session(tmp_path / "root")
    (proved,) = verify.verify(session)
    assert proved.proof == "passed" and "proved on no GPU" in proved.detail
    assert overlay.status(session).verdicts[0].proof == "passed"
    made.page(tmp_path / "pages", patch=_NEEDS, more="# a comment")
    (proved,) = verify.verify(Session(tmp_path / "root"))
    assert proved.proof == "passed"
    made.page(tmp_path / "pages", patch=_NEEDS, more="X = 1")
    (proved,) = verify.verify(Session(tmp_path / "root"))
    assert proved.proof == "stale" and "the page changed" in proved.detail


_KERNEL = "import cppmega.ops.hadamard  # noqa"


def test_a_recorded_proof_is_stale_when_a_kernel_changes(
    prove, tmp_path: Path, accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is named by the patched text alone."""
    prove(patch=_NEEDS, edit=f'replacing("return x", """{_KERNEL}\nreturn 2 * x""")')
    _record(tmp_path)
    accelerator()
    whole = revision.reached
    monkeypatch.setattr(revision, "reached", lambda names: {**whole(names), "cppmega.k": "1"})
    (proved,) = verify.verify(Session(tmp_path / "root"))
    assert proved.proof == "stale" and "code that it runs" in proved.detail


def test_a_recorded_proof_is_of_one_text_of_megatron(prove, tmp_path: Path, accelerator) -> None:
    source = "def double(x):\n    y = x\n    return x\n"
    page = made.page(tmp_path / "pages", patch=_NEEDS)
    pins = {"0.19.2": fingerprint.of_source(source), "0.18.2": fingerprint.of_source(_DOUBLE)}
    known = str({"0.19.2": pins["0.18.2"]})
    assert known in page.read_text()
    page.write_text(page.read_text().replace(known, str(pins)))
    for name, text in (("one", made.THING), ("root", made.THING.replace(_DOUBLE, source))):
        assert overlay.apply(Session(made.tree(tmp_path / name, {_THING: text}))).ok
    verify.verify(Session(tmp_path / "one"), record=[])
    accelerator()
    (proved,) = verify.verify(Session(tmp_path / "one"))
    assert proved.proof == "passed"
    (proved,) = verify.verify(Session(tmp_path / "root"))
    assert proved.proof == "unverified" and "a different text" in proved.detail


def test_what_is_not_proved_is_not_recorded(prove, tmp_path: Path, accelerator) -> None:
    """A failing proof, a tree that drifted, and proofs that any machine makes again."""
    prove(patch=_NEEDS, verify="assert False")
    for name in ("not-recorded", "nothing-to-record", "not-recorded"):
        with pytest.raises(CppmegaError) as caught:
            _record(tmp_path)
        assert caught.value.name == name
        made.page(tmp_path / "pages")
        if name == "nothing-to-record":
            made.page(tmp_path / "pages", patch=_NEEDS)
            overlay.apply(Session(tmp_path / "root"))
            thing = tmp_path / "root" / _THING
            thing.write_text(thing.read_text() + "\n\ndef more():\n    pass\n")
            made.page(tmp_path / "pages", "drifted", source="def f(x):\n    return 3\n")
    assert not (tmp_path / "pages" / proof_file.NAME).exists()


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 9}', '{"schema": 1, "proofs": {"a": 1}}'])
def test_a_torn_record_is_named(prove, tmp_path: Path, text: str) -> None:
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / proof_file.NAME).write_text(text)
    with pytest.raises(CppmegaError, match="proofs-unreadable"):
        prove(patch='reached="forward", needs=("no_such_accelerator",)')


def test_a_record_in_an_installed_package_is_read_and_written(
    prove, tmp_path: Path, accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a wheel the catalogue lies below the package; the file is found there as in a checkout."""
    inside = tmp_path / "site" / "cppmega" / "upstream_patches"
    made.page(inside, patch=_NEEDS)
    monkeypatch.undo()
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.setattr(paths, "PACKAGE", inside.parent)
    root = made.tree(tmp_path / "root")
    assert overlay.apply(Session(root)).ok
    assert _record(tmp_path) == [inside / proof_file.NAME]
    accelerator()
    (proved,) = verify.verify(Session(root))
    assert proved.proof == "passed"


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
        files={_THING: text},
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


@IN_NEW_INTERPRETERS
def test_an_edit_that_depends_on_the_order_of_a_set(prove) -> None:
    """Twice the same in one process, and another text in the next one."""
    proved = prove(edit="act", more=_SETS)
    assert proved.proof == "failed" and "PYTHONHASHSEED" in proved.detail


@IN_NEW_INTERPRETERS
def test_its_text_is_compared_where_its_proof_cannot_run(prove) -> None:
    patch = 'reached="forward", needs=("no_such_accelerator",)'
    proved = prove(edit="act", more=_SETS, patch=patch)
    assert proved.proof == "failed" and "PYTHONHASHSEED" in proved.detail


_LAYER = """\
import dataclasses


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
    ],
    ids=["changed", "added", "removed", "field", "decorator", "default"],
)
def test_what_a_class_holds_can_be_proved(prove, symbol: str, edit: str, verify: str) -> None:
    """The mutant must lose it: it had the patched constant, and every proof of one failed."""
    method = "def forward(self, x, by=1):\n    return x * self.width * by\n"
    proved = prove(
        files={"megatron/core/layer.py": _LAYER},
        target=f"megatron/core/layer.py:{symbol}",
        source=method if symbol == "Layer.forward" else _class(symbol),
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
