"""Hyper-connections in layers that are captured in CUDA graphs or run in FP8, on a CPU.

Without a GPU nothing is captured. What would be a graph runs what it would hold, each time. A
context of FP8 changes nothing, but is noted.

Imported in the process that runs a tree, never by pytest itself.
"""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from megatron.core import fp8_utils
from megatron.core.models.common.language_module import language_module
from megatron.core.models.hybrid import hybrid_block
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import (
    cuda_graphs,
    multi_token_prediction,
    transformer_block,
    transformer_layer,
)
from megatron.core.transformer.enums import CudaGraphModule
from megatron.core.transformer.module import MegatronModule
from torch.utils._pytree import tree_leaves

from cppmega.features.mhc import connections
from tests.upstream_patches.mhc import mhc_models as models

MAKE = {
    "gpt": lambda **options: models.gpt(depths=1, **options),
    "hybrid": lambda **options: models.hybrid("M*-/*-", **options),
    "gpt of experts": lambda **options: models.gpt(**models.EXPERTS, **options),
    "hybrid of experts": lambda **options: models.hybrid("*E-", **models.EXPERTS, **options),
}
_ATTENTION, _ROUTER = CudaGraphModule.attn, CudaGraphModule.moe_router
DENSE = {"whole": [], "attn": [_ATTENTION], "mlp": [CudaGraphModule.mlp]}
PARTS = {**DENSE, "router": [_ROUTER], "attn and router": [_ATTENTION, _ROUTER]}
Calls = list[list[int]]
"""The shape of the hidden states in each call of a graph."""


def local() -> Any:
    """Losses, and the calls of local graphs, by model and part."""
    # Stock fails to build a dense layer of which only the MLP is captured.
    parts = ("whole", "attn")
    names = ("gpt", "hybrid")
    return {f"{name}, {part}": _local(name, part) for name in names for part in parts}


def transformer_engine() -> Any:
    """Losses, calls of Transformer Engine's graphs, and hooked modules, by model and part."""
    parts = {name: {*PARTS} - {*DENSE} if "experts" in name else DENSE for name in MAKE}
    return {f"{name}, {part}": _of_engine(name, part) for name in MAKE for part in parts[name]}


def eager() -> Any:
    """Losses without graphs."""
    return {name: models.trained(make(**models.MHC)) for name, make in MAKE.items()}


def fp8() -> Any:
    """A bf16 model whose layers are in FP8, by the contexts that Transformer Engine would read.

    Losses without and with FP8; what layers and sites compute with, and whether in a context.
    """
    found: dict[str, Any] = {}
    bf16 = {"bf16": True, "params_dtype": torch.bfloat16, **models.MHC}
    for name in ("gpt", "hybrid"):
        make = MAKE[name]
        seen: set[str] = set()
        with _contexts(seen):
            model = make(fp8="hybrid", fp8_recipe="tensorwise", **bf16).bfloat16()
            losses = [models.trained(make(**bf16).bfloat16()), models.trained(model)]
        parts = {type(part).__name__ for site in sites(model) for part in site.modules()}
        found[name] = {"losses": losses, "seen": sorted(seen), "parts": sorted(parts)}
    return found


@contextlib.contextmanager
def _contexts(seen: set[str]) -> Iterator[None]:
    """Replace the contexts in which layers run in FP8, and note what is computed in them."""
    active = 0

    @contextlib.contextmanager
    def context(config: Any, *ignored: Any, is_init: bool = False) -> Iterator[None]:
        nonlocal active
        active += bool(config.fp8 and not is_init)
        yield
        active -= bool(config.fp8 and not is_init)

    def noting(what: str, function: Any) -> Any:
        def noted(*given: Any, **named: Any) -> Any:
            out = function(*given, **named)
            tensors = (x for x in tree_leaves((given, out)) if isinstance(x, torch.Tensor))
            types = {str(x.dtype).removeprefix("torch.") for x in tensors}
            seen.add(f"{what}, {' and '.join(sorted(types))}{', in a context' * (active > 0)}")
            return out

        return noted

    with contextlib.ExitStack() as stack:
        for module in (transformer_block, hybrid_block, multi_token_prediction, fp8_utils):
            stack.enter_context(mock.patch.object(module, "get_fp8_context", context))
        for kind in (ColumnParallelLinear, RowParallelLinear):
            new = noting("product", kind.forward)
            stack.enter_context(mock.patch.object(kind, "forward", new))
        for name in ("weights", "update"):
            new = noting(name, getattr(connections.reference, name))
            stack.enter_context(mock.patch.object(connections.reference, name, new))
        yield


def _local(name: str, part: str) -> Any:
    calls: Calls = []

    class Manager(torch.nn.Module):
        """Replaces the graphs of a layer."""

        def __init__(self, config: Any, *ignored: Any, **others: Any) -> None:
            super().__init__()

        def __call__(self, layer: Any, args: Any, kwargs: Any) -> Any:
            hidden = args[0] if args else kwargs["hidden_states"]
            calls.append(list(hidden.shape))
            out = super(MegatronModule, layer).__call__(*args, **kwargs)
            assert all(site._open is None for site in sites(layer)), "a site is left open"
            runner = SimpleNamespace(base_module=layer, get_tensors=lambda outs, **_: outs[:1])
            outs = out if isinstance(out, tuple) else (out,)
            found = cuda_graphs._CudaGraphRunner.get_connected_params(runner, outs)
            assert len(found) == len([*layer.parameters()]), "a parameter is not in the graph"
            return outs

    with contextlib.ExitStack() as stack:
        for module in (cuda_graphs, language_module):
            stack.enter_context(mock.patch.object(module, "CudaGraphManager", Manager))
        options = {"cuda_graph_impl": "local", "cuda_graph_modules": PARTS[part]}
        model = MAKE[name](**models.MHC, **options)
        assert {*model.state_dict()} == {*MAKE[name](**models.MHC).state_dict()}
        return [models.trained(model), calls]


def _of_engine(name: str, part: str) -> Any:
    calls: Calls = []
    options = {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": PARTS[part]}
    model = MAKE[name](**models.MHC, **options)
    with _engine():
        hooked = _capture(model, calls)
        cuda_graphs.set_current_microbatch(model, 0)
        return [models.trained(model), calls, hooked]


def _capture(model: Any, calls: Calls) -> list[str]:
    """Capture with Megatron's helper; the parts of sites that get a hook before a replay."""

    def graph_of(layer: Any, sample: torch.Tensor, others: Any) -> Any:
        def replay(hidden: torch.Tensor, is_first_microbatch: bool, **given: Any) -> Any:
            assert hidden.shape == sample.shape, (hidden.shape, sample.shape)
            assert is_first_microbatch and all(given[key] is not None for key in others)
            calls.append(list(hidden.shape))
            tensors = {key: given[key] for key in others}
            before = [site._open for site in sites(layer)]
            with mock.patch.object(cuda_graphs, "_IS_GRAPH_CAPTURING", True):
                out = layer._te_cuda_graph_capture(hidden, **tensors)
            after = [site._open for site in sites(layer)]
            assert all(map(operator.is_, after, before)), "a site leaves the graph unseen"
            assert all(isinstance(each, torch.Tensor) for each in out)
            return out

        return replay

    def graphed(layers: Any, samples: Any, sample_kwargs: Any) -> Any:
        each = zip(layers, samples, sample_kwargs, strict=True)
        return [graph_of(layer, hidden, others) for layer, (hidden,), others in each]

    helper = cuda_graphs.TECudaGraphHelper.__new__(cuda_graphs.TECudaGraphHelper)
    helper.model, helper.config, helper.optimizers = [model], model.config, []
    helper.tp_group = helper.dp_cp_group = None
    helper.num_microbatches = helper.num_model_chunks = 1
    helper.seq_length, helper.micro_batch_size = models.LENGTH, models.BATCH
    helper._capture_finished = False
    helper._start_capturing = lambda: 0.0
    helper._finish_capturing = lambda start: None

    def data() -> Any:
        samples, others = helper._get_sample_arguments([1, -1])
        return samples, {"sample_kwargs": others}

    helper._get_cuda_graph_input_data = data
    model._make_forward_pre_hook = lambda: lambda module: None
    with mock.patch.object(cuda_graphs, "make_graphed_callables", graphed, create=True):
        helper._discover_layers()
        helper.create_cudagraphs()
        helper.cuda_graph_set_manual_hooks()
    hooks = (layer.cuda_graph_manual_hooks for layer in helper.flattened_callables)
    hooked = [module for each in hooks for _, (module,) in each]
    names = {id(module): name for name, module in model.named_modules()}
    return sorted(names[id(module)] for module in hooked if "hyper" in names[id(module)])


def sites(layer: Any) -> Iterator[Any]:
    """The sites of a layer, wherever they are."""
    return (x for x in layer.modules() if isinstance(x, connections.HyperConnectionModule))


@contextlib.contextmanager
def _engine() -> Iterator[None]:
    """What the helper and the layers ask of Transformer Engine and of the device."""
    package, part = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    package.pytorch = part  # type: ignore[attr-defined]
    with contextlib.ExitStack() as stack:
        named = {module.__name__: module for module in (package, part)}
        stack.enter_context(mock.patch.dict(sys.modules, named))
        for module in (cuda_graphs, transformer_layer):
            new = mock.patch.object(module, "is_te_min_version", lambda version: True)
            stack.enter_context(new)
        stack.enter_context(mock.patch.object(torch.cuda, "current_device", lambda: "cpu"))
        stack.enter_context(mock.patch.object(cuda_graphs, "log_on_each_pipeline_stage"))
        yield
