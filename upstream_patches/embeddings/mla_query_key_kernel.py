"""Write MLA's queries, keys and values once, and so their gradients, in two kernels each way.

What: In layers of full MLA, the queries, and the keys with the values, each take one kernel of
    `cppmega.ops.pointwise.mla_heads` per direction on a GPU, whose results and gradients are those
    of stock to the bit. The part of the keys that all heads share is rotated by Megatron's
    function, which `mla_rope_kernel` computes. Packed sequences, inference, pairs of neighbouring
    columns and Megatron's fused RoPE are computed by Megatron's code. Another call that the kernels
    do not support ends the run with the reason, or, with `--allow-fallback mla_query_key_kernel`,
    is computed by Megatron's code.
Why: Megatron splits both projections, rotates a part of the queries, joins it and the keys' part
    with the parts that are not rotated, and copies the values; the backward pass joins the
    gradients of both projections again. With `mla_rope_kernel`, that is four launches over all
    heads forward and four backward; these are two and three, and the sum of the keys' gradient over
    heads remains torch's. The rotated part of the queries is written and read once less in each
    direction, and concatenations of such rows reach a quarter of an H200's bandwidth: forward and
    backward take 4.13 ms for 8,192 tokens of DeepSeek-V3, and 1.14 here (`mla_heads_h200`).
Upstream: Not sent: Megatron has fused kernels for this, with YaRN alone (`--apply-rope-fusion`).
Remove: when upstream joins the parts in one kernel with unfused RoPE's results.
Numerics: none (bitwise)
"""

from typing import Any

from cppmega.catalogue.megatron_args import layer_pattern, uses_dsa
from cppmega.edits import inserting
from cppmega.page import Edit, Patch, Source

from ._rotation import rotates

TARGET = (
    "megatron/core/transformer/multi_latent_attention.py:"
    "MLASelfAttention.get_query_key_value_tensors.qkv_up_proj_and_rope_apply"
)


def has_full_mla(args: Any) -> bool:
    """Whether layers that are not DSA's have MLA whose RoPE Megatron does not fuse."""
    pattern = layer_pattern(args)
    return rotates(args) and ("+" in pattern if pattern else not uses_dsa(args))


PATCH = Patch(
    purpose="speed",
    edits=(
        Edit(
            target=TARGET,
            pins={
                "0.15.3": "9ae518f8dc92ac91",
                "0.16.1": "13b75ed24cafc90e",
                "0.17.1": "13b75ed24cafc90e",
                "0.18.2": "13b75ed24cafc90e",
                "0.19.2": "6e148c538ad80521",
            },
            edit=inserting(
                """
                if (
                    q.is_cuda
                    and cu_seqlens_q is None
                    and inference_context is None
                    and not self.config.rotary_interleaved
                    and _cppmega_served(
                        "mla_query_key_kernel",
                        _cppmega_mla_heads.obstacle(q, kv, k_pos_emb, rotary_pos_emb),
                        q=q,
                        kv=kv,
                        k_pos_emb=k_pos_emb,
                        rotary_pos_emb=rotary_pos_emb,
                    )
                ):
                    turned = _cppmega_rope_utils._apply_rotary_pos_emb_bshd(
                        k_pos_emb, rotary_pos_emb, False, True, mscale
                    )
                    return _cppmega_mla_heads.query_key_value(
                        q, kv, turned, rotary_pos_emb, mscale
                    )
                """,
                before="""
                q_no_pe, q_pos_emb = torch.split(
                    q, [self.config.qk_head_dim, self.config.qk_pos_emb_head_dim], dim=-1
                )
                k_no_pe, value = torch.split(
                    kv, [self.config.qk_head_dim, self.config.v_head_dim], dim=-1
                )
                """,
            ),
            imports=(
                "from cppmega.calls import served as _cppmega_served",
                "from cppmega.ops.pointwise import mla_heads as _cppmega_mla_heads",
                "from megatron.core.models.common.embeddings import "
                "rope_utils as _cppmega_rope_utils",
            ),
        ),
    ),
    reached="forward",
    when=has_full_mla,
)


def fixed_upstream(source: Source) -> bool:
    return False  # no code shows whether a kernel elsewhere is faster


def verify() -> None:
    import warnings

    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    from cppmega.calls import allowing
    from cppmega.proof import small_models, stand_ins

    from ._rotation import rotating

    warnings.simplefilter("ignore")  # of calls that the kernels do not support
    launched: list[str] = []

    def key_value(kv, shared, key, value):  # type: ignore[no-untyped-def]
        launched.append("key and value")
        first, second = kv.split((kv.size(-1) - value.size(-1), value.size(-1)), -1)
        key.copy_(torch.cat((first, shared.expand(-1, -1, kv.size(2), -1)), -1))
        value.copy_(second)

    def kv_gradient(of_key, of_value, out):  # type: ignore[no-untyped-def]
        launched.append("gradient of both")
        plain = out.size(-1) - of_value.size(-1)
        out.copy_(torch.cat((of_key[..., :plain], of_value), -1))

    def computed(layer, x, packed=None):  # type: ignore[no-untyped-def]
        leaf = x.detach().requires_grad_()
        out = layer.get_query_key_value_tensors(leaf, packed_seq_params=packed)[:3]
        torch.manual_seed(1)
        upstream = [torch.randn(each.shape).to(each.dtype) for each in out]
        weights = [layer.linear_q_up_proj.weight, layer.linear_kv_up_proj.weight]
        return *out, *torch.autograd.grad(out, (leaf, *weights), upstream)

    def check(kernels, layer, *given):  # type: ignore[no-untyped-def]
        wanted = computed(layer, *given)  # on a CPU, by Megatron's code
        assert not launched, "a tensor of the CPU"
        with (
            stand_ins.on_gpu("pointwise.rope_triton", rotate=rotating(launched)),
            stand_ins.on_gpu(
                "pointwise.mla_heads_triton", key_value=key_value, kv_gradient=kv_gradient
            ),
            allowing("mla_query_key_kernel", "mla_rope_kernel"),
        ):
            found = computed(layer, *given)
        assert sum("value" in name or "both" in name for name in launched) == kernels, launched
        launched.clear()
        for one, other in zip(found, wanted, strict=True):
            assert one.is_contiguous() == other.is_contiguous()
            torch.testing.assert_close(one, other)

    layer, x = small_models.mla_attention(), torch.randn(5, 2, 32)
    check(2, layer, x)
    documents = torch.tensor([0, 2, 5], dtype=torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd",
        **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), documents),
        **dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), 3),
    )
    check(0, layer, x[:, :1], packed)
    check(0, layer.double(), x.double())
    check(2, small_models.mla_attention(rotary_percent=0.5).bfloat16(), x.bfloat16())
    by_neighbours = small_models.mla_attention()
    by_neighbours.config.rotary_interleaved = True
    check(0, by_neighbours, x)
