"""Plain torch in place of what needs a GPU: attention, norms, and the selective scan.

Imported in the process that runs a tree, never by pytest itself. Everything around them is the
tree's own: models, parallel layers, schedules, MTP, recompute, optimizers and checkpoints.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.ssm import mamba_context_parallel, mamba_mixer
from megatron.core.tensor_parallel import random
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch._dynamo import trace_rules

from cppmega.proof import cpu_shims
from examples.smoke.model import DocumentAttention
from tests.configurations.batches import rows
from tests.support.te_stand_ins import of_sequence_parts

LATE = (
    "cppmega.features.embeddings.layer",
    "cppmega.features.linear_cross_entropy.heads",
    "cppmega.features.mhc.depths",
    "cppmega.features.mhc.layers",
    "cppmega.features.mixers.hybrid",
    "cppmega.features.mixers.m2rnn",
    "cppmega.features.mixers.mamba3",
    "cppmega.ops.dsa_attention.naive",
    "cppmega.ops.dsa_indexer.naive",
    "cppmega.training.structure_datasets",
    "megatron.core.datasets.blended_megatron_dataset_builder",
    "megatron.core.dist_checkpointing.exchange_utils",
    "megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader",
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",
    "megatron.core.models.hybrid.hybrid_model",
    "megatron.core.models.mimo",
)
"""What every rank would import for itself, when it first needs it."""


def import_late() -> None:
    """Import it in the process of which ranks are forks."""
    for name in LATE:
        with contextlib.suppress(ImportError):  # of another release
            importlib.import_module(name)
    # A rank would compute it, which takes half a second, although nothing is compiled.
    trace_rules.get_torch_obj_rule_map()


def install() -> None:
    """Replace them in the imported megatron."""
    cpu_shims.shim()
    mock.patch.object(random, "_get_cuda_rng_state", return_value=None).start()
    mock.patch.object(random, "_set_cuda_rng_state").start()
    backends: Any = importlib.import_module("megatron.core.models.backends")
    backends.LocalSpecProvider.core_attention = lambda self: Attention
    backends.LocalSpecProvider.layer_norm = lambda self, *args, **kwargs: Norm
    for name in ("transformer.transformer_block", "models.gpt.gpt_layer_specs"):
        importlib.import_module(f"megatron.core.{name}")
    block: Any = importlib.import_module("megatron.core.transformer.transformer_block")
    block.LayerNormImpl = Norm
    for name in ("models.hybrid.hybrid_block", "ssm.mamba_block"):
        try:
            stack: Any = importlib.import_module(f"megatron.core.{name}")
        except ModuleNotFoundError:
            continue  # other releases have it
        stack.TENorm = Norm
    _mamba()


class Norm:
    """A norm that sequence parallelism may be used with, as Transformer Engine's."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> Any:
        norm = torch.nn.LayerNorm(hidden_size, eps=eps)
        of_sequence_parts(norm.parameters(), config)
        return norm


class Attention(DocumentAttention):
    """Causal attention within documents; a context rank gathers what the others hold.

    Megatron's own for the CPU takes neither packs nor context parallelism.
    """

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        **unused: Any,
    ) -> torch.Tensor:
        """Tensors [s, b, heads, width], or [t, heads, width] of a pack."""
        packed = packed_seq_params is not None
        if packed:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        ranks, rank = self.config.context_parallel_size, 0
        length = query.size(0) * ranks
        bounds = _bounds(packed_seq_params) if packed else [0, length]
        if ranks > 1:
            group = parallel_state.get_context_parallel_group()
            rank = group.rank()
            order = torch.cat([rows(bounds, ranks, r) for r in range(ranks)]).argsort()
            key, value = (_gathered(x, group)[order] for x in (key, value))
        heads = query.size(2) // key.size(2)
        key, value = (x.repeat_interleave(heads, dim=2) for x in (key, value))
        here = rows(bounds, ranks, rank)
        document = torch.bucketize(torch.arange(length), torch.tensor(bounds[1:]), right=True)
        seen = document[here, None] == document[None]
        seen &= here[:, None] >= torch.arange(length)[None]
        scores = torch.einsum("qbhd,kbhd->bhqk", query.float(), key.float()) * self.scale
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1).to(value.dtype)
        out = torch.einsum("bhqk,kbhd->qbhd", weights, value).flatten(2)
        return out.squeeze(1) if packed else out


def _bounds(pack: Any) -> list[int]:
    padded = pack.cu_seqlens_q_padded
    return (pack.cu_seqlens_q if padded is None else padded).tolist()


def _gathered(x: torch.Tensor, group: Any) -> torch.Tensor:
    return tensor_parallel.gather_from_sequence_parallel_region(x, group=group)


# -- Mamba ----------------------------------------------------------------------------------------

_FORMS = {  # what einops is asked for
    "l b d -> b l d": lambda x, **sizes: x.transpose(0, 1),
    "b l d -> l b d": lambda x, **sizes: x.transpose(0, 1),
    "d 1 w -> d w": lambda x, **sizes: x.squeeze(1),
    "l b (g n) -> l b (g r n)": lambda x, g, n, r: (
        x.unflatten(-1, (g, n)).repeat_interleave(r, dim=-2).flatten(-2)
    ),
}


def _mamba() -> None:
    for module in (mamba_mixer, mamba_context_parallel):
        module.HAVE_EINOPS = True
        module.rearrange = module.repeat = lambda x, form, **sizes: _FORMS[form](x, **sizes)
    mamba_mixer.HAVE_MAMBA_SSM = True
    mamba_mixer.ExtendedRMSNorm = GroupNorm
    mamba_mixer.mamba_split_conv1d_scan_combined = scan
    mamba_mixer._check_mamba_sequence_packing_support = lambda **kwargs: (True, None)
    mamba_context_parallel.tex = SimpleNamespace(
        thd_get_partitioned_indices=lambda bounds, total, ranks, rank: rows(
            bounds.tolist(), ranks, rank
        )
    )
    mamba_context_parallel.is_te_min_version = lambda *args, **kwargs: True


class GroupNorm(torch.nn.Module):
    """RMS norm of each group of channels, in place of mamba_ssm's."""

    def __init__(self, size: int, eps: float, group_size: int, dtype: Any, **unused: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=dtype))
        self.eps, self.group_size = eps, group_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> the same."""
        groups = x.float().unflatten(-1, (-1, self.group_size))
        normed = groups * (groups.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return normed.flatten(-2).to(x.dtype) * self.weight

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> Any:
        """Split along the channels, as the tree's own."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets)


def scan(
    zxBCdt: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    dt_bias: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    headdim: int,
    ngroups: int,
    seq_idx: torch.Tensor | None = None,
    **unused: Any,
) -> torch.Tensor:
    """What `mamba_split_conv1d_scan_combined` computes, token by token."""
    heads, length = A.numel(), zxBCdt.size(1)
    inner = heads * headdim
    states = (zxBCdt.size(-1) - 2 * inner - heads) // 2
    z, xBC, dt = zxBCdt.float().split([inner, inner + 2 * states, heads], dim=-1)
    document = torch.zeros(1, length) if seq_idx is None else seq_idx
    x, B, C = _convolved(xBC, weight, bias, document).split([inner, states, states], dim=-1)
    x, dt = x.unflatten(-1, (heads, headdim)), torch.nn.functional.softplus(dt + dt_bias)
    B, C = (
        v.unflatten(-1, (ngroups, -1)).repeat_interleave(heads // ngroups, dim=2) for v in (B, C)
    )
    decay = (dt * A).exp()
    state, out = torch.zeros(()), []
    for t in range(length):
        if t and document[0, t] != document[0, t - 1]:
            state = torch.zeros(())
        state = state * decay[:, t, :, None, None]
        state = state + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        out.append((state * C[:, t, :, None]).sum(-1) + D[:, None] * x[:, t])
    gated = torch.stack(out, 1).flatten(2) * torch.nn.functional.silu(z)
    return gated.to(zxBCdt.dtype)


def _convolved(
    xBC: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, document: torch.Tensor
) -> torch.Tensor:
    """The causal convolution, which does not look back into another document."""
    width, length = weight.size(-1), xBC.size(1)
    total = bias.float().expand_as(xBC)
    for back in range(width):
        past = torch.nn.functional.pad(xBC, (0, 0, back, 0))[:, :length]
        before = torch.nn.functional.pad(document, (back, 0), value=-1)[:, :length]
        same = (before == document)[..., None]
        total = total + past * same * weight[:, width - 1 - back].float()
    return torch.nn.functional.silu(total)
