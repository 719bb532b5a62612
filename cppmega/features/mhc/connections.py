"""Manifold-constrained hyper-connections (mHC): a model's sites, and the ends of its streams.

Between layers the streams are one tensor `[s, b, n * C]`, as in Megatron 0.20, so that code that
passes hidden states on (pipeline stages, recomputation) needs to know only their width. A site
belongs to one sub-layer. It is read before the sub-layer and replaces its bias-dropout-add, so the
sub-layer's own code remains unchanged. Parameters have the names and shapes of 0.20 and stay in
fp32 when a model is converted to bf16 or fp16.

The definition is in `cppmega.ops.mhc.naive`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cppmega.errors import CppmegaError
from cppmega.features import kept_fp32
from cppmega.features.arrived import arrived
from cppmega.features.mhc import recompute as mhc_recompute
from cppmega.ops import mhc as kernels
from cppmega.ops.common.numerics import wide
from cppmega.ops.mhc import naive as reference

PART = 2**27
"""Bytes in fp32 of the tokens that are contracted at a time; the backward needs six times that."""
HEAD = ("hc_head_fn", "hc_head_base", "hc_head_scale")
"""Parameters of the learned contraction at the end of a stack."""


class _Open(NamedTuple):
    """The state that a site keeps from its read to its write."""

    streams: Tensor
    """`[s, b, n * C]`, as they were passed in."""
    site: kernels.Site


class HyperConnectionModule(torch.nn.Module):
    """One site: the weights of a sub-layer's input and output in n streams.

    Code that uses parameters must call the module that holds them, or pass it to `arrived`:
    they may still be in flight.

    Args:
        config: Megatron's TransformerConfig with the fields of mHC.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.streams: int = config.mhc_num_residual_streams
        self.iterations: int = config.mhc_sinkhorn_iterations
        values = self.streams * (self.streams + 2)
        fp32 = torch.float32
        self.mapping_proj = torch.nn.Linear(
            self.streams * config.hidden_size, values, bias=False, dtype=fp32
        )
        alpha = config.mhc_init_gating_factor
        self.alpha_pre = torch.nn.Parameter(torch.full((1,), alpha, dtype=fp32))
        self.alpha_post = torch.nn.Parameter(torch.full((1,), alpha, dtype=fp32))
        self.alpha_res = torch.nn.Parameter(torch.full((1,), alpha, dtype=fp32))
        self.bias = torch.nn.Parameter(torch.zeros(values, dtype=fp32))
        if config.perform_initialization:
            torch.nn.init.xavier_uniform_(self.mapping_proj.weight)
        keep_fp32(self, config, ("alpha_pre", "alpha_post", "alpha_res", "bias"))
        keep_fp32(self.mapping_proj, config, ("weight",))
        self.fused: bool = config.use_fused_mhc
        self.fuse_accumulation: bool = config.gradient_accumulation_fusion
        if self.fused:
            require_kernels(config.params_dtype, self.streams, config.hidden_size)
        self.block: mhc_recompute.Block | None = None
        self._open: _Open | None = None

    def read(self, streams: Tensor) -> Tensor:
        """Compute the input `[s, b, C]` of the sub-layer from the streams `[s, b, n * C]`."""
        x: Tensor = self(streams)
        return x

    def forward(self, streams: Tensor) -> Tensor:
        """Return what `read` returns."""
        with mhc_recompute.scope(self):
            x, site = self._read(streams)
        self._open = _Open(streams, site)
        if self.block is not None:
            before = self.block.recomputed(streams)
            self.block.know(x, lambda: self._read(before.value())[0])
        return x

    def leave(self) -> kernels.Site:
        """Close the site without a write; `resume` continues it outside of a CUDA graph."""
        assert self._open is not None
        (_, site), self._open = self._open, None
        return site

    def resume(self, streams: Tensor, h_post: Tensor, h_res: Tensor) -> None:
        """Open the site with what `leave` returned, before a write."""
        self._open = _Open(streams.flatten(-2), kernels.Site(streams, h_post, h_res))

    def bias_dropout_add(
        self, training: bool, fused: bool
    ) -> Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]:
        """Replace the sub-layer's `get_bias_dropout_add`: its output goes to the streams."""
        return partial(self._write, training)

    def _write(
        self,
        training: bool,
        out_with_bias: tuple[Tensor, Tensor | None],
        residual: Tensor,
        dropout: float,
    ) -> Tensor:
        """Return the streams `[s, b, n * C]` after the sub-layer.

        The residual that the sub-layer passes is its input, which is not added.
        """
        if self._open is None:
            raise RuntimeError("a hyper-connection was written without being read first")
        (streams, site), self._open = self._open, None
        update, repeated = self._updates(dropout if training else 0.0)
        with mhc_recompute.scope(self):
            after = update(site, *out_with_bias)
        if self.block is not None:
            before, (out, bias) = self.block.recomputed(streams), out_with_bias
            kept = (site.h_post.detach(), site.h_res.detach(), out.detach())
            if bias is not None:  # Megatron-FSDP frees it until this layer's own backward pass
                bias = bias.detach().clone()

            def make() -> Tensor:
                h_post, h_res, out = kept
                return repeated(kernels.Site(self._split(before.value()), h_post, h_res), out, bias)

            self.block.know(after, make)
        return after

    def _read(self, streams: Tensor) -> tuple[Tensor, kernels.Site]:
        apart = self._split(streams)
        if self.fused:
            fuse = self.fuse_accumulation and torch.is_grad_enabled()
            return kernels.read(apart, learned(self), self.iterations, fuse_accumulation=fuse)
        inputs = apart, *learned(self)
        x, h_post, h_res = (
            self._plain_read(*inputs)
            if self.block is None
            else mhc_recompute.again(self._plain_read, *inputs)  # saves no fp32 copies
        )
        return x, kernels.Site(apart, h_post, h_res)

    def _plain_read(self, streams: Tensor, *learned: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parameters = reference.Parameters(*learned)
        h_pre, h_post, h_res = reference.weights(streams, parameters, self.iterations)
        return reference.aggregate(streams, h_pre), h_post, h_res

    def _updates(self, dropout: float) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
        """The end of this site, and the same again, with the same random numbers.

        The kernels have no dropout: with it, the reference computes the end of the site.
        """
        if self.fused and not dropout:
            return _fused_update, _fused_update
        update: Callable[..., Tensor] = partial(reference.update, dropout=dropout)
        now = repeated = update
        if self.fused or self.block is not None:  # without its fp32 copies for the backward
            repeated = mhc_recompute.with_these_numbers(update) if dropout else update
            now = partial(mhc_recompute.again, update, repeated=repeated)
        return partial(_plain_update, now), partial(_plain_update, repeated)

    def _split(self, streams: Tensor) -> Tensor:
        return split(streams, self.streams)


def _fused_update(site: kernels.Site, out: Tensor, bias: Tensor | None) -> Tensor:
    return kernels.write(site, out, bias).flatten(-2)


def _plain_update(
    update: Callable[..., Tensor], site: kernels.Site, out: Tensor, bias: Tensor | None
) -> Tensor:
    return update(site.streams, site.h_res, site.h_post, out, bias).flatten(-2)


def learned(site: Any) -> reference.Parameters:
    """The parameters of a site, ours or Megatron's, once they have arrived."""
    return reference.Parameters(
        arrived(site.mapping_proj).weight,
        *(site.alpha_pre, site.alpha_post, site.alpha_res, site.bias),
    )


def require_kernels(dtype: torch.dtype, streams: int, width: int) -> None:
    """Check that a run that requests fused kernels can use them.

    Raises:
        CppmegaError: `no-kernel`.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    why = kernels.obstacle(device, dtype, streams, width)
    if why is not None:
        raise CppmegaError(
            "no-kernel",
            f"--use-fused-mhc was given, but no fused kernel can run: {why}.",
            "The run would use the plain implementation instead of the one it requests.",
            "leave --use-fused-mhc out, or change the unsupported property",
        )


def keep_fp32(module: torch.nn.Module, config: Any, names: Sequence[str]) -> None:
    """Keep parameters of a module in fp32, and have their gradients reduced.

    With sequence parallelism each rank sees different tokens, and Megatron sums the gradients of
    parameters that are marked accordingly.
    """
    kept_fp32.keep_fp32(module, config, names)
    if config.sequence_parallel:
        for name in names:
            getattr(module, name).sequence_parallel = True


def split(streams: Tensor, count: int) -> Tensor:
    """The streams `[..., n * C]` as `[..., n, C]`, without a copy where possible."""
    return streams.reshape(*streams.shape[:-1], count, -1)


def expand(hidden: Tensor, streams: int) -> Tensor:
    """Streams `[s, b, n * C]`, each initialized to the hidden states `[s, b, C]`."""
    return hidden.unsqueeze(-2).expand(*hidden.shape[:-1], streams, -1).flatten(-2)


def add_head(module: torch.nn.Module, config: Any) -> None:
    """Add the parameters of the learned contraction to a module, in fp32."""
    streams = config.mhc_num_residual_streams
    weight = torch.empty(streams, streams * config.hidden_size, dtype=torch.float32)
    if config.perform_initialization:
        torch.nn.init.xavier_uniform_(weight)
    module.hc_head_fn = torch.nn.Parameter(weight)
    module.hc_head_base = torch.nn.Parameter(torch.zeros(streams, dtype=torch.float32))
    module.hc_head_scale = torch.nn.Parameter(torch.ones(1, dtype=torch.float32))
    keep_fp32(module, config, HEAD)


def contract(module: Any, streams: Tensor, block: mhc_recompute.Block | None = None) -> Tensor:
    """Hidden states `[s, b, C]`: the sum of the streams `[s, b, n * C]`, weighted per token.

    A weight is a sigmoid of a projection of all streams, divided by their root mean square, plus
    the layer norm's epsilon, which 0.20 adds in both places. The sum is computed in fp32 and
    rounded once to the type of the streams; the backward recomputes it, so that it keeps no fp32
    copy, nor the streams if a block recomputes them. Tokens are processed in parts, because the
    fp32 copies would otherwise set the peak memory of a step.

    Args:
        module: the module with the parameters.
        streams: the streams after the last layer.
        block: the block of that layer.
    """
    contraction = partial(_contracted, module.config.layernorm_epsilon)
    learned = [getattr(module, name) for name in HEAD]
    tokens = streams.flatten(0, -2)
    rows = max(1, PART // (4 * tokens.size(-1)))
    with mhc_recompute.around(block):
        parts = [
            mhc_recompute.again(contraction, part, *learned) for part in torch.split(tokens, rows)
        ]
    out: Tensor = torch.cat(parts) if len(parts) > 1 else parts[0]
    return out.view(*streams.shape[:-1], -1)


def _contracted(eps: float, streams: Tensor, weight: Tensor, base: Tensor, scale: Tensor) -> Tensor:
    x = wide(streams)
    r = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    h = torch.sigmoid((x @ weight.to(x.dtype).t()) * r * scale + base) + eps
    return reference.aggregate(split(x, len(weight)), h).to(streams.dtype)


def hand_on(hidden: Tensor, streams: Tensor | None) -> None:
    """Attach the streams to the hidden states into which they were contracted, for MTP depths.

    The model code between the stack and the depths passes on this one tensor, and is unchanged.
    """
    if streams is not None:
        hidden.mhc_streams = streams  # type: ignore[attr-defined]


def streams_of(hidden: Tensor) -> Tensor:
    """The streams `[s, b, n * C]` that `hand_on` attached.

    Raises:
        CppmegaError: `mhc-streams-lost`.
    """
    streams: Tensor | None = getattr(hidden, "mhc_streams", None)
    if streams is None:
        raise CppmegaError(
            "mhc-streams-lost",
            "An MTP depth received hidden states without the streams they were contracted from.",
            "A depth reads the streams as the decoder's last layer left them.",
            "train without --mtp-num-layers, or without the code that copies the hidden states in "
            "between",
        )
    return streams
