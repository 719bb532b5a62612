"""How evenly the routers distribute tokens over the experts.

A router that sends everything to a few experts makes a run fast and worthless. Megatron counts the
tokens of each expert for the bias that balances them, and clears the counts at the end of a step.
They are taken before that, on the rank that logs: its own tokens, in the layers of its own pipeline
stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Load = tuple[tuple[float, float], ...]
"""By MoE layer, the fewest and the most tokens of an expert, relative to the mean of its layer."""

_COUNTS = "local_tokens_per_expert"
_DIGITS = 3


class ExpertLoad:
    """The counts of the last step of this rank."""

    def __init__(self) -> None:
        """Nothing is counted yet."""
        self._counts: torch.Tensor | None = None

    def around(self, finalize: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap Megatron's `finalize_model_grads`, which clears the counts."""

        def finalized(models: list[Any], *arguments: Any, **options: Any) -> Any:
            self.take(module for model in models for module in model.modules())
            return finalize(models, *arguments, **options)

        return finalized

    def take(self, modules: Iterable[Any]) -> None:
        """Copy the counts of all routers, without waiting for the device."""
        import torch

        counts = [
            each for module in modules if (each := getattr(module, _COUNTS, None)) is not None
        ]
        self._counts = torch.stack(counts) if counts else None

    def load(self) -> Load | None:
        """The load of the last step; None without routers that count, which have a bias.

        A layer that no token reached has a load of 0.
        """
        if self._counts is None:
            return None
        layers: list[list[float]] = self._counts.tolist()
        means = [sum(layer) / len(layer) or 1.0 for layer in layers]
        return tuple(
            (round(min(layer) / mean, _DIGITS), round(max(layer) / mean, _DIGITS))
            for layer, mean in zip(layers, means, strict=True)
        )
