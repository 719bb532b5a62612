"""The pass configs of Megatron's TileLang kernels."""

from __future__ import annotations

import json

from tests.support import patched, pristine, python

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
