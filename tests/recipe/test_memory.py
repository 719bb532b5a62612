"""The memory estimate against what runs on H200 needed, and the size of a checkpoint."""

from __future__ import annotations

import pytest

from cppmega.recipe import index as recipes_index
from cppmega.recipe.arithmetic import parameters
from cppmega.recipe.memory import GIB, MAMBA_RECOMPUTE, checkpoint_bytes, estimate


def test_memory_is_spread_as_the_layout_says() -> None:
    one = recipes_index.load("nam56r_h200_slice_whole")
    four = recipes_index.load("nam56r_h200_4gpu_ep4")
    count = parameters(one)
    assert estimate(one).states == 18 * count.total
    routed = count.experts // 4
    dense = count.total - count.experts
    assert estimate(four).states == dense * 6 + dense * 12 // 4 + routed * 18


def test_tensor_parallelism_spreads_weights_experts_and_streams() -> None:
    """On H200, a rank had 410,744,192 parameters and a peak of 9.2 GiB, with unfused DSA 14.1."""
    four = recipes_index.load("nam56r_h200_4gpu_tp4")
    assert estimate(four).states == pytest.approx(18 * 410_744_192, rel=5e-3)
    context = 2
    assert estimate(four, attends=True).gib - context == pytest.approx(9.2, rel=0.06)
    assert estimate(four).gib == pytest.approx(14.1, rel=0.06)


def test_logits_are_kept_only_by_heads_that_make_them() -> None:
    native = recipes_index.load("nam56r_h200_slice")
    assert estimate(native).logits == 3 * 4096 * 65536 * 6
    linear = native.with_(cross_entropy_fusion_impl="linear")
    one_chunk = 4096 * 65536 * 2
    assert estimate(linear).logits == one_chunk + 3 * 4096 * (4 * 65536 + 2 * 4096)
    assert estimate(linear.with_(gradient_accumulation_fusion=True)).logits == 3 * one_chunk
    four = linear.with_(micro_batch_size=4, global_batch_size=4)
    assert estimate(four).logits == GIB + 3 * 4096 * (4 * 65536 + 2 * 4 * 4096)


def test_the_whole_model_fits_one_and_two_gpus_by_the_estimate() -> None:
    one, two = (recipes_index.load(f"nam56r_h200_{name}") for name in ("1gpu", "2gpu_ep2"))
    assert estimate(one, attends=True).states == pytest.approx(97.5 * GIB, rel=1e-3)
    assert estimate(two, attends=True).states == pytest.approx(57.8 * GIB, rel=1e-3)
    assert all(estimate(recipe, attends=True).gib < 139 for recipe in (one, two))
    # A Mamba-3 layer keeps its projection and output beside the stream, an M2RNN layer about 64 KB.
    recomputed = estimate(one.with_(gates=(MAMBA_RECOMPUTE,)), attends=True).activations
    mamba3 = 2 * (2 * 8192 + 2 * 4096 + 3 * 128 + 32 + 8192)
    saved = one.micro_batch_size * 4096 * (13 * mamba3 + 4 * 2 * 4096 * 8)
    assert estimate(one, attends=True).activations - recomputed == saved


def test_the_size_of_a_checkpoint() -> None:
    whole = recipes_index.load("nam56r_h200_2gpu_ep2")
    assert checkpoint_bytes(whole) == pytest.approx(75.9 * GIB, rel=1e-3)
    assert checkpoint_bytes(whole, optimizer=False) == pytest.approx(10.8 * GIB, rel=4e-3)
    loop = recipes_index.load("smoke_cpu")
    assert checkpoint_bytes(loop) == 3 * checkpoint_bytes(loop, False)
    assert checkpoint_bytes(loop, False) == 4 * parameters(loop).total


def test_the_estimate_agrees_with_what_fitted_and_what_did_not() -> None:
    """Measured on one H200: 62 GiB at micro-batch 1, out of 139 GiB at micro-batch 4."""
    one = recipes_index.load("nam56r_h200_slice")
    assert estimate(one).gib == pytest.approx(62, rel=0.15)
    two = one.with_(micro_batch_size=2, global_batch_size=2, dsa_kernel_backend="tilelang")
    assert estimate(two).gib < 139
    four = one.with_(micro_batch_size=4, global_batch_size=4)
    assert estimate(four).total > 139 * GIB


def test_recomputed_attention_keeps_the_scores_of_one_layer() -> None:
    one = recipes_index.load("nam56r_h200_slice")
    (body,) = one.layers_by_stage
    layers = body.count("D") + one.layout.depths * one.layout.mtp.count("D")
    assert layers > 1
    again = one.with_(recompute_modules=(*one.recompute_modules, "core_attn"))
    fewer = estimate(one).total - estimate(again).total
    pairs = one.micro_batch_size * one.seq_length**2
    attention, indexer = 3 * 4 * pairs * one.num_attention_heads, 2 * 4 * pairs
    assert fewer == (layers - 1) * (attention + indexer)


def test_one_block_of_a_deep_model_is_not_the_cheapest() -> None:
    recipe = recipes_index.load("gpt_mhc_h200").with_(num_layers=32, recompute_modules=("mhc",))
    blocks = (None, 1, 4)
    one, each, some = (
        estimate(recipe.with_(mhc_recompute_layer_num=n)).activations for n in blocks
    )
    assert some < each < one < estimate(recipe.with_(recompute_modules=())).activations
    stream = 2 * 2 * 4096 * 4096 * 4
    logits = estimate(recipe).logits
    # 64 sites at once, when the logits are gone; 8 blocks of 8 sites, the first without streams.
    assert one - some == (64 * stream - logits) - 7 * stream


@pytest.mark.parametrize(
    ("name", "fused", "measured"),
    [
        ("gpt_mhc_h200", True, 54.7),
        ("gpt_mhc_h200", False, 77.8),
        ("gpt_mhc_h200_4gpu_tp2_pp2", True, 16.1),
        ("gpt_mhc_h200_4gpu_tp2_pp2", False, 27.7),
    ],
)
def test_residual_streams_need_what_they_needed(name: str, fused: bool, measured: float) -> None:
    """On H200 (`mhc_training_h200.md`, `gpt_mhc_h200_4gpu_tp2_pp2_rows.md`)."""
    recipe = recipes_index.load(name).with_(use_fused_mhc=fused)
    assert estimate(recipe).gib == pytest.approx(measured, rel=0.1)
