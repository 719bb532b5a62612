"""Compute the rotary embedding of MLA in one kernel forward and one backward.

What: `_apply_rotary_pos_emb_bshd` rotates MLA's queries and keys on a GPU with `cppmega.ops.rope`;
    other attention's, and calls that its kernel does not support (with a warning that gives the
    reason), by Megatron's code.
Why: Megatron's fused RoPE does not know the order of MLA's columns, and DSA refuses it. The unfused
    code launches some ten kernels forward and fifteen backward for the queries and again for the
    keys of every layer, most of which copy the tensor: about 40 of 2,800 ms of kernels in a step of
    NAM56R on two H200, where this one takes 22, and a fifth of what the host launches in the
    forward pass.
Upstream: Not sent: measured as part of a step on one host of two H200.
Remove: when upstream fuses RoPE in MLA's order of columns for layers with DSA.
Numerics: none (bitwise)
"""

from typing import Any

from cppmega.catalogue.megatron_args import layer_pattern
from cppmega.edits import inserting
from cppmega.page import Edit, Patch, Source

TARGET = "megatron/core/models/common/embeddings/rope_utils.py:_apply_rotary_pos_emb_bshd"


def _taking(gathered: str) -> Any:
    """By the kernel, where it is MLA's and supports the call.

    Args:
        gathered: the name of the argument by which MLA's even columns come first.
    """
    return inserting(
        f"""
        if {gathered} and _cppmega_rope.takes(t, freqs, rotary_interleaved, {gathered}):
            return _cppmega_rope.rotated(t, freqs, rotary_interleaved, {gathered}, mscale)
        """,
        before="rot_dim = freqs.shape[-1]",
    )


def rotates(args: Any) -> bool:
    """Whether the model has MLA whose RoPE Megatron does not fuse."""
    pattern = layer_pattern(args)
    attends = not pattern or bool(set("+D") & set(pattern))
    fused = getattr(args, "apply_rope_fusion", False)
    return bool(getattr(args, "multi_latent_attention", False)) and attends and not fused


PATCH = Patch(
    edits=(
        Edit(
            target=TARGET,
            pins={
                "0.15.3": "b4a5375e37b337db",
                "0.16.1": "b4a5375e37b337db",
                "0.17.1": "b4a5375e37b337db",
                "0.18.2": "b4a5375e37b337db",
            },
            edit=_taking("multi_latent_attention"),
            imports=("from cppmega.ops import rope as _cppmega_rope",),
        ),
        Edit(
            target=TARGET,
            pins={"0.19.2": "1ca2a403acaf344b"},
            edit=_taking("mla_rotary_interleaved"),
            imports=("from cppmega.ops import rope as _cppmega_rope",),
        ),
    ),
    reached="forward",
    when=rotates,
)


def fixed_upstream(source: Source) -> bool:
    return False  # no code shows whether a kernel elsewhere is faster


def verify() -> None:
    import torch
    from megatron.core.models.common.embeddings import rope_utils

    from cppmega.ops import rope, rope_reference
    from cppmega.proof import stand_ins

    t = torch.arange(8.0).view(1, 1, 1, 8)
    angles = torch.tensor([0.0, 0.5, 1.0, 0.0, 0.5, 1.0]).view(1, 1, 1, 6)
    rotated = rope_utils._apply_rotary_pos_emb_bshd
    for adjacent, gathered in ((False, True), (True, False), (False, False)):
        given = (t, angles, adjacent, gathered, 0.5)
        own = rotated(*given)  # on a CPU, by Megatron's code
        with stand_ins.by_reference(rope, "rotated", rope_reference.rotated) as kernel:
            found = rotated(*given)
        if gathered:
            kernel.assert_called_once_with(*given)
        else:
            kernel.assert_not_called()  # not MLA's
        assert torch.equal(found, own), (found, own)
