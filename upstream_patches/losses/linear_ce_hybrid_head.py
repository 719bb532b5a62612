"""Compute the loss of a hybrid model without its logits, for `--cross-entropy-fusion-impl linear`.

What: The output layer of `HybridModel` (`MambaModel` before 0.18) is a `LinearCrossEntropyModule`,
    a ColumnParallelLinear with the same parameters and checkpoint format, and `forward` computes
    the loss from the hidden states. Inference and calls without labels use Megatron's path. A model
    with its own loss, a bias or gathered logits ends the run with the reason, unless
    `--allow-fallback linear_ce_hybrid_head` lets it use Megatron's path, too.
Why: Stock holds the logits `[s, b, V]` and an fp32 copy of them: 36 GiB with V=131072, s=4096 and
    MBS 12. One kernel pass per chunk of tokens needs 2 GiB and is faster
    (benchmarks/results/linear_cross_entropy_h200.md).
Upstream: Not sent: dev has only the GPT head, with kernels for Blackwell; its hybrid head lost the
    class in a merge, and fails at the first MTP depth.
Remove: when the releases have a linear cross-entropy for hybrid models that runs on Hopper.
Numerics: reorders sums: the softmax is computed in fp32 from the same logits, chunk by chunk; dW is
    accumulated in fp32. The label -100 has no loss; in stock its loss is meaningless.
"""

from cppmega.catalogue.megatron_args import layer_pattern
from cppmega.page import Edit, Patch, Source

from ._linear_ce.edits import asked_for, choosing_output_layer, returning_loss

HYBRID = "megatron/core/models/hybrid/hybrid_model.py:HybridModel"
MAMBA = "megatron/core/models/mamba/mamba_model.py:MambaModel"

PATCH = Patch(
    purpose="feature",
    edits=(
        Edit(
            target=f"{HYBRID}.__init__",
            pins={
                "0.18.2": "b737be12a45fe896",
                "0.19.2": "b7202dcd6e0814cb",
                "main-d98e8a64": "1c3179209e7986b2",
                "dev-d48bd6be": "b7202dcd6e0814cb",
            },
            edit=choosing_output_layer(),
        ),
        Edit(
            target=f"{HYBRID}.forward",
            pins={
                "0.18.2": "f0c6ad11370a6a8a",
                "0.19.2": "cc72c3a7ee6033e9",
                "main-d98e8a64": "11cd0a6566dfd959",
                "dev-d48bd6be": "2ebaeee3af243e7a",
            },
            edit=returning_loss("linear_ce_hybrid_head"),
        ),
        Edit(
            target=f"{MAMBA}.__init__",
            pins={"0.16.1": "ef0daff16f3cb716", "0.17.1": "f9de44f6ba46d14a"},
            edit=choosing_output_layer(),
        ),
        Edit(
            target=f"{MAMBA}.forward",
            pins={"0.17.1": "ee2f079b74ebbfb5"},
            edit=returning_loss("linear_ce_hybrid_head"),
        ),
        Edit(
            target=f"{MAMBA}.forward",
            pins={"0.16.1": "a51e85e60db9f16b"},
            # It does not receive the loss mask, so it cannot rely on anything about the gradient.
            edit=returning_loss("linear_ce_hybrid_head", loss_mask="None"),
        ),
    ),
    reached="forward",
    feature=("megatron/core/tensor_parallel/layers.py:ColumnParallelLinear.backward_dw",),
    when=lambda args: asked_for(args) and bool(layer_pattern(args)),
    wanted_by=lambda recipe: recipe.uses_linear_cross_entropy and recipe.kind == "hybrid",
    after=("hybrid_mtp_padding_mask",),
)


def fixed_upstream(source: Source) -> bool:
    return "LinearCrossEntropyModule" in source.text(f"{HYBRID}.__init__")


def verify() -> None:
    from ._linear_ce import proof

    proof.head(proof.hybrid())
