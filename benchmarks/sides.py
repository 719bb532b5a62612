"""The trees that a benchmark compares: copies of one pristine megatron, which is never changed."""

from __future__ import annotations

import shutil
from pathlib import Path


def copy(site: Path, root: Path) -> None:
    """Copy `megatron/` and its dist-info, as pip or an unpacked wheel leave them, into ROOT."""
    shutil.copytree(site / "megatron", root / "megatron")
    for info in site.glob("megatron_core-*.dist-info"):
        shutil.copytree(info, root / info.name)
