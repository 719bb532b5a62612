"""Runs whose routers compute an auxiliary loss must reach the pages about it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.laws import pages

PAGE = "moe_per_token_loss_scale"


@pytest.mark.parametrize(
    ("reached", "other"),
    [
        (True, {}),
        (
            True,
            {
                "moe_router_load_balancing_type": ["seq_aux_loss", "global_aux_loss"],
                "moe_aux_loss_coeff": [0.0, 0.1],
            },
        ),
        (False, {"moe_aux_loss_coeff": 0.0}),
        (False, {"calculate_per_token_loss": False}),
        (False, {"num_experts": None}),
        (False, {"moe_router_load_balancing_type": "none"}),
    ],
)
def test_runs_that_must_reach_it(reached: bool, other: dict[str, Any]) -> None:
    run = {
        "num_experts": 4,
        "calculate_per_token_loss": True,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.1,
    }
    when = pages()[PAGE].patch.when
    assert when is not None and when(SimpleNamespace(**(run | other))) is reached


@pytest.mark.parametrize(
    ("name", "loss", "per_token", "reached"),
    [
        ("moe_seq_aux_loss_scale", "seq_aux_loss", True, True),
        ("moe_seq_aux_loss_scale", "seq_aux_loss", False, False),
        ("moe_seq_aux_loss_scale", "aux_loss", True, False),
        ("moe_aux_loss_of_padding", "aux_loss", False, True),
        ("moe_aux_loss_of_padding", "none", True, False),
    ],
)
def test_runs_that_must_reach_the_others(
    name: str, loss: str, per_token: bool, reached: bool
) -> None:
    run = SimpleNamespace(
        num_experts=4,
        calculate_per_token_loss=per_token,
        moe_router_load_balancing_type=loss,
        moe_aux_loss_coeff=0.1,
    )
    when = pages()[name].patch.when
    assert when is not None and when(run) is reached
