"""Reset Mamba's state at the document boundaries of a pack, without waiting for the device.

What: The mixer derives `seq_idx` from the `cu_seqlens` of a `thd` pack if none was given for the
    sequence length that it processes. `seq_idx` itself is computed by a search instead of by
    `repeat_interleave`.
Why: Since 0.17.0 `seq_idx` exists only if the caller of `PackedSeqParams` also sets `total_tokens`.
    Nothing in megatron/training 0.19.2 and no helper in megatron/core does so, and the mixer
    interprets None as "one document": the state of the convolution and of the scan is carried into
    the next document without an error (tested with a plain stand-in for the kernel: every document
    but the first was wrong). In addition, `repeat_interleave` with counts on the GPU waits for the
    device, once per batch, on 0.16 once per layer.
Upstream: https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/3484 sets `total_tokens` in one caller
Remove: when `MambaMixer` rejects or computes a missing `seq_idx`, without `repeat_interleave`.
Numerics: changes results if `seq_idx` was missing: documents no longer see each other. If the
    caller sets `total_tokens`, the values are bitwise the same.
"""

from typing import Any

from cppmega.catalogue.megatron_args import layer_pattern, variables
from cppmega.edits import body_of, replacing
from cppmega.page import Edit, Patch, Source
from cppmega.sizes import mixers as mixer_sizes

MIXER = "megatron/core/ssm/mamba_mixer.py:MambaMixer"
TRAINING = f"{MIXER}._ssm_training"
IN_MIXER = f"{MIXER}._create_packed_seq_idx"  # 0.16 only
IN_PARAMS = "megatron/core/packed_seq_params.py:PackedSeqParams.__post_init__"


def document_of_token(cu_seqlens, length):  # type: ignore[no-untyped-def]
    import torch

    position = torch.arange(length, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    # Tokens behind the last boundary get an index of their own: they belong to no document.
    found = torch.bucketize(position, cu_seqlens, out_int32=True, right=True)
    return (found - 1).unsqueeze(0)


def seq_idx_of_length(packed_seq_params, length):  # type: ignore[no-untyped-def]
    given = packed_seq_params.seq_idx
    # Under context parallelism callers know only their share of the length, the mixer all of it.
    if given is not None and given.shape[-1] == length:
        return given
    if packed_seq_params.qkv_format != "thd":
        return given  # the boundaries of a batch of sequences are not positions along this one
    cu_seqlens = packed_seq_params.cu_seqlens_q_padded
    if cu_seqlens is None:
        cu_seqlens = packed_seq_params.cu_seqlens_q
    return given if cu_seqlens is None else document_of_token(cu_seqlens, length)


def post_init(self):  # type: ignore[no-untyped-def]
    cu_seqlens = self.cu_seqlens_q_padded
    if cu_seqlens is None:
        cu_seqlens = self.cu_seqlens_q
    if isinstance(cu_seqlens, Tensor) and self.total_tokens is not None:  # noqa: F821
        self.seq_idx = document_of_token(cu_seqlens, self.total_tokens)


def create_packed_seq_idx(self, packed_seq_params, total_tokens):  # type: ignore[no-untyped-def]
    cu_seqlens = packed_seq_params.cu_seqlens_q_padded
    if cu_seqlens is None:
        cu_seqlens = packed_seq_params.cu_seqlens_q
    return document_of_token(cu_seqlens, total_tokens)


def packs_for_mamba(args: Any) -> bool:
    """Whether the run packs documents for a model with Mamba layers."""
    packs = getattr(args, "sft", False) or getattr(args, "dataloader_inter_document_masking", False)
    mamba2 = not mixer_sizes.mamba3(variables(args))  # then M is Megatron's own mixer
    return bool(packs) and mamba2 and "M" in layer_pattern(args)


PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=TRAINING,
            pins={
                "0.17.1": "7a5120b28e5a3b8d",
                "0.18.2": "7a5120b28e5a3b8d",
                "0.19.2": "9645d9758b799cb8",
            },
            edit=replacing(
                "packed_seq_params.seq_idx", "seq_idx_of_length(packed_seq_params, zxBCdt.shape[1])"
            ),
            helpers=(document_of_token, seq_idx_of_length),
        ),
        Edit(
            target=IN_PARAMS,
            pins={
                "0.17.1": "aa9450cee2c631bf",
                "0.18.2": "aa9450cee2c631bf",
                "0.19.2": "aa9450cee2c631bf",
            },
            edit=body_of(post_init),
            helpers=(document_of_token,),
        ),
        Edit(
            target=IN_MIXER,
            pins={"0.16.1": "65b90e2d4a9ed9e1"},
            edit=body_of(create_packed_seq_idx),
            helpers=(document_of_token,),
        ),
    ),
    reached="forward",
    feature=("megatron/core/ssm/mamba_mixer.py:_check_mamba_sequence_packing_support",),
    when=packs_for_mamba,
)


def fixed_upstream(source: Source) -> bool:
    counted = source.text(IN_PARAMS) + source.text(IN_MIXER)
    taken_as_given = "seq_idx = packed_seq_params.seq_idx\n" in source.text(TRAINING)
    return bool(source.text(TRAINING)) and "repeat_interleave" not in counted and not taken_as_given


def verify() -> None:
    import dataclasses
    from types import SimpleNamespace
    from unittest import mock

    import torch
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.ssm import mamba_mixer

    def scan(x, *_, seq_idx=None, **__):  # type: ignore[no-untyped-def]
        """Return for each token the sum over its document so far."""
        same = torch.ones(1, x.shape[1], x.shape[1], device=x.device)
        if seq_idx is not None:
            same = (seq_idx[:, :, None] == seq_idx[:, None, :]).float()
        return same.tril() @ x

    def rearrange(x, pattern):  # type: ignore[no-untyped-def]
        return x.squeeze(1) if pattern == "d 1 w -> d w" else x.transpose(0, 1)

    mixer = mamba_mixer.MambaMixer.__new__(mamba_mixer.MambaMixer)
    torch.nn.Module.__init__(mixer)
    weights = {name: lambda: torch.zeros(2) for name in ("get_A_log", "get_dt_bias", "get_D")}
    mixer.cp = SimpleNamespace(
        **weights,
        get_conv1d_weight=lambda: torch.zeros(2, 1, 4),
        get_conv1d_bias=lambda: None,
        ngroups_local_tpcp=1,
        post_conv_ssm=lambda y, *_: y,
    )
    mixer.conv1d = SimpleNamespace(bias=None)
    mixer.D_has_hdim = mixer.rmsnorm = mixer.norm_before_gate = False
    mixer.chunk_size, mixer.headdim, mixer.activation = 4, 1, "silu"
    mixer.mamba_training_ssm_states_dtype = None

    def outputs(device, **given):  # type: ignore[no-untyped-def]
        documents = torch.tensor([0, 3, 8], dtype=torch.int32).to(device)
        with (
            mock.patch.object(mamba_mixer, "mamba_split_conv1d_scan_combined", scan, create=True),
            mock.patch.object(mamba_mixer, "rearrange", rearrange, create=True),
            mock.patch.object(
                mamba_mixer, "_check_mamba_sequence_packing_support", lambda **_: (True, None)
            ),
        ):
            params = PackedSeqParams(**{"qkv_format": "thd", "cu_seqlens_q": documents, **given})
            return mixer._ssm_training(torch.ones(10, 1, 2, device=device), params)[:, 0, 0]

    wanted = [1, 2, 3, 1, 2, 3, 4, 5, 1, 2]
    assert outputs("cpu").tolist() == wanted, "the state is carried into the next document"
    # A meta tensor has no values: reading one raises.
    assert outputs("meta").shape == (10,)
    if any(field.name == "total_tokens" for field in dataclasses.fields(PackedSeqParams)):
        for total in (10, 5):  # the complete length, and the share of one of two ranks
            assert outputs("cpu", total_tokens=total).tolist() == wanted
            assert outputs("meta", total_tokens=total).shape == (10,)
