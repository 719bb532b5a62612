"""Inputs of linear cross-entropy, and what it must return: dense fp64 autograd."""

from __future__ import annotations

import math
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from cppmega.ops import linear_cross_entropy as implementation
from cppmega.ops.linear_cross_entropy import linear_cross_entropy

UPSTREAMS = ("weighted-scalar", "kept", "arbitrary")
"""What a caller guarantees; `kept` is `weighted-scalar` where the logits are the smaller tensor."""


class Case(NamedTuple):
    """Inputs of one call; `weights` has zeros and is not uniform."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    weights: Tensor
    scalar: float
    vocab_size: int


class Dense(NamedTuple):
    """What fp64 autograd over all logits says."""

    loss: Tensor
    argmax: Tensor
    hidden_grad: Tensor
    weight_grad: Tensor


def make_case(
    tokens: int = 37,
    hidden: int = 12,
    vocabulary: int = 53,
    padding: int = 0,
    std: float = 1.0,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    device: str = "cpu",
) -> Case:
    """Random inputs whose logits have the standard deviation `std`; a few targets are ignored."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x = normal(tokens, hidden)
    w = normal(vocabulary + padding, hidden) * std / hidden**0.5
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    targets[1::9] = -100
    # Eighths times 3/8: exact in fp32, so the promise is kept to the last bit.
    weights = torch.randint(1, 9, (tokens,), generator=generator) / 8
    weights[::4] = 0
    x, w, weights = x.to(device, dtype), w.to(device, dtype), weights.to(device, torch.float32)
    return Case(
        x.requires_grad_(), w.requires_grad_(), targets.to(device), weights, 0.375, vocabulary
    )


def dense(case: Case, upstream: Tensor, scale: float = 1.0) -> Dense:
    """The same in fp64, with all logits at once."""
    x = case.hidden.detach().double().requires_grad_()
    w = case.weight.detach().double().requires_grad_()
    logits = scale * x @ w[: case.vocab_size].t()
    loss = cross_entropy(logits, case.targets, reduction="none", ignore_index=-100)
    x_grad, w_grad = torch.autograd.grad(loss, (x, w), upstream.double())
    argmax = logits.argmax(1).masked_fill(case.targets == -100, -1)
    return Dense(loss.detach(), argmax, x_grad, w_grad)


def run(case: Case, upstream: str, **options: Any) -> Dense:
    """The op, forward and backward, with the upstream gradient `scalar * weights`."""
    options.setdefault("vocab_size", case.vocab_size)
    keeps = upstream == "kept"
    upstream = "weighted-scalar" if keeps else upstream
    with mock.patch.object(implementation, "_keeps_logits", lambda *_: keeps):
        out = linear_cross_entropy(
            case.hidden,
            case.weight,
            case.targets,
            loss_weights=case.weights if upstream == "weighted-scalar" else None,
            upstream=upstream,
            return_argmax=True,
            **options,
        )
    gradient = (case.scalar * case.weights).to(out.loss.dtype)
    grads = torch.autograd.grad(out.loss, (case.hidden, case.weight), gradient)
    assert out.argmax is not None
    return Dense(out.loss.detach(), out.argmax, *grads)


def promised(case: Case, **options: Any) -> Tensor:
    """The op's loss, with the promise that its upstream gradient is a multiple of the weights."""
    return linear_cross_entropy(
        case.hidden,
        case.weight,
        case.targets,
        loss_weights=case.weights,
        upstream="weighted-scalar",
        **options,
    ).loss


def error(got: Tensor, want: Tensor) -> float:
    """Relative error in the 2-norm; NaN is infinitely wrong."""
    value = ((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-300)).item()
    return value if value == value else float("inf")


def assert_same(got: Dense, want: Dense, tolerance: float) -> None:
    assert torch.equal(got.argmax, want.argmax)
    for name in ("loss", "hidden_grad", "weight_grad"):
        assert error(getattr(got, name), getattr(want, name)) <= tolerance, name


class Calls(TorchDispatchMode):
    """Counts the GEMMs and remembers the largest tensor that was made."""

    def __init__(self) -> None:
        super().__init__()
        self.gemms = 0
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.gemms += func._schema.name in ("aten::mm", "aten::addmm", "aten::bmm")
        if isinstance(result, Tensor):
            self.largest = max(self.largest, result.numel())
        return result


def confident_case(
    doubt: float, level: float, dtype: torch.dtype, device: str = "cpu", tokens: int = 48
) -> Case:
    """Every row gives its target the probability `1 - doubt`, at logits around `level`.

    The output matrix has one 1 per row: a logit is one number of hidden, exactly.
    """
    vocabulary = 61
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(tokens, vocabulary, generator=generator, dtype=torch.float64)
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    column = targets.unsqueeze(1)
    rest = logits.scatter(1, column, -torch.inf).logsumexp(1, keepdim=True)
    logits.scatter_(1, column, rest + math.log((1 - doubt) / doubt))
    logits += level - logits.amax(1, keepdim=True)
    weight = torch.eye(vocabulary, 64, dtype=torch.float64)
    hidden = torch.nn.functional.pad(logits, (0, 3))
    weights = torch.randint(1, 9, (tokens,), generator=generator) / 8
    x, w = (t.to(device, dtype).requires_grad_() for t in (hidden, weight))
    return Case(x, w, targets.to(device), weights.to(device), 0.375, vocabulary)


def unrounded(case: Case) -> Dense:
    """Loss and gradients in fp64 by the softplus of the target's lead: neither has a 1 in it."""
    x, w = case.hidden.detach().double(), case.weight.detach().double()
    logits, column = x @ w.t(), case.targets.unsqueeze(1)
    others = logits.scatter(1, column, -torch.inf)
    lag = (others.logsumexp(1) - logits.gather(1, column).squeeze(1)).unsqueeze(1)
    d_logits = others.softmax(1).scatter(1, column, -1.0) * lag.sigmoid()
    d_logits *= (case.scalar * case.weights.double()).unsqueeze(1)
    loss = torch.nn.functional.softplus(lag, threshold=100).squeeze(1)
    return Dense(loss, logits.argmax(1), d_logits @ w, d_logits.t() @ x)
