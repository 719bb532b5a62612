"""CUDA graphs can capture the run, and their pool fits next to a model without pipeline stages."""

from __future__ import annotations

from cppmega.catalogue.megatron_args import captures, cuda_graphs, has_experts
from cppmega.errors import CppmegaError
from cppmega.preflight.context import Context
from cppmega.preflight.findings import NotApplicable
from cppmega.recipe.memory import GIB

AFTER: tuple[str, ...] = ("line_parses",)

_BY_LAYER = ("local", "transformer_engine")
"""Implementations that capture layer by layer: the whole layer unless modules are named."""
_H200 = 140 * GIB
"""Memory of the GPU that the recipes are sized for; no GPU is queried."""


def check(context: Context) -> str:
    """Refuse what cannot be captured, and add the pool to the memory estimate.

    The pool is scaled from the one that was measured for the recipe.

    Raises:
        CppmegaError: `graph-of-packed-documents`, `graph-of-dropless-experts`,
            `graph-pool-does-not-fit`.
    """
    args, recipe = context.megatron_args, context.recipe
    if cuda_graphs(args) == "none":
        raise NotApplicable("no CUDA graphs are requested")
    if recipe is not None and recipe.packed_documents:
        raise CppmegaError(
            "graph-of-packed-documents",
            "The run packs documents and requests CUDA graphs.",
            "The lengths of a pack's documents change from step to step, and a graph takes only "
            "tensors as arguments: Megatron would end the run at its first step.",
            "--set cuda_graph_impl=none, or --set packed_documents=false",
        )
    if _captures_experts(args) and not _drops_and_pads(args):
        raise CppmegaError(
            "graph-of-dropless-experts",
            "CUDA graphs would capture complete MoE layers, whose experts drop no tokens.",
            "The number of tokens per expert changes from step to step, and is known only to the "
            "GPU; the host has to wait for it, which no graph can do. The capture would fail.",
            "--set \"cuda_graph_modules=('attn', 'moe_router')\", which leaves the experts out",
        )
    if recipe is None or recipe.graph_pool is None:
        return "the pool was not measured for this model"
    if args.pipeline_model_parallel_size > 1:
        return "the pool was only measured without pipeline stages"
    layers = len(recipe.layout.trunk) + len(recipe.layout.mtp) * recipe.layout.depths
    sizes = recipe.micro_batch_size, recipe.seq_length, recipe.hidden_size
    pool, needs = recipe.graph_pool.scaled(*sizes, layers), context.memory.total
    if pool * GIB + needs > _H200:
        raise CppmegaError(
            "graph-pool-does-not-fit",
            f"CUDA graphs of {recipe.name} at PP 1 keep a pool of about {pool:.1f} GiB "
            f"next to the {needs / GIB:.1f} GiB of the model.",
            "The run would end out of memory when the graphs are captured.",
            "--set cuda_graph_impl=none, or pipeline stages",
        )
    return f"a pool of about {pool:.1f} GiB"


def _captures_experts(args: object) -> bool:
    """Whether graphs hold complete MoE layers."""
    return has_experts(args) and cuda_graphs(args) in _BY_LAYER and captures(args, "moe")


def _drops_and_pads(args: object) -> bool:
    """Whether each expert gets the same number of tokens in every step."""
    return getattr(args, "moe_expert_capacity_factor", None) is not None and bool(
        getattr(args, "moe_pad_expert_input_to_capacity", False)
    )
