"""The tiles of the attention with a key per head, by width and GPU.

With keys of 192, 128, 96 or 64 and values of 128 or 64 no kernel spills registers; at odd widths,
whose rows are not aligned, and for values of more columns than keys some do.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from cppmega.ops.dsa_indexer_bits_triton import UNIT
from cppmega.ops.dsa_indexer_device import Gpu
from cppmega.ops.dsa_indexer_tiles_triton import padded


class Tile(NamedTuple):
    """A kernel's tile, and how it is launched.

    Attributes:
        queries: of a tile, a power of two from 32 to 128.
        keys: of a tile, likewise.
        warps: of a program.
        stages: of the pipeline; with two no copy overlaps with products, with three one does.
    """

    queries: int
    keys: int
    warps: int
    stages: int

    def options(self) -> dict[str, Any]:
        """The options of a launch."""
        return {
            "QUERIES": self.queries,
            "KEYS": self.keys,
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
"""By the width of keys and values together, see `tiles_for`."""

OTHERS = {
    192: Tiles(Tile(128, 32, 8, 3), Tile(64, 32, 8, 3), Tile(32, 64, 8, 3)),
    256: Tiles(Tile(64, 32, 4, 3), Tile(64, 32, 8, 3), Tile(32, 64, 8, 3)),
    368: Tiles(Tile(64, 32, 8, 3), Tile(32, 32, 4, 3), Tile(32, 32, 4, 3)),
    384: Tiles(Tile(64, 32, 8, 3), Tile(32, 32, 4, 3), Tile(32, 32, 8, 3)),
    512: Tiles(Tile(64, 32, 8, 2), Tile(32, 32, 4, 2), Tile(32, 32, 8, 2)),
}
"""The same within 99 KiB of shared memory, without the instructions of sm_90."""


def widths_of(width: int) -> tuple[int, int, int, int]:
    """A width in two parts, each with the power of two that it is padded to; 0 if there is one."""
    first = 1 << (width.bit_length() - 1)
    if first + padded(width - first) >= padded(width):
        return width, padded(width), 0, 16
    return first, first, width - first, padded(width - first)


def tiles_for(width: int, value_width: int, gpu: Gpu) -> Tiles:
    """The tiles for a width of queries and keys, and of values."""
    _, first, rest, second = widths_of(width)
    whole = first + padded(value_width)
    if rest:
        whole += second + 48  # two parts take more registers than one of their width
    table = HOPPER if gpu.capability == (9, 0) else OTHERS
    return next(tiles for most, tiles in table.items() if whole <= most)
