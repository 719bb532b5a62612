"""Stand-ins that let more of Megatron's unit tests run where there is no GPU, on both trees alike.

A tensor requested on `cuda` is created on the CPU, `.cuda()` changes nothing, the CPU's random
generator is the GPU's, streams and events do nothing, and NCCL groups are gloo groups.
torch.compile is off, since it would only cost time. No test and no line of Megatron is changed;
what needs a real kernel still fails, on both sides.
"""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo  # before anything is replaced: it takes stock of torch's functions
from torch.overrides import TorchFunctionMode

PROPERTIES = SimpleNamespace(
    name="none", major=9, minor=0, total_memory=2**34, multi_processor_count=132
)
"""What the absent GPU is said to be: most tests ask for Hopper or newer."""
_MOVES = (torch.Tensor.cuda, torch.Tensor.pin_memory)


class OnTheCpu(TorchFunctionMode):
    """Every function of torch that is asked for a result on `cuda` returns one on the CPU."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        kinds: Any,
        arguments: tuple[Any, ...] = (),
        named: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(named or {})
        if function in _MOVES:
            return arguments[0]
        if "device" in named:
            named["device"] = _cpu(named["device"])
        if named.get("pin_memory"):
            named["pin_memory"] = False
        if function is torch.Tensor.to:
            arguments = (arguments[0], *map(_cpu, arguments[1:2]), *arguments[2:])
        return function(*arguments, **named)


def _cpu(device: Any) -> Any:
    """Replace a GPU, under any of its names, with the CPU; return anything else unchanged."""
    is_number = isinstance(device, int) and not isinstance(device, bool)
    is_named = isinstance(device, str | torch.device) and str(device).startswith("cuda")
    return torch.device("cpu") if is_number or is_named else device


class Stream:
    """A stream or an event: nothing runs asynchronously here, so there is nothing to wait for."""

    cuda_stream = device_index = priority = 0
    device = torch.device("cpu")

    def __init__(self, *_: Any, **__: Any) -> None:
        """Accept the arguments of a stream or an event."""

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the stream."""

    def wait(self, *_: Any, **__: Any) -> None:
        """Everything is done already."""

    wait_stream = wait_event = record = synchronize = wait

    def record_event(self, event: Any = None) -> Stream:
        return Stream()

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 1.0


def install() -> None:
    """Install the stand-ins, before anything of Megatron is imported, which copies names."""
    os.environ["TORCH_COMPILE_DISABLE"] = "1"
    _replace(
        torch.cuda,
        is_available=lambda: True,
        is_initialized=lambda: True,
        init=_nothing,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=_nothing,
        synchronize=_nothing,
        empty_cache=_nothing,
        mem_get_info=lambda device=None: (PROPERTIES.total_memory,) * 2,
        get_device_properties=lambda device=None: PROPERTIES,
        get_device_capability=lambda device=None: (PROPERTIES.major, PROPERTIES.minor),
        get_device_name=lambda device=None: PROPERTIES.name,
        is_current_stream_capturing=lambda: False,
        device=Stream,
        _lazy_call=lambda call, **_: call(),
        **dict.fromkeys(("Stream", "Event", "ExternalStream"), Stream),
        **dict.fromkeys(("current_stream", "default_stream"), Stream),
        set_stream=_nothing,
        stream=lambda stream: contextlib.nullcontext(),
    )
    _replace(torch.cuda.nvtx, range_push=_nothing, range_pop=_nothing)
    torch.Tensor.record_stream = _nothing  # type: ignore[assignment, method-assign]
    _random_state()
    _groups()
    OnTheCpu().__enter__()


def _random_state() -> None:
    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    torch.cuda.default_generators = (torch.default_generator,)
    cpu = torch.default_generator
    for module in (torch.cuda, torch.cuda.random):
        _replace(
            module,
            get_rng_state=lambda device=None: torch.get_rng_state(),
            set_rng_state=set_rng_state,
            **dict.fromkeys(("manual_seed", "manual_seed_all"), cpu.manual_seed),
            initial_seed=cpu.initial_seed,
        )


def _groups() -> None:
    """Create gloo groups in place of NCCL's."""
    init, new = torch.distributed.init_process_group, torch.distributed.new_group

    def init_process_group(backend: Any = None, *arguments: Any, **named: Any) -> None:
        named.pop("device_id", None)
        named.pop("pg_options", None)
        init("gloo", *arguments, **named)

    def new_group(*arguments: Any, **named: Any) -> Any:
        named |= {"backend": "gloo", "pg_options": None}
        named.pop("device_id", None)
        return new(*arguments[:2], **named)

    for module in (torch.distributed, torch.distributed.distributed_c10d):
        _replace(module, init_process_group=init_process_group, new_group=new_group)


def _nothing(*_: Any, **__: Any) -> None:
    """Done."""


def _replace(owner: Any, **stand_ins: Any) -> None:
    """Give each name a distinct object: torch._dynamo keeps one rule per object."""
    for name, stand_in in stand_ins.items():
        if isinstance(stand_in, type):
            stand_in = type(name, (stand_in,), {})
        elif stand_in is _nothing:
            stand_in = types.FunctionType(stand_in.__code__, stand_in.__globals__, name)
        setattr(owner, name, stand_in)
