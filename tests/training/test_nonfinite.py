"""The layer in which values stop being finite is named, and watching keeps no memory."""

from __future__ import annotations

import gc

import pytest

torch = pytest.importorskip("torch")

from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from cppmega.training.nonfinite import Watch  # noqa: E402


class Model(torch.nn.Module):
    """Layers that scale, of which some are recomputed in the backward pass."""

    def __init__(self, scales: list[float], recomputed: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Scale(each) for each in scales)
        self.recomputed = recomputed
        self.returned: list[StorageWeakRef] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the first layers in one checkpoint, which keeps only what enters it."""
        x = checkpoint(self.run, x, 0, self.recomputed, use_reentrant=False)
        return self.run(x, self.recomputed, len(self.layers))

    def run(self, x: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """Run some layers, and note where their outputs lie."""
        for layer in self.layers[start:end]:
            x = layer(x)
            self.returned.append(StorageWeakRef(x.untyped_storage()))
        return x


class Scale(torch.nn.Module):
    """A layer that saves its input for the backward pass."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply by a weight and a constant."""
        return x * self.weight * self.scale


def watched(scales: list[float], recomputed: int) -> tuple[Model, str, torch.Tensor]:
    """A model after a forward pass, what its watch says, and its output."""
    model, watch = Model(scales, recomputed), Watch()
    watch.begin(model)
    out = model(torch.ones(2))
    watch.passed(model)
    return model, watch.origin(), out


def test_the_first_layer_that_is_not_finite_is_named() -> None:
    nan = float("nan")
    *_, said, out = watched([1, nan, 1, 1], recomputed=0)
    assert out.isnan().all()
    assert said == "layers.1 is the first layer whose output is not finite (2 of 2 values)"


def test_layers_whose_outputs_are_recomputed_are_named_as_well() -> None:
    *_, said, out = watched([1, 1, 1, float("nan"), 1], recomputed=3)
    assert out.isnan().all()
    # The checkpoint's own output is saved by the layer after it, and was finite.
    assert said == "layers.3 is the first layer whose output is not finite (2 of 2 values)"
    *_, said, out = watched([1, float("inf"), 1, 1], recomputed=3)
    assert said.startswith("layers.2 is the first layer whose output is not finite")
    assert said.endswith(
        ", unless that began in layers.0 to layers.1: recomputation has released what they returned"
    )


def test_a_watch_keeps_no_output() -> None:
    model, said, out = watched([1, 1, 1, 1], recomputed=3)
    gc.collect()
    released = [ref.expired() for ref in model.returned]
    assert released == [True, True, False, False]
    assert out.isfinite().all() and "every layer up to layers.3 is finite" in said
