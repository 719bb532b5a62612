"""Kernels and autograd functions by family, each with a reference in plain torch.

A family is a folder: its functions are in `__init__`, the reference in `naive`, the backward passes
in `autograd`, and what is compiled in files that end with `_triton`. Families share only `common`.
They depend neither on Megatron nor on the engine.
"""

from collections.abc import Iterator

from cppmega.host.moved_modules import keep_names

_OF_FAMILIES = {
    "dsa_attention": "autograd backward_triton bits_triton forward_triton naive order_triton "
    "per_head per_head_tiles per_head_triton problem wide_backward_triton wide_tiles wide_triton",
    "dsa_indexer": "autograd dense_triton naive per_head_triton sparse_triton topk_triton",
    "linear_cross_entropy": "autograd chunks external naive",
    "m2rnn": "autograd backward_triton forward_triton naive",
    "mamba3": "naive operands operands_triton scan",
    "mhc": "aggregate_triton autograd naive parts_triton projection_triton sinkhorn_triton "
    "streams_gradient_triton update_triton weights_triton",
    "ngram_hash": "naive",
    "packed_conv": "naive",
}
"""Family -> modules whose names began with that of the family; `naive` ended with `reference`."""

_POINTWISE = (
    "dsa_indexer_prologue dsa_indexer_prologue_triton grouped_linear hadamard hadamard_triton "
    "linear rope rope_triton router_gating router_gating_triton split_columns split_columns_triton"
)
_OTHERS = {
    "dsa_indexer_bits_triton": "common.bits_triton",
    "dsa_indexer_bounds": "common.bounds",
    "dsa_indexer_device": "common.device",
    "dsa_indexer_problem": "dsa_indexer.problem common.bounds",
    "dsa_indexer_prologue_reference": "pointwise.dsa_indexer_prologue_naive",
    "dsa_indexer_tiles_triton": "dsa_indexer.tiles_triton common.tiles_triton",
    "kernel_choice": "common.dispatch",
    "launch_device": "common.launch",
    "linear_cross_entropy_triton": "linear_cross_entropy.kernels_triton",
    "main_grad": "common.main_grad",
    "mamba3_kernels": "mamba3.external",
    "mamba3_scan_autograd": "mamba3.autograd",
    **{
        f"mamba3_scan_{name}_triton": f"mamba3.{name}_triton"
        for name in ("angles", "forward", "rows", "states", "tiles", "values")
    },
    "mamba3_scan_sizes": "common.mamba3_scan_sizes",
    "ngram_hash_triton": "ngram_hash.kernels_triton",
    "once_differentiable": "common.once_differentiable",
    "packed_conv_triton": "packed_conv.kernels_triton",
    "rope_reference": "pointwise.rope_naive",
    "router_gating_reference": "pointwise.router_gating_naive",
    "token_rows": "common.rows",
    "weight_gradient": "common.weight_gradient",
}


def _moved() -> Iterator[tuple[str, str]]:
    """The names in the release before this one, and where the modules are now."""
    for family, names in _OF_FAMILIES.items():
        for name in names.split():
            old = "reference" if name == "naive" else name
            yield f"{family}_{old}", f"{__name__}.{family}.{name}"
    yield from ((name, f"{__name__}.pointwise.{name}") for name in _POINTWISE.split())
    for old, new in _OTHERS.items():
        yield old, " ".join(f"{__name__}.{each}" for each in new.split())


keep_names(__name__, dict(_moved()))
