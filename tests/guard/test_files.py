"""Every imported file of Megatron is judged, whether it is patched or not."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from cppmega.errors import CppmegaError
from cppmega.guard import agreement, files, imports, ranks
from cppmega.guard.agreement import Answer
from cppmega.guard.reached import NOTHING
from cppmega.overlay.receipt import PatchedFile, Receipt
from cppmega.tree.installed import sha256
from tests.guard.sites import FILES, A, B, Site


def test_a_clean_import_is_vouched_for_by_its_record(site: Site) -> None:
    site.load()
    found = site.look()
    assert not found.problems and set(found.files) == set(FILES)
    assert found.summary() == "3 of megatron-core 0.19.2"


def test_files_that_are_not_imported_are_not_read(site: Site) -> None:
    site.write("megatron/core/never.py", b"raise SystemExit\n")
    site.write(B, b"edited = 1\n")
    site.load("megatron.core.a")
    assert not site.look().problems and B not in site.look().files


def test_a_replaced_module_is_told_apart_anew(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.load()
    first, second = types.ModuleType("borrowed"), types.ModuleType("borrowed")
    first.__file__ = types.__file__
    second.__file__ = str(site.root / A)
    for module, asked in ((first, False), (second, True), (first, False)):
        monkeypatch.setitem(sys.modules, "borrowed", module)
        assert any(one is module for _, one in imports.in_question()) is asked


def test_a_tree_without_origin_says_unverified(site: Site) -> None:
    info = next(site.root.glob("*.dist-info"))
    (info / "RECORD").unlink()
    info.rmdir()
    site.load()
    found = site.look()
    assert not found.problems and found.unverified == sorted(FILES)
    assert "3 unverified, of no RECORD and no commit: megatron/core/__init__.py" in found.summary()


def test_another_distribution_of_the_namespace(site: Site, tmp_path: Path) -> None:
    """megatron-bridge and megatron-energon are judged by their own RECORD, wherever they are."""
    other = Site(tmp_path / "other")
    for one in (site, other):
        path = "megatron/bridge/__init__.py" if one is site else "megatron/energon/__init__.py"
        one.write(path, b"VALUE = 1\n")
        info = one.root / f"{Path(path).parent.name}-1.0.dist-info"
        info.mkdir()
        digest = "sha256=" + "cg6j1VmSVD0s9QyV2ZyV6gH2q0rG4yC2J1mF7mQqYqM"
        (info / "RECORD").write_text(f"{path},{digest},10\n")
    site.load()
    sys.modules["megatron"].__path__.append(str(other.root / "megatron"))
    importlib.import_module("megatron.bridge")
    importlib.import_module("megatron.energon")
    found = site.look()
    assert [p.name for p in found.problems] == ["foreign-edit"] * 2  # these hashes are another's
    for one in (site, other):
        (info,) = (i for i in one.root.glob("*-1.0.dist-info"))
        info.rename(info.with_name("gone"))
    found = site.look()
    assert not found.problems and len(found.unverified) == 2


def test_a_checkout_is_judged_by_its_commit(site: Site) -> None:
    site.commit()
    site.load()
    found = site.look()
    assert not found.problems and "3 of commit " in found.summary()
    site.write("megatron/core/mine.py", b"")
    importlib.invalidate_caches()
    importlib.import_module("megatron.core.mine")
    site.write(A, b"VALUE = 2\n")
    assert site.problems() == {"file-changed", "foreign-file"}


def test_a_checkout_with_the_line_ends_of_windows(site: Site) -> None:
    """`core.autocrlf` changes every byte count and no code."""
    site.commit()
    site.write(A, FILES[A].replace(b"\n", b"\r\n"))
    site.load()
    found = site.look()
    assert not found.problems and not found.unverified


def test_a_patched_file_is_what_the_receipt_says(site: Site) -> None:
    site.write(A, b"VALUE = 2\n")
    site.load()
    before, after = sha256(FILES[A]), sha256(b"VALUE = 2\n")
    receipt = Receipt(files={A: PatchedFile(before, after, "record", ["page@1"])})
    assert not site.look(receipt).problems
    assert "1 of patched" in site.look(receipt).summary()
    receipt.files[A] = PatchedFile(before, before, "record", ["page@1"])
    assert [p.name for p in site.look(receipt, **{A: after}).problems] == ["file-changed"]


def test_an_edit_is_accepted_by_name_and_hash(site: Site) -> None:
    site.write(A, b"VALUE = 2\n")
    site.load()
    digest = sha256(b"VALUE = 2\n")
    (refused,) = site.look().problems
    assert f"--accept {A}={digest}" in refused.next
    found = site.look(**{A: digest})
    assert not found.problems and found.edits == {A: digest}
    assert "accepted edits: megatron/core/a.py" in found.summary()
    (differs,) = site.look(**{A: sha256(b"")}).problems
    assert differs.name == "accepted-edit-differs"


def test_a_built_extension_is_hashed(site: Site) -> None:
    import _bisect

    if not hasattr(_bisect, "__file__"):
        pytest.skip("this Python has the module built in")
    there = Path(_bisect.__file__)
    path = f"megatron/core/{there.name}"
    site.write(path, there.read_bytes())
    site.load("megatron.core._bisect")
    assert site.problems() == {"foreign-file"}
    site.write("megatron/core/Makefile", b"")
    found = site.look()
    assert not found.problems and found.files[path] == sha256(there.read_bytes())
    assert "1 of built here" in found.summary()


def test_a_module_inside_an_extension_is_the_extension(site: Site) -> None:
    """As pybind11 makes them: the file of the extension, and neither a spec nor a loader."""
    import _bisect

    if not hasattr(_bisect, "__file__"):
        pytest.skip("this Python has the module built in")
    there = Path(_bisect.__file__)
    site.write(f"megatron/core/{there.name}", there.read_bytes())
    site.write("megatron/core/Makefile", b"")
    site.load("megatron.core._bisect")
    outer = sys.modules["megatron.core._bisect"]
    inner = types.ModuleType("megatron.core._bisect.inner")
    inner.__file__ = outer.__file__
    sys.modules[inner.__name__] = inner
    assert site.problems() == {"other-file"}, "the extension does not have it"
    vars(outer)["inner"] = inner
    assert not site.problems()
    inner.__file__ = str(site.root / A)
    assert site.problems() == {"other-file"}


def answered(where: str, **details: Any) -> Answer:
    blank = {"overlay": "d", "stack": {}, "files": "f", "problem": None, "replaced": None}
    return Answer(where, **{**blank, "seen": NOTHING, "calls": {}, **details})


def test_ranks_are_compared_file_by_file(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pipeline stages import different files; what two of them share must be the same."""
    site.load()
    mine = files.look(site.root, Receipt()).files

    def compare(others: dict[str, str]) -> None:
        answers = [answered("rank 0"), answered("rank 1", files="other")]
        monkeypatch.setattr(ranks, "gather", lambda one: [one, ("rank 1", others)])
        agreement.refuse(answers, "")

    compare(mine)
    compare({A: mine[A], "megatron/x.py": "1"})
    with pytest.raises(CppmegaError) as caught:
        compare({**mine, A: "other"})
    assert caught.value.name == "imported-differs"
    assert A in caught.value.what and "rank 1" in caught.value.what


def test_ranks_run_one_version_of_every_package() -> None:
    """Also where one of them, a pipeline stage, has imported fewer packages."""
    stack = {"torch": "2.11.0", "triton": "3.6.0"}
    agreement.refuse([answered("host a", stack=stack), answered("host b", stack={})], "")
    other = answered("host b, rank 8", stack={**stack, "torch": "2.10.0"})
    with pytest.raises(CppmegaError, match=r"versions of torch: .*, rank 8 has 2\.10") as caught:
        agreement.refuse([answered("host a", stack=stack), other], "")
    assert caught.value.name == "stack-differs"
    assert agreement.stack()["Python"].startswith("3.")


def test_what_one_rank_finds_stops_all() -> None:
    problem = CppmegaError("foreign-edit", "a.py differs.", "why", "next")
    with pytest.raises(CppmegaError) as caught:
        agreement.refuse([answered("rank 0"), answered("rank 1", problem=problem)], "at the end")
    assert caught.value.name == "foreign-edit"
    assert "rank 1, at the end: a.py differs." in caught.value.what
