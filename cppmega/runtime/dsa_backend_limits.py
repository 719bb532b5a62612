"""Refuse what the DSA backend named by a run cannot do, instead of taking Megatron's slow path.

Megatron asks the backend at every call. If it declines, only a debug-level line is logged, and the
run continues with fp32 scores of all keys. Limits that the configuration shows are refused when a
layer is built; those that only a call shows (an explicit mask, types, layouts) at the call. Calls
that the pages `dsa_attention_kernels` and `dsa_indexer_kernels` serve do not reach TileLang, so its
limits do not apply to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from cppmega.errors import CppmegaError
from cppmega.ops import dsa_attention
from cppmega.ops.common.device import gpu_of

VARIANT = "megatron.core.transformer.experimental_attention_variant"
_ATTENTION, _INDEXER = "_cppmega_asks_backend", "_cppmega_serves"
"""Functions that the pages add to Megatron's `dsa`."""
_RELEASED = 576, 512
"""Query and value widths of TileLang's attention; Megatron's hook compares with them."""
_KEYS = 64
"""Keys that TileLang's attention processes at a time; Megatron's hook compares with it."""
_INDEX_HEADS = 128
"""Maximum number of heads of cppmega's indexer, and their maximum width."""


def refuse_configuration(config: Any) -> None:
    """Refuse a configuration that the backend it names cannot run.

    Args:
        config: Megatron's configuration of the model.

    Raises:
        CppmegaError: `dsa-backend-declines`.
    """
    backend = getattr(config, "dsa_kernel_backend", "none")  # absent from a partial configuration
    if backend != "none" and (found := list(limits(config))):
        raise cannot_run(backend, "; ".join(found))


def refuse_call(config: Any, part: str, **tensors: Tensor | None) -> None:
    """Refuse a call that the backend has declined and that Megatron would run without it.

    Args:
        config: Megatron's configuration of the model.
        part: the part of DSA, such as "the indexer".
        tensors: the tensors passed to the backend, by name.

    Raises:
        CppmegaError: `dsa-backend-declines`.
    """
    if _dsa("dsa_kernels").use_fused_dsa_kernels(config):
        given = [
            f"{name} {tuple(tensor.shape)} in {tensor.dtype}".replace("torch.", "")
            for name, tensor in tensors.items()
            if tensor is not None
        ]
        raise cannot_run(config.dsa_kernel_backend, f"{part} of this call: {', '.join(given)}")


def refuse_attention(config: Any, query: Tensor, key: Tensor, value: Tensor | int) -> None:
    """Refuse attention that the backend declined, or was not asked for, and that no page serves.

    Args:
        config: Megatron's configuration of the model.
        query: `[sq, b, heads, d]`, or packed `[t, heads, d]`.
        key: in the same layout.
        value: likewise; or, absorbed, the number of the key's columns that form it.

    Raises:
        CppmegaError: `dsa-backend-declines`.
    """
    obstacle = dsa_attention.obstacle(query, key, value) if query.is_cuda else None
    served = config.dsa_kernel_backend == "tilelang" and hasattr(_dsa("dsa"), _ATTENTION)
    if obstacle is not None or not served:
        values = value if isinstance(value, Tensor) else key[..., :value]
        refuse_call(config, "the attention", queries=query, keys=key, values=values)


def cannot_run(backend: str, limit: str) -> CppmegaError:
    """Return the error for a limit."""
    return CppmegaError(
        "dsa-backend-declines",
        f"The DSA backend {backend} cannot run {limit}.",
        "Megatron would continue without it, with fp32 scores of all keys, in a run that is "
        "recorded as fused.",
        "--dsa-kernel-backend none, with the patches dsa_attention_kernels and "
        "dsa_indexer_kernels, or a configuration within the limit",
    )


def limits(config: Any) -> Iterator[str]:
    """Yield the parts of a configuration that its backend cannot run, as clauses."""
    backend = config.dsa_kernel_backend
    if str(config.attention_backend).endswith("unfused"):
        yield "with attention_backend=unfused, which uses no backend"
        return
    try:
        module = _dsa("dsa_kernels")._load_backend(config)
    except RuntimeError as error:
        yield f"here: {error}"
        return
    of = _of_tilelang if backend == "tilelang" else _of_cudnn
    yield from of(config, module)


def _of_tilelang(config: Any, module: ModuleType) -> Iterator[str]:
    dsa, ops = _dsa("dsa"), module.tilelang_dsa
    half = config.bf16 or config.fp16
    gpu = gpu_of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    fits = dsa_attention.absorbed_obstacle(_heads(config), *_widths(config), gpu) is None
    if not (hasattr(dsa, _ATTENTION) and half and fits):
        yield from _attention_of_tilelang(config, ops)
    sizes = config.dsa_indexer_n_heads, config.dsa_indexer_head_dim
    if not (hasattr(dsa, _INDEXER) and half and max(sizes) <= _INDEX_HEADS):
        yield from _indexer_of_tilelang(config, ops)


def _attention_of_tilelang(config: Any, ops: ModuleType) -> Iterator[str]:
    if ops.SparseMLA is None:
        yield "its sparse attention, whose kernels cannot be imported"
    if not config.bf16:
        yield "attention in another type than bf16"
    widths = _widths(config)
    widened = hasattr(ops, "_cppmega_declines")  # by the page dsa_sparse_mla_widths
    if widths not in ((_RELEASED, (128, 64), (192, 128)) if widened else (_RELEASED,)):
        yield f"queries of {widths[0]} with values of {widths[1]}"
    elif widths != _RELEASED and config.deterministic_mode:
        yield f"values of {widths[1]} in the deterministic mode, as it sums by atomics"
    heads = _heads(config)
    if not ops._is_supported_sparse_mla_head_count(max(heads, 16)):
        yield f"{heads} heads on a rank"
    if config.dsa_indexer_topk % _KEYS:
        yield f"{config.dsa_indexer_topk} keys of a query, not a multiple of {_KEYS}"


def _indexer_of_tilelang(config: Any, ops: ModuleType) -> Iterator[str]:
    if ops.lighting_indexer is None:
        yield "its indexer, whose kernels cannot be imported"
        return
    if not config.bf16:
        yield "an indexer in another type than bf16"
    if not config.dsa_indexer_loss_coeff:
        return
    if not config.dsa_indexer_use_sparse_loss:
        yield "the indexer's loss over all keys (without --dsa-indexer-use-sparse-loss)"
    if not ops.is_supported_indexer_bwd_head_count(config.dsa_indexer_n_heads):
        yield f"the gradients of {config.dsa_indexer_n_heads} index heads"


def _of_cudnn(config: Any, module: ModuleType) -> Iterator[str]:
    if not config.bf16:
        yield "attention in another type than bf16"
    width, value = _widths(config)
    if not module._supports_flash_mla_value_layout(width, value):
        yield f"queries of {width} with values of {value}"
    heads = _heads(config)
    if torch.cuda.is_available() and module._flash_mla_head_padding(heads) is None:
        yield f"{heads} heads on a rank of this GPU"
    dense = config.dsa_indexer_loss_coeff and not config.dsa_indexer_use_sparse_loss
    if dense and config.context_parallel_size > 1:
        yield "the indexer's loss over all keys with context parallelism"
    if dense and config.dsa_indexer_topk_freq > 1:
        yield "the indexer's loss over all keys with keys that layers share"


def _widths(config: Any) -> tuple[int, int]:
    """The widths of an absorbed query and of its value."""
    latent = int(config.kv_lora_rank)
    return latent + int(config.qk_pos_emb_head_dim), latent


def _heads(config: Any) -> int:
    return int(config.num_attention_heads // config.tensor_model_parallel_size)


def _dsa(name: str) -> ModuleType:
    return import_module(f"{VARIANT}.{name}")
