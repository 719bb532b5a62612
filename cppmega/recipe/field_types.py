"""The types of a recipe's fields: no typing mistake may become a default."""

from __future__ import annotations

from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from cppmega.errors import did_you_mean
from cppmega.recipe.fields import Fields, invalid

_POSITIVE = (
    *("hidden_size", "ffn_hidden_size", "num_attention_heads", "seq_length", "vocab_size"),
    *("kv_channels", "num_query_groups", "make_vocab_size_divisible_by", "rotary_base"),
    *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    *("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk"),
    *("num_experts", "moe_router_topk", "moe_ffn_hidden_size"),
    *("moe_shared_expert_intermediate_size", "document_multiple", "train_iters"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"),
    *("micro_batch_size", "global_batch_size"),
)


def check(recipe: Fields) -> None:
    """Words must be known, values of their type and counts positive.

    Raises:
        CppmegaError: `recipe-invalid`.
    """
    for name, hint in _hints().items():
        value = getattr(recipe, name)
        if not _fits(value, hint):
            words = _words(hint)
            raise invalid(
                recipe,
                f"{name}={value!r} is {_wanted(hint)}." + did_you_mean(str(value), words),
                "Megatron would refuse it, or read something else.",
            )
        if name in _POSITIVE and value is not None and value < 1:
            raise invalid(recipe, f"{name}={value!r} must be above 0.", "It counts something.")


@cache
def _hints() -> dict[str, Any]:
    return get_type_hints(Fields)


def _fits(value: object, hint: Any) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return value in inner
    if origin in (UnionType, Union):  # what a Literal makes with | is the older one of the two
        return any(_fits(value, one) for one in inner)
    if origin is tuple:
        many = inner[1:] == (...,)
        hints = inner[:1] * len(value) if many and isinstance(value, tuple) else inner
        return (
            isinstance(value, tuple) and len(value) == len(hints) and all(map(_fits, value, hints))
        )
    if isinstance(value, bool) and hint is not bool:
        return False
    return isinstance(value, (int, float) if hint is float else hint)


def _words(hint: Any) -> tuple[str, ...]:
    """The words that a field may hold, if it holds words."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    return tuple(word for part in get_args(hint) for word in _words(part))


def _wanted(hint: Any) -> str:
    if _words(hint):
        return "none of " + ", ".join(_words(hint))
    return "no " + (hint.__name__ if isinstance(hint, type) else str(hint))
