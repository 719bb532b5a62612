"""The next commands of errors, with the options that choose the tree and the catalogues."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from pathlib import Path

_COMMAND = re.compile(
    r"(python -m cppmega\.apply_patches|cppmega "
    r"(?:(apply|status|diff|verify|revert|advise|preflight|doctor)|list|explain|drift|pin))\b"
)
"""Commands that take `--patches`; those of the group, and the first one, take `--megatron` too."""


def carrying(text: str, root: Path | None, catalogues: Iterable[Path] = ()) -> str:
    """Add a tree and catalogues to the commands in a text, which would see others."""
    patches = "".join(f" --patches {shlex.quote(str(folder))}" for folder in catalogues)
    patches *= " --patches" not in text
    tree = f" --megatron {shlex.quote(str(root))}" if root is not None else ""
    tree *= " --megatron" not in text

    def carried(command: re.Match[str]) -> str:
        of_a_tree = command[2] or command[1].startswith("python")
        return command[1] + patches + (tree if of_a_tree else "")

    return _COMMAND.sub(carried, text)
