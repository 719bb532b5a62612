"""Call Transformer Engine's permutation of tokens without PyTorch's dispatcher.

What: `moe_permute_with_probs`, `moe_unpermute` and both functions that sort chunks call what their
    custom operators compute, and its backward, themselves.
Why: A custom operator in Python passes through several layers of Python for every call. The
    permutation, two sorts and the unpermutation of 20 layers of experts took 52 ms of the host in a
    forward pass of NAM56R on two H200 (while a profiler ran), in which the GPU waits for the
    host.
Upstream: Not sent: Transformer Engine made them operators so that they can be compiled.
Remove: when a custom operator costs the host no more than its function.
Numerics: none (bitwise)
"""

from typing import Any

from cppmega.catalogue.megatron_args import has_experts
from cppmega.edits import replacing
from cppmega.page import Edit, Patch, Source

FILE = "transformer_engine/pytorch/permutation.py"
FUNCTIONS = {
    "moe_permute_with_probs": ("permute_mask_map_fwd", "moe_permute_mask_map_forward"),
    "moe_unpermute": ("unpermute_mask_map_fwd", "moe_unpermute_mask_map_forward"),
    "moe_sort_chunks_by_index": ("chunk_sort_fwd", "moe_chunk_sort_forward"),
    "moe_sort_chunks_by_index_with_probs": ("chunk_sort_fwd", "moe_chunk_sort_forward"),
}


def permutes(args: Any) -> bool:
    """Whether Transformer Engine permutes the tokens for the experts.

    HybridEP and NCCL-EP permute them as they send them.
    """
    flexible = getattr(args, "moe_token_dispatcher_type", None) == "flex"
    backend = getattr(args, "moe_flex_dispatcher_backend", "deepep")  # 0.15 has no other
    if flexible and backend != "deepep":
        return False
    return has_experts(args) and bool(getattr(args, "moe_permute_fusion", False))


def _edit(function: str, pins: dict[str, str]) -> Edit:
    name, operator = FUNCTIONS[function]
    return Edit(
        target=f"{FILE}:{function}",
        pins=pins,
        edit=replacing(f"torch.ops.te_moe.{name}", f"_cppmega_direct({operator})"),
        imports=("from cppmega.runtime.te_permutation_calls import direct as _cppmega_direct",),
        distribution="transformer-engine",
        # Dispatchers sort chunks only where a rank has several experts.
        mark="" if "sort" in function else None,
    )


PATCH = Patch(
    purpose="speed",
    edits=(
        _edit(
            "moe_permute_with_probs", {"2.19.0": "4428dd4da4f1cc12", "2.20.2": "4428dd4da4f1cc12"}
        ),
        _edit("moe_unpermute", {"2.19.0": "bcc2ed5dafaada2c", "2.20.2": "bcc2ed5dafaada2c"}),
        _edit(
            "moe_sort_chunks_by_index", {"2.19.0": "5ce1ce91591a1f43", "2.20.2": "5ce1ce91591a1f43"}
        ),
        _edit(
            "moe_sort_chunks_by_index_with_probs",
            {"2.19.0": "2301adcadca88116", "2.20.2": "2301adcadca88116"},
        ),
    ),
    reached="forward",
    # Before, the functions were autograd functions.
    feature=(f"{FILE}:moe_chunk_sort_forward",),
    when=permutes,
    asked_by=("--moe-permute-fusion",),
)


def fixed_upstream(source: Source) -> bool:
    text = "".join(source.text(f"{FILE}:{function}") for function in FUNCTIONS)
    return bool(text) and "torch.ops." not in text and "_cppmega_direct" not in text


def verify() -> None:
    from unittest import mock

    import torch

    from cppmega.proof import operations

    from ._te_modules import load

    te = load("permutation")
    for name in ("QuantizedTensor", "Float8Tensor", "Float8BlockwiseQTensor", "MXFP8Tensor"):
        setattr(te, name, type(name, (), {}))  # stand-ins of which no tensor is an instance

    def chunk_map(sizes, order, tokens, chunks):  # type: ignore[no-untyped-def]
        rows = torch.arange(tokens, dtype=torch.int32).split(sizes.tolist())
        return torch.cat([rows[chunk] for chunk in order.tolist()])

    def sort(inp, rows, probs, tokens, hidden, is_forward):  # type: ignore[no-untyped-def]
        order = rows.long() if is_forward else rows.long().argsort()
        return inp[order], None if probs is None else probs[order]

    inp, probs = torch.randn(6, 4, requires_grad=True), torch.rand(6, requires_grad=True)
    sizes, chunks = torch.tensor([1, 3, 2]), torch.tensor([2, 0, 1])
    order = torch.tensor([4, 5, 0, 1, 2, 3])
    upstream, of_probs = torch.randn(6, 4), torch.randn(6)
    kernels = {"make_chunk_sort_map": chunk_map, "sort_chunks_by_map": sort}
    unpermuted = {"unpermute_with_mask_map": lambda inp, *_: (2 * inp[:3], None)}
    with (
        mock.patch.multiple(te.triton_permutation, **kernels, **unpermuted),
        operations.counted() as calls,
    ):
        out, own = te.moe_sort_chunks_by_index_with_probs(inp, probs, sizes, chunks)
        gradients = torch.autograd.grad((out, own), (inp, probs), (upstream, of_probs))
        alone = te.moe_sort_chunks_by_index(inp, sizes, chunks)
        (gradient,) = torch.autograd.grad(alone, inp, upstream)
        merged = te.moe_unpermute(inp.detach(), torch.zeros(3, 5), restore_shape=torch.Size((3, 4)))
    forward = [name for name in calls if name.endswith("_fwd")]
    assert not forward, f"the dispatcher was asked for {forward}"
    assert out.equal(inp[order]) and alone.equal(out) and own.equal(probs[order])
    assert merged.equal(2 * inp[:3])
    back = order.argsort()
    assert gradients[0].equal(upstream[back]) and gradients[1].equal(of_probs[back])
    assert gradient.equal(upstream[back])

    class Operator:  # the real one refuses tensors that are not on a GPU
        def _init_fn(self, inp, routing, tokens, probs, offsets):  # type: ignore[no-untyped-def]
            return 3 * inp, routing, probs

        def _setup_context_fn(self, ctx, inputs, outputs):  # type: ignore[no-untyped-def]
            pass

        def _backward_fn(self, ctx, of_out, _, of_probs):  # type: ignore[no-untyped-def]
            return 3 * of_out, None, None, None, None

    with mock.patch.object(te, "moe_permute_mask_map_forward", Operator()):
        permuted, _, _ = te.moe_permute_with_probs(inp, torch.rand(6, 2), torch.ones(6, 2), 6)
    assert permuted.equal(3 * inp), "it was computed by another operator"
    assert torch.autograd.grad(permuted, inp, upstream)[0].equal(3 * upstream)
