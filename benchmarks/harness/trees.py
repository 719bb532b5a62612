"""The trees that a benchmark compares: copies of one pristine megatron, which is never changed."""

from __future__ import annotations

import shutil
from pathlib import Path

from cppmega.tree import links

BESIDE = "transformer_engine"


def copy(site: Path, root: Path) -> None:
    """Copy `megatron/` and its dist-info, as pip or an unpacked wheel leave them, into ROOT.

    Transformer Engine is linked, if SITE has it, so that its pages are applied as well.
    """
    shutil.copytree(site / "megatron", root / "megatron")
    for info in site.glob("megatron_core-*.dist-info"):
        shutil.copytree(info, root / info.name)
    for folder in (*site.glob(BESIDE), *site.glob(f"{BESIDE}*.dist-info")):
        links.link(folder, root / folder.name)
