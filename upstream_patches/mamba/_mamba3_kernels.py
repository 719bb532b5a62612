"""Shared by the pages on mamba-ssm's MIMO kernels of Mamba-3."""

from __future__ import annotations

from typing import Any

from cppmega.catalogue.megatron_args import variables
from cppmega.sizes import mixers as mixer_sizes

FOLDER = "mamba_ssm/ops/tilelang/mamba3"
DISTRIBUTION = "mamba-ssm"


def runs_mimo(args: Any) -> bool:
    """Whether a run trains Mamba-3 mixers whose rank is above 1, and not by cppmega's own scan."""
    sizes = mixer_sizes.mamba3(variables(args))
    return sizes is not None and sizes.rank > 1 and bool(sizes.scan_obstacle(args.hidden_size))


def loaded(*files: str) -> Any:
    """Import the modules of these kernels, without packages that require a GPU.

    Args:
        files: the modules, by the part of their names after `mamba3_mimo_`.

    Returns:
        The stand-in of tilelang, and a list of the modules.
    """
    import importlib
    import sys
    from pathlib import Path

    importlib.import_module("torch._dynamo")  # needed by the marks, with the real triton

    from cppmega.proof import stand_ins

    # The `__init__` files of these packages import compiled extensions, which need a GPU driver.
    # With the real TileLang, the import of a page's targets has loaded modules of them already.
    stand_ins.forget("mamba_ssm")
    tilelang = stand_ins.tilelang()
    for name in ("triton", "triton.testing", "einops"):
        stand_ins.module(name)
    root = next(path for path in map(Path, sys.path) if (path / FOLDER).is_dir())
    for package in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.tilelang", FOLDER):
        name = package.replace("/", ".")
        stand_ins.package(name, str(root / name.replace(".", "/")))
    for name in ("mamba3_mimo_utils", "grouped_head_reduction"):  # Triton kernels
        stand_ins.module(f"mamba_ssm.ops.triton.mamba3.{name}")
    names = (f"{FOLDER.replace('/', '.')}.mamba3_mimo_{file}" for file in files)
    return tilelang, [importlib.import_module(name) for name in names]
