"""Compare packed documents with the same documents alone, and `seq_idx` with stock's.

mamba-ssm's kernel needs a GPU; a plain convolution and recurrence replace it.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from tests.upstream_patches import one_process

torch = pytest.importorskip("torch")

PAGE = "mamba_packed_seq_idx"
WIDTH = 4  # of the convolution
REARRANGE = {
    "l b d -> b l d": lambda x: x.transpose(0, 1),
    "b l d -> l b d": lambda x: x.transpose(0, 1),
    "d 1 w -> d w": lambda x: x.squeeze(1),
}


@pytest.mark.megatron
@pytest.mark.parametrize("version", one_process.PAGES[PAGE])
def test_packed_documents(version: str) -> None:
    one_process.assert_passes(PAGE, version)


def check(stock: one_process.Stock) -> None:
    from megatron.core import packed_seq_params as patched
    from megatron.core.ssm import mamba_mixer

    unpatched = stock.module("megatron.core.packed_seq_params")
    unpatched_mixer = stock.module("megatron.core.ssm.mamba_mixer")
    fields = {field.name for field in dataclasses.fields(patched.PackedSeqParams)}
    if "total_tokens" in fields:
        of_stock = from_params(unpatched.PackedSeqParams)
        same_bits_without_sync(from_params(patched.PackedSeqParams), of_stock)
        # What the page is for: without the length, stock has no index and the state runs on.
        assert not torch.equal(packed(mamba_mixer, patched), packed(unpatched_mixer, patched))
        for total in (20, 10):  # what a caller knows on one rank, and on one of two
            with_length = packed(mamba_mixer, patched, total_tokens=total)
            assert torch.equal(with_length, packed(mamba_mixer, patched))
        # Sequences side by side, as multimodal training passes them: their boundaries are no pack.
        batch = {"qkv_format": "sbhd"}
        assert torch.equal(
            packed(mamba_mixer, patched, **batch), packed(unpatched_mixer, patched, **batch)
        )
        given = torch.tensor([[0] * 13 + [1] * 7], dtype=torch.int32)
        assert torch.equal(
            packed(mamba_mixer, patched, seq_idx=given),
            packed(unpatched_mixer, patched, seq_idx=given),
        )
    else:
        of_stock = from_mixer(unpatched_mixer, patched)
        same_bits_without_sync(from_mixer(mamba_mixer, patched), of_stock)
        assert torch.equal(packed(mamba_mixer, patched), packed(unpatched_mixer, patched))
    documents_are_alone(mamba_mixer, patched)


def from_params(params: Any) -> Any:
    return lambda total, **given: params(total_tokens=total, **given).seq_idx


def from_mixer(module: Any, params: Any) -> Any:
    method = module.MambaMixer._create_packed_seq_idx
    return lambda total, **given: method(None, params.PackedSeqParams(**given), total)


def same_bits_without_sync(patched: Any, unpatched: Any) -> None:
    from cppmega.proof.host_sync import HostSyncError, no_host_sync

    draw = random.Random(0)
    for tail, dtype in itertools.product((0, 0, 5), (torch.int32, torch.int64)):
        # Some documents are empty: packs are filled up to a fixed number of them.
        lengths = [draw.choice((0, 1, 2, 7)) for _ in range(draw.randint(1, 9))]
        ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype)
        for given in (
            {"cu_seqlens_q": ends},
            {"cu_seqlens_q": ends // 2, "cu_seqlens_q_padded": ends},
        ):
            total = sum(lengths) + tail
            wanted = unpatched(total, **given)
            with no_host_sync():
                got = patched(total, **given)
            assert torch.equal(got, wanted) and got.dtype == wanted.dtype == torch.int32
            assert got.shape == (1, total) and got.is_contiguous()
            with pytest.raises(HostSyncError), no_host_sync():
                unpatched(total, **given)


def documents_are_alone(mixer: Any, params: Any) -> None:
    """Assert that output and gradient of a pack are those of its documents, one by one."""
    tokens, ends = example()
    tokens.requires_grad_()
    out = run(mixer, params.PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends), tokens)
    (gradient,) = torch.autograd.grad((out**2).sum(), tokens)
    for start, end in itertools.pairwise((*ends.tolist(), len(tokens))):
        alone = tokens[start:end].detach().requires_grad_()
        out_alone = run(mixer, None, alone)
        torch.testing.assert_close(out[start:end], out_alone)
        (gradient_alone,) = torch.autograd.grad((out_alone**2).sum(), alone)
        torch.testing.assert_close(gradient[start:end], gradient_alone)


def example() -> tuple[Any, Any]:
    tokens = torch.randn(20, 1, 2, generator=torch.Generator().manual_seed(3))
    return tokens, torch.tensor([0, 3, 4, 13, 18], dtype=torch.int32)  # and a tail of 2


def packed(mixer: Any, params: Any, **given: Any) -> Any:
    tokens, ends = example()
    given = {"qkv_format": "thd", **given}
    return run(mixer, params.PackedSeqParams(cu_seqlens_q=ends, **given), tokens)


def run(module: Any, params: Any, tokens: Any) -> Any:
    mixer = module.MambaMixer.__new__(module.MambaMixer)
    torch.nn.Module.__init__(mixer)
    mixer.cp = SimpleNamespace(
        get_A_log=lambda: torch.zeros(2),
        get_conv1d_weight=lambda: torch.linspace(-1, 1, 2 * WIDTH).view(2, 1, WIDTH),
        get_conv1d_bias=lambda: None,
        get_dt_bias=lambda: torch.zeros(2),
        get_D=lambda: torch.zeros(2),
        ngroups_local_tpcp=1,
        post_conv_ssm=lambda y, *_: y,
    )
    mixer.conv1d = SimpleNamespace(bias=None)
    mixer.D_has_hdim = mixer.rmsnorm = mixer.norm_before_gate = False
    mixer.chunk_size, mixer.headdim, mixer.activation = 4, 1, "silu"
    mixer.mamba_training_ssm_states_dtype = None
    supported = {"_check_mamba_sequence_packing_support": lambda **_: (True, None)}
    stand_ins = {
        "mamba_split_conv1d_scan_combined": convolve_and_scan,
        "rearrange": lambda x, pattern: REARRANGE[pattern](x),
    }
    with mock.patch.multiple(module, create=True, **stand_ins, **supported):
        return mixer._ssm_training(tokens, params)


def convolve_and_scan(x: Any, weight: Any, *_: Any, seq_idx: Any = None, **__: Any) -> Any:
    """Compute both kinds of Mamba state; a token sees tokens with the same `seq_idx`."""
    if seq_idx is None:
        seq_idx = torch.zeros(1, x.shape[1], dtype=torch.int32)
    out, state = [], torch.zeros_like(x[:, 0])
    for at in range(x.shape[1]):
        window = torch.zeros_like(x[:, 0])
        for back in range(min(WIDTH, at + 1)):
            if seq_idx[0, at - back] == seq_idx[0, at]:
                window = window + weight[:, back] * x[:, at - back]
        goes_on = at > 0 and seq_idx[0, at - 1] == seq_idx[0, at]
        state = (0.9 * state if goes_on else 0) + window
        out.append(state)
    return torch.stack(out, 1)
