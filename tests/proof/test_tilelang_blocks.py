"""A kernel's body runs block by block, and its stores are recorded."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cppmega.proof.tilelang_blocks import Blocks  # noqa: E402


def kernel(T: Any, shared: bool) -> Any:
    rows = T.dynamic("rows")

    @T.prim_func
    def double(x: T.Tensor([rows], T.float32), out: T.Tensor([rows], T.float32)) -> None:  # type: ignore[valid-type]
        with T.Kernel(T.ceildiv(rows, 2), threads=32) as block:
            for near in T.Parallel(2) if shared else T.serial(2):
                if block * 2 + near < rows:
                    out[block * 2 + near] = x[block * 2 + near] * 2

    return double


@pytest.mark.parametrize("shared, how", [(True, "parallel"), (False, "all threads")])
def test_every_block_runs_and_stores_are_recorded(shared: bool, how: str) -> None:
    language = Blocks(rows=5)
    out = language.recorded(torch.zeros(5))
    language.run(kernel(language, shared), torch.arange(5.0), out)
    assert out.values.tolist() == [0, 2, 4, 6, 8]
    assert out.stores == {row: [how] for row in range(5)}
    assert language.parallel == 0
