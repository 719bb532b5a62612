"""What Megatron's parsed arguments, or a model's configuration, mean: questions and synonyms.

Rules and pages ask them. Releases differ in the options that they have and in their names. A
missing one counts as not given, and values that Megatron replaces when it checks its arguments are
read as their replacements.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import cast

from cppmega.host import env
from cppmega.sizes import mixers

OTHER_NAMES = {
    "accumulate_allreduce_grads_in_fp32": "grad_reduce_in_fp32",
    "apply_layernorm_1p": "layernorm_zero_centered_gamma",
    "check_for_nan_in_loss_and_grad": "check_for_nan_in_grad",
    "cuda_graph_scope_deprecated": "cuda_graph_scope",
    "ddp_average_in_collective": "average_in_collective",
    "ddp_bucket_size": "bucket_size",
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    "fp4_param_gather": "fp4_param",
    "fp8_param_gather": "fp8_param",
    "heterogeneous_layers_config_path": "heterogeneous_block_specs",
    "hybrid_override_pattern": "hybrid_layer_pattern",  # the argument's name until 0.16
    "norm_epsilon": "layernorm_epsilon",
    "num_experts": "num_moe_experts",
}
"""Argument of Megatron's parser -> the field of a configuration, or the argument, that states the
same."""


def synonyms(name: str) -> list[str]:
    """The other names of an argument, or of a configuration's field."""
    return [
        other for pair in OTHER_NAMES.items() for one, other in (pair, pair[::-1]) if one == name
    ]


def destination(flag: str) -> str:
    """The name of an option of Megatron's command line among its parsed arguments."""
    name = flag.removeprefix("--").replace("-", "_")
    return {"fp8_format": "fp8", "fp4_format": "fp4"}.get(name, name)


_MODULES = ("cuda_graph_modules", "cuda_graph_scope_deprecated")  # from 0.18 on
_SCOPE = "cuda_graph_scope"  # until 0.17
_WHOLE_STEP = "full_iteration"


def cuda_graphs(args: object) -> str:
    """How CUDA graphs are captured: none, local, transformer_engine or full_iteration."""
    older = {"enable_cuda_graph": "local", "external_cuda_graph": "transformer_engine"}
    named = next((how for name, how in older.items() if getattr(args, name, False)), "none")
    given = str(getattr(args, "cuda_graph_impl", None) or named)
    given = named if given == "none" else given
    replaces = any(_WHOLE_STEP in _names(args, option) for option in _MODULES)
    if replaces or (given == "local" and _WHOLE_STEP in _names(args, _SCOPE)):
        return _WHOLE_STEP
    return given


def graph_parts(args: object) -> set[str]:
    """The named parts of layers that are captured one by one; empty: complete layers."""
    stated = (_names(args, option) for option in (*_MODULES, _SCOPE))
    return next((names for names in stated if names), set()) - {"full"}


def captures(args: object, part: str) -> bool:
    """Whether training captures a part of layers (attn, mlp, moe, mamba, ...) in CUDA graphs."""
    how, parts = cuda_graphs(args), graph_parts(args)
    if how in ("none", _WHOLE_STEP):
        return how == _WHOLE_STEP
    inference = getattr(args, "inference_cuda_graph_scope", None)
    # Local graphs of blocks of layers are those of inference; no training step uses them.
    of_blocks = how == "local" and getattr(inference, "name", inference) == "block"
    return part in parts if parts else not of_blocks


def _names(args: object, option: str) -> set[str]:
    given = getattr(args, option, None) or ()
    if isinstance(given, str):
        given = given.split(",")
    elif not isinstance(given, (list, tuple, set)):
        given = (given,)
    return {str(getattr(each, "name", each)) for each in given}


def variables(args: object) -> Mapping[str, str]:
    """The environment of the ranks if a launch is being checked, otherwise that of this process."""
    return cast(Mapping[str, str], getattr(args, "cppmega_variables", os.environ))


def layer_pattern(args: object) -> str:
    """A hybrid model's layer pattern, whatever its name in this release; "" for a GPT model."""
    names = ("hybrid_layer_pattern", "hybrid_override_pattern")  # the second until 0.16
    return next((str(p) for name in names if (p := getattr(args, name, None))), "")


def has_mla(args: object) -> bool:
    """Whether any layer has multi-latent attention: each of a GPT, `+` and `D` of a pattern."""
    pattern = layer_pattern(args)
    attends = not pattern or bool(set("+D") & set(pattern))
    return attends and bool(getattr(args, "multi_latent_attention", False))


def uses_dsa(args: object) -> bool:
    """Whether any layer's attention is DSA: the variant of a GPT model, or `D` in a pattern."""
    variant = getattr(args, "experimental_attention_variant", None)
    return variant == "dsa" or "D" in (getattr(args, "hybrid_layer_pattern", None) or "")


def fuses_accumulation(args: object) -> bool:
    """Whether the run adds gradients of weights to `main_grad` where they are computed."""
    return bool(getattr(args, "gradient_accumulation_fusion", False))


def absorbs_dsa(args: object) -> bool:
    """Whether DSA layers have one latent key for all heads: with 0.19, unless a page changes it."""
    return uses_dsa(args) and not env.DSA_KEY_PER_HEAD.read(variables(args))


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
