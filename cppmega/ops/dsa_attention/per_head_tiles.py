"""The tiles of the attention with a key per head, by width and GPU.

With keys of 192, 128, 96 or 64 and values of 128 or 64 columns, no kernel spills registers; some
do at odd widths, whose rows are not aligned, and for values wider than the keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from cppmega.ops.common.bits_triton import UNIT
from cppmega.ops.common.device import Gpu
from cppmega.ops.common.tiles_triton import padded


class Tile(NamedTuple):
    """A kernel's tile and launch options.

    Attributes:
        queries: queries per tile, a power of two from 32 to 128.
        keys: keys per tile, likewise.
        warps: warps per program.
        stages: pipeline stages; with two no copy overlaps with products, with three one does.
    """

    queries: int
    keys: int
    warps: int
    stages: int

    def options(self) -> dict[str, Any]:
        """The launch options."""
        return {
            "BLOCK_M": self.queries,
            "BLOCK_N": self.keys,
            "BITS": UNIT,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


class Tiles(NamedTuple):
    """The tiles of the three kernels."""

    forward: Tile
    query: Tile
    key: Tile


HOPPER = {
    192: Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 3)),
    256: Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 3)),
    368: Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(32, 128, 8, 3)),
    384: Tiles(Tile(128, 64, 8, 3), Tile(128, 32, 8, 3), Tile(32, 32, 8, 3)),
    512: Tiles(Tile(64, 32, 8, 3), Tile(128, 32, 8, 3), Tile(32, 32, 8, 3)),
}
"""Tiles by the combined width of keys and values; see `tiles_for`."""

OTHERS = {
    192: Tiles(Tile(128, 32, 8, 3), Tile(64, 32, 8, 3), Tile(32, 64, 8, 3)),
    256: Tiles(Tile(64, 32, 4, 3), Tile(64, 32, 8, 3), Tile(32, 64, 8, 3)),
    368: Tiles(Tile(64, 32, 8, 3), Tile(32, 32, 4, 3), Tile(32, 32, 4, 3)),
    384: Tiles(Tile(64, 32, 8, 3), Tile(32, 32, 4, 3), Tile(32, 32, 8, 3)),
    512: Tiles(Tile(64, 32, 8, 2), Tile(32, 32, 4, 2), Tile(32, 32, 8, 2)),
}
"""The same for 99 KiB of shared memory, without the instructions of sm_90."""


def widths_of(width: int) -> tuple[int, int, int, int]:
    """Split a width into two parts, each with the power of two to which it is padded; the second
    is 0 if there is only one."""
    first = 1 << (width.bit_length() - 1)
    if first + padded(width - first) >= padded(width):
        return width, padded(width), 0, 16
    return first, first, width - first, padded(width - first)


def tiles_for(width: int, value_width: int, gpu: Gpu) -> Tiles:
    """The tiles for a width of queries and keys, and of values."""
    _, first, rest, second = widths_of(width)
    whole = first + padded(value_width)
    if rest:
        whole += second + 48  # two parts need more registers than one of the same width
    table = HOPPER if gpu.capability == (9, 0) else OTHERS
    return next(tiles for most, tiles in table.items() if whole <= most)
