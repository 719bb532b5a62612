"""Compute the rotary embedding of MLA in one kernel forward and one backward.

What: `_apply_rotary_pos_emb_bshd` rotates MLA's queries and keys on a GPU with
    `cppmega.ops.pointwise.rope`; other attention's, pairs of neighbouring columns, and inverse
    rotations, by Megatron's code. Another call that its kernel does not support ends the run with
    the reason, or, with `--allow-fallback mla_rope_kernel`, is computed by Megatron's code.
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

from cppmega.edits import inserting
from cppmega.page import Edit, Patch, Source

from ._rotation import rotates

IMPORTS = (
    "from cppmega.calls import served as _cppmega_served",
    "from cppmega.ops.pointwise import rope as _cppmega_rope",
)
TARGET = "megatron/core/models/common/embeddings/rope_utils.py:_apply_rotary_pos_emb_bshd"


def _taking(gathered: str, *others: str) -> Any:
    """By the kernel, where it is MLA's, which never pairs neighbouring columns unless asked.

    Args:
        gathered: the name of the argument by which MLA's even columns come first.
        others: arguments that only attention other than MLA's and DSA's sets.
    """
    condition = " and not ".join((f"{gathered} and t.is_cuda", "rotary_interleaved", *others))
    return inserting(
        f"""
        if {condition}:
            reason = _cppmega_rope.obstacle(t, freqs, rotary_interleaved, {gathered})
            if _cppmega_served("mla_rope_kernel", reason, t=t, freqs=freqs):
                return _cppmega_rope.rotated(t, freqs, rotary_interleaved, {gathered}, mscale)
        """,
        before="rot_dim = freqs.shape[-1]",
    )


PATCH = Patch(
    purpose="speed",
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
            imports=IMPORTS,
        ),
        Edit(
            target=TARGET,
            pins={"0.19.2": "1ca2a403acaf344b"},
            edit=_taking("mla_rotary_interleaved"),
            imports=IMPORTS,
        ),
        Edit(
            target=TARGET,
            pins={"main-d98e8a64": "7ceb5696972d146a", "dev-d48bd6be": "7ceb5696972d146a"},
            edit=_taking("mla_rotary_interleaved", "inverse", "mla_output_remove_interleaving"),
            imports=IMPORTS,
        ),
    ),
    reached="forward",
    when=rotates,
)


def fixed_upstream(source: Source) -> bool:
    return False  # no code shows whether a kernel elsewhere is faster


def verify() -> None:
    import inspect
    import warnings
    from functools import partial

    import torch
    from megatron.core.models.common.embeddings import rope_utils

    from cppmega.calls import allowing
    from cppmega.proof import stand_ins

    from ._rotation import rotating

    warnings.simplefilter("ignore")  # of calls that the kernel does not support
    launched: list[str] = []
    rotate = rotating(launched)

    def embedded(t, *how):  # type: ignore[no-untyped-def]
        leaf = t.detach().requires_grad_()
        out = rope_utils._apply_rotary_pos_emb_bshd(leaf, *how)
        (gradient,) = torch.autograd.grad(out, leaf, upstream.to(out.dtype))
        return out, gradient

    t, upstream, angles = torch.randn(3, 2, 2, 8), torch.randn(3, 2, 2, 8), torch.randn(3, 1, 1, 6)
    by_column = t.mT.contiguous().mT
    taken = [
        (t, angles, False, True),
        (t.bfloat16(), angles[..., :4], False, True),
        (by_column, torch.cat((angles, angles[..., :2]), -1), False, True),
    ]
    declined = [
        (t, angles, True, False),  # not MLA's
        (t, angles, False, False),
        (t.double(), angles, False, True),
        (t, angles.double(), False, True),
        (t, angles.expand(3, 2, 1, 6), False, True),
        (t, angles[..., :5], False, True),
        (t, angles.clone().requires_grad_(), False, True),
        (t, angles, True, True),
    ]
    of_others = [{"inverse": True}, {"mla_output_remove_interleaving": True}]
    if "inverse" in inspect.signature(rope_utils._apply_rotary_pos_emb_bshd).parameters:
        for chosen in of_others:
            call = partial(rope_utils._apply_rotary_pos_emb_bshd, t, angles, False, True, **chosen)
            wanted = call()
            with stand_ins.on_gpu("pointwise.rope_triton", rotate=rotate):
                assert torch.equal(call(), wanted) and not launched, chosen
    for by_kernel, calls in ((True, taken), (False, declined)):
        for call in calls:
            wanted = embedded(*call, 0.5)  # on a CPU, by Megatron's code
            assert not launched, "a tensor of the CPU"
            with (
                stand_ins.on_gpu("pointwise.rope_triton", rotate=rotate),
                allowing("mla_rope_kernel"),
            ):
                found = embedded(*call, 0.5)
            assert launched == ["forward", "backward"] * by_kernel, (call[0].dtype, call[2:])
            launched.clear()
            for one, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(one, other)
