"""Scale the per-token losses of MoE routers by the tokens of their group, with or without padding.

What: `TopKRouter` multiplies its auxiliary losses and the z-loss, under
    `--calculate-per-token-loss`, by the rank's tokens that are not padding, times the number of
    tensor- and context-parallel ranks.
Why: The gradients are divided by the tokens of complete sequences. Up to 0.18 the routers multiply
    by the rank's own tokens only: with TP 2 and sequence parallelism, or CP 2, their losses have
    half of the weight that they have on one rank. With a padding mask, the reduction of the counts
    overwrites them in place, so that the rank's own tokens are the group's: from 0.19 on, the
    auxiliary losses of two ranks have twice their weight (tested on two gloo ranks), and a global
    one is too large by data parallelism as well.
Upstream: https://github.com/NVIDIA/Megatron-LM/pull/5047 (in 0.19.0),
    https://github.com/NVIDIA/Megatron-LM/pull/7481 (open), for
    https://github.com/NVIDIA/Megatron-LM/issues/7452 (open)
Remove: when the local tokens are counted before the reduction, or it has a copy of the counts.
Numerics: changes results of runs with `--calculate-per-token-loss` and these losses: up to 0.18 of
    those with tensor or context parallelism, later of those with a padding mask
"""

from cppmega.edits import in_order, inserting, replacing
from cppmega.page import Edit, Patch, Source, left_alone

from ._router_losses import balancing_losses

ROUTER = "megatron/core/transformer/moe/router.py:TopKRouter"
COUNT = "megatron/core/transformer/moe/moe_utils.py:get_tokens_per_expert_and_token_count"


def counting_first(division: str):  # type: ignore[no-untyped-def]
    """Move the division above the reduction."""
    counted = f"local_num_tokens = local_tokens_per_expert.sum() {division} topk"
    return in_order(
        replacing(counted, ""),
        inserting(
            f"""
            if with_padding_mask:
                # The reduction overwrites these counts.
                {counted}
            """,
            after="local_tokens_per_expert = routing_map.sum(dim=0)",
        ),
    )


def of_the_group(loss: str, tokens: str = "num_tokens"):  # type: ignore[no-untyped-def]
    """Multiply a loss by the ranks of the group, as 0.19 does."""
    return replacing(f"{loss} * {tokens}", f"{loss} * {tokens} * self.tp_cp_group.size()")


PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=COUNT,
            pins={
                "0.16.1": "aeb8632e37511d65",
                "0.17.1": "aeb8632e37511d65",
                "0.18.2": "aeb8632e37511d65",
                "0.19.2": "aeb8632e37511d65",
                "main-d98e8a64": "aeb8632e37511d65",
            },
            edit=counting_first("/"),
        ),
        Edit(
            target=COUNT,
            pins={"dev-d48bd6be": "7dc4b0663091ee10"},
            edit=counting_first("//"),
        ),
        Edit(
            target=f"{ROUTER}.attach_and_log_load_balancing_loss",
            pins={
                "0.16.1": "aae7710d6acdd993",
                "0.17.1": "5bea66d0d834700c",
                "0.18.2": "ddf3669e06fae20c",
            },
            edit=of_the_group("aux_loss"),
        ),
        Edit(
            target=f"{ROUTER}.apply_z_loss",
            pins={
                "0.16.1": "8f514e0222954061",
                "0.17.1": "efc8ed69183695dc",
                "0.18.2": "753492ed235bf654",
            },
            edit=of_the_group("z_loss"),
        ),
        Edit(
            target=f"{ROUTER}.attach_and_log_load_balancing_loss",
            pins={"0.15.3": "f0bf65db995b8685"},
            edit=of_the_group("aux_loss", "activation.shape[0]"),
        ),
        Edit(
            target=f"{ROUTER}.apply_z_loss",
            pins={"0.15.3": "72ab0df892adc1da"},
            edit=of_the_group("z_loss", "logits.shape[0]"),
        ),
        Edit(  # it has the factor, or the number of the group's tokens
            target=f"{ROUTER}.attach_and_log_load_balancing_loss",
            pins={
                "0.19.2": "24c5e30a12b4560c",
                "main-d98e8a64": "24c5e30a12b4560c",
                "dev-d48bd6be": "27459d5b8f7a1b5d",
            },
            edit=left_alone,
        ),
        Edit(
            target=f"{ROUTER}.apply_z_loss",
            pins={
                "0.19.2": "722cfeb44926994a",
                "main-d98e8a64": "722cfeb44926994a",
                "dev-d48bd6be": "fc87cc87aaffeb51",
            },
            edit=left_alone,
        ),
    ),
    reached="forward",
    when=lambda args: (
        bool(getattr(args, "calculate_per_token_loss", False)) and bool(balancing_losses(args))
    ),
)


def fixed_upstream(source: Source) -> bool:
    text = source.text(COUNT)
    return "clone()" in text or 0 <= text.find("local_num_tokens =") < text.find("reduce_from")


def verify() -> None:
    import inspect

    import torch
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.router import TopKRouter

    from cppmega.proof import ranks, small_models

    of_both = torch.randn(2, 6, 1, 4, generator=torch.Generator().manual_seed(1))
    masks = "padding_mask" in inspect.signature(TopKRouter.routing).parameters
    cases = [
        (loss, *tokens)
        for loss in ("aux_loss", "global_aux_loss")
        for tokens in ((6, False), (3, True))[: 1 + masks]
    ]

    def gradient(rank, loss, valid, masked):  # type: ignore[no-untyped-def]
        """Return that of a rank's logits, of which so many are not padding."""
        config = small_models.config(
            num_moe_experts=4,
            moe_router_topk=2,
            moe_router_load_balancing_type=loss,
            moe_aux_loss_coeff=0.25,
            moe_z_loss_coeff=0.125,
            calculate_per_token_loss=True,
            add_bias_linear=False,
        )
        groups = ProcessGroupCollection.use_mpu_process_groups()
        router = TopKRouter(config, pg_collection=groups)
        router.set_layer_number(1)
        logits = of_both[rank].clone().requires_grad_()
        mask = {"padding_mask": torch.arange(6)[:, None] >= valid} if masked else {}
        with torch.compiler.set_stance("force_eager"):
            probs, _ = router.routing(logits, **mask)
        (0 * probs).sum().backward()
        return logits.grad[:valid, 0].double()

    answers = ranks.on_two(lambda rank: [gradient(rank, *case) for case in cases])
    for number, (loss, valid, masked) in enumerate(cases):
        whole = of_both[:, :valid, 0].double().requires_grad_()
        chosen = torch.zeros(2, valid, 4).scatter(2, whole.topk(2)[1], 1)
        fractions = chosen.mean((0, 1)) / 2
        balance = 4 * 0.25 * (fractions * whole.softmax(-1).mean((0, 1))).sum()
        z_loss = 0.125 * whole.logsumexp(-1).square().mean()
        (wanted,) = torch.autograd.grad(2 * valid * (balance + z_loss), whole)
        found = torch.stack([of_rank[number] for of_rank in answers])
        assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-6), (loss, masked, found)
