"""The small models of `mhc_training.py`, trained in a process of their own that runs one tree.

All ways begin from one seed and see the same batches, in fp32, on a CPU and on a GPU.
"""

from __future__ import annotations

import importlib
import json
import os
from typing import Any

import torch

from benchmarks.slices import curves
from cppmega.proof.small_models import arguments
from tests.upstream_patches.mhc import mhc_models as models

SIZES = {"width": 256, "length": 128, "batch": 4, "words": 512, "layers": 4}
TINY = {"width": 8, "length": 4, "batch": 1, "words": 16, "layers": 1}
"""What Triton's interpreter can do in seconds."""
STREAMS = 4
NUDGE = 2.0**-23
"""The distance of 1 to the next number in fp32."""

WAYS: dict[str, dict[str, Any]] = {
    "reference": {},
    "again": {},
    "nudged": {},
    "fused": {"use_fused_mhc": True},
    "recomputed": {"use_fused_mhc": True, **models.SELECTIVE, "mhc_recompute_layer_num": 2},
}


def main(way: str, steps: int, sizes: dict[str, int]) -> None:
    """Train both models, and print their curves as JSON on the last line."""
    if os.environ.get("TRITON_INTERPRET"):
        importlib.import_module("tests.ops.interpreted")
    if models.DEVICE.type == "cuda" and not torch.distributed.is_initialized():
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl")
    models.start()
    models.LENGTH, models.BATCH, models.WORDS = (sizes[k] for k in ("length", "batch", "words"))
    options = {
        **{"hidden_size": sizes["width"], "ffn_hidden_size": 4 * sizes["width"]},
        **{"init_method_std": 0.02, "num_attention_heads": sizes["width"] // 32 or 1},
        **{"enable_mhc_connections": True, "mhc_num_residual_streams": STREAMS, **WAYS[way]},
    }
    layers = sizes["layers"]
    # Letters of the hybrid model; small ones have no MTP depth.
    pattern = ("M*-M*-"[: max(layers, 2)]) + ("/*-" if layers > 2 else "")
    found = {}
    for name, make in {
        "GPT": lambda: models.gpt(layers, depths=layers // 4, **options),
        "hybrid": lambda: models.hybrid(pattern, **options),
    }.items():
        model, nudge = make(), NUDGE if way == "nudged" else 0.0
        given = [arguments(model, **models.batch(number)) for number in range(curves.BATCHES)]
        found[name] = curves.trained(model, given.__getitem__, steps, nudge)
    print(json.dumps(found))
