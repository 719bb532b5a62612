"""Which sizes of Mamba-3 our scan supports; without torch, since a recipe is checked without it."""

from __future__ import annotations


def obstacle(
    *, heads_per_group: int, rank: int, state: int, width: int, angles: int, out_norm: bool
) -> str:
    """Why the scan does not support these sizes, as half a sentence; empty if it does.

    Args:
        heads_per_group: heads that share keys and queries.
        rank: of a token's update of the state; 1 is SISO.
        state: n, columns of a state.
        width: p, rows of a state, which are the values of a head.
        angles: rotated pairs of a state.
        out_norm: whether the output is normalized before the gate.
    """
    if rank not in (1, 2, 4) or out_norm:
        norm = " with an output norm" if out_norm else ""
        return f"it supports ranks 1, 2 and 4 without an output norm, not rank {rank}{norm}"
    if any(each & each - 1 for each in (state, width, heads_per_group)):
        return f"{heads_per_group} heads per group, {state} or {width} is not a power of two"
    if state < 32 or width < 16:
        return f"states of {state} x {width} are smaller than 32 x 16, which Triton's products need"
    if state > 256 or state * width > 256 * 64:
        return f"states of {state} x {width} need more shared memory than sm_90 has"
    if 4 * angles != state:
        return f"{angles} angles are not a quarter of states of {state}"
    return ""
