"""Hyper-connections in layers that are captured in CUDA graphs or run in FP8."""

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
    **{"gpt of experts, router": 2, "gpt of experts, attn and router": 2},
    **{"hybrid of experts, router": 1, "hybrid of experts, attn and router": 2},
}
"""Layers with a graph: of the decoder and of an MTP depth."""
SITES = {
    **dict.fromkeys(("gpt, whole", "gpt of experts, attn and router"), 2),
    **{"hybrid of experts, router": 0, "hybrid of experts, attn and router": 0.5},
}
"""Sites per graph, if not one. The graph of a hybrid model's router begins after the read."""


@cache
def found() -> dict[str, Any]:
    """What models on the patched tree do."""
    code = "from tests.upstream_patches.mhc import mhc_checks as t, mhc_graph_checks as g\n"
    code += "t.main(g.eager, g.local, g.transformer_engine, g.fp8)"
    done = python(patched("0.19.2", *PAGES), code)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("case", ["gpt, whole", "gpt, attn", "hybrid, whole", "hybrid, attn"])
def test_local_graphs_take_streams_and_change_nothing(case: str) -> None:
    losses, calls = found()["local"][case]
    assert losses == found()["eager"][case.partition(",")[0]]
    assert calls == [STREAMS] * len(losses) * CAPTURED[case]


@pytest.mark.parametrize("case", CAPTURED)
def test_graphs_of_the_engine_take_streams_and_change_nothing(case: str) -> None:
    losses, calls, hooked = found()["transformer_engine"][case]
    assert losses == found()["eager"][case.partition(",")[0]]
    sites = SITES.get(case, 1) * CAPTURED[case]
    assert len(calls) == len(losses) * CAPTURED[case]
    assert calls.count(STREAMS) == len(losses) * min(CAPTURED[case], sites)
    # Before a replay, each captured site's own parameters and those of its projection arrive.
    assert len(hooked) == 2 * sites
    part = case.removeprefix("gpt, ")
    name = {"attn": "self_attention_hyper", "mlp": "mlp_hyper"}.get(part, "hyper")
    assert all(name in each for each in hooked)


@pytest.mark.parametrize("model", ["gpt", "hybrid"])
def test_fp8_leaves_streams_and_coefficients_in_their_types(model: str) -> None:
    fp8 = found()["fp8"][model]
    assert fp8["losses"][0] == fp8["losses"][1]
    # The engine's context concerns its own modules, and a site has none.
    assert fp8["parts"] == ["HyperConnectionModule", "Linear"]
    of_site = [f"{part}, bfloat16 and float32" for part in ("update", "weights")]
    computed = ("product, bfloat16", *of_site)
    assert fp8["seen"] == [each + how for each in computed for how in ("", ", in a context")]
