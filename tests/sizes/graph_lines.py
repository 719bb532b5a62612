"""What CUDA graphs of Mamba layers capture, by Megatron's own code and by ours, as JSON.

Imported in the process that runs a tree, never by pytest itself.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer import cuda_graphs as theirs

from cppmega.sizes import megatron_args
from tests.support import parsed_line

IMPLEMENTATIONS = ("none", "local", "transformer_engine", "full_iteration")
MODULES = ((), ("mamba",), ("attn",), ("attn", "mamba"), ("full",), ("full_iteration",))
OPTIONS = ("--cuda-graph-modules", "--cuda-graph-scope")


def lines() -> Iterator[list[str]]:
    """Combinations of the options in any release's names; each release refuses some."""
    rest = ["--te-rng-tracker", "--no-check-for-nan-in-loss-and-grad"]
    for how, names in itertools.product(IMPLEMENTATIONS, MODULES):
        for option in OPTIONS if names else OPTIONS[:1]:
            yield ["--cuda-graph-impl", how, *([option, *names] if names else []), *rest]
    for older, names in itertools.product(("enable", "external"), ([], [OPTIONS[0], "attn"])):
        yield [f"--{older}-cuda-graph", *names, *rest]
    for how, given in (
        ("local", ["--inference-cuda-graph-scope", "block"]),
        ("local", ["--inference-cuda-graph-scope", "block", OPTIONS[0], "mamba"]),
        ("local", ["--inference-cuda-graph-scope", "layer"]),
        ("local", [OPTIONS[0], "full_iteration_inference"]),
        ("local", [OPTIONS[1], "full_iteration_inference"]),
        ("none", [OPTIONS[0], "full_iteration_inference"]),
    ):
        yield ["--cuda-graph-impl", how, *given, *rest]


def megatrons(config: Any) -> bool:
    """Whether Megatron captures a Mamba layer with this configuration in a training step."""
    how, scope = config.cuda_graph_impl, getattr(config, "cuda_graph_scope", None) or ()
    named = {getattr(each, "name", each) for each in scope}
    if how == "full_iteration" or (how == "local" and "full_iteration" in named):
        return True
    layer = MambaLayer.__new__(MambaLayer)
    torch.nn.Module.__init__(layer)
    layer.config = config
    if how == "local":
        with mock.patch.object(theirs, "CudaGraphManager", lambda *_: torch.nn.Identity()):
            layer.create_mcore_cudagraph_manager(config)
        return hasattr(layer, "cudagraph_manager")
    return how == "transformer_engine" and theirs._layer_is_graphable(layer, config)


def report() -> None:
    """Line -> what Megatron captures, and our answers before and after it checks the arguments."""
    found = {}
    for line in lines():
        try:
            raw = parsed_line.parsed(*line)
            before = megatron_args.captures(raw, "mamba")
            args = parsed_line.validated(*line)
            config = parsed_line.configured(args)
        except parsed_line.RefusedError as error:
            assert str(error)
            continue
        after = [megatron_args.captures(each, "mamba") for each in (args, config)]
        found[" ".join(line)] = [megatrons(config), before, *after]
    print(json.dumps(found))
