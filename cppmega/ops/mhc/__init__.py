"""Manifold-constrained hyper-connections in a few kernels: the ops, and a site as `read`, `write`.

`naive` defines them; the results are the same, computed in fp32 and rounded once, except
the streams' gradient at a site, which is rounded once more. Everything is bitwise reproducible: all
sums over tokens and columns have a fixed order.

A site launches 5 kernels in the forward and 7 in the backward, at any size. In units of one stream
`[s, b, C]` with n = 4, the single ops move 65, including the sum of the streams' gradients; a site
moves 50: its backward begins the gradient in `write` and completes it in one pass in `read`, after
another pass that reads the streams and the aggregate's gradient for the gradient of `h_pre`. That
pass, n + 1 units, is the difference from the minimum, 45: the gradient of the projection depends on
its result and begins with a complete sum. If `write` computed partial projections for the next
site, the forward would save n more.

Memory besides results: fp32 parts of the projection, at most `PROGRAMS + tiles` tiles of tokens
(`mhc_projection_triton`); for bf16, 1.5 times the size of phi in each direction, and six bytes
per logit of a token in the backward; and 8 times the size of phi for its gradient. Sinkhorn needs
none. The tiles fit sm_80, sm_90, sm_100 and sm_120, and are the fastest of these on an H200
(`benchmarks/results/mhc_designs.md`).

On a CPU the reference computes everything, except in Triton's interpreter. On a GPU there is no
fallback: what the kernels do not support raises `no-kernel`, with the reason of `obstacle`.
"""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

import torch
from torch import Tensor

from cppmega.errors import CppmegaError
from cppmega.ops.common.device import gpu_obstacle
from cppmega.ops.common.dispatch import interpreted
from cppmega.ops.common.mhc_streams import STREAMS
from cppmega.ops.mhc import naive as reference
from cppmega.ops.mhc.naive import Parameters, Weights

__all__ = [
    "Parameters",
    "Site",
    "Weights",
    "aggregate",
    "obstacle",
    "read",
    "sinkhorn",
    "update",
    "weights",
    "write",
]

TYPES = (torch.bfloat16, torch.float16, torch.float32)


class Site(NamedTuple):
    """What `write` needs of the `read` before it.

    Attributes:
        streams: `[s, b, n, C]`. Its gradient is completed in place, so only `write` may use it;
            anything else that needs the streams must use those passed to `read`.
        h_post: `[s, b, n]`, fp32.
        h_res: `[s, b, n, n]`, fp32.
    """

    streams: Tensor
    h_post: Tensor
    h_res: Tensor


def obstacle(device: torch.device, dtype: torch.dtype, n: int, width: int) -> str | None:
    """Why the kernels do not support n streams of this width, as a clause; None if they do.

    On a CPU they run only in Triton's interpreter.
    """
    if dtype not in TYPES:
        return f"the streams are {dtype}"
    if n not in STREAMS:
        return f"there are {n} streams, not 1, 2, 4 or 8"
    if width < 8 or width % 8:
        return f"the width of {width} is not a multiple of 8"
    why: str | None = _device_obstacle(str(device))
    return why


@torch.compiler.assume_constant_result
def _device_obstacle(name: str) -> str | None:
    """Why no kernel runs on a device; torch.compile evaluates this once, without tracing it."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    import triton  # which `interpreted` asks

    device = torch.device(name)
    if device.type != "cuda" and not (device.type == "cpu" and interpreted()):
        return f"the streams are on {device.type}"
    if importlib.util.find_spec("triton.tools.tensor_descriptor") is None:
        return f"Triton {triton.__version__} has no descriptors of tensors, which 3.4 has"
    return gpu_obstacle(device)


def sinkhorn(logits: Tensor, iterations: int) -> Tensor:
    """Compute `naive.sinkhorn` of `[..., n, n]` in fp32.

    Raises:
        CppmegaError: `no-kernel`.
        ValueError: the logits are not square, or there is no iteration.
    """
    if logits.ndim < 2 or logits.size(-1) != logits.size(-2):
        raise ValueError(f"logits {tuple(logits.shape)} are not square matrices")
    _require_iterations(iterations)
    if _on_host(logits):
        return reference.sinkhorn(logits, iterations)
    if logits.dtype != torch.float32:
        raise _no_kernel(f"the logits are {logits.dtype}")
    n = logits.size(-1)
    _require(logits, n, 8)
    from cppmega.ops.mhc.autograd import Sinkhorn

    flat = logits.reshape(-1, n, n).contiguous()
    found: Tensor = Sinkhorn.apply(flat, iterations)
    return found.view(logits.shape)


def weights(
    streams: Tensor, parameters: Parameters, iterations: int, *, fuse_accumulation: bool = False
) -> Weights:
    """Compute `naive.weights` of `[s, b, n, C]`.

    Args:
        streams: bf16, fp16 or fp32.
        parameters: fp32.
        iterations: Sinkhorn iterations, at least one.
        fuse_accumulation: add the gradient of phi to its `main_grad`, which is fp32, and set
            `grad_added_to_main_grad`, as Megatron's linear layers do.

    Raises:
        CppmegaError: `no-kernel`, or `main-grad-missing`: there is no such buffer.
        ValueError: the shapes do not match, or there is no iteration.
    """
    streams = _checked(streams, parameters, iterations)
    main_grad = _main_grad(parameters.phi) if fuse_accumulation else None
    if _on_host(streams):
        return reference.weights(streams, parameters, iterations)
    from cppmega.ops.mhc.autograd import Weights as Apply

    every = [each.contiguous() for each in parameters]
    found: tuple[Tensor, Tensor, Tensor]
    found = Apply.apply(streams, *every, iterations, main_grad)
    return Weights(*found)


def aggregate(streams: Tensor, h_pre: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Compute `naive.aggregate` of `[s, b, n, C]`, with `h_pre` in fp32.

    Args:
        streams: bf16, fp16 or fp32.
        h_pre: `[s, b, n]`.
        out: where to write the result, `[s, b, C]`, for a CUDA graph that reads it there. It
            becomes part of the autograd graph, so each call needs a fresh `detach()` of it.

    Raises:
        CppmegaError: `no-kernel`.
        ValueError: the shapes do not match, or `out` is not such a tensor.
    """
    streams = _required(streams)
    _check_storage(out, streams)
    h_pre = _weight("h_pre", h_pre, streams.shape[:3], streams)
    if _on_host(streams):
        x = reference.aggregate(streams, h_pre)
        return x if out is None else out.copy_(x)
    from cppmega.ops.mhc.autograd import Aggregate

    found: Tensor = Aggregate.apply(streams, h_pre, out)
    return found


def update(
    streams: Tensor, h_res: Tensor, h_post: Tensor, out: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Compute `naive.update` of `[s, b, n, C]`, with `h_res` and `h_post` in fp32.

    Raises:
        CppmegaError: `no-kernel`.
        ValueError: the shapes do not match.
    """
    streams = _required(streams)
    s, b, n, c = streams.shape
    if out.shape != (s, b, c) or (bias is not None and bias.shape != (c,)):
        of_bias = "no bias" if bias is None else f"bias {tuple(bias.shape)}"
        raise ValueError(f"output {tuple(out.shape)} and {of_bias} for {tuple(streams.shape)}")
    for given in (out, bias):
        if given is not None and given.dtype not in (*TYPES, streams.dtype):
            raise _no_kernel(f"the sub-layer's output or bias is {given.dtype}")
    h_res = _weight("h_res", h_res, (s, b, n, n), streams)
    h_post = _weight("h_post", h_post, (s, b, n), streams)
    if _on_host(streams):
        return reference.update(streams, h_res, h_post, out, bias)
    from cppmega.ops.mhc.autograd import Write

    bias = None if bias is None else bias.contiguous()
    found: Tensor = Write.apply(streams, h_res, h_post, out.contiguous(), bias)
    return found


def read(
    streams: Tensor,
    parameters: Parameters,
    iterations: int,
    *,
    out: Tensor | None = None,
    fuse_accumulation: bool = False,
) -> tuple[Tensor, Site]:
    """Compute the input of a sub-layer, `[s, b, C]`, and what `write` needs after it.

    Equivalent to `weights` and `aggregate`, with the same arguments and errors.
    """
    streams = _checked(streams, parameters, iterations)
    _check_storage(out, streams)
    if _on_host(streams):
        h_pre, h_post, h_res = weights(
            streams, parameters, iterations, fuse_accumulation=fuse_accumulation
        )
        return aggregate(streams, h_pre, out=out), Site(streams.view_as(streams), h_post, h_res)
    main_grad = _main_grad(parameters.phi) if fuse_accumulation else None
    from cppmega.ops.mhc.autograd import Read

    every = [each.contiguous() for each in parameters]
    found: tuple[Tensor, Tensor, Tensor, Tensor]
    found = Read.apply(streams, *every, iterations, main_grad, out)
    return found[0], Site(*found[1:])


def write(site: Site, out: Tensor, bias: Tensor | None = None) -> Tensor:
    """The streams after the sub-layer: `update` of what `read` kept, with the same errors."""
    return update(site.streams, site.h_res, site.h_post, out, bias)


def _checked(streams: Tensor, parameters: Parameters, iterations: int) -> Tensor:
    """Check that the parameters fit, and return the streams in the kernels' layout."""
    _require_iterations(iterations)
    streams = _required(streams)
    n, c = streams.shape[2:]
    values = n * n + 2 * n
    shapes = [tuple(each.shape) for each in parameters]
    if shapes != [(values, n * c), (1,), (1,), (1,), (values,)]:
        raise ValueError(f"parameters {shapes} for streams {tuple(streams.shape)}")
    types = {each.dtype for each in parameters}
    if types != {_of_weights(streams)}:
        raise _no_kernel(f"the parameters are {', '.join(sorted(map(str, types)))}, not fp32")
    return streams


def _required(streams: Tensor) -> Tensor:
    if streams.ndim != 4:
        raise ValueError(f"streams {tuple(streams.shape)} are not [s, b, n, C]")
    _require(streams, streams.size(2), streams.size(3))
    return streams.contiguous()


def _require(x: Tensor, n: int, width: int) -> None:
    why = obstacle(x.device, x.dtype, n, width)
    if why is not None and not _on_host(x):
        raise _no_kernel(why)


def _on_host(x: Tensor) -> bool:
    """Whether the reference computes this: on a CPU, unless Triton's interpreter is on."""
    return x.device.type == "cpu" and _device_obstacle("cpu") is not None


def _of_weights(streams: Tensor) -> torch.dtype:
    """The type of parameters and weights; the kernels have no fp64, the reference has."""
    return torch.float64 if streams.dtype == torch.float64 else torch.float32


def _require_iterations(iterations: int) -> None:
    if iterations < 1:
        raise ValueError(f"Sinkhorn of {iterations} iterations")


def _weight(name: str, given: Tensor, shape: tuple[int, ...], streams: Tensor) -> Tensor:
    """Check a weight, and return it in the kernels' layout."""
    if given.shape != shape:
        raise ValueError(f"{name} {tuple(given.shape)}, not {tuple(shape)}")
    if given.dtype != _of_weights(streams):
        raise _no_kernel(f"{name} is {given.dtype}, not fp32")
    return given.contiguous()


def _check_storage(out: Tensor | None, streams: Tensor) -> None:
    s, b, _, c = streams.shape
    if out is None:
        return
    if out.shape != (s, b, c) or out.dtype != streams.dtype or out.device != streams.device:
        raise ValueError(
            f"storage {tuple(out.shape)} of {out.dtype} on {out.device} for the aggregate of "
            f"{tuple(streams.shape)} of {streams.dtype} on {streams.device}"
        )
    if out.requires_grad or not out.is_contiguous():
        raise ValueError("the storage of an aggregate must be contiguous and without gradient")


def _main_grad(phi: Tensor) -> object:
    """Megatron's buffer for the gradient of phi."""
    from cppmega.ops.common.main_grad import MainGrad

    found = MainGrad.of(phi)
    if found is None:
        raise CppmegaError(
            "main-grad-missing",
            "The gradient of phi must be accumulated into its main_grad, but phi has none, or "
            "Megatron-FSDP manages it.",
            "Its gradient would be lost, or would overwrite that of another use of phi.",
            "wrap the model in DistributedDataParallel, or turn off gradient_accumulation_fusion",
        )
    if found.buffer.dtype != torch.float32:
        raise _no_kernel(f"the main_grad of phi is {found.buffer.dtype}, not fp32")
    return found


def _no_kernel(why: str) -> CppmegaError:
    return CppmegaError(
        "no-kernel",
        f"No kernel of the hyper-connections supports this: {why}.",
        "Without kernels, a site would silently use another, slower implementation.",
        "train without the fused kernels, or change the unsupported property",
    )
