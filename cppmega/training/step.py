"""The forward step that Megatron's training loop calls, its loss, and the checks of the loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from cppmega.errors import CppmegaError
from cppmega.recipe import Recipe
from cppmega.runs import rank_progress
from cppmega.training.batch import Batch, next_batch
from cppmega.training.nonfinite import Watch, loss_error

if TYPE_CHECKING:
    import torch

_TOLERANCE = 1.0
"""Nats by which a first loss may be outside the range of an untrained model."""

Loss = tuple["torch.Tensor", "torch.Tensor", dict[str, "torch.Tensor"]]


class ForwardStep:
    """`forward_step(data_iterator, model)` for one run."""

    def __init__(self, recipe: Recipe, eod: int, device: Any, fresh: bool) -> None:
        """Create the step of a run.

        Args:
            recipe: the run.
            eod: id of the token that ends a document.
            device: the device of the model.
            fresh: whether the weights are untrained, so that the first loss is known.
        """
        self.recipe, self.eod, self.device = recipe, eod, device
        self._check_first = fresh
        self.squares: list[float] = []
        """One value per micro-batch since `taken_squares` was last called, for the FLOPs."""
        self._watch = Watch()
        self._marks = rank_progress.of_this_rank()

    def __call__(
        self, data_iterator: Iterator[dict[str, torch.Tensor]], model: Any
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], Loss]]:
        """Run the forward pass of one micro-batch."""
        from megatron.training import get_timers

        timers = get_timers()
        timers("batch-generator", log_level=2).start()
        batch = self.read(data_iterator)
        timers("batch-generator").stop()
        self.squares.append(batch.squares)
        if batch.packed_seq_params is not None:
            _count_for_megatron(batch.packed_seq_params.cu_seqlens_q)
        return self.forward(batch, model), partial(self.loss, batch.loss_mask)

    def read(self, data_iterator: Iterator[dict[str, torch.Tensor]]) -> Batch:
        """Take the next micro-batch."""
        rank = 0
        if self.recipe.context_parallel_size > 1:
            from megatron.core import parallel_state

            rank = parallel_state.get_context_parallel_rank()
        batch = next_batch(self.recipe, data_iterator, self.eod, self.device, rank)
        self._marks.read_batch()
        return batch

    def forward(self, batch: Batch, model: Any) -> torch.Tensor:
        """Run the model on a micro-batch; on the last pipeline stage, returns a loss per token."""
        from cppmega.features.embeddings.layer import feeding

        self._watch.begin(model)
        output: torch.Tensor = model(
            feeding(batch.tokens, self.eod, batch.structure_kinds, batch.structure_depths),
            batch.position_ids,
            None,  # every attention here is causal
            labels=batch.labels,
            loss_mask=batch.loss_mask,
            packed_seq_params=batch.packed_seq_params,
        )
        self._watch.passed(model)
        return output

    def loss(self, loss_mask: torch.Tensor, output: torch.Tensor) -> Loss:
        """Sum the losses of the unmasked tokens.

        Returns:
            The sum, the number of those tokens, and what Megatron logs.

        Raises:
            CppmegaError: `step-not-finite`, `first-loss-implausible`.
        """
        import torch

        mask = loss_mask.reshape(-1).float()
        total = (output.reshape(-1).float() * mask).sum()
        tokens = mask.sum().detach().to(torch.int)
        # This check cannot be switched off: a reference throughput was once measured with nothing
        # but NaN gradients. Megatron's own check skips the first step, reruns a bad one and then
        # saves it.
        if not bool(torch.isfinite(total)):
            raise loss_error(float(total.detach()), self._watch)
        self._watch.end()
        if self._check_first:
            self._check_first = False
            check_first_loss(self.recipe, float(total.detach() / tokens.clamp(min=1)))
        report = torch.stack([total.detach(), tokens.to(total.dtype)])
        return total, tokens, {"lm loss": report}

    def taken_squares(self) -> float | None:
        """Mean over tokens of their document's length since the last call; None if none ran."""
        seen, self.squares = self.squares, []
        return sum(seen) / len(seen) if seen else None


def _count_for_megatron(cu_seqlens: torch.Tensor) -> None:
    """Pass the documents to Megatron for the throughput that it reports; 0.17 cannot use them."""
    from megatron.training import training

    count = getattr(training, "update_seqlen_stats_from_cu_seqlens", None)
    if count is not None:
        count(cu_seqlens)


def untrained_loss(recipe: Recipe) -> float:
    """The mean loss of untrained weights, in nats per token.

    A uniform distribution gives ln V. The head adds noise to the logits: normalised inputs of width
    H times weights of deviation s have a variance of H * s^2, half of which is added to the loss.
    """
    return math.log(recipe.padded_vocab_size) + recipe.hidden_size * recipe.init_method_std**2 / 2


def expected_first_loss(recipe: Recipe) -> tuple[float, float]:
    """The lowest and highest plausible loss of untrained weights, in nats per token."""
    uniform = math.log(recipe.padded_vocab_size)
    return uniform - _TOLERANCE, untrained_loss(recipe) + _TOLERANCE


def check_first_loss(recipe: Recipe, loss: float) -> None:
    """Stop on a first loss that untrained weights cannot produce.

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
        "Below it the labels leak, or the loss is averaged over the wrong tokens; above it "
        "the initialisation, the data or a kernel is wrong. Such a run's numbers mean nothing.",
        "inspect what changed last: data, tokenizer, a patch; --load resumes from a checkpoint and "
        "has no such check",
    )
