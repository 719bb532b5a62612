"""Run DSA without reading device values on the host.

What: In DSA's forward and backward, the host neither reads nor fills a GPU tensor, in plain and in
    packed batches, with and without context parallelism (CP); buffers that a CUDA graph writes to
    belong to that graph. The backward of the cuDNN backend, which is for Blackwell only, still
    reads which rows have keys. Packed batches also require `rope_thd_no_host_sync`.
Why: With CP, every layer gathered the ranks' sequence lengths in each forward pass and waited for
    the GPU three times to compare them, and a packed batch was indexed with boolean masks, whose
    result sizes the host must know: eighteen waits per layer and forward pass with two ranks
    (counted on CPU). None of this can be captured in a CUDA graph, nor can copies of numbers from
    the host, as in the packed layout of the indexer and in the backward of the unfused indexer
    loss. TileLang's loss keeps its buffers in a cache, which frees them while a captured graph
    still writes to them. Unequal lengths are refused as before, but now by the device: the
    assertion is queued before the gather of the keys, which would hang otherwise, and the GPU
    prints it.
Upstream: Not sent: upstream's test of the lengths checks for the copy that is removed here.
Remove: when `_validate_nonpacked_cp_uniform_length` contains no `.item()`, and
    `build_packed_allgather_cp_local_positions` no boolean indexing.
Numerics: none (bitwise)
"""

from cppmega.catalogue.megatron_args import uses_dsa
from cppmega.edits import in_order, inserting, replacing
from cppmega.page import Edit, Patch, Source

FOLDER = "megatron/core/transformer/experimental_attention_variant"
VALIDATE = f"{FOLDER}/dsa.py:_validate_nonpacked_cp_uniform_length"
BACKWARD = f"{FOLDER}/dsa.py:bwd_fused_indexer_loss_naive"
LAYOUT = f"{FOLDER}/dsa_layout.py"
POSITIONS = f"{LAYOUT}:build_packed_allgather_cp_local_positions"

READ_LENGTHS = """
if not torch.all(all_lens == sq):
    raise RuntimeError(
        "Non-packed DSA allgather CP expects uniform per-rank sequence lengths; "
        f"got per-rank lengths {all_lens.tolist()}."
    )
"""
CHECKED_LENGTHS = """
torch._assert_async(
    (all_lens == sq).all(),
    "Non-packed DSA allgather CP expects uniform per-rank sequence lengths; "
    f"this rank has {sq}, and not all {cp_size} ranks have as many.",
)
"""

PATCH = Patch(
    purpose="speed",
    edits=(
        Edit(
            target=VALIDATE,
            pins={
                "0.19.2": "a813e709f9f78f21",
                "main-d98e8a64": "a813e709f9f78f21",
                "dev-d48bd6be": "a813e709f9f78f21",
            },
            edit=in_order(
                replacing(
                    "local_len = torch.tensor([sq], device=device, dtype=torch.int64)",
                    # Made on the device: a number that is copied from the host waits for it.
                    """
                    local_len = torch.tensor([], device=device, dtype=torch.int64).new_full(
                        (1,), sq
                    )
                    """,
                ),
                replacing(READ_LENGTHS, CHECKED_LENGTHS),
                replacing("expected_skv = int(all_lens.sum().item())", ""),
            ),
        ),
        Edit(
            target=BACKWARD,
            pins={
                "0.19.2": "ba215a3c2729da20",
                "main-d98e8a64": "ba215a3c2729da20",
                "dev-d48bd6be": "1431ca47e90f83e1",
            },
            edit=replacing(
                """
                torch.tensor(
                    float(b * sq), dtype=torch.float32, device=attention_scores_normalized.device
                )
                """,
                """
                torch.full(
                    (),
                    float(b * sq),
                    dtype=torch.float32,
                    device=attention_scores_normalized.device,
                )
                """,
            ),
        ),
        Edit(
            target=f"{LAYOUT}:get_cp_positions_from_layout",
            pins={
                "0.19.2": "60ac84d14d6af0b8",
                "main-d98e8a64": "60ac84d14d6af0b8",
                "dev-d48bd6be": "60ac84d14d6af0b8",
            },
            edit=in_order(
                replacing(
                    "local_len = torch.tensor([sq], device=device, dtype=torch.int64)",
                    "local_len = torch.full((1,), sq, device=device, dtype=torch.int64)",
                ),
                replacing(
                    "int(torch.stack(all_lens[:cp_rank]).sum().item()) if cp_rank > 0 else 0",
                    "torch.stack(all_lens[:cp_rank]).sum() if cp_rank > 0 else 0",
                ),
            ),
        ),
        Edit(
            target=POSITIONS,
            pins={
                "0.19.2": "8ce4b8853dd1bcc6",
                "main-d98e8a64": "8ce4b8853dd1bcc6",
                "dev-d48bd6be": "8ce4b8853dd1bcc6",
            },
            edit=in_order(
                replacing(
                    """
                    nonzero = seq_lens > 0
                    seq_starts = seq_starts[nonzero]
                    seq_ends = seq_ends[nonzero]
                    seq_lens = seq_lens[nonzero]
                    if seq_lens.numel() == 0:
                        return torch.empty(0, dtype=torch.int64, device=device)
                    """,
                    # Sequences without tokens stay: their segments are repeated zero times.
                    "seq_lens = seq_lens.clamp_min(0)",
                ),
                replacing(
                    """
                    nonempty_segments = segment_lens > 0
                    segment_starts = segment_starts[nonempty_segments]
                    segment_lens = segment_lens[nonempty_segments]
                    """,
                    "",
                ),
                inserting(
                    """
                    # Without any token the layer has failed; so must this.
                    torch._assert_async(seq_lens.sum(), "Packed DSA CP expects a token")
                    """,
                    after="""
                    if output_size == 0:
                        return torch.empty(0, dtype=torch.int64, device=device)
                    """,
                ),
                replacing(
                    "torch.tensor(output_size, dtype=torch.int64, device=device) "
                    "- segment_lens.sum()",
                    "output_size - segment_lens.sum()",
                ),
            ),
        ),
        Edit(
            target=f"{LAYOUT}:build_packed_cp_indexer_layout",
            pins={
                "0.19.2": "92afa240930a7045",
                "main-d98e8a64": "92afa240930a7045",
            },
            edit=replacing(
                "torch.tensor((half, key_size), dtype=torch.int64, device=device)",
                "half * torch.arange(1, 3, dtype=torch.int64, device=device)",
            ),
        ),
        Edit(
            target=f"{FOLDER}/absorbed_mla.py:AbsorbedMLASelfAttention."
            "_checkpointed_attention_forward",
            pins={
                "0.19.2": "b5d321f8e7b8c9e9",
                "main-d98e8a64": "b5d321f8e7b8c9e9",
                "dev-d48bd6be": "b5d321f8e7b8c9e9",
            },
            edit=in_order(
                replacing(
                    """
                    attn_mask_type = inputs[6]
                    attn_mask_type = AttnMaskType(attn_mask_type.item())
                    """,
                    "",
                ),
                replacing(
                    "attn_mask_type = torch.tensor([attn_mask_type.value], dtype=torch.int)", ""
                ),
                replacing(
                    """
                    tensor_parallel.checkpoint(
                        custom_forward, False, q_absorbed, k_compressed, hidden_states,
                        q_compressed, attention_mask, up_v_weight, attn_mask_type,
                    )
                    """,
                    """
                    tensor_parallel.checkpoint(
                        custom_forward,
                        False,
                        q_absorbed,
                        k_compressed,
                        hidden_states,
                        q_compressed,
                        attention_mask,
                        up_v_weight,
                    )
                    """,
                ),
            ),
        ),
        Edit(
            target=f"{FOLDER}/ops/tilelang_dsa.py:_get_scratch_buffer",
            pins={
                "0.19.2": "69cbfe4ab20de45f",
                "main-d98e8a64": "69cbfe4ab20de45f",
            },
            edit=inserting(
                """
                # A captured graph writes here in every replay, whatever the cache has evicted.
                if device.type != "cpu" and torch.cuda.is_current_stream_capturing():
                    return torch.empty(shape, dtype=dtype, device=device)
                """,
                before="key = (name, shape, dtype, device)",
            ),
        ),
    ),
    reached="forward",
    feature=(
        "megatron/core/transformer/experimental_attention_variant/dsa_layout.py:PackedCPIndexerLayout",
    ),
    when=lambda args: uses_dsa(args) and getattr(args, "context_parallel_size", 1) > 1,
)


def fixed_upstream(source: Source) -> bool:
    validate, positions = source.text(VALIDATE), source.text(POSITIONS)
    return bool(positions) and ".item()" not in validate and "[nonzero]" not in positions


def verify() -> None:
    import itertools
    from types import SimpleNamespace
    from unittest import mock

    import torch
    from megatron.core.transformer.experimental_attention_variant import dsa, dsa_layout

    from .._dsa_layer import after_dense_steps
    from ._dsa_host_reads import first_read

    after_dense_steps()

    for packed, sparse in itertools.product((False, True), repeat=2):
        how = {"packed": packed, "dsa_indexer_use_sparse_loss": sparse}
        read = first_read(context=2, recompute=True, **how)
        assert not read, f"the host waits in a layer with {how}: {read}"

    ends = torch.tensor([0, 8, 8, 12, 12], dtype=torch.int32)  # two sequences have no tokens
    positions = dsa_layout.build_packed_allgather_cp_local_positions
    got = positions(ends, 2, 1, torch.device("cpu"), output_size=7)
    assert got.tolist() == [2, 3, 4, 5, 9, 10, 12 + 7], got

    def check(*lengths):  # type: ignore[no-untyped-def]
        def all_gather(out, mine, group=None):  # type: ignore[no-untyped-def]
            for rank, length in enumerate(lengths):
                out[rank].fill_(length)

        group = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
        with mock.patch.object(torch.distributed, "all_gather", all_gather):
            dsa._validate_nonpacked_cp_uniform_length(4, 4, 2, group, torch.device("cpu"))

    check(4, 4)
    try:
        check(4, 6)
    except RuntimeError as refused:
        assert "uniform per-rank sequence lengths" in str(refused)
    else:
        raise AssertionError("ranks with different lengths are accepted")
