"""Every imported file of Megatron is judged, whether it is patched or not."""

from __future__ import annotations

import importlib
import importlib.util
import os
import py_compile
import subprocess
import sys
import types
import zipfile
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest

from cppmega.errors import CppmegaError
from cppmega.live import copied_names
from cppmega.overlay.receipt import PatchedFile, Receipt
from cppmega.rank import imported, provenance, witness
from cppmega.rank.provenance import Judged
from cppmega.tree import pyc
from cppmega.tree.installed import sha256
from tests.support.made import dist_info

A, B = "megatron/core/a.py", "megatron/core/b.py"
FILES = {"megatron/core/__init__.py": b"", A: b"VALUE = 1\n", B: b"from megatron.core import a\n"}


class Site:
    """A small Megatron, which this process imports as a rank would."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, data: bytes) -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        return file

    def load(self, *names: str) -> list[Any]:
        """Import from the tree, watched as after `guard.start`."""
        witness.install()
        imported.only_from(self.root)
        importlib.invalidate_caches()
        return [importlib.import_module(name) for name in names or ("megatron.core.b",)]

    def look(self, receipt: Receipt | None = None, **accepted: str) -> Judged:
        edits = {path.replace("__", "/"): digest for path, digest in accepted.items()}
        return provenance.judge(self.root, receipt or Receipt(), edits)

    def problems(self) -> set[str]:
        return {problem.name for problem in self.look().problems}

    def bytecode(self, path: str, text: bytes, mode: str = "TIMESTAMP") -> Path:
        """Bytecode of another text, with a header that fits the source."""
        source = self.root / path
        true, stamp = source.read_bytes(), source.stat()
        text += b"#" * (len(true) - len(text))
        source.write_bytes(text)
        os.utime(source, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        invalidation = getattr(py_compile.PycInvalidationMode, mode)
        cached = py_compile.compile(str(source), invalidation_mode=invalidation)
        source.write_bytes(true)
        os.utime(source, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        return Path(str(cached))

    def git(self, *words: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "gc.auto=0"]
        subprocess.run(["git", *identity, "-C", str(self.root), *words], check=True)

    def commit(self) -> None:
        for info in self.root.glob("*.dist-info/*"):
            info.unlink()
        for folder in self.root.glob("*.dist-info"):
            folder.rmdir()
        self.git("init", "-q")
        self.git("add", ".")
        self.git("commit", "-qm", "upstream")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A tree with a RECORD; what this process imports of it is forgotten afterwards."""
    made = Site(tmp_path / "site")
    for path, data in FILES.items():
        made.write(path, data)
    dist_info(made.root, "0.19.2")
    monkeypatch.setattr(witness, "_LEDGER", pyc.Ledger(tmp_path / "cache"))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    names = [name for name in sys.modules if name.partition(".")[0] in copied_names.PACKAGES]
    others = {name: sys.modules.pop(name) for name in names}
    yield made
    for name in [n for n in sys.modules if n.partition(".")[0] in copied_names.PACKAGES]:
        del sys.modules[name]
    sys.modules.update(others)


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


def _edited(site: Site) -> None:
    site.write(A, b"VALUE = 2\n")
    site.load()


def _added(site: Site) -> None:
    site.write("megatron/core/mine.py", b"")
    site.load("megatron.core.mine")


def _listed_by_another_distribution(site: Site) -> None:
    """A RECORD of its own makes no file one of megatron-core's."""
    site.write("megatron/core/mine.py", b"")
    info = site.root / "mine-1.0.dist-info"
    info.mkdir()
    (info / "RECORD").write_text(f"megatron/core/mine.py,sha256={'A' * 43},0\n")
    site.load("megatron.core.mine")


def _replaced_after_import(site: Site) -> None:
    site.load()
    site.write(A, b"VALUE = 3\n")


def _put_back_after_import(site: Site) -> None:
    site.write(A, b"VALUE = 3\n")
    site.load()
    site.write(A, FILES[A])


def _package_beside_a_module(site: Site) -> None:
    site.write("megatron/core/a/__init__.py", FILES[A])
    site.load()


def _extension_beside_a_module(site: Site) -> None:
    """Python takes `_bisect.so` before `_bisect.py`."""
    import _bisect

    if not hasattr(_bisect, "__file__"):
        pytest.skip("this Python has the module built in")
    site.write("megatron/core/_bisect.py", b"")
    there = Path(_bisect.__file__)
    site.write(f"megatron/core/{there.name}", there.read_bytes())
    site.load("megatron.core._bisect")


def _sourceless(site: Site) -> None:
    cached = site.bytecode(A, b"VALUE = 9")
    (site.root / A).unlink()
    cached.rename((site.root / A).with_suffix(".pyc"))
    site.load()


def _archive(site: Site) -> None:
    with zipfile.ZipFile(site.root / "more.zip", "w") as archive:
        archive.writestr("extra.py", "VALUE = 1\n")
    site.load()
    sys.modules["megatron.core"].__path__.append(str(site.root / "more.zip"))
    importlib.import_module("megatron.core.extra")


class _Hook(SourceFileLoader):
    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> Any:
        return super().source_to_code(b"VALUE = 8\n", path, _optimize=_optimize)


def _import_hook(site: Site) -> None:
    """As typeguard, beartype and jaxtyping change code while it is imported."""

    class Finder:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
            if name != "megatron.core.a":
                return None
            file = str(site.root / A)
            return importlib.util.spec_from_file_location(name, file, loader=_Hook(name, file))

    witness.install()
    sys.meta_path.insert(0, Finder)
    site.load()


def _made_in_memory(site: Site) -> None:
    site.load()
    sys.modules["megatron.core.a"] = types.ModuleType("megatron.core.a")


def _no_module_at_all(site: Site) -> None:
    site.load()
    sys.modules["megatron.core.a"] = types.SimpleNamespace(VALUE=5)  # type: ignore[assignment]


def _never_executed(site: Site) -> None:
    """A module with the right spec, and somebody else's contents."""
    site.load()
    del sys.modules["megatron.core.a"]
    spec = importlib.util.find_spec("megatron.core.a")
    assert spec is not None
    sys.modules["megatron.core.a"] = module = importlib.util.module_from_spec(spec)
    vars(module)["VALUE"] = 6


def _another_file_under_its_name(site: Site) -> None:
    site.load()
    spec = importlib.util.spec_from_file_location("megatron.core.a", site.root / B)
    assert spec is not None and spec.loader is not None
    sys.modules["megatron.core.a"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def _added_folder(site: Site) -> None:
    site.write("elsewhere/late.py", b"")
    site.load()
    sys.modules["megatron.core"].__path__.append(str(site.root / "elsewhere"))
    importlib.import_module("megatron.core.late")


def _another_tree(site: Site) -> None:
    other = site.root.parent / "other"
    for path, data in FILES.items():
        (other / path).parent.mkdir(parents=True, exist_ok=True)
        (other / path).write_bytes(data)
    site.load("megatron.core.b")
    sys.modules["megatron"].__path__ = [str(other / "megatron")]
    for name in ("megatron.core", "megatron.core.a", "megatron.core.b"):
        del sys.modules[name]
    importlib.import_module("megatron.core.b")


def _under_another_name(site: Site) -> None:
    """The file counts, whatever its module is called."""
    site.write(A, b"VALUE = 2\n")
    spec = importlib.util.spec_from_file_location("harmless", site.root / A)
    assert spec is not None and spec.loader is not None
    sys.modules["harmless"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def _linked_folder(site: Site) -> None:
    """The text behind a link counts, not the link."""
    (site.root / "megatron/core").rename(site.root.parent / "core")
    (site.root / "megatron/core").symlink_to(site.root.parent / "core")
    site.write(A, b"VALUE = 2\n")
    site.load()


def _torn_record(site: Site) -> None:
    """A RECORD that lost one line vouches for the other files alone."""
    record = next(site.root.glob("*.dist-info")) / "RECORD"
    lines = record.read_text().splitlines()
    record.write_text("\n".join(line for line in lines if A not in line) + "\n")
    site.load()


@pytest.mark.parametrize(
    ("attack", "name"),
    [
        (_edited, "foreign-edit"),
        (_added, "foreign-file"),
        (_listed_by_another_distribution, "foreign-file"),
        (_replaced_after_import, "file-changed"),
        (_put_back_after_import, "file-changed"),
        (_package_beside_a_module, "other-file"),
        (_extension_beside_a_module, "other-file"),
        (_sourceless, "other-file"),
        (_archive, "other-file"),
        (_import_hook, "foreign-loader"),
        (_made_in_memory, "foreign-module"),
        (_no_module_at_all, "foreign-module"),
        (_never_executed, "foreign-module"),
        (_another_file_under_its_name, "other-file"),
        (_added_folder, "other-file"),
        (_another_tree, "shadowed"),
        (_under_another_name, "foreign-edit"),
        (_linked_folder, "foreign-edit"),
        (_torn_record, "foreign-file"),
    ],
)
def test_other_code_than_the_records_is_refused(
    site: Site, attack: Callable[[Site], None], name: str
) -> None:
    attack(site)
    assert name in site.problems()
    sys.modules.pop("harmless", None)


@pytest.mark.parametrize("mode", ["TIMESTAMP", "UNCHECKED_HASH"])
@pytest.mark.parametrize("late", [False, True])
def test_bytecode_of_another_text(site: Site, mode: str, late: bool) -> None:
    """It is not run; and where it ran before anything could be done, that is said."""
    site.bytecode(A, b"VALUE = 7", mode)
    if late:
        imported.only_from(site.root)
        importlib.import_module("megatron.core.a")
    (module,) = site.load("megatron.core.a")
    assert late or module.VALUE == 1
    assert site.problems() == {"stale-bytecode"}


def test_finders_of_editable_installs_are_asked(site: Site) -> None:
    """What they find is loaded by our loader, and judged like the rest."""

    class Old:
        """A finder of before Python 3.4."""

    class Editable:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
            file = site.root / "src" / f"{name.rpartition('.')[2]}.py"
            return importlib.util.spec_from_file_location(name, file) if file.exists() else None

    site.write("src/late.py", b"VALUE = 4\n")
    sys.meta_path[:0] = [Old, Editable]  # type: ignore[list-item]
    (module,) = site.load("megatron.core.late")
    assert module.VALUE == 4 and isinstance(module.__spec__.loader, witness.Witnessed)
    assert site.problems() == {"other-file"}


def test_names_that_differ_in_case_or_type_are_no_modules(site: Site) -> None:
    """`A.py` and `a.pyi` stand beside `a.py` and are not what it imports."""
    site.write("megatron/core/A.py", b"VALUE = 5\n")
    site.write("megatron/core/a.pyi", b"VALUE: str\n")
    (module,) = site.load("megatron.core.a")
    assert module.VALUE == 1 and not site.problems()
    importlib.import_module("megatron.core.A")
    assert site.problems() == {"foreign-file"}


def test_bytecode_that_removes_itself_is_not_run(site: Site) -> None:
    cached = site.root / "megatron/core/__pycache__" / f"a.{sys.implementation.cache_tag}.pyc"
    site.write(A, FILES[A] + b"#" * 200)
    dist = next(site.root.glob("*.dist-info"))
    (dist / "RECORD").unlink()
    dist.rmdir()
    dist_info(site.root, "0.19.2")
    site.bytecode(A, f"VALUE = 7; import os; os.remove({str(cached)!r})".encode())
    (module,) = site.load("megatron.core.a")
    assert module.VALUE == 1 and cached.exists()


def test_bytecode_below_a_prefix_is_looked_at(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "prefix"))
    site.bytecode(A, b"VALUE = 7")
    (module,) = site.load("megatron.core.a")
    assert module.VALUE == 1 and site.problems() == {"stale-bytecode"}


def test_bytecode_is_compared_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second start of a rank compiles nothing, and takes no other bytecode for compared."""
    site.load()
    assert not site.problems()
    compared: list[bytes] = []
    same = pyc.same
    monkeypatch.setattr(pyc, "same", lambda data, code: compared.append(data) or same(data, code))
    for name in [n for n in sys.modules if n.startswith("megatron")]:
        del sys.modules[name]
    ledger = pyc.Ledger(witness._LEDGER._file.parent)
    monkeypatch.setattr(witness, "_LEDGER", ledger)
    site.load()
    assert not site.problems() and not compared
    for name in [n for n in sys.modules if n.startswith("megatron")]:
        del sys.modules[name]
    site.bytecode(A, b"VALUE = 7")
    site.load()
    assert site.problems() == {"stale-bytecode"} and compared


def test_a_ledger_that_others_can_write_says_nothing(site: Site) -> None:
    site.load()
    site.look()
    file = witness._LEDGER._file
    assert pyc.Ledger(file.parent)._known
    file.chmod(0o666)
    assert not pyc.Ledger(file.parent)._known


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


def test_ranks_are_compared_file_by_file(site: Site) -> None:
    """Pipeline stages import different files; what two of them share must be the same."""
    site.load()
    root, receipt = site.root, Receipt()
    mine = site.look()

    def gathered(files: dict[str, str]) -> Callable[[Any], list[Any]]:
        other = Judged(files=files)
        answers = iter([("rank 1", other.digest, None, 0), ("rank 1", other.files)])
        return lambda one: [one, next(answers)]

    provenance.check(root, receipt, "rank 0", gathered(mine.files))
    provenance.check(root, receipt, "rank 0", gathered({A: mine.files[A], "megatron/x.py": "1"}))
    with pytest.raises(CppmegaError) as caught:
        provenance.check(root, receipt, "rank 0", gathered({**mine.files, A: "other"}))
    assert caught.value.name == "imported-differs"
    assert A in caught.value.what and "rank 1" in caught.value.what


def test_what_one_rank_finds_stops_all(site: Site) -> None:
    site.load()
    problem = ("foreign-edit", "a.py differs.", "why", "next")
    with pytest.raises(CppmegaError) as caught:
        provenance.check(
            site.root, Receipt(), "rank 0", lambda one: [one, ("rank 1", "0", problem, 3)]
        )
    assert caught.value.name == "foreign-edit" and "rank 1: a.py differs." in caught.value.what
    assert "(2 more)" in caught.value.what
