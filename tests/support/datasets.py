"""Indexed datasets written number by number, so that a test can write a wrong one."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cppmega.data.corpus import with_suffix

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def write(
    prefix: Path,
    ids: Any,
    lengths: Sequence[int],
    *,
    dtype: str = "uint16",
    documents: Sequence[int] | None = None,
    pointers: Sequence[int] | None = None,
    modes: Sequence[int] = (),
    head: dict[str, Any] | None = None,
) -> Path:
    """A dataset as Megatron's builder writes it, except for what is given otherwise."""
    tokens = np.asarray(ids).astype(dtype)
    with_suffix(prefix, ".bin").write_bytes(tokens.tobytes())
    if documents is None:
        documents = range(len(lengths) + 1)
    if pointers is None:
        pointers = (np.cumsum([0, *lengths])[:-1] * tokens.itemsize).tolist()
    header = {
        **{"magic": b"MMIDIDX\x00\x00", "version": 1, "code": CODES[dtype]},
        **{"sequences": len(lengths), "documents": len(documents)},
        **(head or {}),
    }
    with_suffix(prefix, ".idx").write_bytes(
        struct.pack("<9sQBQQ", *header.values())
        + np.array(lengths, np.int32).tobytes()
        + np.array(pointers, np.int64).tobytes()
        + np.array(documents, np.int64).tobytes()
        + np.array(modes, np.int8).tobytes()
    )
    return prefix
