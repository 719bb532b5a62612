"""The pool of a recipe's CUDA graphs fits next to a model without pipeline stages."""

from __future__ import annotations

from cppmega.errors import CppmegaError
from cppmega.preflight.context import Context
from cppmega.preflight.findings import NotApplicable
from cppmega.recipe.memory import GIB
from cppmega.sizes.megatron_args import cuda_graphs

AFTER: tuple[str, ...] = ("line_parses",)

_H200 = 140 * GIB
"""Memory of the GPU that the recipes are sized for; no GPU is queried."""


def check(context: Context) -> str:
    """Add the pool, scaled from the one that was measured, to the memory estimate.

    Raises:
        CppmegaError: `graph-pool-does-not-fit`.
    """
    args, recipe = context.megatron_args, context.recipe
    if cuda_graphs(args) == "none":
        raise NotApplicable("no CUDA graphs are requested")
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
