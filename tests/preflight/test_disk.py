"""Preflight on disk: each check on a tree that is broken for it, and on one that is not."""

from __future__ import annotations

import fcntl
import json
import os
import py_compile
import shutil
import sys
from pathlib import Path

import pytest

from cppmega.overlay import receipt
from cppmega.overlay import verbs as overlay
from cppmega.overlay.receipt import Receipt
from cppmega.overlay.verbs import Session
from cppmega.preflight import examine as preflight
from cppmega.preflight.context import Context
from cppmega.recipe.run_options import RunOptions
from cppmega.tree.installed import Tree, sha256
from tests.preflight.contexts import (
    SLICE,
    SMOKE,
    change,
    holds,
    launch,
    only,
    own_tree,
    refuses,
    write,
)
from tests.support import patched, pristine
from tests.support.lab import A, Lab

pytestmark = pytest.mark.slow

ROUTER = "megatron/core/transformer/moe/router.py"
UNTOUCHED = "megatron/core/transformer/mlp.py"


@pytest.fixture(scope="module")
def healthy() -> Context:
    """0.19.2 with every page applied; never written to."""
    return launch(SMOKE, root=patched("0.19.2"))


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    return own_tree(tmp_path / "tree")


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """A made tree with one page applied."""
    lab = Lab(tmp_path, monkeypatch)
    lab.page()
    lab.wheel()
    assert lab.apply().ok
    return lab


def rewritten(root: Path, **changes: object) -> None:
    """Change fields of the receipt by hand."""
    place = root / ".cppmega" / "receipt.json"
    write(place, json.dumps({**json.loads(place.read_bytes()), **changes}).encode())


def test_one_root(healthy: Context, broken: Path, tmp_path: Path) -> None:
    assert "0.19.2" in holds("one_root", healthy)
    refuses("one_root", "no-megatron", launch(root=tmp_path))
    for path in (broken / "megatron" / "training").glob("*.py"):
        write(path, b"# of another version\n")
    refuses("one_root", "mixed-versions", launch(root=broken))


def test_shadowing(healthy: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, tmp_path / "cwd")
    assert "only from" in holds("shadowing", launch(root=healthy.root))
    (tmp_path / "path" / "megatron" / "training").mkdir(parents=True)
    on_path = launch(root=healthy.root, environ={"PYTHONPATH": str(tmp_path / "path")})
    assert "PYTHONPATH" in refuses("shadowing", "shadowing-path", on_path).next
    Path("torch.py").write_text("")
    assert "torch.py" in refuses("shadowing", "shadowing-path", launch(root=healthy.root)).what


@pytest.mark.parametrize("name", ["random", "yaml"])
def test_a_module_of_the_launch_folder_takes_the_name_of_another(
    healthy: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    only(monkeypatch, tmp_path / "cwd")
    for harmless in ("setup.py", "conftest.py", "mine.py"):
        Path(harmless).write_text("")
    holds("shadowing", launch(root=healthy.root))
    Path(f"{name}.py").write_text("")
    assert name in refuses("shadowing", "shadowing-path", launch(root=healthy.root)).what
    holds("shadowing", launch(root=healthy.root, environ={"PYTHONSAFEPATH": "1"}))


def test_a_site_packages_on_the_path_shadows_nothing(
    healthy: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, tmp_path / "cwd")
    (tmp_path / "site" / "torch").mkdir(parents=True)
    (tmp_path / "site" / "torch" / "__init__.py").write_text("")
    (tmp_path / "site" / "torch-2.11.0.dist-info").mkdir()
    record = tmp_path / "site" / "torch-2.11.0.dist-info" / "RECORD"
    record.write_text("torch/__init__.py,sha256=,0\n")
    environ = {"PYTHONPATH": f"{tmp_path / 'site'}{os.pathsep}{patched('0.19.2')}"}
    holds("shadowing", launch(root=healthy.root, environ=environ))
    (tmp_path / "site" / "json.py").write_text("")
    found = refuses("shadowing", "shadowing-path", launch(root=healthy.root, environ=environ))
    assert "json.py" in found.what


@pytest.mark.parametrize(
    "taken",
    [
        *("apex.py", "flash_attn.py", "flash_attn_3/__init__.py", "amp_C.so", "tabulate.py"),
        *("apex/contrib.py", "json.pyc", "random/__init__.py", "transformer_engine.py"),
    ],
)
@pytest.mark.parametrize("through", ["cwd", "PYTHONPATH", "archive", "empty entry"])
def test_no_module_takes_a_name_that_the_stack_tries(
    healthy: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: str, through: str
) -> None:
    """Megatron tries dozens of packages that need not be installed."""
    only(monkeypatch, tmp_path / "cwd")
    place = Path("path") if through in ("PYTHONPATH", "archive") else Path()
    (place / taken).parent.mkdir(parents=True, exist_ok=True)
    (place / taken).write_text("")
    if through == "archive":
        if Path(taken).suffix != ".py" or taken == "apex/contrib.py":
            pytest.skip("an archive holds sources")
        shutil.make_archive("path", "zip", "path")
        place = Path("path.zip")
    environ = {"cwd": {}, "empty entry": {"PYTHONPATH": ":/nowhere", "PYTHONSAFEPATH": "1"}}.get(
        through, {"PYTHONPATH": str(place)}
    )
    found = refuses("shadowing", "shadowing-path", launch(root=healthy.root, environ=environ))
    assert taken in found.what or through == "archive" or taken == "apex/contrib.py"


def test_names_that_nothing_tries_are_a_users_own(
    healthy: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prose of Megatron's docstrings has `from the` and `import all` in it."""
    only(monkeypatch, tmp_path / "cwd")
    for name in ("training", "transformer", "gpt", "source_block", "the", "mine", "nodes"):
        Path(f"{name}.py").write_text("")
    for folder in ("wandb", "datasets", "random", "numpy"):
        Path(folder).mkdir()  # without code in it
    Path("numpy/mine.py").write_text("")  # a namespace does not take an installed name
    holds("shadowing", launch(root=healthy.root))


def test_being_patched(lab: Lab) -> None:
    holds("receipt_whole", launch(root=lab.root))
    with (lab.root / ".cppmega" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refuses("receipt_whole", "being-patched", launch(root=lab.root))
    (lab.root / ".cppmega" / "unfinished").touch()
    assert (
        "apply_patches" in refuses("receipt_whole", "leftover-journal", launch(root=lab.root)).next
    )


def test_receipt_whole(healthy: Context, broken: Path) -> None:
    assert "overlay" in holds("receipt_whole", healthy)
    refuses("receipt_whole", "no-receipt", launch(root=pristine("0.19.2")))
    rewritten(broken, gates={})
    refuses("receipt_whole", "receipt-changed", launch(root=broken))
    write(broken / ".cppmega" / "receipt.json", b'{"schema": 1, "to')
    refuses("receipt_whole", "no-receipt", launch(root=broken))


def test_patched_files_and_the_edit_in_them(healthy: Context, broken: Path) -> None:
    holds("patched_files", healthy)
    change(broken / ROUTER, b"import torch\n", b"import torch\n\nHAND = 1\n")
    found = refuses("patched_files", "file-changed", launch(root=broken))
    assert "+HAND = 1" in found.what
    assert "-" not in [line[:1] for line in found.what.splitlines()[3:]], "only the hand's edit"


def test_a_reinstalled_megatron_below_the_receipt(lab: Lab) -> None:
    holds("patched_files", launch(root=lab.root))
    path = "megatron/core/a.py"
    lab.change("megatron_core-1.0.dist-info/RECORD", b"a.py,sha256=", b"a.py,sha256=x")
    rewritten(lab.root, identity=Tree(lab.root).identity)
    found = refuses("patched_files", "receipt-of-other-text", launch(root=lab.root))
    assert path in found.what


def test_a_lost_original(lab: Lab) -> None:
    for kept in (lab.root / ".cppmega" / "originals").iterdir():
        kept.unlink()
    refuses("patched_files", "original-missing", launch(root=lab.root))


def test_foreign_edits_are_shown(
    healthy: Context, broken: Path, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "files are upstream's" in holds("foreign_edits", healthy)
    change(broken / UNTOUCHED, b"class MLP(", b"X = 1\n\n\nclass MLP(")
    (broken / "megatron" / "core" / "mine.py").write_text("")
    found = refuses("foreign_edits", "foreign-edit", launch(root=broken))
    assert UNTOUCHED in found.what and "+X = 1" in found.what
    assert "cppmega new" in found.next
    # Without a copy of the wheel at hand there is no diff to show, and it says so.
    lab.change("megatron/core/b.py", b"return x", b"return -x")
    assert "no copy" in refuses("foreign_edits", "foreign-edit", launch(root=lab.root)).what


def test_a_file_that_is_gone_is_named_though_nobody_imports_it_yet(broken: Path) -> None:
    gone = "megatron/core/dist_checkpointing/strategies/fully_parallel.py"
    (broken / gone).unlink()
    said = refuses("foreign_edits", "file-gone", launch(root=broken))
    assert gone in said.what and str(broken) in said.next


def test_patched_files_pass_for_no_hand_edits_where_the_receipt_is_torn(broken: Path) -> None:
    place = broken / ".cppmega" / "receipt.json"
    write(place, place.read_bytes()[:500])
    found = preflight.examine(launch(root=broken))
    assert [one.name for one in found.failures] == ["no-receipt"]
    assert found.failures[0].next.endswith(f"apply_patches --megatron {broken}")


@pytest.mark.parametrize(
    "field",
    [{"proofs": "x"}, {"proofs": {"page": 3}}, {"gates": [1]}, {"schema": "2"}, {"schema": 0}],
)
def test_a_receipt_of_other_types_is_torn(lab: Lab, field: dict[str, object]) -> None:
    rewritten(lab.root, **field)
    assert "cannot be read" in refuses("receipt_whole", "no-receipt", launch(root=lab.root)).what


def test_originals_that_are_no_folder(lab: Lab) -> None:
    originals = lab.root / ".cppmega" / "originals"
    originals.rename(lab.root / "moved")
    originals.write_text("")
    refuses("patched_files", "original-missing", launch(root=lab.root))


def test_line_ends_are_an_edit_that_a_diff_does_not_show(broken: Path) -> None:
    path = broken / "megatron/core/transformer/multi_token_prediction.py"
    write(path, path.read_bytes().replace(b"\n", b"\r\n"))
    assert "line endings" in refuses("patched_files", "file-changed", launch(root=broken)).what


def test_a_wheel_that_lost_its_record_is_no_other_version(broken: Path) -> None:
    (broken / "megatron_core-0.19.2.dist-info" / "RECORD").unlink()
    holds("one_root", launch(root=broken))
    refuses("receipt_whole", "no-receipt", launch(root=broken))
    assert overlay.apply(Session(broken), environment={}).ok
    holds("receipt_whole", launch(root=broken))


def test_files_of_ones_own_in_the_tree_are_refused_unless_they_are_accepted(broken: Path) -> None:
    (broken / "megatron" / "core" / "mine.py").write_text("")
    change(broken / UNTOUCHED, b"class MLP(", b"X = 1\n\n\nclass MLP(")
    mine, edited = "megatron/core/mine.py", sha256((broken / UNTOUCHED).read_bytes())
    said = refuses("foreign_edits", "foreign-file", launch(root=broken))
    assert mine in said.what and f"--accept {mine}={sha256(b'')}" in said.next
    words = ("--accept", f"{mine}={sha256(b'')}", "--accept", f"{UNTOUCHED}={edited}")
    assert "accepted edits: " + UNTOUCHED in holds(
        "foreign_edits", launch(SMOKE, *words, root=broken)
    ).replace(f"{mine}, ", "")
    recipe = SMOKE.with_(accepted_edits=((UNTOUCHED, edited),))
    holds("foreign_edits", launch(recipe, root=broken, options=RunOptions(accept=words[1:2])))
    write(broken / UNTOUCHED, b"")
    refuses("foreign_edits", "accepted-edit-differs", launch(SMOKE, *words, root=broken))


@pytest.mark.parametrize(
    "odd", ["x.py", "megatron/x.py=12", f"../x/x.py={'0' * 64}", f"/megatron/x.py={'0' * 64}"]
)
def test_an_acceptance_names_a_file_and_its_hash(lab: Lab, odd: str) -> None:
    refuses("foreign_edits", "bad-accept", launch(root=lab.root, options=RunOptions(accept=(odd,))))


def test_an_export_has_nobody_who_vouches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(tmp_path, monkeypatch)
    lab.export()
    assert "3 unverified" in holds("foreign_edits", launch(root=lab.root))


def test_patches(healthy: Context) -> None:
    assert "applied" in holds("patches", healthy)
    # A release without the feature: what the recipe counts on is not there.
    needing = SMOKE.with_(patches=("mhc_fused_kernels",))
    asked = launch(needing, root=healthy.root)
    assert "not-applicable" in refuses("patches", "patch-missing", asked).what


def test_patches_of_a_package_that_is_not_beside_megatron(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the package its patches hold nobody up; a recipe that needs one says what to do."""
    more = {"distribution": "'liger-kernel'"}
    lab.page("other", target="liger_kernel/x.py:f", pins={"0.8.5": "0" * 16}, more=more)
    recipe = SMOKE.with_(patches=("page",))
    assert holds("patches", launch(recipe, root=lab.root)) == "1 not-applicable, 1 applied"
    asked = launch(SMOKE.with_(patches=("other",)), root=lab.root)
    missing = refuses("patches", "patch-missing", asked)
    assert "liger-kernel is not installed here" in missing.what
    assert missing.next.startswith(f"install liger-kernel in {lab.root}, then ")
    (tmp_path / "elsewhere" / "liger_kernel").mkdir(parents=True)
    (tmp_path / "elsewhere" / "liger_kernel" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    place = f"liger-kernel is not patched, because it is in {tmp_path / 'elsewhere'}"
    assert holds("patches", launch(recipe, root=lab.root)).endswith(place)


def test_a_patch_that_vanished_in_an_upgrade_stops_the_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has said that it may go: `not-applicable` would let the run start without it."""
    lab = Lab(tmp_path, monkeypatch)
    lab.page(feature=(f"{A}:Layer",))
    lab.wheel("1.0")
    assert lab.apply().ok
    shutil.rmtree(next(lab.root.glob("megatron_core-*")))
    lab.files[A] = lab.files[A].replace(b"double", b"treble").replace(b"Layer", b"Block")
    lab.wheel("2.0")
    vanished = refuses("patches", "patch-unported", launch(root=lab.root))
    assert "page is unported" in vanished.what and "--without page" in vanished.next


def test_patches_that_the_recipe_names(lab: Lab) -> None:
    asked = launch(SMOKE.with_(patches=("page",)), root=lab.root)
    holds("patches", asked)
    assert lab.revert("page").ok
    missing = launch(SMOKE.with_(patches=("page",)), root=lab.root)
    assert "it is off" in refuses("patches", "patch-missing", missing).what
    unknown = launch(SMOKE.with_(patches=("pge",)), root=lab.root)
    assert "Did you mean page?" in refuses("patches", "patch-unknown", unknown).what


def test_a_page_that_was_never_applied_or_is_not_known(lab: Lab) -> None:
    lab.page("second", "megatron/core/b.py:single", 'replacing("return x", "return 2 * x")')
    lab.page("third", "megatron/core/b.py:other", 'replacing("+ x", "+ x + x")')
    (found,) = preflight.answers("patches", launch(root=lab.root))  # one reason, said once
    assert found.name == "patch-pending" and "so are third" in found.what
    (lab.pages / "third.py").unlink()
    assert "second" in refuses("patches", "patch-pending", launch(root=lab.root)).what
    lab.page("second", "megatron/core/b.py:single", "left_alone", pins={"1.0": "0" * 16})
    refuses("patches", "patch-drifted", launch(root=lab.root))


def test_a_gate_that_says_something_else_than_at_apply(lab: Lab) -> None:
    lab.page(gate="CPPMEGA_TEST_GATE")
    assert lab.apply(environment={"CPPMEGA_TEST_GATE": "1"}).ok
    holds("patches", launch(root=lab.root, environ={"CPPMEGA_TEST_GATE": "1"}))
    refuses("patches", "gate-differs", launch(root=lab.root))


def proved(lab: Lab, **fields: object) -> Receipt:
    """Put a proof of the page into the receipt."""
    held = lab.receipt()
    page = held.pages["page"]
    proof = {"proof": "passed", "revision": page.revision, "digest": held.digest, "detail": ""}
    rewritten(lab.root, proofs={"page": proof | fields})
    return receipt.load(Tree(lab.root)).receipt


def test_proofs(lab: Lab) -> None:
    needing = SLICE.with_(patches=("page",))
    training = {"root": lab.root, "training_machine": True}
    assert "0 of 1" in holds("proofs", launch(needing, root=lab.root)), "not where it trains"
    refuses("proofs", "proof-missing", launch(needing, **training))
    proved(lab, proof="unverified", environment={"OMP_NUM_THREADS": "1"})
    assert "0 of 1" in holds("proofs", launch(needing, **training)), "it was tried, and cannot run"
    proved(lab)
    assert "1 of 1" in holds("proofs", launch(needing, **training))
    proved(lab, proof="failed", detail="it returned 3")
    found = refuses("proofs", "proof-failed", launch(root=lab.root)).what
    assert "it returned 3" in found and "it passes on stock" in found
    proved(lab, digest="of another overlay")
    refuses("proofs", "proof-stale", launch(root=lab.root))
    broken = launch(root=lab.root, unsound={"imported_process"})
    refuses("proofs", "proof-stale", broken)
    proved(lab)
    (waiting,) = preflight.answers("proofs", launch(root=lab.root, unsound={"imported_process"}))
    assert waiting.state == "not-run" and waiting.what == "imported_process does not hold"


def test_a_failed_proof_that_passes_now(lab: Lab) -> None:
    """As one that an earlier release ran with a switch of somebody's shell."""
    proof = "from megatron.core.a import double\nassert double(True) is not True\n"
    page = lab.page(edit='replacing("x + x", "x + x + 1")')
    proof = "def verify():\n    from megatron.core.a import double\n    assert double(2) == 5\n"
    page.write_text(page.read_text().partition("def verify")[0] + proof)
    assert lab.apply().ok
    before = proved(lab, proof="failed", detail="No dot product attention backend")
    found = holds("proofs", launch(root=lab.root))
    assert "1 of 1" in found and "cppmega verify page stores that" in found
    assert lab.receipt() == before
    page.write_text(page.read_text().replace("== 5", "== 6"))
    assert lab.apply().ok
    proved(lab, proof="failed", detail="No dot product attention backend")
    found = refuses("proofs", "proof-failed", launch(root=lab.root)).what
    assert "on the code that would train: AssertionError" in found


def test_bytecode(lab: Lab) -> None:
    source = lab.root / "megatron" / "core" / "a.py"
    now, stat = source.read_bytes(), source.stat()
    cached = Path(py_compile.compile(str(source)) or "")
    assert "1 files are" in holds("patched_files", launch(root=lab.root))
    source.write_bytes(now.replace(b"2 * x", b"3 * x"))
    os.utime(source, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    py_compile.compile(str(source))
    source.write_bytes(now)
    os.utime(source, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    found = refuses("patched_files", "stale-bytecode", launch(root=lab.root))
    assert str(cached) in found.next
    os.utime(source, ns=(stat.st_atime_ns, stat.st_mtime_ns + 5_000_000_000))
    holds("patched_files", launch(root=lab.root))  # Python compiles it again


def test_bytecode_that_python_never_checks_and_that_of_a_prefix(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = lab.root / "megatron" / "core" / "a.py"
    now = source.read_bytes()
    source.write_bytes(now.replace(b"2 * x", b"5 * x"))
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    cached = Path(py_compile.compile(str(source), invalidation_mode=mode) or "")
    source.write_bytes(now)
    refuses("patched_files", "stale-bytecode", launch(root=lab.root))
    folder = tmp_path / "prefix" / source.parent.relative_to("/")
    folder.mkdir(parents=True)
    cached.rename(folder / cached.name)
    holds("patched_files", launch(root=lab.root))
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "prefix"))  # PYTHONPYCACHEPREFIX
    refuses("patched_files", "stale-bytecode", launch(root=lab.root))
