"""Questions about Megatron's parsed arguments, for rules and for a page's `when`.

Releases differ in the arguments that they have. A missing argument counts as not given.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import cast

from cppmega.host import env
from cppmega.host.cuda_graphs import captures as captures
from cppmega.host.cuda_graphs import cuda_graphs as cuda_graphs
from cppmega.host.cuda_graphs import graph_parts as graph_parts
from cppmega.sizes import mixers


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


def mtp_depths(args: object) -> int:
    """The number of MTP depths, by the argument or by the marks of a hybrid model's pattern."""
    return max(getattr(args, "mtp_num_layers", None) or 0, layer_pattern(args).count("/"))


def has_own_mixers(args: object) -> bool:
    """Whether sizes of mixers are stated that Megatron lacks.

    Raises:
        CppmegaError: `sizes-misstated`.
    """
    stated = variables(args)
    return mixers.mamba3(stated) is not None or mixers.m2rnn(stated) is not None


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


def captures_some_layers(args: object) -> str:
    """The parts of local CUDA graphs that hold either a GPT's dense layers or its MoE layers.

    Given `attn` or `mlp`, they hold dense layers as a whole, and given `moe`, MoE layers; of other
    MoE layers, they hold the router without the attention. Transformer Engine's hold the attention
    of all layers. Empty where the graphs hold all layers, or none.
    """
    if cuda_graphs(args) != "local" or layer_pattern(args) or not has_experts(args):
        return ""
    frequency = getattr(args, "moe_layer_freq", None) or 1
    both = len(set(frequency)) > 1 if isinstance(frequency, list) else frequency > 1
    parts = graph_parts(args)
    some = both and ("moe" in parts) != bool(parts & {"attn", "mlp"})
    return ", ".join(sorted(parts)) if some else ""
