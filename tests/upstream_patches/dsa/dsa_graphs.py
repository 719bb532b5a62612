"""DSA layers captured one by one, as Megatron captures them, and replayed on new data.

Imported in the process that runs a tree, never by pytest itself. Without a GPU nothing is captured:
a replay calls the layer again, where a layer outside of its stack still counts as captured. That
shows which keys layers find, and not that a graph can be captured.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.experimental_attention_variant import dsa
from megatron.core.transformer.spec_utils import ModuleSpec

from cppmega.features.dsa import forward as dsa_forward
from cppmega.proof import small_models

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
LENGTH, BATCH, REPLAYS, WARM_UP = (256 if ON_GPU else 24), 2, 10, 3
HIDDEN, HEADS, LATENT, ROTARY, VALUE = 64, 8, 64, 64, 64


def build(sparse: bool, shared: bool = False) -> list[Any]:
    """A layer by itself, or a Full and a Shared one."""
    sharing = {"dsa_indexer_topk_freq": 2, "dsa_indexer_skip_topk_offset": 1} if shared else {}
    config = small_models.dsa_config(
        num_layers=2,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        kv_lora_rank=LATENT,
        qk_pos_emb_head_dim=ROTARY,
        v_head_dim=VALUE,
        dsa_indexer_head_dim=64,
        dsa_indexer_use_sparse_loss=sparse,
        dsa_indexer_loss_coeff=0.5,
        dsa_indexer_rotate_activation=False,
        deterministic_mode=True,
        **sharing,
    )
    parts = dsa.DSAIndexerSubmodules(
        small_models.Projection, small_models.Projection, small_models.Norm, small_models.Projection
    )
    indexer = dsa.DSAttentionSubmodules(ModuleSpec(dsa.DSAIndexer, submodules=parts))
    torch.manual_seed(0)
    return [
        dsa.DSAttention(config, indexer, number, AttnMaskType.causal, "self").to(DEVICE)
        for number in range(1, 2 + shared)
    ]


class Data:
    """The inputs of one call of a layer and the gradient of its output, in memory that stays."""

    def __init__(self, length: int = LENGTH) -> None:
        shapes = {
            "query": (length, BATCH, HEADS, LATENT + ROTARY),
            "key": (length, BATCH, 1, LATENT + ROTARY),
            "up": (HEADS, VALUE, LATENT),
            "hidden": (length, BATCH, HIDDEN),
            "compressed": (length, BATCH, 32),
            "gradient": (length, BATCH, HEADS * VALUE),
        }
        self.tensors = {
            name: torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
            for name, shape in shapes.items()
        }
        self.leaves = [self.tensors[name].requires_grad_() for name in ("query", "key", "up")]

    def draw(self, seed: int) -> Data:
        """Write new values into the same memory."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for tensor in self.tensors.values():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
        return self


class Call:
    """A layer on one microbatch; what it computes is in memory that replays write again."""

    def __init__(self, layer: Any, data: Data) -> None:
        self.layer, self.data = layer, data
        self.leaves = [*data.leaves, *layer.parameters()]

    def forward(self) -> None:
        """Compute the output, and add to the log of losses."""
        given = self.data.tensors
        self.out = self.layer(
            given["query"],
            given["key"],
            None,
            None,
            given["hidden"],
            given["compressed"],
            attn_mask_type=AttnMaskType.causal,
            up_v_weight=given["up"],
        )

    def backward(self) -> None:
        """Compute the gradients of all inputs and parameters."""
        given = self.data.tensors["gradient"]
        self.gradients = torch.autograd.grad(self.out, self.leaves, given, allow_unused=True)

    def results(self) -> list[torch.Tensor | None]:
        """Copies of the output and the gradients."""
        found = [self.out, *self.gradients]
        return [None if tensor is None else tensor.detach().clone() for tensor in found]


Work = Callable[[], None]


def recorded(work: Work, pool: Any) -> Work:
    """Capture what a function does; call what is returned to replay it."""
    if not ON_GPU:
        work()
        return work
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        work()
    return graph.replay


def warmed_up(work: Work) -> None:
    """Run a function as Megatron does before it captures it: kernels are compiled and tuned."""
    if not ON_GPU:
        work()
        return
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            work()
    torch.cuda.current_stream().wait_stream(side)


def captured(calls: Sequence[Sequence[Call]]) -> list[Work]:
    """Capture all forwards by microbatch, then all backwards, the last layer's first.

    That is the order of a pipeline stage with several microbatches under way.
    """
    pool = torch.cuda.graph_pool_handle() if ON_GPU else None
    losses = cuda_graphs._cppmega_indexer_losses()
    cuda_graphs._set_capture_start()
    replays = []
    for microbatch in calls:
        for call in microbatch:
            warmed_up(lambda call=call: (call.forward(), call.backward()))
            replays.append(recorded(call.forward, pool))
    for microbatch in calls:
        replays += [recorded(call.backward, pool) for call in reversed(microbatch)]
    if ON_GPU:  # otherwise replays call layers
        cuda_graphs._set_capture_end()
    cuda_graphs._cppmega_restore_indexer_losses(losses)
    return replays


def eager(layers: Sequence[Any], data: Sequence[Data]) -> list[Any]:
    """The results of each layer of one microbatch in its stack."""
    with dsa_forward.forward():
        calls = [Call(layer, given) for layer, given in zip(layers, data, strict=True)]
        for call in calls:
            call.forward()
    for call in reversed(calls):
        call.backward()
    return [call.results() for call in calls]


def logged() -> list[float]:
    """The losses of all layers since the last call."""
    values = dsa.DSAIndexerLossLoggingHelper.tracker["values"]
    found: list[float] = values.tolist()
    values.zero_()
    return found


def equal(one: list[Any], other: list[Any]) -> bool:
    """Whether results are the same to the bit."""
    return len(one) == len(other) and all(
        (a is None) is (b is None) and (a is None or torch.equal(a, b))
        for a, b in zip(one, other, strict=True)
    )


def replayed(layers: Sequence[Any], microbatches: int) -> dict[str, Any]:
    """How replays on new data differ from eager runs, in between runs of other shapes."""
    data = [[Data().draw(0) for _ in layers] for _ in range(microbatches)]
    eager(layers, data[0])
    found: dict[str, Any] = {"differ": [], "changes": True}
    logged()
    calls = [[Call(*pair) for pair in zip(layers, given, strict=True)] for given in data]
    replays = captured(calls)
    found["logged by the capture"] = logged()
    last = None
    for number in range(1, REPLAYS + 1):
        for place, given in enumerate(x for microbatch in data for x in microbatch):
            given.draw(100 * number + place)
        wanted = [result for given in data for result in eager(layers, given)]
        losses = logged()
        others = [Data(LENGTH // 2 + 7 * number).draw(number) for _ in layers]
        eager(layers, others)
        logged()
        for replay in replays:
            replay()
        got = [call.results() for microbatch in calls for call in microbatch]
        if not all(equal(*pair) for pair in zip(got, wanted, strict=True)) or logged() != losses:
            found["differ"].append(number)
        found["changes"] &= last is None or not any(map(equal, got, last))
        last = got
    cuda_graphs._set_capture_end()
    return found


def main() -> None:
    """All cases, as JSON."""
    small_models.dsa_config()  # the groups of a process by itself
    torch.use_deterministic_algorithms(True)
    if not ON_GPU:
        dsa_forward._records = lambda: cuda_graphs.is_graph_capturing()
    print(
        json.dumps(
            {
                "dense loss": replayed(build(sparse=False), microbatches=1),
                "sparse loss": replayed(build(sparse=True), microbatches=1),
                "two microbatches": replayed(build(sparse=True), microbatches=2),
                "shared keys": replayed(build(sparse=True, shared=True), microbatches=2),
            }
        )
    )
