"""What models with DSA compute, with absorbed attention or a key per head; runs in a tree."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from tests.upstream_patches.dsa import dsa_models as models

HEADS = {"num_attention_heads": 4}  # one on a rank, as wide as the latent, would look absorbed
MODELS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "gpt": (lambda: models.gpt(layers=2, **HEADS), {}),
    "packed": (lambda: models.gpt(layers=2, **HEADS), {"packed": True}),
    "projections recomputed": (lambda: models.gpt(layers=2, **HEADS, **models.PROJECTIONS), {}),
    "attention recomputed": (lambda: models.gpt(layers=2, **HEADS, **models.ATTENTION), {}),
    "hybrid": (lambda: models.hybrid("D-D-/D-", **HEADS), {}),
}


def main(out: str, tensor: int) -> None:
    """Write losses, gradients, weights and classes, of one rank."""
    models.start(tensor=tensor)
    found = {}
    for name, (build, how) in MODELS.items():
        if tensor > 1 and name != "gpt":
            continue
        models.dsa.DSAIndexerLossLoggingHelper.tracker.clear()  # it is as long as the first model
        model = build()
        loss = models.loss(model, **how)
        loss.backward()
        named = dict(model.named_parameters())
        found[name] = {
            "classes": sorted({type(one).__name__ for one in model.modules() if _attends(one)}),
            "weights": {key: value.detach() for key, value in named.items()},
            "gradients": {key: value.grad for key, value in named.items()},
            "loss": loss.detach(),
        }
    torch.save(found, f"{out}.{os.environ.get('RANK', '0')}")


def _attends(module: Any) -> bool:
    return isinstance(getattr(module, "core_attention", None), torch.nn.Module)
