"""Run DSA's attention on meta tensors instead of GPU tensors, to find where the host reads them.

A meta tensor has no values, and nothing is communicated, so only the control flow is real.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

LENGTH, DOCUMENTS = 24, 4


@contextmanager
def groups(context: int) -> Iterator[None]:
    """Megatron's groups for the second of two ranks, without any communication.

    Args:
        context: context-parallel size, 1 or 2.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)  # type: ignore[no-untyped-call]
    parallel_state.initialize_model_parallel(
        context_parallel_size=context, create_gloo_process_groups=False
    )
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def first_read(
    context: int = 1,
    packed: bool = False,
    train: bool = True,
    recompute: bool = False,
    rope: bool = False,
    absorbed: bool = True,
    **config: Any,
) -> str:
    """Where a forward and backward first read or fill a GPU tensor; "" if nowhere.

    An earlier pass, which builds tables, is not watched.

    Args:
        context: context-parallel size.
        packed: one row of several documents instead of two rows.
        train: whether to train; False is an evaluation.
        recompute: whether the core attention is recomputed.
        rope: whether RoPE of packed sequences, which has a separate page, is watched as well.
        absorbed: True: the complete layer; False: only its core attention, with a key per head.
        config: fields of Megatron's configuration.
    """
    import torch

    from cppmega.calls import allowing
    from cppmega.proof.host_sync import HostSyncError, no_host_sync

    with groups(context):
        layer = _layer(context, recompute, **config).train(train)
        x = torch.randn(LENGTH // context, 1 if packed else 2, 32, device="meta")
        documents = _documents() if packed else None
        # Kernels decline meta tensors.
        kernels = ("dsa_attention_kernels", "dsa_indexer_kernels", "dsa_indexer_prologue")
        with _as_on_a_gpu(rope), allowing(*kernels, "mla_rope_kernel"):
            for watched in (False, True):
                try:
                    with no_host_sync("meta") if watched else nullcontext():
                        attend = _attended if absorbed else _attended_per_head
                        attend(layer, x.requires_grad_(), documents).sum().backward()
                except HostSyncError as read:
                    return str(read)
                except (NotImplementedError, RuntimeError) as no_values:
                    if watched or "meta" not in str(no_values):
                        raise
    return ""


def _attended(layer: Any, x: Any, documents: Any) -> Any:
    return layer(x, None, packed_seq_params=documents)[0]


def _attended_per_head(layer: Any, x: Any, documents: Any) -> Any:
    config = layer.config
    rows = x.unsqueeze(2).expand(*x.shape[:2], config.num_attention_heads, x.shape[2])
    wide = config.qk_head_dim + config.qk_pos_emb_head_dim
    return layer.core_attention(
        *(rows[..., :wide], rows[..., :wide], rows[..., : config.v_head_dim], None),
        x=x,
        qr=x[..., : config.q_lora_rank],
        attn_mask_type=layer.attn_mask_type,
        packed_seq_params=documents,
    )


def _layer(context: int, recompute: bool, **config: Any) -> Any:
    from cppmega.proof import small_models

    if context > 1:
        config |= {"context_parallel_size": context, "cp_comm_type": "allgather"}
    if recompute:
        config |= {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    layer = small_models.dsa_attention(dsa_indexer_loss_coeff=0.5, **config).to("meta")
    for part in layer.modules():
        if hasattr(part, "inv_freq"):  # not a buffer
            part.inv_freq = part.inv_freq.to("meta")
    return layer


def _documents() -> Any:
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    ends = torch.zeros(DOCUMENTS + 1, dtype=torch.int32, device="meta")
    both = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    return PackedSeqParams(
        qkv_format="thd", max_seqlen_q=LENGTH // 2, max_seqlen_kv=LENGTH // 2, **both
    )


@contextmanager
def _as_on_a_gpu(rope: bool) -> Iterator[None]:
    """Make Megatron allocate meta tensors; RoPE's table and the random state are not DSA's."""
    import torch
    from megatron.core.models.common.embeddings import rope_utils, rotary_pos_embedding
    from megatron.core.tensor_parallel import random

    without_rope = ("_apply_rotary_pos_emb_thd", lambda t, *_, **__: t)

    def of_rank(table: Any, dim: int, group: Any) -> Any:
        parts = table.chunk(2 * group.size(), dim)
        return torch.cat([parts[group.rank()], parts[-1 - group.rank()]], dim)

    with (
        mock.patch.object(torch.cuda, "current_device", lambda: torch.device("meta")),
        mock.patch.object(rope_utils, "get_pos_emb_on_this_cp_rank", of_rank),
        mock.patch.object(rotary_pos_embedding, "get_pos_emb_on_this_cp_rank", of_rank),
        nullcontext() if rope else mock.patch.object(rope_utils, *without_rope),
        mock.patch.object(random, "_get_cuda_rng_state", lambda *_, **__: torch.zeros(1)),
        mock.patch.object(random, "_set_cuda_rng_state"),
    ):
        yield
