"""The tiles of the wide sparse attention's kernels, by GPU and shape; all tuning is done here."""

from __future__ import annotations

from typing import NamedTuple

from cppmega.ops.common.device import Gpu


class Tile(NamedTuple):
    """The tile of one kernel.

    Attributes:
        heads: heads per program, the rows of its products; all heads for the gradient of keys.
        keys: keys that it processes at a time.
        warps: warps per program.
        stages: blocks of keys in flight; if shared memory holds one, the next block of the
            backward's scores is held in registers.
        columns: columns of the result that a program computes, if not all.
    """

    heads: int
    keys: int
    warps: int
    stages: int
    columns: int = 0


class WideTiles(NamedTuple):
    """The tiles of the forward kernel and of the three backward kernels."""

    forward: Tile
    scores: Tile
    queries: Tile
    keys: Tile


class _Choice(NamedTuple):
    """Candidate tiles of each kernel, fastest first; the first that fits is used."""

    forward: tuple[Tile, ...]
    scores: tuple[Tile, ...]
    queries: tuple[Tile, ...]
    keys: tuple[Tile, ...]


HOPPER = _Choice(
    forward=(Tile(64, 64, 8, 2), Tile(64, 32, 8, 2), Tile(64, 32, 8, 1)),
    scores=(Tile(64, 64, 8, 1), Tile(64, 32, 8, 1)),
    queries=(Tile(128, 64, 8, 3, 256),),
    keys=(Tile(0, 64, 8, 2, 64), Tile(0, 64, 8, 1, 32)),
)
"""For sm_90, whose wide products have 64 rows."""

FEW_HEADS = _Choice(
    forward=(Tile(16, 64, 4, 2),),
    scores=(Tile(16, 64, 4, 2),),
    queries=(Tile(16, 64, 4, 3, 256),),
    keys=(Tile(0, 64, 4, 2, 128),),
)
"""For sm_90 with at most 16 heads: three quarters of a product of 64 rows would be padding."""

OTHERS = _Choice(
    forward=(Tile(16, 32, 4, 2), Tile(16, 16, 4, 1)),
    scores=(Tile(16, 32, 4, 1), Tile(16, 16, 4, 1)),
    queries=(Tile(64, 64, 8, 2, 128),),
    keys=(Tile(0, 32, 8, 2, 64), Tile(0, 32, 8, 2, 32), Tile(0, 16, 8, 1, 32)),
)
"""For 99 KiB of shared memory, and products of 16 rows."""


def _choice(heads: int, gpu: Gpu) -> _Choice:
    if gpu.capability[0] != 9:
        return OTHERS
    return FEW_HEADS if heads <= 16 else HOPPER


def padded_heads(heads: int, tile: Tile) -> int:
    """The number of heads in the scratch memory: a power of two, in complete tiles."""
    return max(1 << (heads - 1).bit_length(), tile.heads)


def _tiles(heads: int, v: int, r: int, gpu: Gpu) -> WideTiles | str:
    """The tiles, or the name of a kernel that none of its candidates fits."""
    choice = _choice(heads, gpu)
    rows = 2 * padded_heads(heads, choice.scores[0])

    def shared(name: str, tile: Tile) -> int:
        """Bytes of shared memory: the operands that a program keeps, and the keys in flight."""
        columns = min(tile.columns, v)
        flying = tile.stages * tile.keys
        elements = {
            "forward": tile.heads * (v + r + tile.keys) + flying * (v + r),
            "scores": tile.heads * (2 * v + r) + flying * (v + r),
            "queries": flying * (tile.heads + columns),
            "keys": rows * (columns + flying) + 2 * tile.keys * columns,  # the latter in fp32
        }
        return 2 * elements[name]

    found = []
    for name, tiles in choice._asdict().items():
        fitting = [tile for tile in tiles if shared(name, tile) <= gpu.shared]
        if not fitting:
            return name
        found.append(fitting[0])
    return WideTiles(*found)


def tiles_of(heads: int, v: int, r: int, gpu: Gpu) -> WideTiles:
    """The tiles of a call that `wide_obstacle` does not refuse."""
    found = _tiles(heads, v, r, gpu)
    if isinstance(found, str):
        raise ValueError(f"no tile of {found} fits {heads} heads of {v}+{r}")
    return found


def wide_obstacle(heads: int, v: int, r: int, gpu: Gpu) -> str | None:
    """Why the wide kernels do not support a shape on a GPU, as a clause; None if they do.

    Args:
        heads: the number of heads on this rank.
        v: columns of the value.
        r: the remaining columns of the key.
        gpu: the GPU.
    """
    for width, least in ((v, 16), (r, 16)):
        if width & (width - 1) or 0 < width < least:
            return f"keys of {v}+{r} columns are not powers of two of at least 16"
    found = _tiles(heads, v, r, gpu)
    if isinstance(found, str):
        major, minor = gpu.capability
        return f"sm_{major}{minor} lacks the shared memory for {heads} heads of {v}+{r}"
    return None
