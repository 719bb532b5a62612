"""What models with hyper-connections do in one process, as JSON on the last line.

Imported in the process that runs a tree, never by pytest itself.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cppmega.errors import CppmegaError
from tests.upstream_patches.mhc import mhc_models as models

PATTERN = "M*-E/*-"


def main(*parts: Callable[[], Any]) -> None:
    """Print what each part returns, by its name."""
    models.start()
    print(json.dumps({part.__name__: part() for part in parts}))


def gpt(**options: Any) -> Any:
    return models.gpt(depths=1, **options)


def hybrid(**options: Any) -> Any:
    return models.hybrid(PATTERN, **models.EXPERTS, **options)


MAKE = {"gpt": gpt, "hybrid": hybrid}


def off() -> Any:
    """Losses, weights after three steps and keys of models with one stream."""
    found = {}
    for name, make in MAKE.items():
        model = make()
        losses = models.trained(model)
        keys = sorted(model.sharded_state_dict())
        found[name] = [losses, models.digest(model.parameters()), list(model.state_dict()), keys]
    return found


def on() -> Any:
    """Losses of 20 steps, shapes of what is saved, and how the first gradients look."""
    found = {}
    for name, make in MAKE.items():
        model = make(**models.MHC)
        shapes = {key: list(t.shape) for key, t in model.state_dict().items() if t is not None}
        saved = sorted(key for key in model.sharded_state_dict() if "_extra_state" not in key)
        losses = models.trained(model, 20)
        found[name] = {"shapes": shapes, "saved": saved, "losses": losses}
    return found


def zeros() -> Any:
    """Where gradients of the first step are exactly zero, and the largest of each site's parts.

    With the initial values of 0.20, and with one stream.
    """
    words = set(models.batch(1)["input_ids"].flatten().tolist())
    found: dict[str, Any] = {"unseen": sorted(set(range(models.WORDS)) - words)}
    for name, make in MAKE.items():
        for how, options in {"off": {}, "on": {"enable_mhc_connections": True}}.items():
            model = make(**options)
            models.loss(model).backward()
            gradients = {key: p.grad for key, p in model.named_parameters()}
            places = {key: (g == 0).nonzero().tolist() for key, g in gradients.items()}
            found[f"{name}, {how}"] = {
                "places": {key: where for key, where in places.items() if where},
                "sites": _of_sites(gradients),
            }
    return found


def _of_sites(gradients: dict[str, torch.Tensor]) -> dict[str, dict[str, float]]:
    """The largest gradient of each site by what it weighs: input, output and mixing of streams."""
    found = {}
    for key, gradient in gradients.items():
        site, _, last = key.partition("hyper_connection.")
        parts = last.startswith(("mapping_proj", "bias")) and gradient.tensor_split((4, 8))
        for part, values in zip(("pre", "post", "res"), parts or (), strict=bool(parts)):
            largest = found.setdefault(site, {})
            largest[part] = max(values.abs().max().item(), largest.get(part, 0.0))
    return found


def recomputed() -> Any:
    """Distances of losses and gradients to those without recomputation, and streams kept."""
    found = {}
    for name, make in MAKE.items():
        plain = stepped(make(**models.MHC))
        kept = {"none": plain[2]}
        apart = {}
        for how, options in {
            "full": models.FULL,
            "mhc": models.SELECTIVE,
            "mhc by 2": {**models.SELECTIVE, "mhc_recompute_layer_num": 2},
        }.items():
            step = stepped(make(**models.MHC, **options))
            apart[how], kept[how] = distances(step, plain), step[2]
        with mock.patch("cppmega.features.mhc.connections.PART", 1):  # each token by itself
            apart["in parts"] = distances(stepped(make(**models.MHC)), plain)
        found[name] = {"apart": apart, "kept": kept}
    return found


DROPOUT = {"hidden_dropout": 0.2}


def dropout() -> Any:
    """Distances with dropout to none, and to itself where it is recomputed, by other numbers, too.

    Every step begins with the same random numbers.
    """

    def step(make: Callable[..., Any], seed: int = 5, **options: Any) -> Step:
        model = make(**models.MHC, **options)
        torch.manual_seed(seed)
        return stepped(model)

    found = {}
    for name, make in MAKE.items():
        plain = step(make, **DROPOUT)
        rows = {
            "full": step(make, **DROPOUT, **models.FULL),
            "mhc": step(make, **DROPOUT, **models.SELECTIVE),
            "mhc by 2": step(make, **DROPOUT, **models.SELECTIVE, mhc_recompute_layer_num=2),
            "other numbers": step(make, 6, **DROPOUT),
            "none": step(make),
        }
        found[name] = {how: distances(row, plain) for how, row in rows.items()}
        evaluated = [models.loss(make(**models.MHC, **how).eval()) for how in (DROPOUT, {})]
        found[name]["evaluated"] = [(evaluated[0] - evaluated[1]).item()]
    return found


class _Made(TorchDispatchMode):
    """Notes all memory that operations fill."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, torch.Tensor):
                storage = each.untyped_storage()
                self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out

    def alive(self, model: torch.nn.Module) -> int:
        """Bytes that are still in use, apart from the parameters."""
        parameters = {p.untyped_storage()._cdata for p in model.parameters()}
        filled = (self.storages[key] for key in self.storages.keys() - parameters)
        return sum(size for ref, size in filled if not ref.expired())


def memory() -> Any:
    """Values per token after the forward and after the backward of a GPT of 4 layers, C 64."""
    found = {}
    for how, options in {
        "without": {},
        "none": models.MHC,
        "mhc": {**models.MHC, **models.SELECTIVE},
        "mhc by 2": {**models.MHC, **models.SELECTIVE, "mhc_recompute_layer_num": 2},
    }.items():
        model = models.gpt(4, hidden_size=64, add_bias_linear=False, **options)
        tokens = 4 * models.LENGTH * models.BATCH
        with _Made() as made:
            value = models.loss(model)
            found[how] = {"forward": made.alive(model) / tokens}
            value.backward()
        found[how]["backward"] = made.alive(model) / tokens
    return found


def other_site() -> None:
    """Let the interpreter forget the tensors with which it ran each kernel last."""
    from cppmega.features.mhc import connections as mhc

    config = models.config(num_layers=1, use_fused_mhc=True, **models.MHC)
    site = mhc.HyperConnectionModule(config)
    x = site.read(torch.zeros(1, 1, 4 * models.WIDTH))
    site.bias_dropout_add(True, False)((x, None), x, 0.0)


Step = tuple[float, list[torch.Tensor], int]


def distances(one: Step, other: Step) -> list[float]:
    """How far apart the losses of two steps are, and their gradients at most."""
    pairs = zip(one[1], other[1], strict=True)
    return [abs(one[0] - other[0]), max((a - b).abs().max().item() for a, b in pairs)]


def stepped(model: Any, then: Callable[[], None] = lambda: None) -> Step:
    """Loss and gradients of a step, and how many tensors of streams wait for its backward."""
    from cppmega.features.mhc import connections as mhc

    read, seen = mhc.HyperConnectionModule.read, []

    def noting(site: Any, streams: torch.Tensor) -> torch.Tensor:
        seen.append(StorageWeakRef(streams.untyped_storage()))
        return read(site, streams)

    with mock.patch.object(mhc.HyperConnectionModule, "read", noting):
        value = models.loss(model)
        reads = len(seen)
        then()
        waiting_of_model = seen[:reads]
        waiting = {ref.cdata for ref in waiting_of_model if not ref.expired()}
        value.backward()
    return value.item(), [p.grad for p in model.parameters()], len(waiting)


def fused() -> Any:
    """Distances between the kernels, which are interpreted here, and the reference."""
    importlib.import_module("tests.ops.interpreted")
    options = {**models.MHC, "mhc_num_residual_streams": 2}
    plain = stepped(models.gpt(1, **options))
    kernels = {"use_fused_mhc": True, **models.SELECTIVE}

    def then() -> None:
        other_site()
        gc.collect()  # forks do it seldom, and what holds itself would hold tensors until then

    step = stepped(models.gpt(1, **options, **kernels), then)
    found = {"apart": distances(plain, step), "kept": step[2]}
    steps = []
    for how in ({}, kernels, {"use_fused_mhc": True}):
        model = models.gpt(1, **options, **how, **DROPOUT)
        torch.manual_seed(5)
        steps.append(stepped(model, then))
    found["with dropout"] = [distances(steps[0], each) for each in steps[1:]]
    return found


def refusal(**options: Any) -> str:
    """The error with which a GPT is not built."""
    try:
        models.gpt(1, **{**models.MHC, **options})
    except CppmegaError as error:
        return f"{error.name}: {error.what}"
    return "built"


def options() -> Any:
    """What the parser makes of both spellings."""
    from megatron.core.transformer import TransformerConfig
    from megatron.training.argument_utils import ArgumentGroupFactory

    def parsed(*given: str) -> Any:
        parser = argparse.ArgumentParser(exit_on_error=False)
        names = (
            "activation_func",
            "embedding_init_method",
            "init_method",
            "output_layer_init_method",
        )
        fields = [f for f in TransformerConfig.__dataclass_fields__ if "mhc" not in f]
        ArgumentGroupFactory(TransformerConfig, exclude=[*fields, *names]).build_group(parser)
        with mock.patch.object(parser, "error", side_effect=ValueError):
            try:
                found = vars(parser.parse_args(given))
            except ValueError:
                return "refused"
        return {name: value for name, value in found.items() if not name.startswith("_")}

    return {
        "none": parsed(),
        "ours": parsed("--enable-mhc-connections", "--mhc-num-residual-streams", "2"),
        "dev": parsed("--enable-hyper-connections", "--num-residual-streams", "2"),
        "both": parsed("--num-residual-streams", "2", "--mhc-num-residual-streams", "2"),
        "two values": parsed("--num-residual-streams", "2", "--mhc-num-residual-streams", "4"),
        "on a CPU": refusal(use_fused_mhc=True),
        "double": refusal(use_fused_mhc=True, params_dtype=torch.float64),
        "3 streams": refusal(use_fused_mhc=True, mhc_num_residual_streams=3),
        "mhc is off": refusal(enable_mhc_connections=False, **models.SELECTIVE),
    }
