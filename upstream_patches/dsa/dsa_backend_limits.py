"""Refuse a DSA backend that is requested by name and cannot run.

What: With `--dsa-kernel-backend tilelang` or `cudnn`, building a DSA layer raises
    `dsa-backend-declines` if the configuration has anything that the backend declines: widths,
    heads per rank, dtype, top-k, the dense loss, the deterministic mode, a backend that cannot be
    imported, or `attention_backend=unfused` at the same time. What becomes known only in a call,
    such as a custom mask, raises the error in that call. Where Megatron has functions for these
    limits, they decide. Calls that `dsa_attention_kernels` and `dsa_indexer_kernels` serve instead
    of TileLang are not limited here.
Why: A hook that declines returns None, which is logged only at DEBUG level, and Megatron runs
    unfused attention or the reference indexer, in a run that is recorded as fused. Their fp32
    scores have shape `[batch, heads, seq, seq]`: NAM56R's sparse attention takes 213 ms and 60.6
    GiB compared with 5.1 ms and 0.5 GiB with a batch of 4 (one H200;
    benchmarks/results/dsa_sparse_mla_h200.md).
Upstream: Not sent: upstream's tests expect the fallback.
Remove: when Megatron refuses a requested backend that declines.
Numerics: none (bitwise): a run that is not refused computes the same as before.
"""

from __future__ import annotations

from cppmega.catalogue.megatron_args import uses_dsa
from cppmega.edits import appending, in_order, inserting
from cppmega.errors import CppmegaError
from cppmega.page import Edit, Patch, Source

FOLDER = "megatron/core/transformer/experimental_attention_variant"
DSA = f"{FOLDER}/dsa.py"
LAYER = f"{DSA}:DSAttention.__init__"

BUILT = """
from cppmega.runtime.dsa_backend_limits import refuse_configuration

refuse_configuration(config)
"""
ASKED = """
output = dsa_kernels.run_fused_absorbed_sparse_attention(
    config, query, key, topk_indices, softmax_scale, latent_v_channels, topk_length=topk_length
)
"""
DECLINED = """
if output is None:
    from cppmega.runtime.dsa_backend_limits import refuse_attention

    refuse_attention(config, query, key, latent_v_channels)
"""
PER_HEAD = """
return unfused_dsa_fn(
    query, key, value, topk_indices, softmax_scale, mask=mask, varlen_starts=varlen_starts,
    varlen_ends=varlen_ends, key_positions=key_positions
)
"""
NOT_ABSORBED = """
if dsa_kernels.use_fused_dsa_kernels(config):
    from cppmega.runtime.dsa_backend_limits import refuse_attention

    refuse_attention(config, query, key, value)
"""
REFERENCE_LOSS = "topk_indices, indexer_loss = compute_indexer_loss_with_reference_path()"
REFERENCE_KEYS = """
with torch.no_grad():
    index_scores, topk_indices = fused_qk_topk_naive(
        q, k, weights, self.index_topk, mask=float_mask, varlen_starts=varlen_starts,
        varlen_ends=varlen_ends, key_positions=key_positions,
        use_relu=self.config.dsa_indexer_scoring_relu,
    )
    del index_scores
"""
INDEXER = """
if use_fused_kernels:
    from cppmega.runtime.dsa_backend_limits import refuse_call

    refuse_call(self.config, "{0}", queries=q, keys=k, mask=float_mask)
"""


PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=LAYER,
            pins={
                "0.19.2": "15c0540610558523",
                "main-d98e8a64": "15c0540610558523",
                "dev-d48bd6be": "b85d530644fbffda",
            },
            edit=appending(BUILT),
        ),
        Edit(
            target=f"{DSA}:_run_sparse_attention",
            pins={
                "0.19.2": "c9586f62ba634f7d",
                "main-d98e8a64": "c9586f62ba634f7d",
                "dev-d48bd6be": "c9586f62ba634f7d",
            },
            edit=in_order(
                inserting(DECLINED, after=ASKED), inserting(NOT_ABSORBED, before=PER_HEAD)
            ),
            mark="",  # the layer that calls it was built
        ),
        Edit(
            target=f"{DSA}:DSAttention.forward",
            pins={
                "0.19.2": "bc3bc02b6b7ddf0c",
                "main-d98e8a64": "bc3bc02b6b7ddf0c",
                "dev-d48bd6be": "eb952f1eec56daa5",
            },
            edit=in_order(
                inserting(INDEXER.format("the indexer's loss"), before=REFERENCE_LOSS),
                inserting(INDEXER.format("the indexer"), before=REFERENCE_KEYS),
            ),
            mark="",
        ),
    ),
    after=("dsa_attention_kernels", "dsa_indexer_kernels"),
    reached="startup",
    when=uses_dsa,
    feature=(f"{FOLDER}/dsa_kernels.py:_log_declined_hook",),
)


def fixed_upstream(source: Source) -> bool:
    text = source.text(f"{FOLDER}/dsa_kernels.py:_log_declined_hook")
    return bool(text) and "debug" not in text


def verify() -> None:
    from types import SimpleNamespace
    from unittest import mock

    import torch
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.experimental_attention_variant import dsa

    from cppmega.proof.stand_ins import Arguments

    from .._dsa_layer import layer

    def refusal(call, *given, **named) -> str:
        try:
            call(*given, **named)
        except CppmegaError as error:
            assert error.name == "dsa-backend-declines", error
            return error.what
        raise AssertionError("a backend that cannot run is accepted")

    def build(**fields) -> None:
        config = Arguments(
            0, attention_backend="auto", dsa_kernel_backend="cudnn", bf16=True, kv_lora_rank=512,
            qk_pos_emb_head_dim=64, num_attention_heads=64, tensor_model_parallel_size=1,
            context_parallel_size=1, dsa_indexer_topk=64, kv_channels=8,
        )  # fmt: skip
        vars(config).update(fields)
        group = SimpleNamespace(tp=None, cp=None)
        with mock.patch.object(dsa, "build_module"):
            dsa.DSAttention(
                config, mock.Mock(), 1, AttnMaskType.causal, "self", pg_collection=group
            )

    build()  # within all limits
    build(dsa_kernel_backend="none", kv_lora_rank=64, attention_backend="unfused")
    assert "queries of 128" in refusal(build, kv_lora_rank=64)
    assert "unfused" in refusal(build, attention_backend="unfused")
    assert "bf16" in refusal(build, bf16=False)
    dense = {"dsa_indexer_loss_coeff": 1.0, "context_parallel_size": 2}
    assert "context parallelism" in refusal(build, **dense)

    q, k, weights = torch.randn(6, 1, 2, 4), torch.randn(6, 1, 4), torch.randn(6, 1, 2)
    x, heads = torch.randn(6, 1, 8), torch.randn(6, 1, 3, 4)
    own = torch.ones(1, 1, 6, 6, dtype=torch.bool).triu(1)
    named = {"attention_backend": "auto", "dsa_kernel_backend": "cudnn"}
    hooks = ("run_fused_dsa_attention", "run_fused_qk_topk", "run_fused_qk_topk_with_loss")
    with mock.patch.multiple(dsa.dsa_kernels, **{hook: lambda *a, **_: None for hook in hooks}):
        for coefficient in (0.0, 1.0):
            attention = layer(q, k, weights, 3, dsa_indexer_loss_coeff=coefficient, **named)
            assert "mask (1, 6, 6)" in refusal(attention, heads, heads, heads, own, x, x)
    rest = ("up_v_weight", "mask", "varlen_starts", "varlen_ends", "key_positions")
    call = {
        "query": torch.randn(1, 1, 16, 6), "key": torch.randn(1, 1, 1, 6), "value": None,
        "topk_indices": torch.zeros(1, 1, 2, dtype=torch.int32), "softmax_scale": 1.0,
        "config": SimpleNamespace(kv_lora_rank=4, **named), **dict.fromkeys(rest),
    }  # fmt: skip
    call["up_v_weight"] = torch.randn(16, 2, 4)
    with mock.patch.object(dsa.dsa_kernels, "run_fused_absorbed_sparse_attention") as hook:
        hook.return_value = None
        message = refusal(dsa._run_sparse_attention, absorbed_mla=True, **call)
    assert "queries (1, 1, 16, 6) in float32" in message
    call |= {"key": heads[:1], "value": heads[:1], "query": heads[:1]}
    assert "values" in refusal(dsa._run_sparse_attention, absorbed_mla=False, **call)
