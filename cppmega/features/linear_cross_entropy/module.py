"""Megatron's output layer fused with the loss, so that the logits are never materialized.

`LinearCrossEntropyModule` is a `ColumnParallelLinear`: same constructor, parameters, state-dict
keys, sharded checkpoint and hooks. Called as Megatron calls it, it behaves like one. Called with
`labels`, it returns the loss per token, computed by `cppmega.ops.linear_cross_entropy`. Both are
calls of the module, so the pre-forward hooks that gather parameters run (distributed optimizer with
overlap).

It supports megatron-core 0.16.1, 0.17.1, 0.18.2 and 0.19.2, whose constructors differ, and
therefore defines no constructor.
"""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from cppmega.errors import CppmegaError
from cppmega.ops.linear_cross_entropy import (
    LinearCrossEntropyOutput,
    Upstream,
    linear_cross_entropy,
)


class LinearCrossEntropyModule(ColumnParallelLinear):  # type: ignore[misc]
    """A `ColumnParallelLinear` that can also return the loss instead of the logits.

    Call forms:
        module(hidden, weight=None, runtime_gather_output=None) -> (logits, bias), exactly
            Megatron's.
        module(hidden, weight=None, labels=...) -> `LinearCrossEntropyOutput`, loss and argmax
            `[b, s]`.
        module(hidden, weight=None, labels=..., output_cross_entropy_loss=True) -> the loss alone,
            `[b, s]`: the call form of the module of this name on upstream's dev branch.

    Reductions over the tensor-parallel group in the second form: with sequence parallelism hidden
    is gathered here, and the backward of the gather reduce-scatters dX; without it the op
    all-reduces dX, unless `disable_grad_reduce` leaves this to the caller. dW is never reduced:
    each rank owns its part of the vocabulary.
    """

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        *,
        labels: Tensor | None = None,
        loss_weights: Tensor | None = None,
        upstream: Upstream = "arbitrary",
        counted_tokens: int | None = None,
        vocab_size: int | None = None,
        ignore_index: int = -100,
        logit_scale: float = 1.0,
        return_argmax: bool = False,
        output_cross_entropy_loss: bool = False,
        caller: str = "LinearCrossEntropyModule",
    ) -> Any:
        """Compute the logits, or the loss if labels are given.

        Args:
            input_: `[s, b, H]` hidden states; `[s/tp, b, H]` with sequence parallelism.
            weight: `[V/tp, H]`, instead of the module's own (tied embeddings).
            runtime_gather_output: see `ColumnParallelLinear`; must not be True with labels.
            labels: `[b, s]` int64 token ids, as Megatron passes them.
            loss_weights: `[b, s]`, such as the loss mask: what the gradient of the loss will be, up
                to one scalar. Only with `upstream="weighted-scalar"`.
            upstream: what is known about the gradient of the loss, see `linear_cross_entropy`.
            counted_tokens: an upper bound of the tokens that count; the others are not computed.
            vocab_size: true vocabulary; None counts the padding columns, as Megatron does.
            ignore_index: label without a loss.
            logit_scale: factor on the logits (MuP).
            return_argmax: return the arg-max token as well.
            output_cross_entropy_loss: return only the loss.
            caller: the name in the error if `upstream` does not hold.

        Returns:
            `(logits, bias)` without labels; with them `LinearCrossEntropyOutput`, or its loss.

        Raises:
            CppmegaError: `linear-ce-module` if the layer has a feature that the loss does not
                support (see `loss_obstacle`), or what `linear_cross_entropy` raises.
        """
        if labels is None:
            asked = loss_weights is not None or return_argmax or output_cross_entropy_loss
            if asked or upstream != "arbitrary":
                raise CppmegaError(
                    "linear-ce-module",
                    "Arguments that only affect the loss were passed without labels.",
                    "The call would return logits and ignore these arguments.",
                    "pass labels, or leave them out",
                )
            return super().forward(input_, weight, runtime_gather_output)
        obstacle = self.loss_obstacle(weight, runtime_gather_output)
        if obstacle:
            raise CppmegaError(
                "linear-ce-module",
                f"The output layer was called with labels, but {obstacle}.",
                "The loss would not be the one that Megatron's own path computes.",
                "call it without labels and compute the loss from the logits",
            )
        if weight is None:
            weight = self.weight
        hidden = input_
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                input_, tensor_parallel_output_grad=True, group=self.tp_group
            )
        out = linear_cross_entropy(
            hidden,
            weight,
            labels.transpose(0, 1),
            loss_weights=None if loss_weights is None else loss_weights.transpose(0, 1),
            upstream=upstream,
            counted_tokens=counted_tokens,
            vocab_size=vocab_size,
            ignore_index=ignore_index,
            logit_scale=logit_scale,
            tp_group=self.tp_group,
            hidden_grad="reduced" if self.allreduce_dgrad else "partial",
            gradient_accumulation_fusion=self.gradient_accumulation_fusion,
            return_argmax=return_argmax,
            caller=caller,
        )
        loss = out.loss.transpose(0, 1).contiguous()
        if output_cross_entropy_loss:
            return loss
        return LinearCrossEntropyOutput(
            loss,
            out.argmax.transpose(0, 1).contiguous() if out.argmax is not None else None,
            out.backend,
        )

    def loss_obstacle(
        self, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> str | None:
        """Return why this layer cannot be called with labels, as a clause; None if it can.

        The answer depends only on the configuration and the arguments, so that callers can use
        it to select Megatron's path.

        Args:
            weight: as for `forward`.
            runtime_gather_output: as for `forward`.
        """
        config = self.config
        expected = (self.output_size_per_partition, self.input_size)
        used = self.weight if weight is None else weight
        gathers = self.gather_output if runtime_gather_output is None else runtime_gather_output
        obstacles = {
            "no weight was supplied and the layer has none": used is None,
            f"the weight is not shaped {expected}": used is not None
            and tuple(used.shape) != expected,
            "it has a bias": self.bias is not None,
            "it gathers its output over ranks": gathers and self.output_size != expected[0],
            "it belongs to an expert": self.is_expert,
            "defer_embedding_wgrad_compute is on": config.defer_embedding_wgrad_compute,
            "its weight is sharded by generalized tensor parallelism": getattr(
                self, "gtp_remat_size", 1
            )
            > 1,
        }
        return next((what for what, is_so in obstacles.items() if is_so), None)
