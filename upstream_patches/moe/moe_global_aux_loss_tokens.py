"""Weigh every token of a step alike in the global auxiliary loss of MoE routers.

What: `TopKRouter._apply_global_aux_loss` divides the experts' counts of the step so far by the
    tokens that they count.
Why: The router averages these counts over the micro-batches, but divides the mean by the current
    micro-batch's number of tokens. If padding is masked or lengths vary, the fractions of the
    experts do not add up to 1: after a micro-batch with 6 tokens, one with 2 has twice the loss
    that it should have, and one with 18 two thirds of it (tested on CPU, on 0.16.1 to 0.19.2).
Upstream: https://github.com/NVIDIA/Megatron-LM/pull/7214 (open), for
    https://github.com/NVIDIA/Megatron-LM/issues/7213 (open)
Remove: when the counts are divided by the tokens that they count.
Numerics: changes results of runs with a global auxiliary loss whose micro-batches differ in their
    number of tokens; otherwise none, as long as fp32 holds a step's counts exactly (2^24)
"""

from cppmega.edits import replacing
from cppmega.page import Edit, Patch, Source

from ._router_losses import balancing_losses

TARGET = "megatron/core/transformer/moe/router.py:TopKRouter._apply_global_aux_loss"
STOCK = "averated_tokens_per_expert = self.global_tokens_per_expert / self.ga_steps"


PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=TARGET,
            pins={
                "0.16.1": "bbd2311be3c24001",
                "0.17.1": "bbd2311be3c24001",
                "0.18.2": "aef0eaca0934735a",
                "0.19.2": "aef0eaca0934735a",
                "main-d98e8a64": "aef0eaca0934735a",
                "dev-d48bd6be": "098dc6fca076544e",
            },
            edit=replacing(
                STOCK,
                """
                # The micro-batches that would have these counts if all were like the current one.
                counts = self.global_tokens_per_expert.sum(dtype=torch.float32).clamp(min=1)
                steps = counts / (total_num_tokens * self.topk)
                averated_tokens_per_expert = self.global_tokens_per_expert / steps
                """,
            ),
        ),
    ),
    reached="forward",
    # Up to 0.15 the router receives no mask.
    feature=("megatron/core/transformer/moe/moe_layer.py:MoELayer.route",),
    when=lambda args: "global_aux_loss" in balancing_losses(args),
)


def fixed_upstream(source: Source) -> bool:
    text = source.text(TARGET)
    return bool(text) and "self.global_tokens_per_expert / self.ga_steps" not in text


def verify() -> None:
    import torch
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.router import TopKRouter

    from cppmega.proof import cpu_shims, small_models

    cpu_shims.init_distributed()
    config = small_models.config(
        num_moe_experts=4,
        moe_router_topk=2,
        moe_router_load_balancing_type="global_aux_loss",
        moe_aux_loss_coeff=0.25,
        add_bias_linear=False,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    router = TopKRouter(config, pg_collection=groups)
    losses = []
    router.attach_and_log_load_balancing_loss = lambda probs, _, loss, *a, **k: losses.append(loss)
    generator = torch.Generator().manual_seed(3)
    seen = torch.zeros(4, dtype=torch.float64)
    for tokens, length in ((6, 8), (2, 8), (18, 20), (5, 5)):
        masked = tokens < length
        scores = torch.rand(length, 4, generator=generator)
        routing_map = torch.zeros(length, 4, dtype=torch.bool)
        routing_map.scatter_(1, scores.topk(2)[1], True)
        scores[tokens:], routing_map[tokens:] = 0, False
        router._apply_global_aux_loss(None, scores, routing_map, with_padding_mask=masked)
        seen += routing_map.sum(0)
        fractions, probabilities = seen / seen.sum(), scores.double().sum(0) / tokens
        wanted = 4 * 0.25 * (fractions * probabilities).sum()
        found = losses[-1].double()
        assert torch.allclose(found, wanted, rtol=1e-5), f"{tokens} tokens: {found}, not {wanted}"
