"""Compute the loss of GPTModel without its logits, for `--cross-entropy-fusion-impl linear`.

What: The output layer is a `LinearCrossEntropyModule`, a ColumnParallelLinear with the same
    parameters and checkpoint format, and `_postprocess` computes the loss from the hidden states.
    Inference, calls without labels and logged logits use Megatron's path. A model with its own
    loss, a bias, gathered logits or deferred weight gradients ends the run with the reason, unless
    `--allow-fallback linear_ce_gpt_head` lets it use Megatron's path, too.
Why: Stock holds the logits `[s, b, V]` and an fp32 copy of them: 36 GiB with V=131072, s=4096 and
    MBS 12. One kernel pass per chunk of tokens needs 2 GiB and is faster
    (benchmarks/results/linear_cross_entropy_h200.md).
Upstream: Not sent: dev has a GPT head, but its kernels support only Blackwell.
Remove: when the releases have a linear cross-entropy that runs on Hopper.
Numerics: reorders sums: the softmax is computed in fp32 from the same logits, chunk by chunk; dW is
    accumulated in fp32. The label -100 has no loss; in stock its loss is meaningless.
"""

from textwrap import indent

from cppmega.catalogue.megatron_args import layer_pattern
from cppmega.edits import in_order, inserting, replacing
from cppmega.page import Edit, Patch, Source

from ._linear_ce.edits import asked_for, choosing_output_layer, returning_loss

PATH = "megatron/core/models/gpt/gpt_model.py"
INIT = f"{PATH}:GPTModel.__init__"
POSTPROCESS = f"{PATH}:GPTModel._postprocess"
KERNELS = "megatron/core/fusions/fused_linear_cross_entropy.py"
LOGGED = "has_config_logger_enabled(self.config)"
"""If set, GPTModel writes its logits to disk."""

OF_DEV = f"""
if {LOGGED} or labels is None:
    logits, _ = self.output_layer(
        hidden_states, weight=output_weight, runtime_gather_output=runtime_gather_output
    )
else:
    logits = None
"""
UNFUSED = """
logits, _ = self.output_layer(**output_layer_kwargs)
loss = self.compute_language_model_loss(labels, logits)
"""
FUSED_BY_DEV = f"""
if self.fuse_linear_cross_entropy:
    loss = self.output_layer(
        output_cross_entropy_loss=self.fuse_linear_cross_entropy,
        labels=labels,
        **output_layer_kwargs,
    )
else:
{indent(UNFUSED, "    ")}
"""

PATCH = Patch(
    purpose="feature",
    edits=(
        Edit(
            target=INIT,
            pins={
                "0.16.1": "1538c0d41299f48d",
                "0.17.1": "860c4e30804a9925",
                "0.18.2": "53a672d2d56c43e7",
                "0.19.2": "f0c73715b456bd77",
                "main-d98e8a64": "8b7b2a1a1e78736b",
            },
            edit=choosing_output_layer(),
        ),
        Edit(
            target=INIT,
            pins={"dev-d48bd6be": "3125ec8d202f1a4d"},
            edit=choosing_output_layer("LinearCrossEntropyModule"),
        ),
        Edit(
            target=POSTPROCESS,
            pins={
                "0.17.1": "7795e20c52482408",
                "0.18.2": "bad3e6ff127d7596",
                "0.19.2": "7cce493b49072d6a",
                "main-d98e8a64": "7cce493b49072d6a",
            },
            edit=returning_loss("linear_ce_gpt_head", unless=LOGGED),
        ),
        Edit(
            target=POSTPROCESS,
            pins={"dev-d48bd6be": "d3b8822c9a27864b"},
            edit=in_order(
                returning_loss("linear_ce_gpt_head", unless=LOGGED, before=OF_DEV),
                # What gets here was declined, or its logits are logged.
                replacing(FUSED_BY_DEV, UNFUSED),
            ),
        ),
        Edit(
            target=POSTPROCESS,
            pins={"0.16.1": "46958da335bff1de"},
            edit=in_order(
                # MTP is inline in this version and rebinds the name of the mask.
                inserting(
                    "main_loss_mask = loss_mask  # before MTP rolls it",
                    before="output_weight = None",
                ),
                returning_loss("linear_ce_gpt_head", unless=LOGGED, loss_mask="main_loss_mask"),
            ),
        ),
    ),
    reached="forward",
    feature=("megatron/core/tensor_parallel/layers.py:ColumnParallelLinear.backward_dw",),
    when=lambda args: asked_for(args) and not layer_pattern(args),
    wanted_by=lambda recipe: recipe.uses_linear_cross_entropy and recipe.kind != "hybrid",
)


def fixed_upstream(source: Source) -> bool:
    # dev has the module, with kernels that support only Blackwell.
    return "LinearCrossEntropyModule" in source.text(INIT) and "hopper" in source.file(KERNELS)


def verify() -> None:
    from ._linear_ce import proof

    proof.head(proof.gpt())
