"""Autograd functions of the hyper-connections' kernels: the single ops, and a site's two ends.

Tensors are contiguous here; `cppmega.ops.mhc` ensures that and checks their shapes. The two ends
share the gradient of the streams: `Write` allocates it and writes the update's contribution, and
`Read` adds those of aggregation and mapping in place, so that it is never summed from three
tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cppmega.ops.common.main_grad import MainGrad
from cppmega.ops.common.once_differentiable import once_differentiable
from cppmega.ops.mhc import (
    aggregate_triton,
    parts_triton,
    projection_triton,
    sinkhorn_triton,
    streams_gradient_triton,
    update_triton,
    weights_triton,
)
from cppmega.ops.mhc.naive import Parameters

Found = tuple[Tensor, Tensor, Tensor]
"""`h_pre`, `h_post` and `h_res`."""


def _tokens(streams: Tensor) -> Tensor:
    """`[s, b, n, C]` as `[T, n, C]`."""
    s, b, n, c = streams.shape
    return streams.view(s * b, n, c)


def _mapped(streams: Tensor, parameters: Parameters, iterations: int) -> tuple[Tensor, Found]:
    """The products that the backward needs, and the weights."""
    s, b, n, c = streams.shape
    like: dict[str, Any] = {"dtype": torch.float32, "device": streams.device}
    phi, *rest = parameters
    width = projection_triton.padded(n)
    parts = torch.empty(
        projection_triton.split(s * b, n, c, streams.dtype)[0], s * b, width, **like
    )
    projection_triton.projection(_tokens(streams), parts_triton.factor(phi, streams.dtype), parts)
    values = torch.empty(s * b, width, **like)
    h_pre, h_post = torch.empty(s, b, n, **like), torch.empty(s, b, n, **like)
    h_res = torch.empty(s, b, n, n, **like)
    flat = h_pre.view(-1, n), h_post.view(-1, n), h_res.view(-1, n, n)
    weights_triton.weights(parts, *rest, values, *flat, n * c, iterations)
    return values, (h_pre, h_post, h_res)


class _Mapping:
    """The backward of the mapping, from the tensors that its forward saved."""

    def __init__(self, ctx: Any) -> None:
        self.streams, self.values, self.h_pre, *parameters = ctx.saved_tensors
        self.parameters = Parameters(*parameters)
        self.iterations: int = ctx.iterations
        self.main_grad: MainGrad | None = ctx.main_grad
        self.want_phi: bool = ctx.needs_input_grad[1]

    def gradients(
        self, weights: list[Tensor | None], begun: Tensor | None, aggregated: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """The gradients of the streams and of the five parameters.

        Args:
            weights: gradients of `h_pre`, `h_post` and `h_res`; None is zero.
            begun: the part of the streams' gradient computed so far, to which the rest is added in
                place; None: there is none.
            aggregated: the gradient of the aggregate of these streams, if there is one.
        """
        s, b, n, _ = self.streams.shape
        like: dict[str, Any] = {"dtype": torch.float32, "device": self.streams.device}
        sizes = ((s * b, n), (s * b, n), (s * b, n, n))
        d_weights = [
            torch.zeros(size, **like) if given is None else given.contiguous().view(size)
            for given, size in zip(weights, sizes, strict=True)
        ]
        phi, *rest = self.parameters
        factor = parts_triton.factor(phi, self.streams.dtype)
        d_values = torch.empty_like(self.values)
        shape = (3, *d_values.shape) if factor is not phi else (0,)
        d_parts = torch.empty(shape, dtype=factor.dtype, device=phi.device)
        sums = torch.empty(weights_triton.programs(s * b, n), 2, len(phi), **like)
        width = self.streams[0, 0].numel() if s * b else phi.size(1)
        weights_triton.weights_backward(
            self.values, *rest, *d_weights, d_values, d_parts, sums, width, self.iterations
        )
        d_rest = [torch.empty_like(each) for each in rest]
        weights_triton.parameters(sums, *d_rest, n)
        d_streams = torch.empty_like(self.streams) if begun is None else begun
        count = (
            streams_gradient_triton.ranges(s * b, n, self.streams.dtype)[0] if self.want_phi else 0
        )
        parts = torch.empty(count, *phi.shape, **like)
        streams_gradient_triton.streams_gradient(
            _tokens(self.streams),
            factor,
            d_values,
            d_parts,
            None if aggregated is None else self.h_pre.view(-1, n),
            None if aggregated is None else aggregated.flatten(0, 1),
            _tokens(d_streams),
            parts,
            begun is not None,
        )
        return d_streams, self._of_phi(parts) if self.want_phi else None, *d_rest

    def _of_phi(self, parts: Tensor) -> Tensor | None:
        if self.main_grad is not None:
            streams_gradient_triton.phi_gradient(parts, self.main_grad.buffer, True)
            return self.main_grad.added()
        out = torch.empty_like(self.parameters.phi)
        streams_gradient_triton.phi_gradient(parts, out, False)
        return out


class Sinkhorn(torch.autograd.Function):
    """`sinkhorn(logits [T, n, n], iterations)`."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, iterations: int) -> Tensor:
        out = torch.empty_like(logits)
        sinkhorn_triton.sinkhorn(logits, out, iterations)
        ctx.save_for_backward(logits)
        ctx.iterations = iterations
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (logits,) = ctx.saved_tensors
        out = torch.empty_like(logits)
        sinkhorn_triton.sinkhorn_backward(logits, gradient.contiguous(), out, ctx.iterations)
        return out, None


class Weights(torch.autograd.Function):
    """`weights(streams, phi, alpha_pre, alpha_post, alpha_res, bias, iterations, main_grad)`."""

    @staticmethod
    def forward(
        ctx: Any,
        streams: Tensor,
        phi: Tensor,
        alpha_pre: Tensor,
        alpha_post: Tensor,
        alpha_res: Tensor,
        bias: Tensor,
        iterations: int,
        main_grad: MainGrad | None,
    ) -> Found:
        parameters = Parameters(phi, alpha_pre, alpha_post, alpha_res, bias)
        values, found = _mapped(streams, parameters, iterations)
        ctx.save_for_backward(streams, values, found[0], *parameters)
        ctx.iterations, ctx.main_grad = iterations, main_grad
        ctx.set_materialize_grads(False)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return *_Mapping(ctx).gradients(list(gradients), None, None), None, None


class Aggregate(torch.autograd.Function):
    """`aggregate(streams, h_pre, out)`; `out` is the caller's storage or None."""

    @staticmethod
    def forward(ctx: Any, streams: Tensor, h_pre: Tensor, out: Tensor | None) -> Tensor:
        ctx.save_for_backward(streams, h_pre)
        return _aggregated(ctx, streams, h_pre, out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        streams, h_pre = ctx.saved_tensors
        d_streams, d_pre = torch.empty_like(streams), torch.empty_like(h_pre)
        flat = _tokens(streams), h_pre.view(-1, h_pre.size(-1)), gradient.contiguous()
        aggregate_triton.aggregate_backward(*flat, _tokens(d_streams), d_pre.view_as(flat[1]))
        return d_streams, d_pre, None


def _aggregated(ctx: Any, streams: Tensor, h_pre: Tensor, out: Tensor | None) -> Tensor:
    if out is None:
        s, b, _, c = streams.shape
        out = streams.new_empty(s, b, c)
    else:
        ctx.mark_dirty(out)
    aggregate_triton.aggregate(_tokens(streams), h_pre.view(-1, h_pre.size(-1)), out)
    return out


class Read(torch.autograd.Function):
    """The start of a site: the aggregate, and what its end needs.

    The arguments are those of `Weights`, and `out` is that of `Aggregate`. Returns the aggregate,
    the streams (only for `Write`; their gradient is completed in place), `h_post` and `h_res`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        streams: Tensor,
        phi: Tensor,
        alpha_pre: Tensor,
        alpha_post: Tensor,
        alpha_res: Tensor,
        bias: Tensor,
        iterations: int,
        main_grad: MainGrad | None,
        out: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        parameters = Parameters(phi, alpha_pre, alpha_post, alpha_res, bias)
        values, (h_pre, h_post, h_res) = _mapped(streams, parameters, iterations)
        aggregate = _aggregated(ctx, streams, h_pre, out)
        ctx.save_for_backward(streams, values, h_pre, *parameters)
        ctx.iterations, ctx.main_grad = iterations, main_grad
        ctx.set_materialize_grads(False)
        return aggregate, streams.view_as(streams), h_post, h_res

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        aggregated: Tensor | None,
        begun: Tensor | None,
        d_post: Tensor | None,
        d_res: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        mapping = _Mapping(ctx)
        d_pre = None
        if aggregated is not None:
            aggregated = aggregated.contiguous()
            d_pre = torch.empty_like(mapping.h_pre)
            flat = d_pre.view(-1, d_pre.size(-1))
            aggregate_triton.aggregate_dots(_tokens(mapping.streams), aggregated, flat)
        begun = None if begun is None else begun.contiguous()
        found = mapping.gradients([d_pre, d_post, d_res], begun, aggregated)
        return *found, None, None, None


class Write(torch.autograd.Function):
    """The end of a site, or the update alone: `update(streams, h_res, h_post, out, bias)`."""

    @staticmethod
    def forward(
        ctx: Any, streams: Tensor, h_res: Tensor, h_post: Tensor, out: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(streams, h_res, h_post, out, bias)
        found = torch.empty_like(streams)
        flat = h_res.view(-1, *h_res.shape[2:]), h_post.view(-1, h_post.size(-1))
        update_triton.update(_tokens(streams), *flat, out, bias, _tokens(found))
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        streams, h_res, h_post, out, bias = ctx.saved_tensors
        gradient = gradient.contiguous()
        d_streams, d_out = torch.empty_like(streams), torch.empty_like(out)
        d_res, d_post = torch.empty_like(h_res), torch.empty_like(h_post)
        n = h_post.size(-1)
        update_triton.update_backward(
            _tokens(streams),
            h_res.view(-1, n, n),
            h_post.view(-1, n),
            out,
            bias,
            _tokens(gradient),
            _tokens(d_streams),
            d_res.view(-1, n, n),
            d_post.view(-1, n),
            d_out,
        )
        return d_streams, d_res, d_post, d_out, _of_bias(bias, h_post, gradient)


def _of_bias(bias: Tensor | None, h_post: Tensor, gradient: Tensor) -> Tensor | None:
    """The gradient of the sub-layer's bias."""
    if bias is None:
        return None
    flat = h_post.view(-1, h_post.size(-1))
    parts = torch.empty(
        update_triton.bias_parts(len(flat))[0], len(bias), dtype=torch.float32, device=bias.device
    )
    update_triton.bias_gradient(flat, _tokens(gradient), parts)
    return parts.sum(0).to(bias.dtype)
