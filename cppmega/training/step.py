"""The forward step that Megatron's training loop calls, its loss, and what guards it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from cppmega.errors import CppmegaError
from cppmega.recipe import Recipe
from cppmega.training.batch import next_batch
from cppmega.training.nonfinite import Watch, loss_error

if TYPE_CHECKING:
    import torch

_TOLERANCE = 1.0
"""Nats that a first loss may lie outside of what an untrained model gives."""

Loss = tuple["torch.Tensor", "torch.Tensor", dict[str, "torch.Tensor"]]


class ForwardStep:
    """`forward_step(data_iterator, model)`, with what it needs to know about the run."""

    def __init__(self, recipe: Recipe, eod: int, device: Any, fresh: bool) -> None:
        """Make it.

        Args:
            recipe: the run.
            eod: id of the token that ends a document.
            device: where the model is.
            fresh: whether the weights are untrained, so that the first loss is known.
        """
        self.recipe, self.eod, self.device = recipe, eod, device
        self._check_first = fresh
        self.squares: list[float] = []
        """Of every micro-batch since somebody last looked, for the FLOPs."""
        self._watch = Watch()

    def __call__(
        self, data_iterator: Iterator[dict[str, torch.Tensor]], model: Any
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], Loss]]:
        """One forward pass of one micro-batch."""
        from megatron.training import get_timers

        timers = get_timers()
        timers("batch-generator", log_level=2).start()
        batch = next_batch(self.recipe, data_iterator, self.eod, self.device)
        timers("batch-generator").stop()
        self.squares.append(batch.squares)
        if batch.packed_seq_params is not None:
            _count_for_megatron(batch.packed_seq_params.cu_seqlens_q)
        self._watch.begin(model)
        output = model(
            batch.tokens,
            batch.position_ids,
            None,  # every attention here is causal
            labels=batch.labels,
            loss_mask=batch.loss_mask,
            packed_seq_params=batch.packed_seq_params,
        )
        self._watch.passed(model)
        return output, partial(self.loss, batch.loss_mask)

    def loss(self, loss_mask: torch.Tensor, output: torch.Tensor) -> Loss:
        """Sum of the losses of tokens that count, how many they are, and what is logged.

        Raises:
            CppmegaError: `loss-not-finite`, `first-loss-implausible`.
        """
        import torch

        mask = loss_mask.reshape(-1).float()
        total = (output.reshape(-1).float() * mask).sum()
        tokens = mask.sum().detach().to(torch.int)
        # This check has no switch: a golden throughput once had nothing but NaN gradients. And it
        # is not Megatron's, which lets the first step pass, runs a bad one again and then saves it.
        if not bool(torch.isfinite(total)):
            raise loss_error(float(total.detach()), self._watch)
        self._watch.end()
        if self._check_first:
            self._check_first = False
            check_first_loss(self.recipe, float(total.detach() / tokens.clamp(min=1)))
        report = torch.stack([total.detach(), tokens.to(total.dtype)])
        return total, tokens, {"lm loss": report}

    def taken_squares(self) -> float | None:
        """Mean document length seen by a token since the last call, None where nothing ran."""
        seen, self.squares = self.squares, []
        return sum(seen) / len(seen) if seen else None


def _count_for_megatron(cu_seqlens: torch.Tensor) -> None:
    """Let the throughput that Megatron reports know the documents; 0.17 cannot."""
    from megatron.training import training

    count = getattr(training, "update_seqlen_stats_from_cu_seqlens", None)
    if count is not None:
        count(cu_seqlens)


def expected_first_loss(recipe: Recipe) -> tuple[float, float]:
    """Lowest and highest plausible loss of untrained weights, in nats per token.

    All tokens alike give ln V. The head adds noise to the logits: normalised inputs of width H
    times weights of deviation s have a variance of H * s^2, half of which is added to the loss.
    """
    uniform = math.log(recipe.padded_vocab_size)
    noise = recipe.hidden_size * recipe.init_method_std**2 / 2
    return uniform - _TOLERANCE, uniform + noise + _TOLERANCE


def check_first_loss(recipe: Recipe, loss: float) -> None:
    """Stop on a first loss that untrained weights cannot give.

    Raises:
        CppmegaError: `first-loss-implausible`.
    """
    low, high = expected_first_loss(recipe)
    if low <= loss <= high:
        return
    uniform = math.log(recipe.padded_vocab_size)
    raise CppmegaError(
        "first-loss-implausible",
        f"The first loss is {loss:.3f}; untrained weights and a vocabulary of "
        f"{recipe.padded_vocab_size} give {low:.2f} to {high:.2f} (ln V = {uniform:.2f}).",
        "Below it the labels are seen, or the loss is averaged over the wrong tokens; above it "
        "the initialisation, the data or a kernel is wrong. Such a run's numbers mean nothing.",
        "look at the last thing that changed: data, tokenizer, a patch; --load continues a "
        "checkpoint and has no such check",
    )
