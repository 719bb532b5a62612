"""Resolve the name of a tree: a version, a wheel, or a folder that holds `megatron/`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from cppmega.errors import CppmegaError
from cppmega.tree import links, wheels
from cppmega.tree.installed import PACKAGES, Tree, find_root

VERSION = re.compile(r"\d+(\.\d+)+[\w.+!-]*\Z")
_OTHERS = tuple(name for name in PACKAGES if name != "megatron-core")


def is_version(name: str) -> bool:
    """Whether a name is a version, not a path: `0.19.2` is, `trees/0.19.2` is not."""
    separators = [os.sep, os.altsep] if os.altsep else [os.sep]
    is_path = name.endswith(".whl") or any(separator in name for separator in separators)
    return not is_path and VERSION.match(name) is not None


def requirement(version: str, distribution: str) -> str:
    """The name of a release: `0.19.2` for Megatron, `liger-kernel==0.8.5` for another package."""
    return version if distribution == "megatron-core" else f"{distribution}=={version}"


def tree_of(name: str, scratch: Path, say: Callable[[str], None]) -> Tree:
    """Open the tree that a name refers to; it is never written to.

    Args:
        scratch: the folder in which a wheel file is unpacked.

    Raises:
        CppmegaError: `no-megatron`, `no-wheel`.
    """
    path = Path(name).expanduser()
    distribution, _, version = name.rpartition("==")
    if is_version(version) and (not distribution or distribution in PACKAGES):
        root = wheels.unpacked(version, say, distribution or "megatron-core")
    elif name.endswith(".whl"):
        root = scratch / path.stem
        if not root.is_dir():
            say(f"unpacking {path.name}")
            wheels.unpack(path, root)
    elif path.is_dir():
        root = path.parent if _is_the_package(path) else path
    else:
        raise CppmegaError(
            "no-megatron",
            f"{name} is neither a version, nor a .whl file, nor an existing folder.",
            "There is nothing to compare with.",
            "pass a version such as 0.19.2 or liger-kernel==0.8.5, a wheel, or the folder that "
            "holds megatron/",
        )
    tree = Tree(root)
    if not (root / "megatron" / "core").is_dir() and not any(map(tree.has, _OTHERS)):
        raise CppmegaError(
            "no-megatron",
            f"{name} does not contain megatron/core.",
            "There is nothing to compare with.",
            "pass a version such as 0.19.2, a wheel, or the folder that holds megatron/",
        )
    return tree


def with_megatron(tree: Tree, place: Path) -> Tree:
    """Add the installed Megatron to a tree that has none, for the proofs, which import it.

    Args:
        place: the folder to create, if one is needed.

    Raises:
        CppmegaError: `no-megatron`, `several-megatrons`.
    """
    if tree.has("megatron-core"):
        return tree
    links.join((tree.root, find_root()), place)
    return Tree(place)


def label_of(tree: Tree, distribution: str = "megatron-core") -> str:
    """The label under which texts of a tree are pinned: its version, or the folder of an export.

    An export declares the version that it will become, and would be mistaken for that release.
    """
    if distribution in tree.distributions:
        return tree.version_of(distribution)
    folder = re.sub(r"[^\w.+-]+", "-", tree.root.resolve().name)
    return folder or tree.version_of(distribution)


def _is_the_package(folder: Path) -> bool:
    """Whether the folder is `megatron` itself, so that its parent is meant."""
    return folder.name == "megatron" and not (folder / "megatron").is_dir()
