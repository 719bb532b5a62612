"""Count the tokens of each expert exactly for the MoE expert bias and the global auxiliary loss.

What: `TopKRouter` counts the tokens of each expert, and the micro-batches of the global auxiliary
    loss, in int64, which a conversion of the model to bf16 or fp16 leaves alone.
Why: The counts are buffers in fp32, and `Float16Module` converts them with the rest of the model.
    bf16 has 8 significant bits: of 26,260 tokens in 40 micro-batches it counted 25,984, and 25,728
    of 26,000 (0.19.2, on CPU). Experts whose loads differ by 1 % get no update or one of the wrong
    sign, and the sum over ranks depends on its order. fp16 overflows above 65,504 tokens. The bias
    itself is kept in fp32. The loss averages its counts over the micro-batches, whose number stays
    at 256 in bf16: if each expert gets 6,525 tokens per micro-batch, the loss of this balanced load
    is 0.96 after 64 of them and 1.26 after 300 (computed on CPU), instead of 1.
Upstream: https://github.com/NVIDIA/Megatron-LM/pull/7081 (main, September 2026; not released)
    counts for the bias exactly, not for the loss.
Remove: when none of these counts is a floating-point buffer.
Numerics: changes results of bf16 and fp16 runs with an expert bias, whose updates follow exact
    counts and have the exact rate, or with a global auxiliary loss. Checkpoints do not contain the
    counts, and load in both directions.
"""

from typing import Any

from cppmega.catalogue.megatron_args import has_experts
from cppmega.edits import in_order, replacing
from cppmega.page import Edit, Patch, Source

from ._router_losses import balancing_losses

TARGET = "megatron/core/transformer/moe/router.py:TopKRouter.__init__"
UPDATE = "megatron/core/transformer/moe/moe_utils.py:get_updated_expert_bias"
COUNTS = ("local_tokens_per_expert", "global_tokens_per_expert")
COUNTED = """
self.register_buffer(
    '{}',
    torch.zeros(
        self.config.num_moe_experts,
        dtype=torch.{},
        device=torch.cuda.current_device(),
    ),
    persistent=False,
)
"""
STEPS = "torch.tensor(0, dtype=torch.{}, device=torch.cuda.current_device())"


def counts(args: Any) -> bool:
    """Whether the routers of a run count tokens in a buffer that stock would round."""
    return (
        has_experts(args)
        and bool(getattr(args, "bf16", False) or getattr(args, "fp16", False))
        and (
            bool(getattr(args, "moe_router_enable_expert_bias", False))
            or "global_aux_loss" in balancing_losses(args)
        )
    )


PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=TARGET,
            pins={
                "0.15.3": "b81d555e0d163e1f",
                "0.16.1": "c6152f62fa686cb6",
                "0.17.1": "ebbcf2e45d3479ac",
                "0.18.2": "ebbcf2e45d3479ac",
                "0.19.2": "b701f693d7cdc616",
                "main-d98e8a64": "b701f693d7cdc616",
                "dev-d48bd6be": "8c480b0a1681ab13",
            },
            edit=in_order(
                *(
                    replacing(COUNTED.format(name, "float32"), COUNTED.format(name, "int64"))
                    for name in COUNTS
                ),
                replacing(STEPS.format("float32"), STEPS.format("int64")),
            ),
        ),
    ),
    reached="startup",
    feature=(UPDATE,),
    when=counts,
    wanted_by=lambda recipe: recipe.moe_router_enable_expert_bias and recipe.precision != "fp32",
)


def fixed_upstream(source: Source) -> bool:
    text = source.text(TARGET)
    registered = [
        text.partition(f"'{name}'")[2].partition(")")[0] for name in (*COUNTS, "ga_steps")
    ]
    return all("dtype=" in r and "dtype=torch.float" not in r for r in registered)


def verify() -> None:
    import torch
    from megatron.core.distributed.finalize_model_grads import (
        _update_router_expert_bias,
        reset_model_temporary_tensors,
    )
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.moe.router import TopKRouter

    from cppmega.proof import cpu_shims, small_models

    cpu_shims.init_distributed()
    experts = torch.arange(4)
    loads = torch.tensor([6_501, 6_520, 6_530, 6_549])  # in bf16 and in fp16 they are closer
    logits = 8.0 * (experts.repeat_interleave(loads)[:, None, None] == experts)
    for precision in ("bf16", "fp16"):
        config = small_models.config(
            num_moe_experts=4,
            moe_router_topk=1,
            moe_router_score_function="sigmoid",
            moe_router_enable_expert_bias=True,
            moe_router_load_balancing_type="global_aux_loss",
            moe_aux_loss_coeff=1e-2,
            moe_router_bias_update_rate=1e-3,
            add_bias_linear=False,
            **{precision: True},
        )
        groups = ProcessGroupCollection.use_mpu_process_groups()
        router = TopKRouter(config, pg_collection=groups)
        model = [Float16Module(config, router)]
        with torch.compiler.set_stance("force_eager"):
            router.eval()
            with torch.no_grad():
                router.routing(logits)
            router.train()
            for _ in range(11):
                router.routing(logits)
        counted = router.local_tokens_per_expert
        for found in (counted, router.global_tokens_per_expert):
            assert found.tolist() == (11 * loads).tolist(), f"{found} of {11 * loads}"
        router.ga_steps += 4095
        router.ga_steps += 1
        assert router.ga_steps == 4107, f"{router.ga_steps} of 4107 micro-batches"
        # This makes the bias fp32 again, too, as `forward` does.
        assert set(router.state_dict()) == {"weight", "expert_bias"}
        _update_router_expert_bias(model, config)
        wanted = torch.tensor([1e-3, 1e-3, -1e-3, -1e-3])
        assert router.expert_bias.equal(wanted), f"an update of {router.expert_bias}"
        reset_model_temporary_tensors(config, model)
        assert not counted.any(), "the counts of a step are added to those of the last one"
