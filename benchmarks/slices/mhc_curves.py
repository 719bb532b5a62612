"""The small models of `mhc_training.py`, trained in a process of their own that runs one tree.

All ways begin from one seed and see the same batches, in fp32, so that the same model trains on a
CPU and on a GPU. Few batches are repeated, so that there is something to learn.
"""

from __future__ import annotations

import importlib
import json
import os
from typing import Any

import torch

from cppmega.proof.small_models import arguments
from tests.upstream_patches.mhc import mhc_models as models

SIZES = {"width": 256, "length": 128, "batch": 4, "words": 512, "layers": 4}
TINY = {"width": 8, "length": 4, "batch": 1, "words": 16, "layers": 1}
"""What Triton's interpreter can do in seconds."""
STREAMS, BATCHES, RATE = 4, 4, 1e-3
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
    made = {
        "GPT": lambda: models.gpt(sizes["layers"], depths=sizes["layers"] // 4, **options),
        "hybrid": lambda: models.hybrid(_pattern(sizes["layers"]), **options),
    }
    found = {name: trained(make(), steps, way == "nudged") for name, make in made.items()}
    print(json.dumps(found))


def _pattern(layers: int) -> str:
    """Letters of the hybrid model; small ones have no MTP depth."""
    return ("M*-M*-"[: max(layers, 2)]) + ("/*-" if layers > 2 else "")


def trained(model: Any, steps: int, nudged: bool) -> dict[str, list[float]]:
    """Losses and gradient norms of a few steps of Adam.

    Args:
        model: from the seed of all ways.
        steps: their number.
        nudged: every weight begins one rounding away.
    """
    if nudged:
        drawn = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for p in model.parameters():
                sign = torch.randint(2, p.shape, generator=drawn).to(p) * 2 - 1
                p.mul_(1 + NUDGE * sign)
    optimizer = torch.optim.Adam(model.parameters(), RATE)
    found: dict[str, list[float]] = {"loss": [], "grad norm": []}
    for step in range(steps):
        optimizer.zero_grad()
        batch = models.batch(step % BATCHES)
        value = model(**arguments(model, **batch)).float().mean()
        value.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        found["loss"].append(value.item())
        found["grad norm"].append(torch.nn.utils.get_total_norm(gradients).item())
        optimizer.step()
    return found
