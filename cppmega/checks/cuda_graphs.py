"""CUDA graphs whose memory pool does not fit: NAM56R without pipeline stages.

Measured: at PP 1 the graphs of NAM56R keep a pool of 39.5 GiB beside everything else.
"""

from __future__ import annotations

from cppmega.check import Context, NotApplicable
from cppmega.errors import CppmegaError
from cppmega.memory import GIB, estimate
from cppmega.recipe import Recipe

AFTER: tuple[str, ...] = ("line_parses",)

_POOL = 39.5 * GIB
_OF = 8 * 4096 * 4096 * 56
"""Micro-batch, sequence, width, layers (two MTP depths of 2 among them) of that run."""
_H200 = 140 * GIB
"""Where no GPU can be asked."""


def check(context: Context) -> str:
    """Add the pool to the estimate.

    Raises:
        CppmegaError: `graph-pool-does-not-fit`.
    """
    _ = context.line
    args, recipe = context.process["line"]["args"], context.recipe
    if args.get("cuda_graph_impl") in (None, "none"):
        raise NotApplicable("no CUDA graph is asked for")
    if recipe is None or args["pipeline_model_parallel_size"] > 1:
        return "the pool's size is known for recipes without pipeline stages alone"
    pool, needs = _pool(recipe), estimate(recipe).total
    if pool + needs > _H200:
        raise CppmegaError(
            "graph-pool-does-not-fit",
            f"CUDA graphs of {recipe.name} at PP 1 keep a pool of about {pool / GIB:.1f} GiB "
            f"beside {needs / GIB:.1f} GiB.",
            "The run would end out of memory when the graphs are captured.",
            "--set cuda_graph_impl=none, or pipeline stages",
        )
    return f"a pool of about {pool / GIB:.1f} GiB"


def _pool(recipe: Recipe) -> float:
    layers = len(recipe.layout.trunk) + len(recipe.layout.mtp) * recipe.layout.depths
    return _POOL * recipe.micro_batch_size * recipe.seq_length * recipe.hidden_size * layers / _OF
