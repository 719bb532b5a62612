"""Keep a layer's input alive if a recomputed function returns it.

What: `CheckpointWithoutOutput` frees only those outputs of its function that are not its inputs,
    and never links a storage to itself when it recomputes.
Why: With `--fused-residual-rmsnorm` the norm returns its input as the residual. If the norm is also
    recomputed (`--recompute-modules layernorm`, MLA or MoE layers), the layer's input is freed
    before the residual is added, and is also missing when the norm is recomputed. The first forward
    pass reads a null pointer and crashes (a segmentation fault on CPU, on 0.17.1, 0.18.2 and
    0.19.2, with a norm that returns what Transformer Engine's operations return).
Upstream: https://github.com/NVIDIA/Megatron-LM/pull/4497 (main, August 2026; not released)
Remove: when outputs that share their storage with an input are kept.
Numerics: none (bitwise); such runs used to crash
"""

from typing import Any

from cppmega.catalogue.megatron_args import has_experts, recomputes
from cppmega.edits import inserting, replacing
from cppmega.page import Edit, Patch, Source, left_alone

CLASS = "megatron/core/tensor_parallel/random.py:CheckpointWithoutOutput"
RECOMPUTE = f"{CLASS}._recompute"


def returns_inputs(args: Any) -> bool:
    """Whether the run recomputes a norm that returns the residual."""
    return (
        getattr(args, "fused_residual_rmsnorm", False)
        and getattr(args, "transformer_impl", None) == "transformer_engine"
        and recomputes(args, "layernorm")
        # In other models the norm is part of the linear layer after it. With CUDA graphs a norm may
        # be excluded from recomputation.
        and bool(getattr(args, "multi_latent_attention", False) or has_experts(args))
        and getattr(args, "cuda_graph_impl", "none") == "none"
        and not getattr(args, "hybrid_layer_pattern", None)  # hybrid layers have no fused norm
    )


PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=f"{CLASS}.checkpoint",
            pins={
                "0.17.1": "ff508be5d85ff3af",
                "0.18.2": "ff508be5d85ff3af",
                "0.19.2": "ff508be5d85ff3af",
                "dev-d48bd6be": "1711496d2d8c772f",
            },
            edit=inserting(
                """
                self._cppmega_inputs = {
                    arg.untyped_storage()._cdata for arg in args if isinstance(arg, torch.Tensor)
                }
                """,
                before="outputs = CheckpointWithoutOutputFunction.apply(run_function, self, *args)",
            ),
        ),
        Edit(
            target=f"{CLASS}.discard_output_and_register_recompute",
            pins={
                "0.17.1": "1f3398fcbcc63010",
                "0.18.2": "1f3398fcbcc63010",
                "0.19.2": "1f3398fcbcc63010",
                "dev-d48bd6be": "991c856fb59c83bb",
            },
            edit=replacing(
                "output.untyped_storage().resize_(0)",
                """
                # An input that is returned is needed: by the caller and to recompute the others.
                if output.untyped_storage()._cdata not in self._cppmega_inputs:
                    output.untyped_storage().resize_(0)
                """,
            ),
        ),
        Edit(
            target=RECOMPUTE,
            pins={
                "0.17.1": "04ee57d6baea3508",
                "0.18.2": "04ee57d6baea3508",
                "0.19.2": "04ee57d6baea3508",
            },
            edit=replacing(
                "share_storage(output, recomputation_output)",
                """
                if output.untyped_storage()._cdata != recomputation_output.untyped_storage()._cdata:
                    share_storage(output, recomputation_output)
                """,
            ),
            mark="",
        ),
        Edit(RECOMPUTE, {"dev-d48bd6be": "2765464246d2adf6"}, left_alone),
    ),
    reached="forward",
    # Up to 0.16 no norm returns the residual.
    feature=("megatron/core/extensions/transformer_engine_spec_provider.py:_TENormWithResidual",),
    when=returns_inputs,
)


def fixed_upstream(source: Source) -> bool:
    return "not in self._saved_input_ptrs" in source.file(CLASS.partition(":")[0])


def verify() -> None:
    import contextlib
    import inspect
    from unittest import mock

    import torch
    from megatron.core.tensor_parallel import random

    weight = torch.tensor([2.0, 3.0], requires_grad=True)
    takes = inspect.signature(random.CheckpointWithoutOutput).parameters
    # With upstream's fix, the caller has to request that inputs are kept.
    asked = {"retain_input_tensors": True} if "retain_input_tensors" in takes else {}

    def norm(hidden):  # type: ignore[no-untyped-def]
        return torch.tanh(hidden) * weight, hidden

    def share(output, recomputed):  # type: ignore[no-untyped-def]
        """Replace the C++ extension, which takes too long to compile for a proof."""
        storage, other = output.untyped_storage(), recomputed.untyped_storage()
        assert storage._cdata != other._cdata, "a storage was linked to itself"
        storage.resize_(other.nbytes())
        storage.copy_(other)

    def outcome(recompute):  # type: ignore[no-untyped-def]
        """Return output and gradients of a layer: norm, differentiable function, residual."""
        weight.grad = None
        given = torch.tensor([[1.0, -2.0]], requires_grad=True)
        hidden = given * 1.0
        checkpoint = random.CheckpointWithoutOutput(fp8=None, **asked) if recompute else None
        normed, residual = checkpoint.checkpoint(norm, hidden) if recompute else norm(hidden)
        inner = normed**2
        if recompute:
            checkpoint.discard_output_and_register_recompute(inner)
            assert residual.untyped_storage().nbytes(), "the residual was freed before it was added"
            assert not normed.untyped_storage().nbytes(), "nothing was freed"
        output = inner + residual
        output.sum().backward()
        return output.detach(), given.grad, weight.grad

    states = {
        "_get_all_rng_states": lambda: (),
        "_set_all_rng_states": lambda *_: None,
        "_fork_rng": contextlib.nullcontext,
        "_get_share_storage": lambda: share,
    }
    with mock.patch.multiple(random, **states):
        for ours, plain in zip(outcome(True), outcome(False), strict=True):
            assert torch.equal(ours, plain)
