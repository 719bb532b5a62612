"""Layers that share keys in the graphs that Megatron itself captures, `--cuda-graph-impl local`.

Imported in the process that runs a tree, never by pytest itself, and needs no GPU: Megatron records
a step of two microbatches under way and creates their graphs, but the code of a graph runs instead
of being captured, and a replay does nothing. That shows which keys each graph reads and what is
kept of them, and not that a GPU can capture the layers.
"""

from __future__ import annotations

import gc
import hashlib
import json
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from megatron.core.tensor_parallel import random
from megatron.core.transformer import cuda_graphs

from cppmega.features.dsa import forward as dsa_forward
from tests.upstream_patches.dsa import dsa_models as models

LAYERS, MICROBATCHES, WARM_UP = 4, 2, 2


class Calls:
    """What the sparse attention of each layer was called with."""

    def __init__(self) -> None:
        self.captures = False
        self.found: dict[str, list[tuple[str, weakref.ref[torch.Tensor]]]] = defaultdict(list)
        self.doing = "step"

    @contextmanager
    def capture(self, *ignored: Any, **options: Any) -> Iterator[None]:
        """Stands in for `torch.cuda.graph`."""
        self.captures, outside = True, self.doing
        self.doing = "capture"
        yield
        self.captures, self.doing = False, outside

    def note(self, keys: torch.Tensor) -> None:
        digest = hashlib.sha256(keys.long().numpy().tobytes()).hexdigest()
        self.found[self.doing].append((digest, weakref.ref(keys)))

    def keys(self, doing: str, times: int = 1) -> list[list[str]]:
        """The keys of each microbatch's layers, which are called so many times in succession."""
        digests = [digest for digest, _ in self.found[doing]]
        assert len(digests) == MICROBATCHES * LAYERS * times, (doing, len(digests))
        layers = digests[::times]
        assert digests == [digest for digest in layers for _ in range(times)]
        return [layers[at : at + LAYERS] for at in range(0, len(layers), LAYERS)]

    def alive(self, doing: str) -> list[bool]:
        """Whether the keys of each call are still held."""
        gc.collect()
        return [keys() is not None for _, keys in self.found[doing]]


def buffer(meta: Any) -> torch.Tensor:
    """The input of a graph, or a gradient; random, so that microbatches select different keys."""
    return torch.randn(meta.shape, requires_grad=meta.requires_grad)


def stand_ins(calls: Calls) -> Iterator[tuple[Any, str, Any]]:
    """What takes the place of a GPU: its graphs, and the memory of their inputs."""
    for name in ("CUDAGraph", "Event", "Stream", "default_stream", "set_stream"):
        yield torch.cuda, name, mock.MagicMock()
    yield torch.cuda, "graph", calls.capture
    yield torch.cuda, "graph_pool_handle", mock.Mock()
    yield torch.cuda, "device_count", lambda: 0
    yield torch.cuda, "memory_stats", lambda: defaultdict(int)
    yield cuda_graphs, "get_all_rng_states", dict
    yield cuda_graphs, "alloc_tensor_from_graph_mempool", buffer
    yield dsa_forward, "_records", lambda: calls.captures


def model() -> Any:
    """Four layers, each with graphs of its own for every microbatch, as in a pipeline stage."""
    random.initialize_rng_tracker(use_cudagraphable_rng=True)
    gpt = models.gpt(
        LAYERS,
        dsa_indexer_topk_freq=2,
        cuda_graph_impl="local",
        cuda_graph_warmup_steps=WARM_UP,
    )
    for layer in gpt.decoder.layers:
        layer.cudagraph_manager.reuse_cudagraphs = False
    for parameter in gpt.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    return gpt


def step(gpt: Any) -> None:
    """The forwards of both microbatches, and then their backwards."""
    for loss in [models.loss(gpt, number) for number in (1, 2)]:
        loss.backward()


def main() -> None:
    """What a step, its graphs and their replays did, as JSON."""
    models.start()
    calls = Calls()
    with ExitStack() as stack:
        for where, name, stand_in in stand_ins(calls):
            stack.enter_context(mock.patch.object(where, name, stand_in))
        gpt = model()
        stack.enter_context(models.noting_keys(calls.note))
        step(gpt)
        calls.doing = "warm-up"
        cuda_graphs.create_cudagraphs()
        keys = {
            "step": calls.keys("step"),
            "warm-up": calls.keys("warm-up", times=WARM_UP),
            "capture": calls.keys("capture"),
        }
        calls.doing = "replay"
        step(gpt)
        with torch.no_grad():
            models.loss(gpt.eval(), 3)
        found = {
            "keys": keys,
            "alive": {doing: calls.alive(doing) for doing in keys},
            "calls of replays": len(calls.found["replay"]),
        }
        print(json.dumps(found))
