"""Let a micro-batch of padding alone have an auxiliary loss of zero instead of NaN.

What: `get_tokens_per_expert_and_token_count` returns at least one token, by whose square the
    auxiliary losses of MoE routers are divided.
Why: If a padding mask covers a whole micro-batch, as that of a filler that data-parallel ranks get
    so that all have as many steps, the losses are 0 / 0. Their gradient turns every weight below
    the router into NaN (tested on CPU, on 0.16.1 to 0.19.2, main and dev). The z-loss next to them
    is divided by at least one token.
Upstream: Not sent: found by reading; nobody has reported it.
Remove: when the number of tokens cannot be zero.
Numerics: changes results of micro-batches without a token that is not padding; on dev also of
    those with fewer tokens than sequences, whose number of tokens per sequence it rounds to zero
"""

from cppmega.edits import replacing
from cppmega.page import Edit, Patch, Source

from ._router_losses import balancing_losses

TARGET = "megatron/core/transformer/moe/moe_utils.py:get_tokens_per_expert_and_token_count"


PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=TARGET,
            pins={
                "0.16.1": "aeb8632e37511d65",
                "0.17.1": "aeb8632e37511d65",
                "0.18.2": "aeb8632e37511d65",
                "0.19.2": "aeb8632e37511d65",
                "main-d98e8a64": "aeb8632e37511d65",
            },
            edit=replacing(
                "global_tokens_per_expert.sum() / topk",
                "global_tokens_per_expert.sum().clamp(min=1) / topk",
            ),
        ),
        Edit(
            target=TARGET,
            pins={"dev-d48bd6be": "7dc4b0663091ee10"},
            edit=replacing(
                "global_tokens_per_expert.sum() // topk",
                "(global_tokens_per_expert.sum() // topk).clamp(min=1)",
            ),
        ),
    ),
    reached="forward",
    # Up to 0.15 the router receives no mask.
    feature=("megatron/core/transformer/moe/moe_layer.py:MoELayer.route",),
    when=lambda args: bool(balancing_losses(args)),
    after=("moe_per_token_loss_scale",),
)


def fixed_upstream(source: Source) -> bool:
    return "clamp" in source.text(TARGET)


def verify() -> None:
    import torch
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.router import TopKRouter

    from cppmega.proof import cpu_shims, small_models

    cpu_shims.init_distributed()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    logits = torch.randn(6, 2, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
    for loss in ("aux_loss", "seq_aux_loss", "global_aux_loss"):
        for per_token in (False, True):
            config = small_models.config(
                num_moe_experts=4,
                moe_router_topk=2,
                moe_router_load_balancing_type=loss,
                moe_aux_loss_coeff=0.25,
                calculate_per_token_loss=per_token,
                add_bias_linear=False,
            )
            router = TopKRouter(config, pg_collection=groups)
            router.set_layer_number(1)
            for padded in (6, 3):
                mask = (torch.arange(6) >= 6 - padded)[:, None].expand(6, 2)
                logits.grad = None
                with torch.compiler.set_stance("force_eager"):
                    probs, _ = router.routing(logits, padding_mask=mask)
                (0 * probs).sum().backward()
                found = logits.grad
                assert found.isfinite().all(), f"{loss}: the gradient is {found.flatten()[0]}"
                assert bool(found.any()) is (padded < 6), (loss, padded, found)
