"""The pass configs of Megatron's and mamba_ssm's TileLang kernels, and what the check lists."""

from __future__ import annotations

import json
import os
from pathlib import Path

from cppmega.overlay import verbs as overlay
from cppmega.preflight.ask import ask
from cppmega.preflight.messages import TilelangAnswer, TilelangKernel, TilelangOrder
from tests.support import copy, patched, pristine, python

VERSION = "0.19.2"
OPS = "megatron/core/transformer/experimental_attention_variant/ops"
KEY = "TL_ENABLE_AGGRESSIVE_SHARED_MEMORY_MERGE"

ASK = """
import importlib, json

from cppmega.proof import stand_ins

tilelang = stand_ins.tilelang()
# Stock's kernels get a package of their own next to the patched ones: their imports are relative.
stand_ins.package("stock", STOCK)
answers = []
for folder in ("stock", "megatron.core.transformer.experimental_attention_variant.ops"):
    tilelang.kernels.clear()
    for name in ("indexer_fwd", "indexer_bwd", "indexer_loss", "sparse_mla_fwd", "sparse_mla_bwd"):
        importlib.import_module(f"{folder}.tilelang_{name}")
    utils = importlib.import_module(f"{folder}.tilelang_utils")
    utils.tilelang_jit(out_idx=[0], pass_configs={KEY: False})(lambda: 0)
    utils.HAVE_TILELANG = False
    assert utils.tilelang_jit(print) is print and utils.tilelang_jit(out_idx=[0])(print) is print
    answers.append({kernel.name: kernel.options for kernel in tilelang.kernels})
print(json.dumps(answers))
"""


def test_every_kernel_of_megatron_is_built_with_it() -> None:
    code = f"STOCK, KEY = {str(pristine(VERSION) / OPS)!r}, {KEY!r}\n{ASK}"
    done = python(patched(VERSION, "smem_merge"), code)
    assert done.returncode == 0, done.stderr
    stock, ours = json.loads(done.stdout.splitlines()[-1])
    assert len(stock) == 10 and sum(_merges(given) for given in stock.values()) == 1
    for name, given in stock.items():
        configs = {**(given.get("pass_configs") or {}), KEY: True}
        assert ours[name] == {**given, "pass_configs": configs}, name


def _merges(given: dict[str, dict[str, bool]]) -> bool:
    return (given.get("pass_configs") or {}).get(KEY) is True


def listed(package: Path) -> list[TilelangKernel]:
    """The TileLang kernels of a package, as the check `shared_memory_flag` lists them."""
    order = TilelangOrder(root=str(package.parent), packages=[str(package)])
    worker = "cppmega.preflight.workers.tilelang_kernels"
    return ask(worker, order, TilelangAnswer, dict(os.environ)).kernels


def test_the_check_lists_stock_kernels() -> None:
    stock = listed(pristine(VERSION) / "megatron")
    assert [kernel.name for kernel in stock if not kernel.reason] == ["bwd"] and len(stock) == 9
    assert listed(pristine("0.18.2") / "megatron") == []


def test_the_check_accepts_patched_kernels() -> None:
    ours = listed(patched(VERSION, "smem_merge") / "megatron")
    assert len(ours) == 9 and not any(kernel.reason for kernel in ours)


def test_mamba_ssm(tmp_path: Path) -> None:
    """The check lists mamba_ssm's kernels, and accepts them once they are patched."""
    root = copy("mamba-ssm==2.3.2.post1", tmp_path / "site")
    before = listed(root / "mamba_ssm")
    assert len(before) == 6 and all(kernel.reason for kernel in before)
    session = overlay.Session(root)
    environment = {"CPPMEGA_SMEM_MERGE": "1"}
    assert overlay.apply(session, only=["smem_merge_mamba"], environment=environment).ok
    assert [kernel.reason for kernel in listed(root / "mamba_ssm")] == [""] * 6
