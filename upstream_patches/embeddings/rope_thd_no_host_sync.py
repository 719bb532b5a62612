"""Apply RoPE to packed sequences without reading the sequence lengths on the host.

What: `_apply_rotary_pos_emb_thd` computes each token's position with a search and a gather on the
    device, for any number of sequences and for context parallelism.
Why: Stock reads the lengths on the host: it waits for the GPU twice per call, with one call for the
    queries and one for the keys of every attention layer, and, with a table for the complete pack,
    once more per sequence (tested: `.tolist()`, `cu_seqlens[-1]`, `cu_seqlens[i].item()`). None of
    this can be captured in a CUDA graph. 0.19 also launches a dozen kernels per sequence, and DSA
    does not support the fused RoPE. main still reads the last boundary if no `max_seqlen` is given,
    as in DSA's indexer.
Upstream: https://github.com/NVIDIA/Megatron-LM/pull/5944 (in part: not without
    `max_seqlen`)
Remove: when the function contains neither `.tolist()` nor `.item()`.
Numerics: none (bitwise)
"""

from cppmega.edits import body_of, in_order, replacing
from cppmega.page import Edit, Patch, Source

TARGET = "megatron/core/models/common/embeddings/rope_utils.py:_apply_rotary_pos_emb_thd"


def freqs_of_packed_tokens(t, cu_seqlens, freqs, cp_group):  # type: ignore[no-untyped-def]
    import torch

    if cp_group is None:
        raise ValueError("cp_group must be provided for THD format RoPE")
    cp_size, cp_rank = cp_group.size(), cp_group.rank()
    boundaries = cu_seqlens.long()
    lengths = boundaries.diff() // cp_size  # tokens of each sequence on this rank
    ends = lengths.cumsum(0)
    whole = ends[-1:] == t.size(0)
    if cp_size > 1:  # a rank has two halves of each sequence, one from either end
        whole = whole & (lengths % 2 == 0).all()
    # Stock fails in torch.split where the lengths are not those of `t`; so must this, unseen.
    torch._assert_async(whole, "cu_seqlens does not describe the packed tensor")

    token = torch.arange(t.size(0), device=t.device)
    sequence = torch.searchsorted(ends, token, right=True)
    length = lengths[sequence]
    position = token - ends[sequence] + length
    if cp_size > 1:
        half = length // 2
        front = cp_rank * half + position
        back = length * cp_size - (cp_rank + 1) * half + position - half
        position = torch.where(position < half, front, back)
    # A table as long as the pack has a row for every token of it; any other starts at zero again.
    packed = boundaries[-1] == freqs.size(0)
    return freqs[position + torch.where(packed, boundaries[sequence], 0)]


def until_018(  # type: ignore[no-untyped-def]
    t, cu_seqlens, freqs, rotary_interleaved, multi_latent_attention, mscale, cp_group
):
    return _apply_rotary_pos_emb_bshd(  # noqa: F821
        t.unsqueeze(1),
        freqs_of_packed_tokens(t, cu_seqlens, freqs, cp_group),
        rotary_interleaved=rotary_interleaved,
        multi_latent_attention=multi_latent_attention,
        mscale=mscale,
    ).squeeze(1)


def since_019(  # type: ignore[no-untyped-def]
    t,
    cu_seqlens,
    freqs,
    rotary_interleaved,
    mla_rotary_interleaved,
    mscale,
    cp_group,
    multi_latent_attention,
):
    if multi_latent_attention is not None:
        warnings.warn(  # noqa: F821
            "multi_latent_attention is deprecated. Please use mla_rotary_interleaved instead.",
            DeprecationWarning,
            stacklevel=2,
        )
        mla_rotary_interleaved = multi_latent_attention
    return _apply_rotary_pos_emb_bshd(  # noqa: F821
        t.unsqueeze(1),
        freqs_of_packed_tokens(t, cu_seqlens, freqs, cp_group),
        rotary_interleaved=rotary_interleaved,
        mla_rotary_interleaved=mla_rotary_interleaved,
        mscale=mscale,
    ).squeeze(1)


PATCH = Patch(
    purpose="speed",
    edits=(
        Edit(
            target=TARGET,
            pins={
                "0.15.3": "04977edc9a3f2bd2",
                "0.16.1": "04977edc9a3f2bd2",
                "0.17.1": "04977edc9a3f2bd2",
                "0.18.2": "04977edc9a3f2bd2",
            },
            edit=body_of(until_018),
            helpers=(freqs_of_packed_tokens,),
        ),
        Edit(
            target=TARGET,
            pins={"0.19.2": "5dd4cb729a8d92d8"},
            edit=body_of(since_019),
            helpers=(freqs_of_packed_tokens,),
        ),
        Edit(
            target=TARGET,
            pins={"main-d98e8a64": "faa139aa674ea3d5"},
            edit=in_order(
                replacing(
                    "freqs.dim() >= 1 and freqs.size(0) == int(cu_seqlens[-1].item())",
                    "cu_seqlens_i64[-1] == freqs.size(0)",
                ),
                replacing(
                    """
                    if exact_packed_freqs:
                        freq_pos = freq_pos + global_seq_start
                    """,
                    """
                    if isinstance(exact_packed_freqs, bool):
                        freq_pos = freq_pos + (global_seq_start if exact_packed_freqs else 0)
                    else:
                        freq_pos = freq_pos + torch.where(exact_packed_freqs, global_seq_start, 0)
                    """,
                ),
            ),
        ),
    ),
    reached="forward",
    when=lambda args: False,  # only runs that pack sequences and do not fuse RoPE reach it
)


def fixed_upstream(source: Source) -> bool:
    text = source.text(TARGET)
    return bool(text) and ".tolist()" not in text and ".item()" not in text


def verify() -> None:
    from types import SimpleNamespace

    import torch
    from megatron.core.models.common.embeddings import rope_utils

    one, first, second = (
        SimpleNamespace(size=lambda n=n: n, rank=lambda r=r: r) for n, r in ((1, 0), (2, 0), (2, 1))
    )

    def positions(group, boundaries, rows, tokens, device="cpu"):  # type: ignore[no-untyped-def]
        """Rotate unit vectors, and return the row of the table that each was rotated by."""
        table = (torch.arange(rows, device=device) * 0.01).view(rows, 1, 1, 1).expand(-1, 1, 1, 2)
        unit = torch.tensor([1.0, 0.0]).to(device).expand(tokens, 1, 2)
        longest = rows if rows < boundaries[-1] else rows - 1
        boundaries = torch.tensor(boundaries, dtype=torch.int32).to(device)
        turn = rope_utils._apply_rotary_pos_emb_thd
        try:
            turned = turn(unit, boundaries, table, cp_group=group)
        except AssertionError:  # on dev every caller passes the length of the longest sequence
            turned = turn(unit, boundaries, table, cp_group=group, max_seqlen=longest)
        return (torch.atan2(turned[:, 0, 1], turned[:, 0, 0]) * 100).round().long()

    cases = (  # group, boundaries, rows of the table, positions of the tokens
        (one, [0, 3, 8], 6, [0, 1, 2, 0, 1, 2, 3, 4]),
        (one, [0, 3, 8], 8, [0, 1, 2, 3, 4, 5, 6, 7]),
        (first, [0, 4, 12], 9, [0, 3, 0, 1, 6, 7]),
        (second, [0, 4, 12], 12, [1, 2, 6, 7, 8, 9]),
    )
    for group, boundaries, rows, wanted in cases:
        assert positions(group, boundaries, rows, len(wanted)).tolist() == wanted
        # A meta tensor has no values: reading one raises.
        assert positions(group, boundaries, rows, len(wanted), "meta").shape == (len(wanted),)
