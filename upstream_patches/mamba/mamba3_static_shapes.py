"""Compile mamba-ssm's batched MIMO kernels for the shapes that they run with.

What: The forward and backward of Mamba-3's MIMO scan, for batches that are not packed, request
    TileLang kernels for the given batch size, length, heads and groups. Another batch size or
    length is compiled anew, which takes minutes; the kernels for packed documents are unchanged,
    and serve all lengths.
Why: mamba-ssm 2.3.2.post1 compiles them for dynamic shapes, which upstream reverted as a latency
    regression. Not measured here.
Upstream: https://github.com/state-spaces/mamba/pull/968 (main, not released).
Remove: with the first release after 2.3.2.post1 that has static shapes.
Numerics: reorders sums at most: the same program is compiled with constant sizes. Not compared on a
    GPU yet.
"""

from __future__ import annotations

from typing import Any

from cppmega.edits import in_order, replacing
from cppmega.page import Edit, Patch, Source

from ._mamba3_kernels import DISTRIBUTION, FOLDER, loaded, runs_mimo

FORWARD = f"{FOLDER}/mamba3_mimo_fwd.py:mamba_mimo_forward"
BACKWARD = f"{FOLDER}/mamba3_mimo_bwd.py:mamba_mimo_bwd_combined"
SIZES = ("B", "S", "H", "G")


def _given(kernels: int) -> Any:
    """Replace the dynamic sizes of this many kernels with those of the tensors."""
    return in_order(*(replacing(f'T.dynamic("{name}")', name, times=kernels) for name in SIZES))


PATCH = Patch(
    purpose="feature",
    edits=(
        Edit(
            target=FORWARD,
            pins={"2.3.2.post1": "8a764aa3423db4f5"},
            edit=_given(kernels=1),
            distribution=DISTRIBUTION,
        ),
        Edit(
            target=BACKWARD,
            pins={"2.3.2.post1": "e528be4a850d0607"},
            edit=_given(kernels=2),
            distribution=DISTRIBUTION,
            mark="",
        ),
    ),
    reached="forward",
    when=runs_mimo,
    feature=("mamba_ssm/modules/mamba3.py:Mamba3",),
    wanted_by=lambda recipe: recipe.uses_mimo,
    after=("mamba3_grouped_backward",),
)


def fixed_upstream(source: Source) -> bool:
    return all(
        bool(text) and "dynamic" not in text for text in map(source.text, (FORWARD, BACKWARD))
    )


def verify() -> None:
    import torch

    _, (forward, backward) = loaded("fwd", "bwd")
    built: list[tuple[Any, ...]] = []

    def kernel(*shape: Any, **options: Any) -> Any:
        built.append(shape[: len(SIZES)])
        return lambda *tensors: None

    forward.mamba_mimo_fwd = backward.mamba_mimo_bwd_fwd = backward.mamba_mimo_bwd_bwd = kernel
    per_head = torch.zeros(2, 4, 8)
    backward.bwd_dtrap_ddt_triton = lambda *_: (per_head, per_head)
    backward.bwd_dadt_fused_triton = lambda *_: per_head
    keys, values = torch.zeros(2, 8, 2, 1, 4), torch.zeros(2, 8, 4, 3)
    bias, ranked, angles = torch.zeros(4, 2, 4), torch.zeros(4, 2, 3), torch.zeros(2, 8, 4, 1)
    of_tokens, d = [per_head.clone() for _ in range(4)], torch.zeros(4)
    last = (*of_tokens, per_head)
    empty = torch.empty
    on_cpu = lambda *size, device=None, **given: empty(*size, **given)  # noqa: E731
    torch.empty = on_cpu  # type: ignore[assignment]
    forward.mamba_mimo_forward(
        *(keys, keys, values, bias, bias, ranked, ranked, values, d, ranked, angles),
        *(*last, 4, 4, torch.float32),
    )
    backward.mamba_mimo_bwd_combined(
        *(values, keys, keys, values, bias, bias, ranked, ranked, values, ranked, angles),
        *(*of_tokens, d, per_head, 4, 4, torch.float32),
    )
    assert built == [(2, 8, 4, 1)] * 3, built
