"""Find the first layer whose output or gradient is not finite.

A forward hook on every layer notes its output until the pass has ended. That costs no kernel, no
synchronisation, no collective and no memory: the output is inspected if something else, such as the
backward pass, still keeps it. That happens only when a run has already failed, on the rank that
failed and without communicating with the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from cppmega.errors import CppmegaError

_OWN = ("embedding",)
"""Modules that are watched in addition to the layers. Not the head: its logits are the largest
tensor of a run, and must not live longer because of this check."""


class _Output:
    """A tensor that is not kept from being released."""

    def __init__(self, tensor: Any) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._like = tensor.new_empty(0)
        self._place = tensor.storage_offset(), tensor.size(), tensor.stride()

    def value(self) -> Any | None:
        """The tensor; None if its memory has been released."""
        import torch

        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)  # type: ignore[attr-defined]
        return None if storage is None else self._like.set_(storage, *self._place)


class Watch:
    """The outputs of one forward pass, layer by layer."""

    def __init__(self) -> None:
        self._watched: set[int] = set()
        self._outputs: list[tuple[str, Any, _Output | None]] = []
        self._passing = False

    def begin(self, model: Any) -> None:
        """Discard the last pass and watch this model."""
        self._outputs.clear()
        if _captured(model):
            return
        self._passing = True
        if id(model) in self._watched:
            return
        self._watched.add(id(model))
        for name, module in layers(model):
            module.register_forward_hook(self._hook(name))

    def passed(self, model: Any) -> None:
        """End the forward pass: layers that are recomputed in the backward pass are not kept."""
        self._passing = False
        if not getattr(unwrapped(model), "post_process", True):
            self._outputs.clear()  # a pipeline stage without a loss needs none

    def end(self) -> None:
        """Discard the pass: its loss was finite."""
        self._outputs.clear()

    def origin(self) -> str:
        """Describe where the values of the last pass stopped being finite."""
        import torch

        released: list[str] = []
        for name, module, output in self._outputs:
            bad = [key for key, p in module.named_parameters() if not _finite(p)]
            if bad:
                return f"the weights of {name} are not finite ({bad[0]})"
            if output is None:
                continue
            tensor = output.value()
            if tensor is None:
                released.append(name)
            elif _finite(tensor):
                released.clear()  # what came before was finite, too
            else:
                count = int((~torch.isfinite(tensor)).sum())
                return (
                    f"{name} is the first layer whose output is not finite "
                    f"({count} of {tensor.numel()} values){_unless(released)}"
                )
        if not self._outputs:
            return (
                "no layer was watched, since CUDA graphs allow no hooks; "
                "--set cuda_graph_impl=none would name it"
            )
        last = self._outputs[-1][0]
        return f"every layer up to {last} is finite: the head or the loss is not{_unless(released)}"

    def _hook(self, name: str) -> Callable[..., None]:
        def keep(module: Any, inputs: Any, output: Any) -> None:
            if self._passing:
                tensor = _tensor(output)
                self._outputs.append((name, module, None if tensor is None else _Output(tensor)))

        return keep


def _unless(released: list[str]) -> str:
    """What is not known of layers whose outputs are recomputed in the backward pass."""
    if not released:
        return ""
    names = released[0] if len(released) == 1 else f"{released[0]} to {released[-1]}"
    return f", unless that began in {names}: recomputation has released what they returned"


def layers(model: Any) -> Iterator[tuple[str, Any]]:
    """The embedding and the layers of a model, in the order of their definition."""
    for name, module in model.named_modules():
        parent, _, last = name.rpartition(".")
        if (last.isdigit() and parent.endswith("layers")) or last in _OWN:
            yield short_name(name), module


def gradient_origin(models: Iterable[Any]) -> str:
    """Describe the first parameter in the backward pass whose gradient is not finite.

    A gradient that is not finite at one layer is not finite in all layers before it, so it began
    at the last one in the order of the forward pass.
    """
    named = [pair for model in models for pair in model.named_parameters()]
    bad = [(name, p) for name, p in named if not _finite(gradient(p))]
    if not bad:
        return "the gradient of every parameter of this rank is finite by itself"
    name, parameter = bad[-1]
    ends = [key for key, p in named if not _finite(p)]
    weights = f"; the weights of {short_name(ends[0])} are not finite either" if ends else ""
    return (
        f"the gradient of {short_name(name)} {list(parameter.shape)} is the first that is not "
        f"finite in the backward pass, {len(bad)} of {len(named)} parameters have one{weights}"
    )


def loss_error(loss: float, watch: Watch) -> CppmegaError:
    """The error of a loss that is not finite."""
    return CppmegaError(
        "step-not-finite",
        f"The loss is {_word(loss)}: {watch.origin()}.",
        "Every later step would train on it, and a checkpoint of it is worthless.",
        "resume from an earlier checkpoint (--load); inspect that layer, its data and its kernel",
    )


def gradient_error(models: Iterable[Any], what: str) -> CppmegaError:
    """The error of a gradient that is not finite."""
    return CppmegaError(
        "step-not-finite",
        f"{what}: {gradient_origin(models)}{_lost_depths()}.",
        "The weights would not be numbers after this step.",
        "resume from an earlier checkpoint (--load); inspect that layer and its kernel's backward",
    )


def around_train_step(
    train_step: Callable[..., Any],
    begin: Callable[[list[Any]], None] = lambda models: None,
    ended: Callable[[], None] = lambda: None,
) -> Callable[..., Any]:
    """Wrap Megatron's `train_step`, whose gradient check names the bucket but not the layer.

    Its arguments begin with (forward_step, data_iterator, model chunks) in every release.

    Args:
        begin: called before every step, with the model's chunks.
        ended: called after every step.
    """
    import functools

    @functools.wraps(train_step)
    def named(*args: Any, **kwargs: Any) -> Any:
        model = kwargs["model"] if "model" in kwargs else args[2]
        chunks = model if isinstance(model, list) else [model]
        begin(chunks)
        try:
            result = train_step(*args, **kwargs)
        except RuntimeError as error:
            if "grad norm" not in str(error) or isinstance(error, CppmegaError):
                raise
            message = str(error).partition("(message='")[2].rstrip("')") or str(error)
            raise gradient_error(chunks, message) from error
        ended()
        return result

    return named


def check_step(loss: float | None, norm: float | None) -> None:
    """Stop on a logged step that is not finite, which no earlier check has caught.

    Raises:
        CppmegaError: `step-not-finite`.
    """
    for name, value in (("loss", loss), ("gradient norm", norm)):
        if value is not None and not math.isfinite(value):
            raise CppmegaError(
                "step-not-finite",
                f"The {name} of a logged step is {_word(value)}.",
                "Each rank was finite by itself; their sum is not. The weights are lost.",
                "resume from the last checkpoint with a smaller learning rate or another seed",
            )


def _lost_depths() -> str:
    """Name the MTP depths whose loss is not finite: the main loss does not include them."""
    import torch
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    tracker = MTPLossLoggingHelper.tracker
    losses = tracker.get("loss_values", tracker.get("values"))  # renamed in 0.19
    if losses is None:
        return ""
    lost = [str(depth) for depth, ok in enumerate(torch.isfinite(losses).tolist(), 1) if not ok]
    return f"; the loss of MTP depth {', '.join(lost)} is not finite" if lost else ""


def _captured(model: Any) -> bool:
    """Whether the layers are captured in CUDA graphs, which refuse modules with hooks."""
    config = getattr(unwrapped(model), "config", None)
    return bool(getattr(config, "cuda_graph_impl", "none") != "none")


def unwrapped(model: Any) -> Any:
    """The model inside the wrappers for data parallelism and precision."""
    while hasattr(model, "module"):
        model = model.module
    return model


def gradient(parameter: Any) -> Any:
    """The accumulated gradient of a parameter; None if it has none."""
    main = getattr(parameter, "main_grad", None)
    return parameter.grad if main is None else main


def _finite(tensor: Any) -> bool:
    import torch

    if tensor is None or not tensor.is_floating_point():
        return True
    # FP8 weights of Transformer Engine show it only in their dequantized values.
    return bool(torch.isfinite(tensor.detach().float()).all())


def _tensor(output: Any) -> Any:
    """The hidden states in the output of a layer."""
    import torch

    for one in output if isinstance(output, tuple | list) else (output,):
        if isinstance(one, torch.Tensor) and one.is_floating_point():
            return one
    return None


def short_name(name: str) -> str:
    """The name of a module without the wrappers around the model."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def _word(value: float) -> str:
    return "NaN" if math.isnan(value) else str(value)
