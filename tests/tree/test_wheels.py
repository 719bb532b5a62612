"""Releases of other packages: what is downloaded, unpacked, and joined with a Megatron."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from cppmega.errors import CppmegaError
from cppmega.tree import resolve, wheels
from cppmega.tree.installed import Tree
from tests.support import made

TEXT = b"def double(x):\n    return x\n"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that holds the sources of one release; pip finds nothing."""
    monkeypatch.setenv("CPPMEGA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(wheels, "_CHOICES", ())
    made.write(tmp_path / "mamba_ssm-2.3.2", {"mamba_ssm/x.py": TEXT, "setup.py": b"raise"})
    (tmp_path / "cache" / "wheels").mkdir(parents=True)
    with tarfile.open(tmp_path / "cache" / "wheels" / "mamba_ssm-2.3.2.tar.gz", "w:gz") as packed:
        packed.add(tmp_path / "mamba_ssm-2.3.2", "mamba_ssm-2.3.2")
    return tmp_path / "cache"


def test_a_package_without_wheels_is_unpacked_from_its_sources(cache: Path) -> None:
    root = wheels.unpacked("2.3.2", print, "mamba-ssm")
    assert root.parent == cache / "trees"
    files = [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
    assert files == ["mamba_ssm/x.py"]
    tree = resolve.tree_of("mamba-ssm==2.3.2", cache / "scratch", print)
    assert (tree.root, tree.read("mamba_ssm/x.py")) == (root, TEXT)


def test_torn_sources_are_refused(cache: Path) -> None:
    (cache / "wheels" / "mamba_ssm-2.3.2.tar.gz").write_bytes(b"torn")
    with pytest.raises(CppmegaError) as caught:
        wheels.unpacked("2.3.2", print, "mamba-ssm")
    assert caught.value.name == "no-wheel" and not (cache / "trees" / "mamba_ssm-2.3.2").exists()


def test_a_release_that_pip_does_not_find_is_named(cache: Path) -> None:
    with pytest.raises(CppmegaError) as caught:
        resolve.tree_of("liger-kernel==9.9.9", cache / "scratch", print)
    assert caught.value.next == "pip index versions liger-kernel"


@pytest.mark.parametrize("name", ["numpy==2.0.0", "liger-kernel==", "liger-kernel==main"])
def test_what_is_no_release_is_refused(cache: Path, name: str) -> None:
    with pytest.raises(CppmegaError) as caught:
        resolve.tree_of(name, cache / "scratch", print)
    assert caught.value.name == "no-megatron"


def test_a_tree_without_megatron_gets_the_installed_one(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files stay where they are, and each package keeps the RECORD that vouches for it."""
    installed = made.tree(tmp_path / "installed", version="0.18.2")
    made.write(installed, {"liger_kernel/x.py": b"older"})
    made.dist_info(installed, "0.8.0", "liger_kernel")
    made.write(tmp_path / "wheel", {"liger_kernel/x.py": TEXT})
    made.dist_info(tmp_path / "wheel", "0.8.5", "liger_kernel")
    monkeypatch.setattr(resolve, "find_root", lambda: installed)
    tree = resolve.with_megatron(Tree(tmp_path / "wheel"), tmp_path / "joined")
    assert (tree.version, tree.version_of("liger-kernel")) == ("0.18.2", "0.8.5")
    assert tree.read("liger_kernel/x.py") == TEXT and tree.vouched("liger_kernel/x.py")
    assert tree.vouched("megatron/core/thing.py")
    whole = Tree(installed)
    assert resolve.with_megatron(whole, tmp_path / "not-made") is whole
