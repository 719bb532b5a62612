"""The scores of TileLang's indexer are stock's, and each is stored by one thread."""

from __future__ import annotations

import itertools
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.support import patched, pristine, python
from tests.upstream_patches.one_process import Stock

NAME = "tilelang_indexer_parallel_store"
OPS = "megatron.core.transformer.experimental_attention_variant.ops"
VERSION = "0.19.2"


def test_scores_are_those_of_stock() -> None:
    # A process of its own: the stand-in for TileLang stays in it.
    code = f"""
    from pathlib import Path
    from tests.upstream_patches.dsa_indexer import test_{NAME} as test
    test.check(test.Stock(Path({str(pristine(VERSION))!r})))
    """
    done = python(patched(VERSION, NAME), code)
    assert done.returncode == 0, done.stderr


def check(stock: Stock) -> None:
    """Compare with stock's module, loaded beside the patched one."""
    import torch

    from cppmega.proof import stand_ins

    stand_ins.tilelang()
    stand_ins.forget(OPS)
    module = import_module(f"{OPS}.tilelang_indexer_fwd")
    theirs = stock.module(f"{OPS}.tilelang_indexer_fwd")
    shapes = itertools.product((1, 5), (1, 3, 8), (1, 2), (True, False))
    for rows, keys, block_q, relu in shapes:
        ours = _scores(module, rows, keys, block_q, relu)
        other = _scores(theirs, rows, keys, block_q, relu)
        assert torch.equal(ours.values.nan_to_num(7), other.values.nan_to_num(7))
        assert ours.stores.keys() == other.stores.keys()
        assert set(map(tuple, ours.stores.values())) <= {("parallel",)}
        assert set(map(tuple, other.stores.values())) <= {("all threads",)}


def _scores(module: Any, rows: int, keys: int, block_q: int, relu: bool) -> Any:
    from unittest import mock

    import torch

    from cppmega.proof.tilelang_blocks import Blocks

    torch.manual_seed(rows * keys)
    heads, width = 3, 4
    q, k, w = (torch.randn(n + 16, m) for n, m in ((rows * heads, width), (keys, width), (rows, 3)))
    starts, ends = torch.randint(-2, keys + 3, (2, rows))
    language = Blocks(seq_len=rows, seq_len_kv=keys)
    with mock.patch.object(module, "T", language):
        sizes = {"heads": heads, "index_dim": width, "block_N": 2, "block_Q": block_q}
        kernel = module.tl_indexer_fwd_impl(**sizes, use_relu=relu)
        logits = language.recorded(torch.full((rows, keys), float("nan")))
        language.run(kernel, q, k, logits, w, starts, ends)
    return logits


GENERATE = """
from importlib import import_module
from tilelang import tvm
from tilelang.engine.lower import lower

module = import_module(OPS + ".tilelang_indexer_fwd")
target = "cuda -arch=sm_90a"
for heads, width in ((32, 64), (64, 128)):
    function = module.tl_indexer_fwd_impl.get_tir(heads=heads, index_dim=width)
    with tvm.transform.PassContext(opt_level=3), tvm.target.Target(target):
        print(lower(function, target=target, enable_device_compile=False).kernel_source)
"""


def test_the_generated_code_stores_each_score_once() -> None:
    """TileLang generates CUDA code without a GPU, and without compiling it."""
    pytest.importorskip("tilelang")
    trees: tuple[Path, Path] = patched(VERSION, NAME), pristine(VERSION)
    ours, theirs = (python(tree, f"OPS = {OPS!r}\n{GENERATE}") for tree in trees)
    assert ours.returncode == theirs.returncode == 0, ours.stderr + theirs.stderr
    assert "Data race" not in ours.stdout + ours.stderr
    stores = [re.findall(r"Logits\[(.*)\] = ", run.stdout) for run in (ours, theirs)]
    assert stores[0] and all("threadIdx.x" in index for index in stores[0])
    assert stores[1] and not any("threadIdx.x" in index for index in stores[1])
