"""A per-token auxiliary loss on two ranks that mask different numbers of tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import VERSIONS, patched, python
from tests.support.laws import pages

PAGE = "moe_per_token_loss_scale"

CODE = """
import torch
from cppmega.proof import cpu_shims, small_models

cpu_shims.init_distributed(tensor=2)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router import TopKRouter

config = small_models.config(
    num_moe_experts=4,
    moe_router_topk=2,
    moe_router_load_balancing_type="aux_loss",
    moe_aux_loss_coeff=0.25,
    calculate_per_token_loss=True,
    add_bias_linear=False,
)
router = TopKRouter(config, pg_collection=ProcessGroupCollection.use_mpu_process_groups())
router.set_layer_number(1)
rank, valid = torch.distributed.get_rank(), (3, 5)
every = torch.randn(2, 6, 1, 4, generator=torch.Generator().manual_seed(1))
padding = torch.arange(6) >= torch.tensor(valid)[:, None]
logits = every[rank].clone().requires_grad_()
with torch.compiler.set_stance("force_eager"):
    probs, _ = router.routing(logits, padding_mask=padding[rank][:, None])
(0 * probs).sum().backward()

whole = every.double().requires_grad_()
tokens = whole[~padding].view(-1, 4)
chosen = torch.zeros(8, 4).scatter(1, tokens.topk(2)[1], 1)
loss = 4 * 0.25 * (chosen.sum(0) / 16 * tokens.softmax(-1).sum(0) / 8).sum()
(wanted,) = torch.autograd.grad(loss, whole)
assert torch.allclose(logits.grad.double(), 2 * valid[rank] * wanted[rank], rtol=1e-4, atol=1e-7)
"""


@pytest.mark.megatron
def test_on_two_ranks() -> None:
    done = python(patched(VERSIONS[-1], PAGE), CODE, nproc=2)
    assert done.returncode == 0, done.stderr


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
