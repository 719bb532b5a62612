"""Every public op computes the same in any layout, reads nothing else, and takes empty tensors.

With memcheck, which reports every access outside of a tensor's own allocation, on a GPU:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \
        --target-processes all python -m pytest -q -m gpu tests/ops/test_layouts.py
"""

from __future__ import annotations

import ast

import pytest
import torch

pytest.importorskip("triton")

from cppmega.ops.pointwise.dsa_indexer_prologue import Rotary, prepare_index_inputs
from cppmega.ops.pointwise.grouped_linear import grouped_linear
from tests.ops.in_interpreter import run
from tests.ops.layout_rows import ROWS, check
from tests.ops.pointwise.test_grouped_linear import products
from tests.support import REPOSITORY

INTERNAL = ("autograd", "chunks", "external", "naive", "operands", "per_head", "scan", "triton")
"""Ends of the names of modules that only ops import."""
NO_OPS = {"linear_cross_entropy.counting_tokens", "m2rnn.document_bounds"}
"""Functions of tensors that no op exports, or that launch no kernel."""
RETURNED = ("Tensor", "IndexerOutput", "Inputs", "LinearCrossEntropyOutput", "Weights")


def test_every_public_op_has_a_row() -> None:
    ops = set()
    for path in (REPOSITORY / "cppmega" / "ops").glob("*/*.py"):
        module = path.parent.name if path.stem == "__init__" else path.stem
        internal = path.parent.name == "common" or path.stem.endswith(INTERNAL)
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and not internal:
                returned = ast.unparse(node.returns) if node.returns else ""
                first = [ast.unparse(x.annotation) for x in node.args.args[:1] if x.annotation]
                takes = bool(first) and first[0] in ("Tensor", "torch.Tensor", "Inputs", "Site")
                gives = any(kind in returned for kind in RETURNED)
                if takes and gives and not node.name.startswith("_"):
                    ops.add(f"{module}.{node.name}")
    rows = {op for row in ROWS.values() for op in row.ops}
    assert ops - NO_OPS == rows


def test_a_prologue_without_heads() -> None:
    k, weights, angles = torch.ones(2, 1, 4), torch.ones(2, 1, 0), torch.zeros(2, 1, 1, 4)
    q = torch.ones(2, 1, 0, 4)
    found = prepare_index_inputs(q, k, weights, Rotary(angles=angles), hadamard=False)
    assert found[0].shape == q.shape and found[1].equal(k)


def test_a_group_without_experts() -> None:
    with pytest.raises(ValueError, match="no weights"):
        grouped_linear(torch.ones(0, 4), [], [], products)


@pytest.mark.slow
@pytest.mark.parametrize("names", [tuple(ROWS)[at::4] for at in range(4)])
def test_layouts_in_the_interpreter(names: tuple[str, ...]) -> None:
    run(
        f"""
from tests.ops.layout_rows import as_on_a_gpu, check
as_on_a_gpu()
for name in {names}:
    check(name, "cpu")
""",
        warnings="ignore::RuntimeWarning",
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", ROWS)
def test_layouts_on_a_gpu(name: str) -> None:
    check(name, "cuda")
    torch.cuda.synchronize()
