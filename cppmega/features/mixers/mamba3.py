"""The Mamba-3 mixer of a layer, with Megatron's conventions for parallelism and checkpoints.

`cppmega.ops.mamba3.naive` defines the computation. Heads, and the groups of keys and queries
that serve them, are sharded over tensor-parallel ranks; the angles, which all heads share, and the
norms of keys and queries are replicated, and their gradients are summed over the ranks' heads.
Context-parallel ranks share out a rank's heads and groups once more, each for complete sequences.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.ssm.mamba_mixer import _split_tensor_factory
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor, nn
from torch.nn import functional

from cppmega.features.documents import boundaries
from cppmega.features.kept_fp32 import keep_fp32
from cppmega.features.mixers.calls import projections, refuse_inference
from cppmega.features.mixers.sequences import Exchange
from cppmega.ops import mamba3
from cppmega.ops.pointwise.split_columns import split_columns
from cppmega.rules import check_model, combinations
from cppmega.sizes import mixers as mixer_sizes

DT_RANGE = (1e-3, 1e-1)
"""Range of the initial values of dt, which are log-uniform."""

PARTS = ("z", "x", "B", "C", "dt", "A", "trap")
"""Parts of the sharded projection, in this order; also used in a checkpoint's keys."""

OF_HEADS = ("dt_bias", "D", "B_bias", "C_bias", "rank_x", "rank_z", "rank_out", "out_norm")
DIVIDED = dict.fromkeys(OF_HEADS, 0)
"""Per-head parameters, with the axis that is sharded."""


class Mamba3Mixer(MegatronModule):  # type: ignore[misc]
    """Mamba-3 over a sequence: `[s, b, hidden]` to the same, without the layer's norm or residual.

    Args:
        config: Megatron's TransformerConfig.
        submodules: has `in_proj` and `out_proj`, a column- and a row-parallel linear layer.
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
        sizes: mixer_sizes.Mamba3,
        d_model: int,
        layer_number: int | None = None,
        pg_collection: Any = None,
        pp_layer_offset: int = 0,
        name: str | None = None,
    ) -> None:
        super().__init__(config)
        check_model(config, combinations.MIXERS, combinations.MAMBA3)
        self.sizes = sizes
        self.layer_number = layer_number
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        ranks = self.tp_group.size()
        heads, groups = sizes.heads(d_model), sizes.groups
        inner, states = heads * sizes.head_dim, groups * sizes.rank * sizes.state_dim
        self.heads, self.groups = heads // ranks, groups // ranks
        widths = (inner, inner, states, states, heads, heads, heads)
        self.widths = [width // ranks for width in widths]
        outer = (d_model, sum(widths), inner)
        self.in_proj, self.out_proj = projections(config, submodules, outer, self.tp_group, name)
        self.in_proj.weight.partition_sizes = self.widths
        self._add_parameters(heads, d_model)

    def _add_parameters(self, heads: int, d_model: int) -> None:
        """Create the parameters outside the linear layers; every rank draws the same values and
        keeps those of its own heads."""
        sizes, config = self.sizes, self.config
        device = self.out_proj.weight.device
        own = slice(self.tp_group.rank() * self.heads, (self.tp_group.rank() + 1) * self.heads)

        def parameter(name: str, value: Tensor) -> None:
            created = nn.Parameter(value.to(device).contiguous())
            if name in DIVIDED:
                created.tensor_model_parallel = True  # type: ignore[attr-defined]
                created.partition_dim = 0  # type: ignore[attr-defined]
                created.partition_stride = 1  # type: ignore[attr-defined]
            setattr(self, name, created)

        angles = torch.empty(sizes.angles, d_model, dtype=config.params_dtype)
        if config.perform_initialization:
            config.init_method(angles)
        parameter("angle_proj", angles)
        low, high = (math.log(bound) for bound in DT_RANGE)
        dt = torch.exp(torch.rand(heads) * (high - low) + low)
        parameter("dt_bias", torch.log(torch.expm1(dt))[own])  # the inverse of softplus
        parameter("D", torch.ones(self.heads))
        states = (self.heads, sizes.rank, sizes.state_dim)
        parameter("B_bias", torch.ones(states))
        parameter("C_bias", torch.ones(states))
        kept = ["dt_bias", "D", "B_bias", "C_bias"]
        if sizes.rank > 1:
            values = torch.ones(self.heads, sizes.rank, sizes.head_dim)
            parameter("rank_x", values / sizes.rank)
            parameter("rank_z", values)
            parameter("rank_out", values / sizes.rank)
            kept += ["rank_x", "rank_z", "rank_out"]
        for name in ("B_norm", "C_norm"):
            parameter(name, torch.ones(sizes.state_dim, dtype=config.params_dtype))
        if sizes.out_norm:
            width = self.heads * sizes.head_dim
            parameter("out_norm", torch.ones(width, dtype=config.params_dtype))
        keep_fp32(self, config, kept)
        # The name of this buffer records in a checkpoint which definition of A the model uses.
        self.register_buffer(f"decay_{sizes.definition}", torch.ones(1, device=device))

    def forward(
        self,
        hidden_states: Tensor,
        inference_context: Any = None,
        *,
        inference_params: Any = None,
        packed_seq_params: Any = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Mix a sequence, or the documents of a pack one by one.

        Args:
            hidden_states: `[s, b, hidden]`, normalized; with sequence parallelism this rank's part.
            inference_context: must be None.
            inference_params: must be None.
            packed_seq_params: Megatron's, with the document boundaries; b must then be 1.

        Returns:
            `[s, b, hidden]`, and no bias.

        Raises:
            CppmegaError: `no-inference`, `no-kernel`.
        """
        refuse_inference(inference_context, inference_params)
        projected, _ = self.in_proj(hidden_states)
        angles, cumulative = self._angles(hidden_states), boundaries(packed_seq_params)
        if self.cp_group.size() == 1:
            mixed = self._mixed(projected, angles, cumulative)
        else:
            mixed = self._mixed_of_parts(projected, angles, cumulative)
        out: tuple[Tensor, Tensor | None] = self.out_proj(mixed)
        return out

    def _mixed_of_parts(
        self, projected: Tensor, angles: Tensor, cumulative: Tensor | None
    ) -> Tensor:
        """Compute `_mixed` of this rank's part of a sequence, whose heads ranks share out."""
        ranks = self.cp_group.size()
        exchange = Exchange.of(self.cp_group, len(projected), cumulative, projected.device)
        parts = [part.chunk(ranks, -1) for part in projected.split(self.widths, -1)]
        pieces = [torch.cat((*own, angles), -1) for own in zip(*parts, strict=True)]
        sequence, own = exchange.sequence(pieces), sum(self.widths) // ranks
        mixed = self._mixed(sequence[..., :own], sequence[..., own:], cumulative)
        return exchange.pieces(mixed, [self.widths[0] // ranks] * ranks)

    def _mixed(self, projected: Tensor, angles: Tensor, cumulative: Tensor | None) -> Tensor:
        """Compute complete sequences of this rank's heads, before the last projection.

        Args:
            projected: `[s, b, channels]`.
            angles: `[s, b, k]`.
            cumulative: where documents begin, and where the last one ends; None if not packed.

        Returns:
            `[s, b, inner]`.
        """
        ranks = self.cp_group.size()
        z, x, keys, queries, dt, decay, trap = (
            part.transpose(0, 1)
            for part in split_columns(projected, [width // ranks for width in self.widths])
        )
        states = (self.groups // ranks, self.sizes.rank, self.sizes.state_dim)
        of_heads = (self.heads // ranks, self.sizes.head_dim)
        inputs = mamba3.Inputs(
            torch.unflatten(z, -1, of_heads),
            torch.unflatten(x, -1, of_heads),
            torch.unflatten(keys, -1, states),
            torch.unflatten(queries, -1, states),
            *(dt, decay, trap),
            angles.transpose(0, 1),
        )
        mixed = mamba3.mixed(
            inputs,
            self._parameters_of_heads(),
            self.sizes.definition,
            cumulative,
            self.sizes.chunk,
        )
        return mixed.flatten(-2).transpose(0, 1).contiguous()

    def _angles(self, hidden_states: Tensor) -> Tensor:
        """`[s, b, k]` of the full sequence; the gradient is the sum over the ranks' heads."""
        group = self.tp_group
        if not self.config.sequence_parallel or group.size() == 1:
            angles = functional.linear(hidden_states, self.angle_proj)
            return self._summed(angles)
        # Each rank projects its own tokens, so its weight has only part of the gradient, too.
        angles = functional.linear(hidden_states, self._summed(self.angle_proj))
        gathered: Tensor = mappings.gather_from_sequence_parallel_region(angles, group=group)
        return gathered

    def _summed(self, tensor: Tensor) -> Tensor:
        """The same tensor, with its gradient summed over the tensor-parallel ranks."""
        if self.tp_group.size() == 1:
            return tensor
        same: Tensor = mappings.copy_to_tensor_model_parallel_region(tensor, self.tp_group)
        return same

    def _parameters_of_heads(self) -> mamba3.Parameters:
        """Those of the heads that this rank computes."""
        ranks, rank = self.cp_group.size(), self.cp_group.rank()

        def own(name: str) -> Any:
            value: Tensor | None = getattr(self, name, None)
            return value if value is None or ranks == 1 else value.chunk(ranks)[rank]

        first = [own(name) for name in OF_HEADS[:4]]
        norms = [self._summed(self.B_norm), self._summed(self.C_norm)]
        return mamba3.Parameters._make(first + norms + [own(name) for name in OF_HEADS[4:]])

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The entries of a distributed checkpoint; each part of the projection is sharded
        separately."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        groups = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        own: dict[str, Tensor] = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        saved: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            own, prefix, DIVIDED, sharded_offsets, **groups
        )
        for name, module in self.named_children():
            saved |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group
            )
        weight = f"{prefix}in_proj.weight"
        split: ShardedTensorFactory = _split_tensor_factory(
            saved[weight], self.widths, list(PARTS), 0
        )
        saved[weight] = split
        return saved
