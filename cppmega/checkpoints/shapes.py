"""Sizes of a model, derived from the shapes of a checkpoint's tensors, under a recipe's names."""

from __future__ import annotations

import re
from collections.abc import Mapping

Shapes = Mapping[str, tuple[int, ...]]

_LAYER = re.compile(r"(?:^|\.)decoder\.layers\.(?:(\d+)\.)?(.*)")
_DEPTH = re.compile(r"(?:^|\.)mtp\.layers\.(\d+)\.")


def facts(shapes: Shapes) -> dict[str, int]:
    """Return widths and counts, ignoring the optimizer; empty if there is no embedding."""
    model = {name: shape for name, shape in shapes.items() if not name.startswith("optimizer")}
    sizes: dict[str, int] = {}
    for name, shape in model.items():
        if name.endswith("embedding.word_embeddings.weight") and len(shape) == 2:
            sizes["vocab_size"], sizes["hidden_size"] = shape
        elif name.endswith("embedding.position_embeddings.weight"):
            sizes["seq_length"] = shape[0]
        elif name.endswith("mlp.linear_fc1.weight") and _LAYER.search(name) and len(shape) > 1:
            sizes["ffn_hidden_size"] = shape[-2]
    if "hidden_size" not in sizes:
        return {}
    sizes["num_layers"] = _layers(model)
    depths = [int(depth[1]) for name in model if (depth := _DEPTH.search(name))]
    sizes["mtp_num_layers"] = max(depths, default=-1) + 1
    return sizes


def _layers(model: Shapes) -> int:
    """Count layers saved one by one, or stacked along the first dimension of each tensor."""
    count = 0
    for name, shape in model.items():
        layer = _LAYER.search(name)
        if layer is not None and shape:
            count = max(count, shape[0] if layer[1] is None else int(layer[1]) + 1)
    return count
