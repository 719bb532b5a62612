"""A DSA layer of a tree, run on the CPU: its output, keys, loss and gradients in many calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from cppmega.catalogue import loader as catalogue
from cppmega.page import Page, Patch
from tests.support import pristine, python

LAYER = """
import hashlib, json, os, sys, warnings
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import random
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.experimental_attention_variant import dsa
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig

from cppmega.calls import allowing
from cppmega.proof import cpu_shims
from cppmega.proof.small_models import Norm, Projection

TENSOR, CONTEXT = TENSOR_AND_CONTEXT
cpu_shims.init_distributed(tensor=TENSOR, context=CONTEXT)
mock.patch.object(dsa, "rotate_activation", lambda x: x).start()
random._get_cuda_rng_state = lambda *device, **named: torch.zeros(1)
random._set_cuda_rng_state = lambda *state, **named: None
tensor = torch.tensor
torch.tensor = lambda *data, pin_memory=False, **named: tensor(*data, **named)
torch.Tensor.cuda = lambda self, **named: self
NEW = hasattr(dsa, "dsa_kernels")  # 0.19
LENGTH, HEADS = 24, 4
here = parallel_state.get_tensor_model_parallel_rank()
of_context = parallel_state.get_context_parallel_rank()


def rows(x):
    # The rows of this context-parallel rank: its part of the first half, and of the second.
    parts = x.chunk(2 * CONTEXT)
    return x if CONTEXT == 1 else torch.cat([parts[of_context], parts[-1 - of_context]])


def run(sparse=False, coefficient=0.5, train=True, mask=None, packed=None, recompute=False,
        absorbed=NEW, kernels=False, **fields):
    torch.manual_seed(0)
    gathered = {"cp_comm_type": "allgather"} if CONTEXT > 1 else {}
    config = MLATransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=HEADS, q_lora_rank=16, kv_lora_rank=16,
        qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=16, add_bias_linear=False,
        experimental_attention_variant="dsa", dsa_indexer_n_heads=8, dsa_indexer_head_dim=32,
        dsa_indexer_topk=6, rope_type="rope", tensor_model_parallel_size=TENSOR,
        context_parallel_size=CONTEXT, dsa_indexer_use_sparse_loss=sparse,
        dsa_indexer_loss_coeff=coefficient, **gathered, **fields,
    )
    parts = dsa.DSAIndexerSubmodules(Projection, Projection, Norm, Projection)
    indexer = ModuleSpec(module=dsa.DSAIndexer, submodules=parts)
    layer = dsa.DSAttention(
        config, dsa.DSAttentionSubmodules(indexer), 1, AttnMaskType.causal, "self", **gathered
    ).train(train)
    batch = 1 if packed else 2
    # All ranks draw the same, and take their heads and rows.
    width = 24 if absorbed else 20
    query = torch.randn(LENGTH, batch, HEADS, width)
    key = torch.randn(LENGTH, batch, 1 if absorbed else HEADS, width)
    value = torch.randn(LENGTH, batch, HEADS, 16)
    up = torch.randn(HEADS, 16, 16)
    query, value = (x.chunk(TENSOR, 2)[here] for x in (query, value))
    key, up = key if absorbed else key.chunk(TENSOR, 2)[here], up.chunk(TENSOR)[here]
    query, key, value, up = (
        x.contiguous().requires_grad_() for x in (rows(query), rows(key), rows(value), up)
    )
    hidden = rows(torch.randn(LENGTH, batch, 32))
    compressed = rows(torch.randn(LENGTH, batch, 16))
    thd = None
    if packed:
        ends = torch.tensor([0, *packed], dtype=torch.int32)
        thd = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends,
                              max_seqlen_q=LENGTH, max_seqlen_kv=LENGTH)
    causal = None if mask is not None else AttnMaskType.causal
    named = {"up_v_weight": up} if absorbed else {}
    chosen, attention = [], dsa._run_sparse_attention if NEW else dsa.unfused_dsa_fn

    def seen(*inputs, **named):
        keys = named["topk_indices"] if NEW else inputs[3]
        ends = torch.arange(keys.size(1))[:, None]
        chosen.append([sorted({i for i in row if 0 <= i <= at or NEW and i >= 0})
                       for b in keys.tolist() for at, row in enumerate(b)])
        return attention(*inputs, **named)

    def forward(query, key, value):
        return layer(query, key, None if absorbed else value, mask, hidden, compressed,
                     attn_mask_type=causal, packed_seq_params=thd, **named)

    helper = dsa.DSAIndexerLossLoggingHelper
    helper.tracker.clear()
    getattr(dsa, "_CPPMEGA_REACHED", set()).clear()
    name = "_run_sparse_attention" if NEW else "unfused_dsa_fn"
    attended = mock.patch.object(dsa, name, seen)
    on_kernels = by_kernels() if kernels else nullcontext()
    allowed = allowing("dsa_attention_kernels", "dsa_indexer_kernels")
    heard = warnings.catch_warnings(record=True)
    with attended, allowed, on_kernels as target, heard as said:
        warnings.simplefilter("always")
        if recompute:
            out = random.checkpoint(forward, False, query, key, value)
        else:
            out = forward(query, key, value)
        out.square().sum().backward()
    grads = [query.grad, key.grad, *(p.grad for p in layer.parameters())]
    losses = helper.tracker.get("values")
    return {
        "out": out.detach().tolist(),
        "grads": [None if g is None else g.tolist() for g in grads],
        "loss": None if losses is None else losses.tolist(),
        "chosen": chosen,
        "declined": [str(w.message) for w in said if "_kernels: " in str(w.message)],
        "reached": sorted(getattr(dsa, "_CPPMEGA_REACHED", ())),
        "targets": target.call_count if kernels else None,
    }


@contextmanager
def by_kernels():
    # The kernels, interpreted on the CPU; counts the targets of sparse losses with a key per head.
    import tests.ops.interpreted
    from cppmega.ops import dsa_indexer
    from cppmega.ops.dsa_indexer import per_head_triton as per_head

    possible = mock.patch.object(dsa_indexer, "obstacle", lambda q, k: None)
    with possible, mock.patch.object(per_head, "target", wraps=per_head.target) as target:
        yield target
"""
CASES = """
mask = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
holes = torch.rand(mask.shape, generator=torch.Generator().manual_seed(0)) < 0.3
holes[..., torch.arange(LENGTH), torch.arange(LENGTH)] = False
cases = {
    "own mask": dict(mask=mask),
    "mask with holes": dict(mask=mask | holes),
    "dense": {},
    "sparse": dict(sparse=True),
    "off": dict(coefficient=0.0),
    "evaluation": dict(train=False),
    "recomputed": dict(recompute=True),
}
if NEW:
    cases |= {
        "packed": dict(packed=(5, 6, 17, LENGTH)),
        "packed sparse": dict(packed=(5, 6, 17, LENGTH), sparse=True),
        "per token": dict(calculate_per_token_loss=True, sparse=True),
        "plain scores": dict(dsa_indexer_scoring_relu=False),
        "a key per head": dict(absorbed=False, sparse=True),
    }
print(json.dumps({name: run(**case) for name, case in cases.items()}))
"""
PARALLEL = """
print(json.dumps([run(), run(sparse=True)]))
"""


def answers(
    root: Path, code: str, tensor: int = 1, context: int = 1, interpreted: bool = False
) -> list[dict]:
    """What each rank of a run prints; `interpreted` lets it run Triton's kernels on the CPU."""
    head = LAYER.replace("TENSOR_AND_CONTEXT", f"{tensor}, {context}")
    done = python(root, head + code, nproc=tensor * context, interprets=interpreted)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line[:1] in "[{"]


def same(one: object, other: object, tolerance: float = 2e-5) -> bool:
    """Whether two nested lists of numbers are equal, relative to the largest number."""
    import torch

    if one is None or other is None or [] in (one, other):
        return one == other
    a, b = torch.tensor(one, dtype=torch.float64), torch.tensor(other, dtype=torch.float64)
    return a.shape == b.shape and bool((a - b).norm() <= tolerance * a.norm())


def assert_same(mine: dict, theirs: dict, name: str) -> None:
    """Two runs choose the same keys, and compute the same loss and gradients."""
    assert mine["chosen"] == theirs["chosen"], name
    assert same(mine["out"], theirs["out"]) and same(mine["loss"], theirs["loss"]), name
    for got, want in zip(mine["grads"], theirs["grads"], strict=True):
        assert same(got, want), name


@cache
def stock(version: str) -> dict[str, dict]:
    """The answer of every case on a version as released."""
    (found,) = answers(pristine(version), CASES)
    return found


@cache
def _pages() -> Mapping[str, Page]:
    return catalogue.load()


def patch_of(page: str) -> Patch:
    """The patch of a page; the catalogue is read once."""
    return _pages()[page].patch
