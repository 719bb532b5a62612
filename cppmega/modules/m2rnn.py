"""The mixer of M2RNN, a layer's non-linear recurrence with matrix-valued states (arXiv 2603.14360).

It is the authors' model code, with one head of queries and keys, as many heads of values as
`hidden // (K + V)`, one decay each, and a gate as wide as the values:

    queries, keys, values, decay, gate = in_proj(x)
    q, k, v = silu(convolution(queries, keys, values))
    y = recurrence(q, k, v, decay) + D * v
    out = out_proj(rms_norm(y * silu(gate)))

The decay is `exp(-exp(A_log) * softplus(decay + dt_bias))`. Convolution and recurrence begin anew
at every document of a pack. The norm is over all heads together, and its learnt weight is the only
one; no projection has a bias.

First values are the authors': transitions of one, D of 1, `exp(A_log)` uniform up to 16, and
`softplus(dt_bias)` log-uniform from 0.001 to 0.1. The linear layers begin as Megatron's do, and the
convolution as `torch.nn.Conv1d`. `A_log` and `dt_bias` stay in fp32 when a model is converted; the
optimizers can save such a model with the page float16_keep_fp32. Megatron decays no parameter of
one dimension, and D is flat for that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor
from torch.nn.functional import rms_norm, silu, softplus

from cppmega.errors import CppmegaError
from cppmega.modules.mhc import keep_fp32
from cppmega.ops.m2rnn import document_bounds, m2rnn
from cppmega.ops.packed_conv import packed_conv

MOST_DECAY = 16.0
LEAST_STEP, MOST_STEP = 1e-3, 0.1
"""Ranges of the first values of `exp(A_log)`, which is above 0, and of `softplus(dt_bias)`."""


@dataclass
class M2RNNSubmodules:
    """The linear layers of a mixer: Megatron's own, or those of Transformer Engine."""

    in_proj: Any = ColumnParallelLinear
    out_proj: Any = RowParallelLinear


class M2RNNMixer(MegatronModule):  # type: ignore[misc]
    """The mixer of one layer, on its normalised input.

    Args:
        config: Megatron's TransformerConfig, with `m2rnn_key_dim`, `m2rnn_value_dim` and
            `m2rnn_conv`, the taps of the convolution.
        submodules: None: Megatron's own linear layers.
        layer_number: of the layer, from 1.
        pg_collection: process groups; None: those of Megatron's parallel state.

    Raises:
        CppmegaError: `m2rnn-tensor-parallel`, `m2rnn-unsupported`.
    """

    def __init__(
        self,
        config: Any,
        submodules: M2RNNSubmodules | None = None,
        layer_number: int | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config)
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(["tp"])
        self.layer_number, self.tp_group = layer_number, pg_collection.tp
        self.key_dim: int = config.m2rnn_key_dim
        self.value_dim: int = config.m2rnn_value_dim
        self.heads: int = config.hidden_size // (self.key_dim + self.value_dim)
        self.width = self.heads * self.value_dim
        self.convolved = 2 * self.key_dim + self.width
        _check(config, self.heads, self.tp_group.size())
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        made: dict[str, Any] = {"device": device, "dtype": config.params_dtype}
        fp32 = made | {"dtype": torch.float32}
        given = submodules or M2RNNSubmodules()
        common = {"config": config, "bias": False, "is_expert": False, "tp_group": self.tp_group}
        self.in_proj = build_module(
            given.in_proj,
            config.hidden_size,
            self.convolved + self.heads + self.width,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="fc1",
            **common,
        )
        self.conv1d = torch.nn.Conv1d(
            self.convolved, self.convolved, config.m2rnn_conv, groups=self.convolved, **made
        )
        self.A_log = torch.nn.Parameter(torch.empty(self.heads, **fp32))
        self.dt_bias = torch.nn.Parameter(torch.empty(self.heads, **fp32))
        square = (self.heads, self.value_dim, self.value_dim)
        self.transition = torch.nn.Parameter(torch.empty(square, **made))
        self.D = torch.nn.Parameter(torch.ones(self.width, **made))
        self.norm = torch.nn.RMSNorm(self.width, eps=config.layernorm_epsilon, **made)
        self.out_proj = build_module(
            given.out_proj,
            self.width,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="fc2",
            **common,
        )
        if config.perform_initialization:
            self._initialize()
        keep_fp32(self, config, ("A_log", "dt_bias"))

    @torch.no_grad()
    def _initialize(self) -> None:
        drawn = 1 - torch.rand_like(self.A_log)  # above 0: its logarithm is finite
        self.A_log.copy_(torch.log(MOST_DECAY * drawn))
        low, high = math.log(LEAST_STEP), math.log(MOST_STEP)
        step = torch.exp(torch.empty_like(self.dt_bias).uniform_(low, high))
        self.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # softplus has this inverse
        self.transition.copy_(torch.eye(self.value_dim).expand_as(self.transition))

    def forward(
        self,
        hidden_states: Tensor,
        inference_context: Any = None,
        packed_seq_params: Any = None,
    ) -> tuple[Tensor, None]:
        """Mix tokens of one document.

        Args:
            hidden_states: `[s, b, hidden]`, normalised.
            inference_context: None.
            packed_seq_params: Megatron's PackedSeqParams of documents, for b of 1.

        Returns:
            `[s, b, hidden]`, and None for the bias that there is not.

        Raises:
            CppmegaError: `m2rnn-unsupported`.
        """
        if inference_context is not None:
            raise _unsupported("inference", "train or evaluate without an inference context")
        s, b, _ = hidden_states.shape
        bounds = _bounds(packed_seq_params, s, b)
        projected, _ = self.in_proj(hidden_states)
        x, decay, gate = projected.split((self.convolved, self.heads, self.width), dim=-1)
        conv_bias = self.conv1d.bias
        assert conv_bias is not None
        x = packed_conv(x, self.conv1d.weight.squeeze(1), conv_bias, bounds)
        q, k, v = torch.split(x, [self.key_dim, self.key_dim, self.width], dim=-1)
        y = m2rnn(
            q,
            k,
            v.view(s, b, self.heads, self.value_dim),
            self.transition,
            -self.A_log.exp() * softplus(decay.float() + self.dt_bias),
            bounds,
        )
        gated = (y.flatten(-2).float() + self.D * v.float()) * silu(gate.float())
        normed = rms_norm(gated, (self.width,), self.norm.weight.float(), self.norm.eps)
        out, _ = self.out_proj(normed.to(hidden_states.dtype))
        return out, None


def _bounds(packed_seq_params: Any, length: int, batch: int) -> Tensor | None:
    """Where documents begin, with their padding if they have one; None without packs."""
    if packed_seq_params is None:
        return None
    if batch != 1:
        raise _unsupported(f"packs in a batch of {batch}", "set the micro-batch size to 1")
    padded = getattr(packed_seq_params, "cu_seqlens_q_padded", None)
    cu_seqlens = packed_seq_params.cu_seqlens_q if padded is None else padded
    return document_bounds(cu_seqlens, length)


def _check(config: Any, heads: int, tensor: int) -> None:
    if tensor > 1:
        raise CppmegaError(
            "m2rnn-tensor-parallel",
            f"An M2RNN layer of {heads} heads on {tensor} tensor-parallel ranks.",
            "All heads share a query and a key, and their number is seldom a multiple of the "
            "ranks; nothing divides the layer, or repeats it on every rank, yet.",
            "train with --tensor-model-parallel-size 1",
        )
    if config.context_parallel_size > 1:
        raise _unsupported("context parallelism", "train with --context-parallel-size 1")
    if config.fp8 or getattr(config, "fp4", None):
        raise _unsupported("FP8 or FP4", "train in bf16")
    if heads < 1:
        raise _unsupported(
            f"a hidden size of {config.hidden_size}, less than a key and a value together",
            "set m2rnn_key_dim and m2rnn_value_dim to less",
        )


def _unsupported(what: str, after: str) -> CppmegaError:
    return CppmegaError(
        "m2rnn-unsupported",
        f"An M2RNN layer with {what}.",
        "Nothing has made it right or tried it.",
        after,
    )
