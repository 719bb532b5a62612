"""Layers of Mamba-3 and M2RNN in Megatron's own CUDA graphs, beside the same layers without.

Imported in the process that runs a tree, never by pytest itself. With a GPU, the layers are those
of a hybrid stack, captured and replayed. Without one, stand-ins note every operation of a capture
and every launch of a kernel, and a replay repeats them on the memory of the capture: a decision or
a value of the host that changes after the capture has then no effect, as in a graph. That does not
show which memory a graph may reuse.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import random
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.enums import CudaGraphModule
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.spec_utils import build_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cppmega.features.mixers.hybrid import layer_spec
from cppmega.ops import mamba3
from cppmega.ops.common.dispatch import interpreted
from cppmega.ops.mamba3 import autograd
from cppmega.proof import cpu_shims, small_models
from cppmega.sizes import mixers as mixer_sizes
from cppmega.sizes import stated as environment_sizes

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
# Graphs follow each other, and code that is not captured. Triton's interpreter is slow.
LETTERS, STEPS, MICROBATCHES = ("MR-", 2, 1) if interpreted() else ("M-RM-", 3, 2)
HIDDEN, LENGTH, BATCH = (1024, 1024, 2) if ON_GPU else (32, 40, 1)
MAMBA3 = mixer_sizes.Mamba3()
if not ON_GPU:
    MAMBA3 = mixer_sizes.Mamba3(head_dim=16, state_dim=32, groups=2, rank=2, chunk=8)
M2RNN = mixer_sizes.M2RNN() if ON_GPU else mixer_sizes.M2RNN(key_dim=8, value_dim=8)
STATED = {
    "CPPMEGA_MAMBA3": environment_sizes.text(MAMBA3),
    "CPPMEGA_M2RNN": environment_sizes.text(M2RNN),
}
KIND = torch.float32 if interpreted() else torch.bfloat16  # whose products Triton misinterprets
EVALUATED = 1


class Tape(TorchDispatchMode):
    """Stands in for a `torch.cuda.CUDAGraph`: what was computed while it was entered."""

    def __init__(self) -> None:
        super().__init__()
        self.work: list[Callable[[], None]] = []
        self.within = False

    def register_generator_state(self, *ignored: Any) -> None:
        """These layers draw no random numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        outside, self.within = self.within, True
        out = func(*args, **named)
        self.within = outside
        places = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor)]

        def again() -> None:
            found = [x for x in tree_leaves(func(*args, **named)) if isinstance(x, torch.Tensor)]
            for place, value in zip(places, found, strict=True):
                if place.data_ptr() != value.data_ptr():
                    place.copy_(value)

        if not self.within:
            self.work.append(again)
        return out

    @torch.no_grad()
    def replay(self) -> None:
        """Compute it again."""
        for work in self.work:
            work()


@contextmanager
def _capture(tape: Tape, **options: Any) -> Iterator[None]:
    """Stands in for `torch.cuda.graph`."""
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def noted(self: Any, *given: Any, **named: Any) -> None:
        if not tape.within:  # otherwise a whole operator is noted
            tape.work.append(lambda: launch(self, *given, **named))
        outside, tape.within = tape.within, True
        launch(self, *given, **named)
        tape.within = outside

    with mock.patch.object(GridExecutor, "__call__", noted), tape:
        yield


def _buffer(meta: Any) -> torch.Tensor:
    made = torch.zeros(meta.shape, dtype=meta.dtype, requires_grad=meta.requires_grad)
    made.is_from_global_mempool = True  # type: ignore[attr-defined]
    return made


def _stand_ins() -> Iterator[tuple[Any, str, Any]]:
    """What takes the place of a GPU: its graphs, and the memory of their inputs."""
    for name in ("Event", "Stream", "default_stream", "current_stream", "set_stream"):
        yield torch.cuda, name, mock.MagicMock()
    yield torch.cuda, "CUDAGraph", Tape
    yield torch.cuda, "graph", _capture
    yield torch.cuda, "graph_pool_handle", mock.Mock()
    yield torch.cuda, "device_count", lambda: 0
    yield torch.cuda, "synchronize", lambda: None
    yield torch.cuda, "memory_stats", lambda: defaultdict(int)
    yield cuda_graphs, "get_all_rng_states", dict
    yield cuda_graphs, "alloc_tensor_from_graph_mempool", _buffer
    if interpreted():
        yield mamba3, "mixed", _scanned


def _scanned(inputs: Any, parameters: Any, definition: Any, bounds: Any, chunk: int) -> Any:
    """Mamba-3 by the kernels, which it takes on a GPU alone."""
    return autograd.mixed(inputs, parameters, definition, bounds)


class Between(torch.nn.Module):
    """A layer that is not captured, and keeps its input and a product of it."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.up = torch.nn.Linear(HIDDEN, HIDDEN, bias=False, dtype=config.params_dtype)

    def forward(self, hidden_states: torch.Tensor, **ignored: Any) -> torch.Tensor:
        return hidden_states + torch.nn.functional.gelu(self.up(hidden_states)) * hidden_states


def _stock() -> Any:
    """The spec of a hybrid stack's Mamba layers."""
    if ON_GPU:
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

        return hybrid_stack_spec.submodules.mamba_layer
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    linear = MambaMixerSubmodules(ColumnParallelLinear, RowParallelLinear)
    layer = MambaLayerSubmodules(
        WrappedTorchNorm, ModuleSpec(object, submodules=linear), get_bias_dropout_add
    )
    return ModuleSpec(MambaLayer, submodules=layer)


class Stack(MegatronModule):  # type: ignore[misc]
    """The layers of `LETTERS`, called as a hybrid stack calls them."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        groups, stock = ProcessGroupCollection.use_mpu_process_groups(), _stock()
        self.layers = torch.nn.ModuleList(
            Between(config)
            if letter == "-"
            else build_module(
                layer_spec(stock, letter), config=config, layer_number=number, pg_collection=groups
            )
            for number, letter in enumerate(LETTERS, 1)
        )
        cuda_graphs.annotate_first_last_layer(self.layers)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden_states = layer(
                hidden_states=hidden_states,
                attention_mask=None,
                inference_context=None,
                packed_seq_params=None,
            )
            if isinstance(hidden_states, tuple):  # what a graph returns
                (hidden_states,) = hidden_states
        return hidden_states


class Run:
    """A stack under DDP."""

    def __init__(self, graphs: bool) -> None:
        options: dict[str, Any] = {"cuda_graph_impl": "local", "cuda_graph_warmup_steps": 1}
        config = small_models.config(
            num_layers=len(LETTERS),
            hidden_size=HIDDEN,
            normalization="RMSNorm",
            bf16=torch.bfloat16 == KIND,
            params_dtype=KIND,
            gradient_accumulation_fusion=True,
            use_cpu_initialization=not ON_GPU,
            **options if graphs else {},
        )
        if graphs:
            config.cuda_graph_modules = [CudaGraphModule.mamba]
        torch.manual_seed(1)
        if ON_GPU:
            random.model_parallel_cuda_manual_seed(1)
        with mock.patch.dict(os.environ, STATED):
            stack = Stack(config).to(DEVICE)
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True)
        whole = Float16Module(config, stack) if config.bf16 else stack
        self.model = DistributedDataParallel(config, ddp, whole)
        self.parameters = dict(stack.named_parameters())

    def step(self, number: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and value of everything that a step computes, and then change the weights."""
        self.model.zero_grad_buffer()
        for microbatch in range(MICROBATCHES):
            x, to = (self.drawn(100 * number + 10 * microbatch + part) for part in range(2))
            last = microbatch == MICROBATCHES - 1
            with nullcontext() if last else self.model.no_sync():
                out = self.model(x.requires_grad_())
                torch.autograd.backward(out, to)
            yield f"output {microbatch}", out.detach().clone()
            assert x.grad is not None
            yield f"gradient of the input {microbatch}", x.grad
        self.model.finish_grad_sync()
        for name, parameter in self.parameters.items():
            assert parameter.main_grad.any(), f"{name} has no gradient in step {number}"
            yield f"gradient of {name}", parameter.main_grad.clone()
            parameter.data.add_(parameter.main_grad.to(parameter.dtype), alpha=-1e-2)

    @torch.no_grad()
    def evaluated(self, number: int) -> torch.Tensor:
        """The output of an evaluation between two steps."""
        self.model.eval()
        out: torch.Tensor = self.model(self.drawn(7 + number)).clone()
        self.model.train()
        return out

    @staticmethod
    def drawn(seed: int) -> torch.Tensor:
        """Values of a micro-batch."""
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(LENGTH, BATCH, HIDDEN, generator=generator)
        return values.to(DEVICE, KIND)


def main() -> None:
    """What differs from eager in any bit, by step: of a second eager run, and of one in graphs."""
    if ON_GPU:
        torch.distributed.init_process_group("nccl", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
    else:
        cpu_shims.init_distributed()
    with ExitStack() as stack:
        for place in () if ON_GPU else _stand_ins():
            stack.enter_context(mock.patch.object(*place))
        random.initialize_rng_tracker(ON_GPU, use_cudagraphable_rng=True, force_reset=True)
        eager, again, graphed = (Run(graphs) for graphs in (False, False, True))
        torch.cuda.synchronize()  # building graphs changed the stream, and creating them does
        replays, replay = [0], torch.cuda.CUDAGraph.replay

        def counted(graph: Any) -> None:
            replays[0] += 1
            replay(graph)

        stack.enter_context(mock.patch.object(torch.cuda.CUDAGraph, "replay", counted))
        found: dict[str, Any] = {"eager": [], "graphs": []}
        for number in range(STEPS):
            wanted = dict(eager.step(number))
            pairs = {"eager": dict(again.step(number)), "graphs": dict(graphed.step(number))}
            if number == EVALUATED:
                wanted["evaluation"] = eager.evaluated(number)
                for one, values in zip((again, graphed), pairs.values(), strict=True):
                    values["evaluation"] = one.evaluated(number)
            for kind, values in pairs.items():
                differ = [name for name, value in wanted.items() if not value.equal(values[name])]
                found[kind] += [f"step {number}, {name}" for name in differ]
            if not number:
                graphs = len(cuda_graphs._CudagraphGlobalRecord.cudagraph_record)
                assert replays == [0]
                cuda_graphs.create_cudagraphs()
                torch.cuda.synchronize()
        mixers, calls = len(LETTERS.replace("-", "")), (STEPS - 1) * MICROBATCHES
        assert graphs == 2 * mixers, f"{graphs} graphs of {mixers} layers"
        assert replays == [mixers * (2 * calls + 1)], f"{replays} replays, an evaluation included"
        print(json.dumps(found))
