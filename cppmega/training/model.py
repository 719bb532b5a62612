"""The model of a run, built by the release's own builders if it has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cppmega.recipe import Recipe


def model_config(recipe: Recipe, args: Any) -> Any | None:
    """The config that carries its builder, as `pretrain` expects from 0.19 on; None before that."""
    from megatron.training import argument_utils

    if not hasattr(argument_utils, "gpt_config_from_args"):
        return None
    make = getattr(argument_utils, f"{recipe.kind}_config_from_args")
    return make(args)


def model_provider(recipe: Recipe) -> Callable[..., Any]:
    """Build the function that `pretrain` of 0.17 and 0.18 calls for each stage of the model.

    The builders of those releases are in the git repository and not in the wheel.
    """
    build = _hybrid if recipe.kind == "hybrid" else _gpt

    def provide(
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        config: Any = None,
        pg_collection: Any = None,
    ) -> Any:
        from megatron.training import get_args
        from megatron.training.arguments import core_transformer_config_from_args

        args = get_args()
        config = config or core_transformer_config_from_args(args)
        own, options = build(args, config, vp_stage)
        return own(
            config=config,
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            pre_process=pre_process,
            post_process=post_process,
            parallel_output=True,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            rotary_percent=args.rotary_percent,
            rotary_base=args.rotary_base,
            pg_collection=pg_collection,
            vp_stage=vp_stage,
            **options,
        )

    return provide


def _hybrid(args: Any, config: Any, vp_stage: int | None) -> tuple[Any, dict[str, Any]]:
    """Class and own arguments of a hybrid model, which was called Mamba up to 0.17."""
    pattern = {"hybrid_layer_pattern": args.hybrid_layer_pattern}
    try:
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
        from megatron.core.models.hybrid.hybrid_model import HybridModel
    except ModuleNotFoundError:
        from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec
        from megatron.core.models.mamba.mamba_model import MambaModel

        return MambaModel, {**pattern, "mamba_stack_spec": mamba_stack_spec}
    return HybridModel, {**pattern, "hybrid_stack_spec": hybrid_stack_spec}


def _gpt(args: Any, config: Any, vp_stage: int | None) -> tuple[Any, dict[str, Any]]:
    """Class and own arguments of a GPT."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
        get_transformer_block_with_experimental_attention_variant_spec as variant_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel

    options = {
        "use_transformer_engine": True,
        "normalization": args.normalization,
        "qk_l2_norm": False,
        "vp_stage": vp_stage,
    }
    if args.experimental_attention_variant is not None:
        layers = variant_spec(config=config, vp_stage=vp_stage)
    else:
        layers = gpt_layer_specs.get_gpt_decoder_block_spec(config, **options)
    mtp = None
    if args.mtp_num_layers:
        last = gpt_layer_specs.get_gpt_decoder_layer_specs(config, **options)[-1]
        mtp = gpt_layer_specs.get_gpt_mtp_block_spec(
            config, last, use_transformer_engine=True, vp_stage=vp_stage
        )
    return GPTModel, {"transformer_layer_spec": layers, "mtp_block_spec": mtp}
