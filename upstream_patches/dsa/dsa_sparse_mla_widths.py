"""Support head widths other than DeepSeek's 576 and 512 in TileLang's sparse MLA.

What: `fused_sparse_mla_absorbed` accepts queries of width 128 with values of width 64, and 192 with
    128, in addition to 576 with 512. The kernels, which support any width, receive the actual
    widths instead of the constants 576 and 512. Calls with 576 and 512 run as before and all other
    widths are declined. A declined call (widths, fp16, 24 heads, a top-k of 250) ends the run with
    the reason, or, with `--allow-fallback dsa_sparse_mla_widths`, runs unfused. The deterministic
    mode declines the new widths as well, because the kernel accumulates dkv with atomics.
Why: With other widths the hook returns None, which is logged only at DEBUG level, and Megatron runs
    `_unfused_absorbed_dsa_fn`, whose fp32 scores have shape `[batch, heads, seq, seq]`. Forward and
    backward with NAM56R's 128 and 64 (32 heads, sequence length 4096, 256 keys), unpatched and
    patched: 53.4 ms and 15.1 GiB compared with 4.0 ms and 0.1 GiB; with a batch of 4, 213 ms and
    60.6 GiB compared with 5.1 ms and 0.5 GiB (one H200, TileLang 0.1.8;
    benchmarks/results/dsa_sparse_mla_h200.md).
Upstream: Not sent: no upstream model has such widths.
Remove: when `fused_sparse_mla_absorbed` supports a value width of 64.
Numerics: reorders sums: softmax over the selected keys in blocks of 64, and dkv with fp32 atomics,
    so that dkv is not bitwise reproducible (as with 576 and 512; the output and dq are). Relative
    L2 errors against fp64 of the output, dq and dkv with 128 and 64: 1.9e-3, 2.1e-3, 2.4e-3;
    unfused 2.1e-3, 2.1e-3, 3.1e-3; an fp32 reference rounded to bf16 1.7e-3 each. The error of dq
    grows with the peakedness of the scores: 2.4, 4.2 and 4.9 times the error of that reference with
    queries 5, 30 and 150 times as large (unfused 1.4 times with 5), because the kernels compute
    delta from the bf16 output, also with 576 and 512. As released, calls with these two widths
    ignore the deterministic mode.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cppmega.edits import adding_parameter, in_order, replacing
from cppmega.page import Edit, Patch, Source

if TYPE_CHECKING:
    import torch

OPS = "megatron/core/transformer/experimental_attention_variant/ops"
HOOK = f"{OPS}/tilelang_dsa.py:fused_sparse_mla_absorbed"
WIDTHS = ((128, 64), (192, 128), (576, 512))
"""Widths of queries and values that were compared with fp64 on a GPU."""


def _cppmega_declines(query, key, topk_indices, v_channels):
    """Whether the kernels cannot compute a call; where the run relies on them, they must."""
    from cppmega.calls import served

    heads, topk = max(query.size(2), 16), topk_indices.size(-1)
    deterministic = torch.are_deterministic_algorithms_enabled()
    widths = (query.size(-1), v_channels)
    obstacles = {
        f"queries of {widths[0]} with values of {v_channels} were never run on a GPU": widths
        not in ((128, 64), (192, 128), (576, 512)),
        f"the tensors are {query.dtype}, not bf16": not _all_bfloat16(query, key),  # noqa: F821
        f"{heads} heads are not a power of two": heads & (heads - 1) != 0,
        f"a top-k of {topk} is not a multiple of 64": topk % 64 != 0,
        "the deterministic mode is on, and dkv is added up by atomics": deterministic
        and v_channels != 512,
    }
    reason = next((obstacle for obstacle, stands in obstacles.items() if stands), None)
    return not served("dsa_sparse_mla_widths", reason, query=query, key=key)


_GIVEN = "query_bshd, key_bshd, indices_bsgk, softmax_scale"
_CALL = "sparse_mla_fwd_interface(q, kv, indices, sm_scale=scaling)"


PATCH = Patch(
    purpose="feature",
    edits=(
        Edit(
            target=HOOK,
            pins={"0.19.2": "031883292557e60e", "main-d98e8a64": "031883292557e60e"},
            edit=in_order(
                replacing(
                    """
                    if not _all_bfloat16(query, key):
                        return None
                    """,
                    """
                    if _cppmega_declines(query, key, topk_indices, v_channels):
                        return None
                    """,
                ),
                replacing(
                    """
                    if query.size(-1) != 576 or v_channels != 512:
                        return None
                    """,
                    "",
                ),
                replacing(
                    f"SparseMLA.apply({_GIVEN})",
                    f"SparseMLA.apply({_GIVEN}, *(() if v_channels == 512 else (v_channels,)))",
                ),
            ),
            helpers=(_cppmega_declines,),
            mark="",  # a declined call has not passed through the patch
        ),
        Edit(
            target=f"{OPS}/sparse_mla.py:SparseMLA.forward",
            pins={"0.19.2": "7fb4ae0ff8933c47", "main-d98e8a64": "7fb4ae0ff8933c47"},
            edit=in_order(
                adding_parameter("d_v=512"),
                replacing(_CALL, f"{_CALL[:-1]}, d_v=d_v)"),
            ),
        ),
        Edit(
            target=f"{OPS}/sparse_mla.py:SparseMLA.backward",
            pins={"0.19.2": "e44012a33e4cdb25", "main-d98e8a64": "e44012a33e4cdb25"},
            edit=in_order(
                replacing(_CALL, f"{_CALL[:-1]}, d_v=grad_output.size(-1))"),
                replacing(
                    "return tl_dq, tl_dkv, None, None",
                    """
                    # Autograd drops a None too many: a call that gives no d_v is served too.
                    return tl_dq, tl_dkv, None, None, None
                    """,
                ),
            ),
        ),
        Edit(
            target=f"{OPS}/tilelang_sparse_mla_fwd.py:sparse_mla_fwd_interface",
            pins={"0.19.2": "1a4229cf13d4cbaf", "main-d98e8a64": "1a4229cf13d4cbaf"},
            edit=replacing(
                """
                assert (
                    dim_plus_tail_dim == 576
                ), "TileLang sparse MLA fwd is currently specialized for dim_plus_tail_dim=576"
                """,
                "",
            ),
        ),
        Edit(
            target=f"{OPS}/tilelang_sparse_mla_bwd.py:sparse_mla_bwd",
            pins={"0.19.2": "a803cd02a7ee7ae9", "main-d98e8a64": "a803cd02a7ee7ae9"},
            edit=replacing("D = 512", "D = do.shape[-1]"),
        ),
    ),
    reached="forward",
    feature=(
        "megatron/core/transformer/experimental_attention_variant/ops/sparse_mla.py:SparseMLA",
    ),
    when=lambda args: False,  # also with TileLang, `dsa_attention_kernels` may attend
    wanted_by=lambda recipe: (
        recipe.uses_dsa
        and recipe.dsa_kernel_backend == "tilelang"
        and recipe.dsa_widths in WIDTHS[:-1]  # the last pair is that of the release
    ),
    provides={"dsa_widths_tilelang": WIDTHS},
)


def fixed_upstream(source: Source) -> bool:
    text = source.text(HOOK)
    return bool(text) and "query.size(-1) != 576" not in text


def verify() -> None:
    import warnings
    from importlib import import_module

    import torch

    from cppmega.calls import allowing
    from cppmega.proof import stand_ins

    # TileLang's kernels need a GPU; Megatron's unfused path takes their place.
    stand_ins.tilelang()
    package = OPS.replace("/", ".")
    stand_ins.forget(package)
    forward = import_module(f"{package}.tilelang_sparse_mla_fwd")
    backward = import_module(f"{package}.tilelang_sparse_mla_bwd")
    hook = import_module(f"{package}.tilelang_dsa").fused_sparse_mla_absorbed
    unfused = import_module(package.removesuffix("ops") + "dsa")._unfused_absorbed_dsa_fn

    def attend(q, kv, indices, dim, scale):
        q, kv = (x.transpose(0, 1).float() for x in (q, kv))
        return unfused(q, kv, indices[:, :, 0], scale, dim).transpose(0, 1)

    def forward_kernel(heads, dim, tail_dim, sm_scale, **options):
        def kernel(q, kv, indices):
            assert q.size(-1) == dim + tail_dim
            return attend(q, kv, indices, dim, sm_scale), torch.zeros(q.shape[:3])

        return kernel

    def backward_kernel(heads, dim, tail_dim, topk, kv_group, sm_scale, max_block_h):
        def kernel(q, kv, do, indices, lse, delta, dkv):
            assert q.size(-1) == dim + tail_dim
            _, (dq, total) = torch.autograd.functional.vjp(
                lambda q, kv: attend(q, kv, indices, dim, sm_scale), (q, kv), do
            )
            dkv.copy_(total)
            return dq

        return kernel

    forward._get_sparse_mla_fwd_kernel = forward_kernel
    backward._get_bwd_kernel = backward_kernel
    backward._get_preprocess_kernel = lambda heads, dim: lambda o, do: (o * do).sum(-1)
    backward._get_postprocess_kernel = lambda dim, tail_dim, kv_group: torch.clone

    torch.manual_seed(0)
    indices = torch.rand(1, 70, 70).tril_().topk(64).indices
    indices = indices.masked_fill(indices > torch.arange(70)[:, None], -1)

    def inputs(width):
        shapes = (70, 1, 16, width), (70, 1, 1, width)
        return [torch.randn(shape).bfloat16().requires_grad_() for shape in shapes]

    for query, width in WIDTHS:
        q, kv = inputs(query)
        ours = hook(q, kv, indices, 0.1, width)
        assert ours is not None, f"{query} and {width} are declined"
        stock = unfused(q.float(), kv.float(), indices, 0.1, width)
        grad = torch.randn_like(stock)
        got, want = ((x, *torch.autograd.grad(x, (q, kv), grad)) for x in (ours, stock))
        for mine, other in zip(got, want, strict=True):
            assert (mine - other).norm() < 1e-2 * other.norm(), (query, width)
    warnings.simplefilter("ignore")
    for query, width in ((320, 256), (160, 96), (96, 64), (576, 448)):  # not tested on a GPU
        with allowing("dsa_sparse_mla_widths"):
            assert hook(*inputs(query), indices, 0.1, width) is None, (query, width)
