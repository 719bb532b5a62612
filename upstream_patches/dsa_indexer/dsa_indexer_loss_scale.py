"""Scale the gradient of the DSA indexer loss like that of every other loss.

What: `forward_step_calc_loss` sets the scale of the indexer loss to the gradient scale divided by
    the number of microbatches, as it does for the MoE and MTP losses.
Why: The scale was never set, so the indexer's gradient was the sum over the microbatches instead of
    their mean (with 8 microbatches it is 8 times too large, and clipping then shrinks all other
    gradients). With a gradient scaler (fp16) it was divided by a factor by which it had never been
    multiplied. Seen on CPU, 0.16.1 to 0.18.2.
Upstream: https://github.com/NVIDIA/Megatron-LM/pull/4070 (in 0.19.0)
Remove: when `forward_step_calc_loss` sets the scale of `DSAIndexerLossAutoScaler`.
Numerics: changes results: the indexer's gradient is divided by the number of microbatches and
    multiplied by the gradient scale. With one microbatch and no gradient scaler nothing changes.
    With `calculate_per_token_loss` only the gradient scale applies, as upstream does it.
"""

# ruff: noqa: F821
from cppmega.catalogue.megatron_args import uses_dsa
from cppmega.edits import inserting
from cppmega.page import Edit, Patch, Source

TARGET = "megatron/core/pipeline_parallel/schedules.py:forward_step_calc_loss"
SCALER = "megatron/core/transformer/experimental_attention_variant/dsa.py:DSAIndexerLossAutoScaler"


def _cppmega_scale_indexer_loss(config, num_microbatches):
    """Tell the indexer loss, whose backward starts by itself, what the main loss is scaled by."""
    if getattr(config, "experimental_attention_variant", None) != "dsa":
        return
    from megatron.core.transformer.experimental_attention_variant.dsa import (
        DSAIndexerLossAutoScaler,
    )

    scale = torch.ones(1, device=torch.cuda.current_device())
    if config.grad_scale_func is not None:
        scale = config.grad_scale_func(scale)
    if not config.calculate_per_token_loss:
        scale = scale / num_microbatches
    # Without dimensions: a backward that ran before has left such a tensor to copy into.
    DSAIndexerLossAutoScaler.set_loss_scale(scale.reshape(()))


PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=TARGET,
            pins={
                "0.16.1": "0895c5219700206a",
                "0.17.1": "c026876147a378a4",
                "0.18.2": "6a3dd20783a5a037",
            },
            edit=inserting(
                "_cppmega_scale_indexer_loss(config, num_microbatches)",
                before="return output_tensor, num_tokens",
            ),
            helpers=(_cppmega_scale_indexer_loss,),
        ),
    ),
    reached="forward",
    when=uses_dsa,
    feature=(SCALER,),
)


def fixed_upstream(source: Source) -> bool:
    text = source.text(TARGET)
    return "DSAIndexerLossAutoScaler" in text or "experimental_attention_variant" in text


def verify() -> None:
    from types import SimpleNamespace
    from unittest import mock

    import torch
    from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss
    from megatron.core.transformer.experimental_attention_variant import dsa

    config = SimpleNamespace(timers=None, calculate_per_token_loss=False)
    config.experimental_attention_variant, config.grad_scale_func = "dsa", lambda loss: loss * 8
    with (
        mock.patch.object(dsa.DSAIndexerLossAutoScaler, "main_loss_backward_scale", None),
        mock.patch.object(torch.cuda, "current_device", return_value="cpu"),
    ):
        for microbatches, expected in ((4, 2.0), (2, 4.0)):
            loss = torch.tensor(1.0, requires_grad=True)
            forward_step_calc_loss(
                None,
                torch.ones(()),
                lambda output: (output, {}),
                config,
                None,
                False,
                microbatches,
                [],
                cp_group_size=1,
                is_last_stage=True,
            )
            dsa.DSAIndexerLossAutoScaler.apply(torch.ones(3), loss).sum().backward()
            assert loss.grad == expected, loss.grad
