"""One tree's part of `benchmarks/mhc_upstream.py`; imported in the process that runs the tree."""

from __future__ import annotations

import inspect
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import multi_token_prediction, transformer_layer

from tests.upstream_patches.mhc import mhc_models as models
from tests.upstream_patches.mhc.mhc_ranks import load, save

CASES = {
    "GPT": models.gpt,
    "GPT with an MTP depth": partial(models.gpt, depths=1),
    "hybrid M*-E": partial(models.hybrid, "M*-E", **models.EXPERTS),
    "hybrid M*-E with an MTP depth *-": partial(models.hybrid, "M*-E/*-", **models.EXPERTS),
}


def main(folder: str, other: str) -> None:
    """Build and save what this tree has, or load what the other tree has saved."""
    models.start()
    _take_any_axes()
    # Without Transformer Engine it would compare with classes that are none.
    multi_token_prediction.is_inference_column_parallel_linear = lambda module: False
    here, there = Path(folder), Path(other) if other else None
    here.mkdir(parents=True, exist_ok=True)
    cases = {name: make for name, make in CASES.items() if _builds(name)}
    if not (here / "cases.json").exists():
        for name, make in cases.items():
            _own(make(**models.MHC), here, name)
        (here / "cases.json").write_text(json.dumps(list(cases)))
    if there is not None:
        for name in json.loads((there / "cases.json").read_text()):
            if name in cases:
                model = make_of(name)
                load(model, there / name)
                torch.save(_step(model), here / f"{name}-loaded.pt")


def make_of(name: str) -> Any:
    return CASES[name](**models.MHC)


def _builds(name: str) -> bool:
    """Whether this tree's specs build a GPT with sites: 0.20's will not."""
    own = hasattr(transformer_layer, "HyperConnectionTransformerLayer")
    takes = inspect.signature(gpt_layer_specs.get_gpt_layer_local_spec).parameters
    return not name.startswith("GPT") or not own or models.OF_SPEC in takes


def _take_any_axes() -> None:
    """Let Megatron's linear layers take streams apart, `[s, b, n, C]`, as those of TE do."""
    plain = ColumnParallelLinear.forward

    def forward(self: Any, x: torch.Tensor, *given: Any, **named: Any) -> Any:
        out, bias = plain(self, x.flatten(1, -2) if x.ndim > 3 else x, *given, **named)
        return (out.unflatten(1, x.shape[1:-1]) if x.ndim > 3 else out), bias

    ColumnParallelLinear.forward = forward


def _own(model: Any, folder: Path, name: str) -> None:
    """Draw all parameters, and save the model, its shapes, its loss and its gradients."""
    drawn = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=drawn)
    save(model, folder / name)
    sharded = model.sharded_state_dict()
    shapes = {
        "parameters": {key: tuple(p.shape) for key, p in model.named_parameters()},
        "saved": {each.key: tuple(getattr(each, "global_shape", ())) for each in sharded.values()},
    }
    torch.save(shapes | _step(model), folder / f"{name}.pt")


def _step(model: Any) -> dict[str, Any]:
    value = models.loss(model)
    value.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {"loss": value.item(), "gradients": gradients}
