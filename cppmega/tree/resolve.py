"""A Megatron as people name it: a version, a wheel, or a folder that holds `megatron/`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from cppmega.errors import CppmegaError
from cppmega.tree import wheels
from cppmega.tree.installed import Tree

VERSION = re.compile(r"\d+(\.\d+)+[\w.+!-]*\Z")


def is_version(given: str) -> bool:
    """Whether a name is a version, not a path: `0.19.2` is, `trees/0.19.2` is not."""
    separators = [os.sep, os.altsep] if os.altsep else [os.sep]
    is_path = given.endswith(".whl") or any(separator in given for separator in separators)
    return not is_path and VERSION.match(given) is not None


def tree_of(given: str, scratch: Path, say: Callable[[str], None]) -> Tree:
    """The tree that a name stands for; nothing below it is ever written.

    Args:
        scratch: where a wheel given as a file is unpacked.

    Raises:
        CppmegaError: `no-such-megatron`, `no-megatron`, `no-wheel`.
    """
    path = Path(given).expanduser()
    if is_version(given):
        root = wheels.unpacked(given, say)
    elif given.endswith(".whl"):
        root = scratch / path.stem
        if not root.is_dir():
            say(f"unpacking {path.name}")
            wheels.unpack(path, root)
    elif path.is_dir():
        root = path.parent if _is_the_package(path) else path
    else:
        raise CppmegaError(
            "no-such-megatron",
            f"{given} is neither a version, nor a .whl file, nor an existing folder.",
            "There is nothing to compare with.",
            "pass a version such as 0.19.2, a wheel, or the folder that holds megatron/",
        )
    if not (root / "megatron" / "core").is_dir():
        raise CppmegaError(
            "no-megatron",
            f"{given} holds no megatron/core.",
            "There is nothing to compare with.",
            "pass a version such as 0.19.2, a wheel, or the folder that holds megatron/",
        )
    return Tree(root)


def label_of(tree: Tree) -> str:
    """The label under which texts of a tree are pinned: its version, or the folder of an export.

    An export says the version that it is going to be, and would be taken for that release.
    """
    if "megatron-core" in tree.distributions:
        return tree.version
    return re.sub(r"[^\w.+-]+", "-", tree.root.resolve().name) or tree.version


def _is_the_package(folder: Path) -> bool:
    """Whether the folder is `megatron` itself: its parent is meant."""
    return folder.name == "megatron" and not (folder / "megatron").is_dir()
