"""The mixer of M2RNN, a layer's non-linear recurrence with matrix-valued states (arXiv 2603.14360).

It follows the authors' model code, with one query head and one key head, `hidden // (K + V)` value
heads with one decay each, and a gate as wide as the values:

    queries, keys, values, decay, gate = in_proj(x)
    q, k, v = silu(convolution(queries, keys, values))
    y = recurrence(q, k, v, decay) + D * v
    out = out_proj(rms_norm(y * silu(gate)))

The decay is `exp(-exp(A_log) * softplus(decay + dt_bias))`. Convolution and recurrence restart at
every document of a pack. The norm spans all heads together, and its learned weight is the only one;
no projection has a bias.

Tensor-parallel ranks share out the value heads, the first of them taking one more where the number
of heads is not a multiple of theirs, and the channels of query and key, which they gather after the
convolution. The norm sums the squares of all ranks. A distributed checkpoint has the tensors of a
single rank, whatever the number of ranks. Context-parallel ranks share out the heads in the same
way for the convolution and the recurrence, each over the complete sequence.

In the backward, the gradient of every step's state is clipped to `gradient_clipping`, 1 in all of
the authors' configurations: `cppmega.ops.m2rnn.naive` defines it. The bound is on gradients of
what is backpropagated, which are larger for a sum over tokens (`--calculate-per-token-loss`) than
for their mean.

Initial values are the authors': identity transitions, D of 1, `exp(A_log)` uniform up to 16, and
`softplus(dt_bias)` log-uniform from 0.001 to 0.1. The linear layers are initialized as Megatron's,
and the convolution as `torch.nn.Conv1d`. `A_log` and `dt_bias` stay in fp32 when a model is
converted; the optimizers can save such a model with the page float16_keep_fp32. In an FP8 model,
both projections stay in bf16: the projected width is not a multiple of 16. Megatron applies no
weight decay to one-dimensional parameters, which is why D is flat.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.functional import rms_norm, silu, softplus

from cppmega.features.arrived import arrived
from cppmega.features.documents import boundaries
from cppmega.features.kept_fp32 import keep_fp32
from cppmega.features.mixers.bf16_products import bf16_products, bf16_weights
from cppmega.features.mixers.calls import projections, refuse_inference
from cppmega.features.mixers.sequences import Exchange
from cppmega.features.mixers.shares import Runs, share
from cppmega.ops.m2rnn import document_bounds, m2rnn
from cppmega.ops.packed_conv import packed_conv
from cppmega.rules import check_model, combinations
from cppmega.sizes import mixers as mixer_sizes

MOST_DECAY = 16.0
LEAST_STEP, MOST_STEP = 1e-3, 0.1
"""Ranges of the initial values of `exp(A_log)`, which is above 0, and of `softplus(dt_bias)`."""


class M2RNNMixer(MegatronModule):  # type: ignore[misc]
    """The mixer of one layer, applied to its normalized input.

    Args:
        config: Megatron's TransformerConfig.
        submodules: has `in_proj` and `out_proj`, a column- and a row-parallel linear layer; the
            first may add columns to its result.
        sizes: the sizes of the mixer.
        d_model: width of the model.
        layer_number: the number of the layer in the model, from 1.
        pg_collection: Megatron's process groups.
        pp_layer_offset: the number of layers in earlier pipeline stages; unused.
        name: the name of the module, as Megatron passes it down.

    Raises:
        CppmegaError: `unsupported`, `arguments-invalid`.
    """

    def __init__(
        self,
        config: Any,
        submodules: Any,
        sizes: mixer_sizes.M2RNN,
        d_model: int,
        layer_number: int | None = None,
        pg_collection: Any = None,
        pp_layer_offset: int = 0,
        name: str | None = None,
    ) -> None:
        super().__init__(config)
        check_model(config, combinations.MIXERS, combinations.M2RNN, combinations.CLIPPED_M2RNN)
        self.layer_number = layer_number
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        self.gradient_clipping, self.value_dim = sizes.gradient_clipping, sizes.value_dim
        ranks, rank = self.tp_group.size(), self.tp_group.rank()
        heads, keys = sizes.heads(d_model), sizes.key_dim
        own = share(heads, ranks, rank)
        self.heads, self.total_width = own.stop - own.start, heads * self.value_dim
        self.width = self.heads * self.value_dim
        values = self._channels(own)
        channels = 2 * [(keys, share(keys, ranks, rank))] + [(self.total_width, values)]
        of_values, of_channels = Runs.of(channels[2:]), Runs.of(channels)
        projected = Runs.of([*channels, (heads, own), (self.total_width, values)])
        self.convolved, self.key_dim = sum(of_channels.sizes), of_channels.sizes[0]
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        factory_kwargs: dict[str, Any] = {"device": device, "dtype": config.params_dtype}
        fp32 = factory_kwargs | {"dtype": torch.float32}
        # Megatron divides what a layer is given by the ranks, whose shares differ.
        outer = (d_model, ranks * sum(projected.sizes), ranks * self.width)
        with bf16_weights(config), _one_random_stream(ranks):
            self.in_proj, self.out_proj = projections(
                config, submodules, outer, self.tp_group, name
            )
        self.in_proj.weight.partition_sizes = projected.sizes
        self.conv1d = _convolution(of_channels, sizes.conv, factory_kwargs)
        self.A_log = torch.nn.Parameter(torch.empty(self.heads, **fp32))
        self.dt_bias = torch.nn.Parameter(torch.empty(self.heads, **fp32))
        square = (self.heads, self.value_dim, self.value_dim)
        self.transition = torch.nn.Parameter(torch.empty(square, **factory_kwargs))
        self.D = torch.nn.Parameter(torch.ones(self.width, **factory_kwargs))
        self.norm = torch.nn.RMSNorm(self.width, eps=config.layernorm_epsilon, **factory_kwargs)
        if config.perform_initialization:
            self._initialize(heads, own)
        keep_fp32(self, config, ("A_log", "dt_bias"))
        of_heads = Runs.of([(heads, own)])
        self.sharded = {
            "in_proj.weight": projected,
            "out_proj.weight": Runs.of(channels[2:], axis=1),
            "conv1d.weight": of_channels,
            "conv1d.bias": of_channels,
            "norm.weight": of_values,
            "D": of_values,
            **dict.fromkeys(("A_log", "dt_bias", "transition"), of_heads),
        }
        """The parameters by name, each with this rank's share in it."""
        for each in self.sharded.keys() - {"in_proj.weight", "out_proj.weight"}:
            set_tensor_model_parallel_attributes(self.get_parameter(each), True, 0, 1)

    @torch.no_grad()
    def _initialize(self, heads: int, own: slice) -> None:
        """Every rank draws the same values for all heads, and keeps those of its own."""
        drawn = 1 - torch.rand_like(self.A_log.new_empty(heads))  # above 0: its logarithm is finite
        self.A_log.copy_(torch.log(MOST_DECAY * drawn)[own])
        low, high = math.log(LEAST_STEP), math.log(MOST_STEP)
        step = torch.exp(self.dt_bias.new_empty(heads).uniform_(low, high))
        inverse = step + torch.log(-torch.expm1(-step))  # of softplus
        self.dt_bias.copy_(inverse[own])
        self.transition.copy_(torch.eye(self.value_dim).expand_as(self.transition))

    def forward(
        self,
        hidden_states: Tensor,
        inference_context: Any = None,
        *,
        inference_params: Any = None,
        packed_seq_params: Any = None,
    ) -> tuple[Tensor, None]:
        """Mix a sequence, or the documents of a pack one by one.

        Args:
            hidden_states: `[s, b, hidden]`, normalized; with sequence parallelism this rank's part.
            inference_context: must be None.
            inference_params: must be None.
            packed_seq_params: Megatron's, with the document boundaries; b must then be 1.

        Returns:
            `[s, b, hidden]`, and no bias.

        Raises:
            CppmegaError: `no-inference`.
        """
        refuse_inference(inference_context, inference_params)
        with bf16_products(self.config):
            projected, _ = self.in_proj(hidden_states)
        widths = (self.convolved, self.heads, self.width)
        x, decay, gate, _ = projected.split((*widths, projected.size(-1) - sum(widths)), dim=-1)
        if self.cp_group.size() == 1:
            values = self._values(x, decay, slice(0, self.heads), boundaries(packed_seq_params))
        else:
            values = self._values_of_parts(x, decay, boundaries(packed_seq_params))
        gated = values * silu(gate.float())
        normed = self._normed(gated)
        with bf16_products(self.config):
            out, _ = self.out_proj(normed.to(hidden_states.dtype))
        return out, None

    def _values_of_parts(self, x: Tensor, decay: Tensor, cumulative: Tensor | None) -> Tensor:
        """Compute `_values` of this rank's part of a sequence, whose heads ranks share out."""
        group, keys = self.cp_group, 2 * self.key_dim
        exchange = Exchange.of(group, len(x), cumulative, x.device)
        shares = [share(self.heads, group.size(), rank) for rank in range(group.size())]
        pieces = [
            torch.cat((x[..., :keys], x[..., keys:][..., self._channels(own)], decay[..., own]), -1)
            for own in shares
        ]
        own = shares[group.rank()]
        heads = own.stop - own.start
        sequence = exchange.sequence(pieces)
        x, decay = sequence.split([keys + heads * self.value_dim, heads], dim=-1)
        values = self._values(x, decay, own, cumulative)
        widths = [(each.stop - each.start) * self.value_dim for each in shares]
        return exchange.pieces(values, widths)

    def _channels(self, heads: slice) -> slice:
        return slice(self.value_dim * heads.start, self.value_dim * heads.stop)

    def _values(self, x: Tensor, decay: Tensor, own: slice, cumulative: Tensor | None) -> Tensor:
        """Convolve, and compute the recurrence of complete sequences.

        Args:
            x: `[s, b, channels]`, the queries, the keys, and the values of these heads.
            decay: `[s, b, heads]`.
            own: the heads.
            cumulative: where documents begin, and where the last one ends; None if not packed.

        Returns:
            `[s, b, values]` in fp32, with the values that D adds.
        """
        s, b, heads = decay.shape
        bounds = None if cumulative is None else document_bounds(cumulative, s)
        keys, channels = 2 * self.key_dim, self._channels(own)
        conv = arrived(self.conv1d)
        assert conv.bias is not None
        weight, bias = conv.weight.squeeze(1), conv.bias
        transition: Tensor
        a_log: Tensor
        dt_bias: Tensor
        d: Tensor
        transition, a_log, dt_bias, d = self.transition, self.A_log, self.dt_bias, self.D
        if heads < self.heads:
            weight, bias = (torch.cat((w[:keys], w[keys:][channels])) for w in (weight, bias))
            transition, a_log, dt_bias = transition[own], a_log[own], dt_bias[own]
            d = d[channels]
        x = packed_conv(x, weight, bias, bounds)
        shared, v = x.split([keys, heads * self.value_dim], dim=-1)
        q, k = self._keys_of_all_ranks(shared)
        y = m2rnn(
            q,
            k,
            v.view(s, b, heads, self.value_dim),
            transition,
            -a_log.exp() * softplus(decay.float() + dt_bias),
            bounds,
            self.gradient_clipping,
        )
        values: Tensor = y.flatten(-2).float() + d * v.float()
        return values

    def _keys_of_all_ranks(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """The query and the key, from this rank's channels of them; gradients are summed."""
        ranks = self.tp_group.size()
        if ranks > 1:
            own = mappings.all_gather_last_dim_from_tensor_parallel_region(own, self.tp_group)
        q, k = own.unflatten(-1, (ranks, 2, self.key_dim)).unbind(-2)
        return q.flatten(-2), k.flatten(-2)

    def _normed(self, gated: Tensor) -> Tensor:
        """This rank's part of the result, normalized over the heads of all ranks."""
        weight = arrived(self.norm).weight.float()
        if self.tp_group.size() == 1:
            return rms_norm(gated, (self.width,), weight, self.norm.eps)
        own = gated.square().sum(-1, keepdim=True)
        summed = mappings.reduce_from_tensor_model_parallel_region(own, self.tp_group)
        shared = mappings.copy_to_tensor_model_parallel_region(summed, self.tp_group)
        return gated * torch.rsqrt(shared / self.total_width + self.norm.eps) * weight

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The entries of a distributed checkpoint, which has the tensors of a single rank."""
        saved: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        if self.tp_group.size() > 1:
            for name, runs in self.sharded.items():
                saved[prefix + name] = runs.sharded(saved[prefix + name])
        return saved


def _convolution(channels: Runs, taps: int, factory_kwargs: dict[str, Any]) -> torch.nn.Conv1d:
    """This rank's channels of a convolution that every rank draws with those of all."""
    made = torch.nn.Conv1d(
        channels.total, channels.total, taps, groups=channels.total, **factory_kwargs
    )
    for name, value in list(made.named_parameters()):
        setattr(made, name, torch.nn.Parameter(channels.select(value.detach())))
    made.in_channels = made.out_channels = made.groups = sum(channels.sizes)
    return made


@contextmanager
def _one_random_stream(ranks: int) -> Iterator[None]:
    """Let what follows draw the same values on all ranks, whose layers are of different sizes.

    Only initialization on the CPU draws layers from the stream that ranks have in common.
    """
    seed = torch.randint(2**62, ()).item() if ranks > 1 else None
    yield
    if seed is not None:
        torch.default_generator.manual_seed(int(seed))
