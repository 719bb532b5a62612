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
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.functional import rms_norm, silu, softplus

from cppmega.features.arrived import arrived
from cppmega.features.kept_fp32 import keep_fp32
from cppmega.features.mixers.bf16_products import bf16_products, bf16_weights
from cppmega.features.mixers.calls import boundaries, projections, refuse_inference
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
        self.layer_number, self.tp_group = layer_number, pg_collection.tp
        self.key_dim, self.value_dim = sizes.key_dim, sizes.value_dim
        self.gradient_clipping = sizes.gradient_clipping
        self.heads = sizes.heads(d_model)
        self.width = self.heads * self.value_dim
        self.convolved = 2 * self.key_dim + self.width
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        factory_kwargs: dict[str, Any] = {"device": device, "dtype": config.params_dtype}
        fp32 = factory_kwargs | {"dtype": torch.float32}
        outer = (d_model, self.convolved + self.heads + self.width, self.width)
        with bf16_weights(config):
            self.in_proj, self.out_proj = projections(
                config, submodules, outer, self.tp_group, name
            )
        self.conv1d = torch.nn.Conv1d(
            self.convolved, self.convolved, sizes.conv, groups=self.convolved, **factory_kwargs
        )
        self.A_log = torch.nn.Parameter(torch.empty(self.heads, **fp32))
        self.dt_bias = torch.nn.Parameter(torch.empty(self.heads, **fp32))
        square = (self.heads, self.value_dim, self.value_dim)
        self.transition = torch.nn.Parameter(torch.empty(square, **factory_kwargs))
        self.D = torch.nn.Parameter(torch.ones(self.width, **factory_kwargs))
        self.norm = torch.nn.RMSNorm(self.width, eps=config.layernorm_epsilon, **factory_kwargs)
        if config.perform_initialization:
            self._initialize()
        keep_fp32(self, config, ("A_log", "dt_bias"))

    @torch.no_grad()
    def _initialize(self) -> None:
        drawn = 1 - torch.rand_like(self.A_log)  # above 0, so its logarithm is finite
        self.A_log.copy_(torch.log(MOST_DECAY * drawn))
        low, high = math.log(LEAST_STEP), math.log(MOST_STEP)
        step = torch.exp(torch.empty_like(self.dt_bias).uniform_(low, high))
        self.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus
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
            hidden_states: `[s, b, hidden]`, normalized.
            inference_context: must be None.
            inference_params: must be None.
            packed_seq_params: Megatron's, with the document boundaries; b must then be 1.

        Returns:
            `[s, b, hidden]`, and no bias.

        Raises:
            CppmegaError: `no-inference`.
        """
        refuse_inference(inference_context, inference_params)
        s, b, _ = hidden_states.shape
        cumulative = boundaries(packed_seq_params)
        bounds = None if cumulative is None else document_bounds(cumulative, s)
        with bf16_products(self.config):
            projected, _ = self.in_proj(hidden_states)
        widths = (self.convolved, self.heads, self.width)
        x, decay, gate, _ = projected.split((*widths, projected.size(-1) - sum(widths)), dim=-1)
        conv = arrived(self.conv1d)
        assert conv.bias is not None
        x = packed_conv(x, conv.weight.squeeze(1), conv.bias, bounds)
        q, k, v = torch.split(x, [self.key_dim, self.key_dim, self.width], dim=-1)
        y = m2rnn(
            q,
            k,
            v.view(s, b, self.heads, self.value_dim),
            self.transition,
            -self.A_log.exp() * softplus(decay.float() + self.dt_bias),
            bounds,
            self.gradient_clipping,
        )
        gated = (y.flatten(-2).float() + self.D * v.float()) * silu(gate.float())
        normed = rms_norm(gated, (self.width,), arrived(self.norm).weight.float(), self.norm.eps)
        with bf16_products(self.config):
            out, _ = self.out_proj(normed.to(hidden_states.dtype))
        return out, None
