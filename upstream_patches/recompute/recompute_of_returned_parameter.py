"""Train after a recomputed function has returned one of its parameters.

What: `CheckpointFunction` returns an alias of a parameter that its function returns.
Why: The MLP returns the bias of its second layer, which is added after it. Autograd takes every
    tensor that such a function returns for its result, the parameter itself included: its bias is
    no longer a leaf, and the backward pass, which recomputes the function and continues from what
    it returns, calls itself without an end. `--recompute-granularity selective
    --recompute-modules mlp` with biases and Megatron's own layers ends in a RecursionError, or
    hangs in it, in the first backward pass (seen on CPU, on 0.16.1 to 0.19.2). Transformer Engine's
    layers return the parameter as well unless they have to convert it. With `--disable-bias-linear`
    nothing is returned.
Upstream: Not sent: no report of it was found.
Remove: when `CheckpointFunction` returns no leaf of its function.
Numerics: none (bitwise); such runs used to fail
"""

from typing import Any

from cppmega.catalogue.megatron_args import has_experts, layer_pattern, recomputes
from cppmega.edits import inserting
from cppmega.page import Edit, Patch, Source

TARGET = "megatron/core/tensor_parallel/random.py:CheckpointFunction.forward"


def recomputes_biased(args: Any) -> bool:
    """Whether the run recomputes MLPs with biases; in FP8 and FP4 Transformer Engine does that."""
    pattern = layer_pattern(args)
    return (
        recomputes(args, "mlp")
        and getattr(args, "add_bias_linear", True)
        and ("-" in pattern if pattern else not has_experts(args))
        and not (getattr(args, "fp8", None) or getattr(args, "fp4", None))
    )


def _cppmega_no_leaves(outputs):  # type: ignore[no-untyped-def]
    """Alias parameters among the outputs; autograd would make them results of the function."""
    if isinstance(outputs, (tuple, list)):
        return type(outputs)(_cppmega_no_leaves(output) for output in outputs)
    return outputs.detach() if isinstance(outputs, torch.nn.Parameter) else outputs  # noqa: F821


PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=TARGET,
            pins={
                "0.15.3": "2ae3284d05edbf95",
                "0.16.1": "8db3f108080b88e9",
                "0.17.1": "6f75d49c57a22f36",
                "0.18.2": "6f75d49c57a22f36",
                "0.19.2": "6f75d49c57a22f36",
                "main-d98e8a64": "6f75d49c57a22f36",
                "dev-d48bd6be": "6f75d49c57a22f36",
            },
            edit=inserting(
                "outputs = _cppmega_no_leaves(outputs)",
                after="""
                with torch.no_grad():
                    outputs = run_function(*args)
                """,
            ),
            helpers=(_cppmega_no_leaves,),
        ),
    ),
    reached="forward",
    when=recomputes_biased,
)


def fixed_upstream(source: Source) -> bool:
    return "Parameter" in source.text(TARGET)


def verify() -> None:
    from unittest import mock

    import torch
    from megatron.core.tensor_parallel import random

    from cppmega.proof import small_models

    states = {
        "_get_cuda_rng_state": lambda *_, **__: None,
        "_set_cuda_rng_state": lambda *_, **__: None,
    }

    def outcome(**options):  # type: ignore[no-untyped-def]
        model = small_models.gpt(num_layers=2, **options)
        loss = model(**small_models.arguments(model))
        biases = [layer.mlp.linear_fc2.bias for layer in model.decoder.layers]
        assert all(bias.is_leaf for bias in biases), "a bias became the result of a function"
        (loss * torch.arange(1.0, loss.numel() + 1).view_as(loss)).sum().backward()
        return [loss.detach(), *(param.grad for param in model.parameters())]

    with mock.patch.multiple(random, **states):
        ours = outcome(recompute_granularity="selective", recompute_modules=["mlp"])
    for recomputed, plain in zip(ours, outcome(), strict=True):
        assert torch.equal(recomputed, plain)
