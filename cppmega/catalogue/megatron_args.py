"""Questions about Megatron's parsed arguments, for a page's `when`.

Releases differ in the arguments that they have. A missing argument counts as not given.

Example:
    >>> from cppmega.catalogue.megatron_args import has_mtp, uses_dsa
    >>> Patch(..., when=lambda args: uses_dsa(args) and has_mtp(args))
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import cast

from cppmega.host import env
from cppmega.host.cuda_graphs import captures as captures
from cppmega.host.cuda_graphs import cuda_graphs as cuda_graphs


def variables(args: object) -> Mapping[str, str]:
    """The environment of the ranks if a launch is being checked, otherwise that of this process."""
    return cast(Mapping[str, str], getattr(args, "cppmega_variables", os.environ))


def layer_pattern(args: object) -> str:
    """A hybrid model's layer pattern, whatever its name in this release; "" for a GPT model."""
    names = ("hybrid_layer_pattern", "hybrid_override_pattern")  # the second until 0.16
    return next((str(p) for name in names if (p := getattr(args, name, None))), "")


def uses_dsa(args: object) -> bool:
    """Whether any layer's attention is DSA: the variant of a GPT model, or `D` in a pattern."""
    variant = getattr(args, "experimental_attention_variant", None)
    return variant == "dsa" or "D" in (getattr(args, "hybrid_layer_pattern", None) or "")


def shares_dsa_keys(args: object) -> bool:
    """Whether some DSA layers use the keys that others select, by Megatron's options or ours."""
    frequency = getattr(args, "dsa_indexer_topk_freq", None) or 1
    return uses_dsa(args) and (frequency > 1 or env.INDEX_CACHE.read(variables(args)))


def has_mtp(args: object) -> bool:
    """Whether the model predicts additional tokens (MTP)."""
    return bool(getattr(args, "mtp_num_layers", None))


def has_experts(args: object) -> bool:
    """Whether the model has MoE layers."""
    return bool(getattr(args, "num_experts", None))


def uses_fsdp(args: object) -> bool:
    """Whether parameters are sharded by Megatron's or PyTorch's FSDP, not Megatron's own DDP."""
    return any(getattr(args, f"use_{kind}", False) for kind in ("megatron_fsdp", "torch_fsdp2"))


def recomputes(args: object, module: str = "") -> bool:
    """Whether activations are recomputed in full or, given a name, that module selectively."""
    granularity = getattr(args, "recompute_granularity", None)
    if not module:
        return granularity == "full"
    return granularity == "selective" and module in (getattr(args, "recompute_modules", None) or ())
