"""Train Mamba-3 with grouped keys and queries in mamba-ssm's MIMO kernels.

What: `mamba_mimo_bwd_combined`, packed or not, sums the gradients of keys and queries over the
    heads of a group, for every number of groups that divides the number of heads.
Why: In mamba-ssm 2.3.2.post1 the forward pass accepts any such number, but the backward pass fails
    with "G value of 8 is not currently supported!", after its kernels have run, unless there is one
    group or one per head. NAM56R has 8 groups and 128 heads.
Upstream: https://github.com/state-spaces/mamba/pull/967 (main, not released).
Remove: with the first release after 2.3.2.post1 that has the reduction.
Numerics: changes results where stock raises. The sums are computed in fp32 and rounded once, in a
    fixed order; with one group or one per head nothing changes (bitwise).
"""

from __future__ import annotations

from cppmega.edits import in_order, inserting, replacing
from cppmega.page import Edit, Patch, Source

from ._mamba3_kernels import DISTRIBUTION, FOLDER, loaded, runs_mimo

PLAIN = f"{FOLDER}/mamba3_mimo_bwd.py:mamba_mimo_bwd_combined"
PACKED = f"{FOLDER}/mamba3_mimo_bwd_varlen.py:mamba_mimo_bwd_combined_varlen"
SUMMED = """
if 1 < G < H:
    dq_tilelang, dq_bias_tilelang = _cppmega_of_groups(dq_tilelang, G)
    dk_tilelang, dk_bias_tilelang = _cppmega_of_groups(dk_tilelang, G)
"""


def _cppmega_of_groups(gradient, groups):
    """Sum `[b, s, R, heads, n]` over the neighbouring heads of a group; and over tokens, for the
    heads' biases, in the type of these parameters."""
    of_biases = gradient.sum(dim=(0, 1), dtype=torch.float32)  # noqa: F821
    return gradient.unflatten(3, (groups, -1)).sum(dim=4), of_biases.permute((1, 0, 2))


def _summing(ends: str):  # type: ignore[no-untyped-def]
    return in_order(
        replacing("G == H", "H % G == 0"),
        inserting(SUMMED, before=ends),
    )


PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=PLAIN,
            pins={"2.3.2.post1": "e528be4a850d0607"},
            edit=_summing(
                "ddt, dtrap = bwd_dtrap_ddt_triton(trap, dt, dfactor, dgamma_diag, chunk_size)"
            ),
            helpers=(_cppmega_of_groups,),
            distribution=DISTRIBUTION,
        ),
        Edit(
            target=PACKED,
            pins={"2.3.2.post1": "ecfb9149dd4ef1ec"},
            edit=_summing(
                "ddt, dtrap = bwd_dtrap_ddt_triton_varlen("
                "trap, dt, dfactor, dgamma_diag, chunk_size, cu_seqlens)"
            ),
            helpers=(_cppmega_of_groups,),
            distribution=DISTRIBUTION,
        ),
    ),
    reached="backward",
    when=runs_mimo,
    feature=("mamba_ssm/modules/mamba3.py:Mamba3",),
    wanted_by=lambda recipe: recipe.uses_mimo,
)


def fixed_upstream(source: Source) -> bool:
    return all(
        bool(text) and "is not currently supported" not in text
        for text in map(source.text, (PLAIN, PACKED))
    )


def verify() -> None:
    from typing import Any

    import torch

    _, modules = loaded("bwd", "bwd_varlen")
    batch, length, rank, heads, groups, state, width = 2, 8, 2, 4, 2, 4, 3
    generator = torch.Generator().manual_seed(0)
    of_heads = [torch.randn(batch, length, rank, heads, state, generator=generator) for _ in "qk"]

    def kernel(*shape: Any, **options: Any) -> Any:
        """A kernel that writes known gradients of every head."""

        def run(*tensors: Any) -> None:
            outputs = [t for t in tensors if t is not None and t.shape[1:2] == (length * rank,)]
            for output, gradient in zip(outputs, reversed(of_heads), strict=bool(outputs)):
                output.copy_(gradient.view(batch, length * rank, heads, state))

        return run

    per_head = torch.zeros(batch, heads, length)
    nothing = torch.zeros(heads, rank, width)
    for module, packed in zip(modules, ((), (torch.tensor([0, length]),)), strict=True):
        for name in ("mamba_mimo_bwd_fwd", "mamba_mimo_bwd_bwd"):
            setattr(module, name, kernel)
        suffix = "_varlen" if packed else ""
        setattr(module, f"bwd_dtrap_ddt_triton{suffix}", lambda *_: (per_head, per_head))
        setattr(module, f"bwd_dadt_fused_triton{suffix}", lambda *_: per_head)
        for count in (1, groups, heads):
            keys = torch.zeros(batch, length, rank, count, state)
            values = torch.zeros(batch, length, heads, width)
            bias, angles = torch.zeros(heads, rank, state), torch.zeros(batch, length, heads, 1)
            of_tokens = [per_head.clone() for _ in range(4)]
            given = (
                *(values, keys, keys, values, bias, bias, nothing, nothing, values, nothing),
                *(angles, *of_tokens, torch.zeros(heads), per_head, 4, 4, torch.float32, *packed),
            )
            try:
                dq, dk, *_, dq_bias, dk_bias = getattr(module, f"mamba_mimo_bwd_combined{suffix}")(
                    *given
                )[:8]
            except ValueError as error:
                raise AssertionError(str(error)) from error
            for found, shift, whole in zip((dq, dk), (dq_bias, dk_bias), of_heads, strict=True):
                parts = [
                    sum(whole[:, :, :, g * heads // count + h] for h in range(heads // count))
                    for g in range(count)
                ]
                torch.testing.assert_close(found, torch.stack(parts, 3))
                torch.testing.assert_close(shift, whole.sum((0, 1)).transpose(0, 1))
