"""Store each index score of TileLang's indexer once, instead of once per warp.

What: The forward kernel of TileLang's indexer stores a tile of scores in one parallel loop, in
    which every thread has its own scores. Which scores are stored, and their values, do not change.
Why: The released kernel stores them in serial loops, which all 512 threads of a block run: each of
    the 16 warps stores every score, one after the other (read in the CUDA code that TileLang 0.1.8
    generates). Here a thread stores 2 of the 1024 scores of a tile, and a warp 32 neighbors: at
    sequence length 4096, 32 heads of 64 and a batch of 8 the scores take 1.9 ms compared with
    15.6 ms, at a batch of 1 0.32 ms compared with 1.98 ms (one H200, in one process;
    benchmarks/results/dsa_indexer_h200.md).
Upstream: Not sent: mentioned in the review of #6279, its port to dev.
Remove: when the kernel stores its scores in a loop over `T.Parallel`.
Numerics: none (bitwise): the same values are stored in the same places.
"""

from cppmega.edits import replacing
from cppmega.page import Edit, Patch, Source

TARGET = (
    "megatron/core/transformer/experimental_attention_variant/ops/"
    "tilelang_indexer_fwd.py:tl_indexer_fwd_impl"
)

PATCH = Patch(
    purpose="speed",
    edits=(
        Edit(
            target=TARGET,
            pins={"0.19.2": "cd27f7595d610cfe", "main-d98e8a64": "cd27f7595d610cfe"},
            edit=replacing(
                """
                for bq_i in T.serial(block_Q):
                    q_idx = seq_len_i + bq_i
                    if q_idx < seq_len:
                        for bn_i in T.serial(block_N):
                            k_idx = cu_k_s_min + nbn_i * block_N + bn_i
                            if k_idx >= 0 and k_idx < cu_k_e_max:
                                Logits[q_idx, k_idx] = logits_shared[bn_i, bq_i]
                """,
                """
                # The indices are spelled out: TileLang suspects a race if they have names.
                first_k = cu_k_s_min + nbn_i * block_N
                for bq_i, bn_i in T.Parallel(block_Q, block_N):
                    if seq_len_i + bq_i < seq_len and first_k + bn_i < cu_k_e_max:
                        Logits[seq_len_i + bq_i, first_k + bn_i] = logits_shared[bn_i, bq_i]
                """,
            ),
        ),
    ),
    reached="forward",
    feature=(
        "megatron/core/transformer/experimental_attention_variant/ops/tilelang_indexer_fwd.py:indexer_fwd_interface",
    ),
    when=lambda args: False,  # also with TileLang, other kernels may compute the scores
)


def fixed_upstream(source: Source) -> bool:
    text = source.text(TARGET)
    return bool(text) and "for bn_i in T.serial(block_N)" not in text


def verify() -> None:
    from importlib import import_module
    from unittest import mock

    import torch

    from cppmega.proof import stand_ins
    from cppmega.proof.tilelang_blocks import Blocks

    stand_ins.tilelang()
    name = TARGET.partition(".py")[0].replace("/", ".")
    stand_ins.forget(name.rpartition(".")[0])
    module = import_module(name)

    torch.manual_seed(0)
    rows, keys, heads, d, nan = 5, 11, 2, 4, float("nan")
    q, k, w = torch.randn(rows * heads, d), torch.randn(keys, d), torch.randn(rows, heads)
    # After the last row and key there is memory that no score may depend on.
    behind = [torch.cat((x, torch.full((16, x.size(1)), nan))) for x in (q, k, w)]
    starts, ends = torch.tensor([0, 0, 3, 3, 9]), torch.tensor([4, 11, 5, 11, 10])
    products = torch.relu(torch.einsum("shd,td->sht", q.view(rows, heads, d), k))
    scores = (products * w[..., None]).sum(1)

    language = Blocks(seq_len=rows, seq_len_kv=keys)
    with mock.patch.object(module, "T", language):
        kernel = module.tl_indexer_fwd_impl(heads=heads, index_dim=d, block_N=4, block_Q=2)
        logits = language.recorded(torch.full((rows, keys), nan))
        language.run(kernel, behind[0], behind[1], logits, behind[2], starts, ends)

    # A block stores what any of its rows sees; another kernel clears the rest.
    seen = torch.zeros(rows, keys, dtype=torch.bool)
    for first in range(0, rows, 2):
        block = slice(first, first + 2)
        seen[block, starts[block].min() : ends[block].max()] = True
    assert logits.stores == {tuple(at): ["parallel"] for at in seen.nonzero().tolist()}
    torch.testing.assert_close(logits.values, scores.masked_fill(~seen, nan), equal_nan=True)
