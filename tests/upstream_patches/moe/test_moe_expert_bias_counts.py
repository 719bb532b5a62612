"""The counts that update an expert bias are exact, in bf16 and fp16, and across checkpoints."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.laws import pages
from tests.upstream_patches import one_process

torch = pytest.importorskip("torch")

PAGE = "moe_expert_bias_counts"
STEPS = [torch.tensor([608 + i, 640, 650, 676 - i]) for i in range(40)]


@pytest.mark.megatron
@pytest.mark.parametrize("version", one_process.PAGES[PAGE])
def test_router(version: str) -> None:
    one_process.assert_passes(PAGE, version)


@pytest.mark.parametrize(
    ("reached", "arguments"),
    [
        (True, {"bf16": True}),
        (True, {"fp16": True}),
        (False, {}),
        (False, {"bf16": True, "num_experts": None}),
        (False, {"bf16": True, "moe_router_enable_expert_bias": False}),
        *(
            (True, {"bf16": True, "moe_router_enable_expert_bias": False} | loss)
            for loss in (
                {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.1},
                {
                    "moe_router_load_balancing_type": ["seq_aux_loss", "global_aux_loss"],
                    "moe_aux_loss_coeff": [0.0, 0.1],
                },
            )
        ),
    ],
)
def test_runs_that_must_reach_it(reached: bool, arguments: dict[str, Any]) -> None:
    given = {"num_experts": 4, "moe_router_enable_expert_bias": True} | arguments
    when = pages()[PAGE].patch.when
    assert when is not None and when(SimpleNamespace(**given)) is reached


def check(stock: one_process.Stock) -> None:
    from megatron.core.transformer.moe import router as patched

    from cppmega.proof import cpu_shims

    cpu_shims.init_distributed()
    unpatched = stock.module("megatron.core.transformer.moe.router")
    exact = torch.stack(STEPS).sum(0).tolist()
    for precision in ("bf16", "fp16"):
        assert counted(patched, precision).tolist() == exact
        assert counted(unpatched, precision).tolist() != exact

    # Checkpoints do not have the counts, and are the same with the page and without.
    for saver, loader in ((patched, unpatched), (unpatched, patched), (patched, patched)):
        saved = build(saver, "bf16").module.state_dict()
        assert saved.keys() == build(unpatched, "bf16").module.state_dict().keys()
        saved["expert_bias"] = torch.tensor([0.5, -0.25, 0.0, 1.0], dtype=torch.bfloat16)
        model = build(loader, "bf16")
        model.module.load_state_dict(saved)
        assert model.module.expert_bias.dtype == torch.float32
        assert model.module.expert_bias.equal(saved["expert_bias"].float())
        exactly = loader is patched
        assert (model.module.local_tokens_per_expert.dtype == torch.int64) is exactly


def counted(module: Any, precision: str) -> Any:
    """Route micro-batches with known loads, in a model that is converted once more meanwhile."""
    model = build(module, precision)
    experts = torch.arange(4)
    with torch.compiler.set_stance("force_eager"):
        for loads in STEPS:
            logits = 8.0 * (experts.repeat_interleave(loads)[:, None, None] == experts)
            model.module.routing(logits)
            model.to(getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[precision]))
    return model.module.local_tokens_per_expert


def build(module: Any, precision: str) -> Any:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.module import Float16Module

    from cppmega.proof import small_models

    config = small_models.config(
        num_moe_experts=4,
        moe_router_topk=1,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_load_balancing_type="none",
        add_bias_linear=False,
        **{precision: True},
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return Float16Module(config, module.TopKRouter(config, pg_collection=groups))
