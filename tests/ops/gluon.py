"""Kernels in Gluon, which need more of it than Triton has before 3.6; 3.3 has none."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import triton

PRESENT = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6)
needed = pytest.mark.skipif(not PRESENT, reason="kernels in Gluon need Triton 3.6 or later")


def launching() -> list[ModuleType]:
    """The modules that launch kernels in Gluon; none where Triton does not know these."""
    return [importlib.import_module("cppmega.ops.mamba3.scan_hopper")] if PRESENT else []
