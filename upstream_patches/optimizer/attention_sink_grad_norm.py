"""Count the gradients of all attention sinks in the gradient norm.

What: The learnable `softmax_offset` of Megatron's attention and of Transformer Engine's is marked
    as divided among the tensor-parallel ranks.
Why: With `--softmax-type learnable` each rank has the sinks of its own heads, but nothing says so.
    The gradient norm and the number of zeros take those of ranks above 0 for copies and leave them
    out, so that gradients are clipped too little: with TP 2, half of the sinks are missing (seen on
    two gloo ranks, on 0.16.1 to 0.19.2). The norm of the parameters in the log omits them, too.
Upstream: https://github.com/NVIDIA/Megatron-LM/pull/7530 (open)
Remove: when `softmax_offset` has `tensor_model_parallel` in both classes.
Numerics: changes results of runs with learnable sinks and tensor parallelism: the gradient norm,
    and therefore clipping
"""

from cppmega.edits import appending
from cppmega.page import Edit, Patch, Source

OWN = "megatron/core/transformer/dot_product_attention.py:DotProductAttention.__init__"
TE = "megatron/core/extensions/transformer_engine.py:TEDotProductAttention.__init__"
MARKED = "set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)"

PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=OWN,
            pins={
                "0.15.3": "16e612a9743eaa0c",
                "0.16.1": "5e4601284060858a",
                "0.17.1": "5e4601284060858a",
                "0.18.2": "5e4601284060858a",
                "0.19.2": "5e4601284060858a",
                "main-d98e8a64": "5e4601284060858a",
                "dev-d48bd6be": "21b78afb2046739d",
            },
            edit=appending(
                f"""
                if self.config.softmax_type == "learnable":
                    tensor_parallel.{MARKED}
                """
            ),
        ),
        Edit(
            target=TE,
            pins={
                "0.15.3": "ae999f664e645c1e",
                "0.16.1": "43d2f76fa26d6d8d",
                "0.17.1": "91665cc7df891e60",
                "0.18.2": "91665cc7df891e60",
                "0.19.2": "1238f6baa378f59f",
                "main-d98e8a64": "ab68926fde2bab20",
                "dev-d48bd6be": "d55366a26ca2421b",
            },
            edit=appending(
                f"""
                if self.config.softmax_type == "learnable":
                    {MARKED}
                """
            ),
        ),
    ),
    reached="startup",
    when=lambda args: getattr(args, "softmax_type", None) == "learnable",
)


def fixed_upstream(source: Source) -> bool:
    return all(MARKED in source.text(target) for target in (OWN, TE))


def verify() -> None:
    from megatron.core import tensor_parallel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    from cppmega.proof import ranks, small_models

    def work(rank):  # type: ignore[no-untyped-def]
        """Return by kind the heads, two of four, whose sinks count in the norm on this rank."""
        groups = ProcessGroupCollection.use_mpu_process_groups()
        counted = {}
        for kind in ("vanilla", "off-by-one", "learnable"):
            config = small_models.config(
                num_attention_heads=4, tensor_model_parallel_size=2, softmax_type=kind
            )
            attention = DotProductAttention(
                config, 1, AttnMaskType.causal, "self", pg_collection=groups
            )
            for param in attention.parameters():
                # Before it trains, Megatron takes what is not marked for a copy.
                tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(param)
                if tensor_parallel.param_is_not_tensor_parallel_duplicate(param):
                    first = rank * len(param)
                    counted[kind] = list(range(first, first + len(param)))
        return counted

    found = ranks.on_two(work)
    assert found == [{"learnable": [0, 1]}, {"learnable": [2, 3]}], f"sinks that count: {found}"
