"""Prepare the inputs of the DSA indexer's scores in one kernel forward and one backward.

What: Between its projections and its scores, `DSAIndexer` computes RoPE, the Hadamard transform and
    the scaling of the head weights with `cppmega.ops.pointwise.dsa_indexer_prologue`. The rotated
    columns are determined by calling the indexer's own `_apply_rope`, with or without
    `dsa_indexer_rope`. A call is declined if it or `rotate_activation` computes something else, and
    on CUDA if the rotated width is not a power of two: it ends a run that relies on the kernel, or,
    with `--allow-fallback dsa_indexer_prologue`, is computed by Megatron's code. 0.19.2 refuses
    packed documents that are longer than the table of angles, and so does the patch, on the stream,
    with about six more small kernels.
Why: Forward and backward launch 50 kernels on 0.19.2, and 786 with 16 packed documents, for which
    the host also waits; with the patch they launch 6, and the host does not wait. For rows of 32
    heads of 64 on one H200, the times are 1.6 and 0.50 ms for 4096, 2.7 and 0.98 ms for 4096 x 8,
    15.5 and 0.85 ms for 4096 in 16 documents (benchmarks/results/dsa_indexer_h200.md).
Upstream: Not sent: upstream has no such kernel and asserts that its fused RoPE is off for DSA.
Remove: when the indexer's RoPE and Hadamard transform are fused upstream.
Numerics: reorders sums: computed in fp32 and rounded once, where stock rounds cos, sin, each
    product, their sum and the transform. In bf16, relative L2 distances to stock's results and
    gradients are 2.5e-3 to 3.6e-3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cppmega.catalogue.megatron_args import uses_dsa
from cppmega.edits import in_order, replacing
from cppmega.page import Edit, Patch, Source

if TYPE_CHECKING:
    from cppmega.edits import NodeEdit

DSA = "megatron/core/transformer/experimental_attention_variant/dsa.py"
INDEXER = f"{DSA}:DSAIndexer"

_PREPARED = """
from cppmega.runtime.dsa_indexer_prologue import find_rotary
from cppmega.ops.pointwise.dsa_indexer_prologue import prepare_index_inputs

rotate = {rotate}
rotary = find_rotary(
    self, q, k, weights, rotary_pos_emb, mscale, rotate=rotate{documents}
)

def prepared():  # a declined call does not get here
    return prepare_index_inputs(
        q,
        k,
        weights,
        rotary,
        hadamard=rotate is not None,
        scale=self.index_n_heads**-0.5 * self.softmax_scale,
    )

if rotary is not None:
    q, k, weights = prepared()
else:
    q = {rope_q}
    k = k.reshape(seqlen, bsz, 1, self.index_head_dim)
    k = {rope_k}
    k = k.reshape(seqlen, bsz, self.index_head_dim)
    if rotate is not None:
        q = rotate(q)
        k = rotate(k)
    weights = weights * (self.index_n_heads**-0.5) * self.softmax_scale
"""
_ROTATE = """
q = rotate_activation(q)
k = rotate_activation(k)
"""
_ROTATE_IF_ASKED = """
if self.config.dsa_indexer_rotate_activation:
    q = rotate_activation(q)
    k = rotate_activation(k)
"""
_PACKED = """,
    documents=(cu_seqlens_q, cu_seqlens_kv) if packed_seq else None"""


def preparing(rotation: str, rotate: str, documents: str = "", lengths: str = "") -> NodeEdit:
    """Move Megatron's lines after the projections, where they become one of two alternatives.

    Args:
        rotation: the statements that rotate the activations.
        rotate: an expression for the function that they call, or for None.
        documents: additional arguments, in releases that support packed documents.
        lengths: an argument of `_apply_rope` that is named after q or kv, too.
    """
    rope = "self._apply_rope({0}, rotary_pos_emb, mscale{1})"
    named = f", cu_seqlens=cu_seqlens_{{0}}{lengths}" if documents else "{0}"
    rope_q = rope.format("q", named.format("q" if documents else ""))
    rope_k = rope.format("k", named.format("kv" if documents else ""))
    return in_order(
        replacing(f"q = {rope_q}", ""),
        replacing(
            f"""
            k = k.reshape(seqlen, bsz, 1, self.index_head_dim)
            k = {rope_k}
            k = k.reshape(seqlen, bsz, self.index_head_dim)
            """,
            "",
        ),
        replacing(rotation, ""),
        replacing(
            "weights = weights * (self.index_n_heads**-0.5) * self.softmax_scale",
            _PREPARED.format(rotate=rotate, documents=documents, rope_q=rope_q, rope_k=rope_k),
        ),
    )


IF_ASKED = "rotate_activation if self.config.dsa_indexer_rotate_activation else None"


def kernel_takes(args: Any) -> bool:
    """Whether the kernel supports the widths of a run's indexers."""
    d, part = (getattr(args, f"{n}_head_dim", 64) for n in ("dsa_indexer", "qk_pos_emb"))
    width = int(part * min(getattr(args, "rotary_percent", 1.0), 1.0))
    rotates = getattr(args, "dsa_indexer_rotate_activation", True)
    return (
        uses_dsa(args)
        and not getattr(args, "apply_rope_fusion", False)
        and width & (width - 1) == 0
        and (d - part) % width == 0
        and not (rotates and d & (d - 1))
    )


PATCH = Patch(
    purpose="feature",
    edits=(
        Edit(
            target=f"{INDEXER}.forward_with_scores",
            pins={"0.16.1": "3f3264055a0eecb1"},
            edit=preparing(_ROTATE, "rotate_activation"),
            mark="prepared",
        ),
        Edit(
            target=f"{INDEXER}.forward_before_topk",
            pins={"0.17.1": "e487b3c2b9c6152d", "0.18.2": "e487b3c2b9c6152d"},
            edit=preparing(_ROTATE, "rotate_activation"),
            mark="prepared",
        ),
        Edit(
            target=f"{INDEXER}.forward_before_topk",
            pins={"0.19.2": "0e4df74f417d740d", "main-d98e8a64": "0e4df74f417d740d"},
            edit=preparing(_ROTATE_IF_ASKED, IF_ASKED, documents=_PACKED),
            mark="prepared",
        ),
        Edit(
            target=f"{INDEXER}.forward_before_topk",
            pins={"dev-d48bd6be": "ad21091f7119335a"},
            edit=preparing(
                *(_ROTATE_IF_ASKED, IF_ASKED),
                documents=_PACKED,
                lengths=", max_seqlen=max_seqlen_{0}",
            ),
            mark="prepared",
        ),
    ),
    after=("dsa_indexer_kernels",),
    reached="forward",
    feature=(f"{INDEXER}._apply_rope",),
    when=kernel_takes,
)


def fixed_upstream(source: Source) -> bool:
    text = source.text(f"{INDEXER}.forward_before_topk")
    return bool(text) and "_apply_rope" not in text


def verify() -> None:
    from unittest import mock

    import torch
    from megatron.core.transformer.experimental_attention_variant import dsa

    from cppmega.proof import small_models

    indexer = small_models.dsa_indexer()
    heads, d = indexer.index_n_heads, indexer.index_head_dim
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < d:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    matrix = matrix * d**-0.5

    def transform(x, scale):  # the package
        return (x.double() @ matrix).to(x.dtype)

    torch.manual_seed(0)
    projected = [torch.randn(24, 2, n, dtype=torch.bfloat16) for n in (heads * d, d, heads)]
    projected = [x.requires_grad_() for x in projected]
    names = ("linear_wq_b", "linear_wk", "linear_weights_proj")
    modules = [getattr(indexer, name) for name in names]
    for module, result in zip(modules, projected, strict=True):
        module.forward = lambda x, result=result: (result, None)
    indexer.k_norm.forward = lambda k: k
    with mock.patch.object(dsa, "hadamard_transform", transform):
        found = small_models.dsa_index_inputs(indexer, torch.zeros(24, 2, 1), torch.zeros(24, 2, 1))
    upstream = [torch.randn_like(x) for x in found]
    gradients = torch.autograd.grad(found, projected, upstream)

    # Compare with Megatron's own RoPE in fp64. Rounded once, no element is further away than
    # half a unit in its last place, which is at most 2**-8 of it.
    q, k, weights = exact = [x.detach().double().requires_grad_() for x in projected]
    angles = indexer.rotary_pos_emb(24, packed_seq=False).double()
    want = [
        indexer._apply_rope(x.view(24, 2, -1, d), angles, 1.0).reshape_as(like) @ matrix
        for x, like in ((q, found[0]), (k, found[1]))
    ]
    want.append(weights * (heads * d) ** -0.5)
    true = torch.autograd.grad(want, exact, [x.double() for x in upstream])
    for ours, result in zip((*found, *gradients), (*want, *true), strict=True):
        torch.testing.assert_close(ours.double(), result, rtol=1.001 * 2**-8, atol=1e-6)
