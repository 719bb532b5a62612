"""Code that no record vouches for is refused, and bytecode of another text is not run."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import sys
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cppmega.guard import expected, files
from cppmega.tree import pyc
from tests.guard.sites import FILES, A, B, Site


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


def _made_in_memory(site: Site) -> None:
    site.load()
    sys.modules["megatron.core.a"] = types.ModuleType("megatron.core.a")


def _no_module_at_all(site: Site) -> None:
    site.load()
    sys.modules["megatron.core.a"] = types.SimpleNamespace(VALUE=5)  # type: ignore[assignment]


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
        (_made_in_memory, "foreign-module"),
        (_no_module_at_all, "foreign-module"),
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
    """Whether it ran before the guard could see it, or after."""
    site.bytecode(A, b"VALUE = 7", mode)
    if late:
        files.only_from(site.root)
        importlib.import_module("megatron.core.a")
    (module,) = site.load("megatron.core.a")
    assert module.VALUE == 7, "the bytecode of this test is not taken"
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
    assert module.VALUE == 4
    assert site.problems() == {"other-file"}


def test_names_that_differ_in_case_or_type_are_no_modules(site: Site) -> None:
    """`A.py` and `a.pyi` stand beside `a.py` and are not what it imports."""
    site.write("megatron/core/A.py", b"VALUE = 5\n")
    site.write("megatron/core/a.pyi", b"VALUE: str\n")
    (module,) = site.load("megatron.core.a")
    assert module.VALUE == 1 and not site.problems()
    importlib.import_module("megatron.core.A")
    assert site.problems() == {"foreign-file"}


def test_bytecode_below_a_prefix_is_looked_at(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "prefix"))
    site.bytecode(A, b"VALUE = 7")
    (module,) = site.load("megatron.core.a")
    assert module.VALUE == 7 and site.problems() == {"stale-bytecode"}


def test_bytecode_is_compared_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second start of a rank compiles nothing, and takes no other bytecode for compared."""
    site.load()
    assert not site.problems()
    compared: list[bytes] = []
    same = pyc.same
    monkeypatch.setattr(pyc, "same", lambda data, code: compared.append(data) or same(data, code))
    for name in [n for n in sys.modules if n.startswith("megatron")]:
        del sys.modules[name]
    monkeypatch.setattr(expected, "_LEDGER", pyc.Ledger(expected._LEDGER._file.parent))
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
    file = expected._LEDGER._file
    assert pyc.Ledger(file.parent)._known
    file.chmod(0o666)
    assert not pyc.Ledger(file.parent)._known


def test_an_import_searches_for_no_garbage(site: Site) -> None:
    site.write(A, b"import gc\nVALUE = gc.isenabled()\n")
    site.write(B, b"from megatron.core import a\nraise ImportError\n")
    with pytest.raises(ImportError):
        site.load()
    assert gc.isenabled()
    assert site.load("megatron.core.a")[0].VALUE is False and gc.isenabled()
