"""Support a padding mask with sequence parallelism in the decoder of a hybrid model.

What: The stack of a hybrid model takes its rank's part of the padding mask, as it has its part of
    the sequence, unless the caller has already divided the mask.
Why: `GPTModel` divides the mask among the ranks and hybrid models do not: their layers get the mask
    of all tokens with the rank's part of the sequence (seen on two gloo ranks, on 0.17.1 to
    0.19.2). The router of the first MoE layer combines the two, and the run dies in its first
    forward pass. A decoder without experts ignores the mask.
Upstream: Not sent: found by a trial of layouts; neither main nor dev divides it.
Remove: when the stack, or the model before it, divides `padding_mask` with sequence parallelism.
Numerics: none (bitwise); such runs used to fail
"""

from cppmega.catalogue.megatron_args import has_experts, layer_pattern
from cppmega.edits import inserting
from cppmega.page import Edit, Patch, Source

STACKS = (
    "megatron/core/models/hybrid/hybrid_block.py:HybridStack.forward",
    "megatron/core/ssm/mamba_block.py:MambaStack.forward",
)


def _edit(target: str, pins: dict[str, str]) -> Edit:
    return Edit(
        target=target,
        pins=pins,
        edit=inserting(
            """
            if (
                padding_mask is not None
                and self.config.sequence_parallel
                and padding_mask.shape[1] != hidden_states.shape[0]
            ):
                padding_mask = scatter_to_sequence_parallel_region(
                    padding_mask.transpose(0, 1).contiguous(), group=self.tp_group
                ).transpose(0, 1)
            """,
            after="use_fp4_context = self.config.fp4 is not None",
        ),
        imports=("from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region",),
    )


PATCH = Patch(
    purpose="fix",
    edits=(
        _edit(
            STACKS[0],
            {
                "0.18.2": "50ac5b73f74c7aa0",
                "0.19.2": "50ac5b73f74c7aa0",
                "main-d98e8a64": "50ac5b73f74c7aa0",
                "dev-d48bd6be": "edfdf11c3ea33a4e",
            },
        ),
        _edit(STACKS[1], {"0.17.1": "4b57784b860f9ea5"}),
    ),
    reached="forward",
    # Until 0.16 the layers of a stack get no mask.
    feature=("megatron/core/models/hybrid/hybrid_layer_allocation.py:parse_hybrid_pattern",),
    when=lambda args: bool(layer_pattern(args)) and has_experts(args),
    after=(
        "mamba_stack_full_recompute",
        "mhc_connections",
        "dsa_index_share_holder",
        "dsa_index_share_backport",
    ),
)


def fixed_upstream(source: Source) -> bool:
    return any("scatter_to_sequence_parallel_region(" in source.text(target) for target in STACKS)


def verify() -> None:
    import torch

    from cppmega.proof import ranks, small_models

    mask = torch.arange(16).view(2, 8) % 5 == 0

    def work(rank):  # type: ignore[no-untyped-def]
        """Return the masks that a layer gets: of all tokens' mask, and of the rank's."""
        stack = small_models.hybrid(tensor_model_parallel_size=2).decoder
        stack.config.sequence_parallel = True  # the norm of a model on CPU declines it
        seen = []

        def record(hidden_states, padding_mask=None, **_):  # type: ignore[no-untyped-def]
            seen.append(None if padding_mask is None else padding_mask.clone())
            return hidden_states, None

        for layer in stack.layers:
            layer.forward = record
        hidden = torch.zeros(4, 2, small_models.H)
        for given in (mask, mask.chunk(2, 1)[rank], None):
            stack(hidden, None, padding_mask=given)
        return seen[:: len(stack.layers)]

    for rank, seen in enumerate(ranks.on_two(work)):
        wanted = mask.chunk(2, 1)[rank]
        for got in seen[:2]:
            assert got.equal(wanted), (
                f"a layer of rank {rank}, with {wanted.shape}, got {got.shape}"
            )
        assert seen[2] is None
