"""Give the sequence-level auxiliary loss of MoE routers its weight at any micro-batch size.

What: `TopKRouter._apply_seq_aux_loss` multiplies its loss, under `--calculate-per-token-loss`, by
    the tokens of all sequences of the micro-batch.
Why: The loss is a mean over the sequences, and the gradients are divided by the tokens of the
    step, but the router multiplies by the tokens of one sequence. With a micro-batch size of 2 the
    loss has half of the weight that it has with 1 (tested on CPU, on 0.16.1 to 0.18.2 and dev).
Upstream: https://github.com/NVIDIA/Megatron-LM/pull/5798 (in 0.19.0)
Remove: when dev counts the tokens of the micro-batch, too, and 0.18 is no longer supported.
Numerics: changes results of runs with `--calculate-per-token-loss`, this loss and a micro-batch
    size above 1
"""

from cppmega.edits import replacing
from cppmega.page import Edit, Patch, Source

from ._router_losses import balancing_losses

TARGET = "megatron/core/transformer/moe/router.py:TopKRouter._apply_seq_aux_loss"
_OF_ONE_SEQUENCE = (
    "valid_token_count=local_num_tokens",
    "aux_loss_scale_num_tokens=total_num_tokens",
)


PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=TARGET,
            pins={
                "0.16.1": "cb095cb9f32d80f7",
                "0.17.1": "cb095cb9f32d80f7",
                "0.18.2": "cb095cb9f32d80f7",
            },
            edit=replacing(_OF_ONE_SEQUENCE[0], f"{_OF_ONE_SEQUENCE[0]} * bsz"),
        ),
        Edit(
            target=TARGET,
            pins={"dev-d48bd6be": "766846295c6f7ef7"},
            edit=replacing(_OF_ONE_SEQUENCE[1], f"{_OF_ONE_SEQUENCE[1]} * bsz"),
        ),
    ),
    reached="forward",
    when=lambda args: (
        bool(getattr(args, "calculate_per_token_loss", False))
        and "seq_aux_loss" in balancing_losses(args)
    ),
)


def fixed_upstream(source: Source) -> bool:
    text = source.text(TARGET)  # up to 0.15 it passes no number of tokens
    return bool(text) and not any(
        f"{one}," in text or f"{one})" in text for one in _OF_ONE_SEQUENCE
    )


def verify() -> None:
    import torch
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.router import TopKRouter

    from cppmega.proof import cpu_shims, small_models

    cpu_shims.init_distributed()
    config = small_models.config(
        num_moe_experts=4,
        moe_router_topk=2,
        moe_router_load_balancing_type="seq_aux_loss",
        moe_aux_loss_coeff=0.25,
        calculate_per_token_loss=True,
        add_bias_linear=False,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    for sequences in (1, 3):
        router = TopKRouter(config, pg_collection=groups)
        router.set_layer_number(1)
        generator = torch.Generator().manual_seed(sequences)
        logits = torch.randn(6, sequences, 4, generator=generator).requires_grad_()
        with torch.compiler.set_stance("force_eager"):
            probs, _ = router.routing(logits)
        (0 * probs).sum().backward()
        exact = logits.detach().double().requires_grad_()
        chosen = torch.zeros(exact.shape).scatter(2, exact.topk(2)[1], 1)
        balance = (chosen.mean(0) / 2 * exact.softmax(-1).mean(0)).sum(-1).mean()
        (wanted,) = torch.autograd.grad(6 * sequences * 4 * 0.25 * balance, exact)
        found = logits.grad.double()
        assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-6), (sequences, found / wanted)
