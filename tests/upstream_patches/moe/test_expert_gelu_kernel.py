"""Which runs have experts whose activation the kernel computes.

`tests/ops/pointwise/test_weighted_gelu.py` compares the kernel with its reference.
"""

from __future__ import annotations

from typing import Any

import pytest

from cppmega.proof.stand_ins import Arguments
from tests.support import laws


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ({}, True),
        ({"num_experts": None}, False),
        ({"moe_grouped_gemm": False}, False),
        ({"moe_router_dtype": None}, False),
        ({"swiglu": True}, False),
        ({"squared_relu": True}, False),
        ({"add_bias_linear": True}, False),
    ],
)
def test_runs_that_pass_through_it(changed: dict[str, Any], wanted: bool) -> None:
    when = laws.pages()["expert_gelu_kernel"].patch.when
    assert when is not None
    args = {"num_experts": 8, "moe_grouped_gemm": True, "moe_router_dtype": "fp32"}
    assert when(Arguments(**(args | {"add_bias_linear": False} | changed))) is wanted
