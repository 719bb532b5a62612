"""Hyper-connections in layers that are captured in CUDA graphs."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from tests.support import patched, python

PAGES = ("mhc_connections", "float16_keep_fp32", "te_graphs_hybrid_mtp")
STREAMS = [12, 2, 4 * 16]
CAPTURED = {
    **{"gpt, whole": 3, "gpt, attn": 3, "gpt, mlp": 3},
    **{"hybrid, whole": 5, "hybrid, attn": 2, "hybrid, mlp": 2},
}
"""Layers with a graph: of the decoder and of an MTP depth."""


@cache
def found() -> dict[str, Any]:
    """What models on the patched tree do."""
    code = "from tests.upstream_patches.mhc import mhc_checks as t, mhc_graph_checks as g\n"
    code += "t.main(g.eager, g.local)"
    done = python(patched("0.19.2", *PAGES), code)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("case", [case for case in CAPTURED if "mlp" not in case])
def test_local_graphs_take_streams_and_change_nothing(case: str) -> None:
    losses, calls = found()["local"][case]
    assert losses == found()["eager"][case.partition(",")[0]]
    assert calls == [STREAMS] * len(losses) * CAPTURED[case]
