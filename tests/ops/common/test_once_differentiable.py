"""A second derivative of a kernel is an error, and never missing silently."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cppmega.features.mhc import recompute as mhc_recompute
from cppmega.features.mixers.sequences import _Permuted
from cppmega.ops.common.once_differentiable import once_differentiable
from cppmega.ops.mamba3 import operands as mamba3_operands
from cppmega.ops.mamba3.naive import Inputs, Parameters
from cppmega.ops.pointwise.linear import linear
from tests.support import REPOSITORY

DIFFERENTIABLE = {"WalshHadamard", "_AllToAll", "_Permuted"}
"""Functions with derivatives of any order: linear, and their backward passes call themselves."""
DECORATOR = "from cppmega.ops.common.once_differentiable import once_differentiable"


def test_every_backward_pass_is_once_differentiable() -> None:
    functions, undecorated = set(), set()
    for path in (REPOSITORY / "cppmega").rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and any(
                ast.unparse(base).endswith("Function") for base in node.bases
            ):
                functions.add(node.name)
                (backward,) = (
                    each for each in node.body if getattr(each, "name", "") == "backward"
                )
                decorators = [ast.unparse(each) for each in backward.decorator_list]  # type: ignore[attr-defined]
                if decorators != ["staticmethod", "once_differentiable"] or DECORATOR not in text:
                    undecorated.add(node.name)
    assert len(functions) > 25
    assert undecorated == {"_Refused"} | DIFFERENTIABLE


class Cubed(torch.autograd.Function):
    """x ** 3, of which the input or the derivative is saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep_input: bool) -> Tensor:
        ctx.save_for_backward(x if keep_input else 3 * x**2)
        ctx.keep_input = keep_input
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (saved,) = ctx.saved_tensors
        return gradient * (3 * saved**2 if ctx.keep_input else saved), None


def of_mamba3(leaf: Tensor) -> Tensor:
    scale = leaf.sum()
    shapes = Inputs(*[(1, 3, 2, 4)] * 2, *[(1, 3, 1, 1, 4)] * 2, *[(1, 3, 2)] * 3, (1, 3, 1))
    inputs = Inputs(*(scale * torch.ones(shape) for shape in shapes))
    head, state = torch.ones(2), torch.ones(4)
    parameters = Parameters(head, head, head, head, state, state)
    return mamba3_operands.differentiable(inputs, parameters, "softplus").log_a


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "the input is saved": lambda x: Cubed.apply(2 * x, True),
    "the derivative is saved": lambda x: Cubed.apply(2 * x, False),
    "the input is a leaf": lambda x: Cubed.apply(x, False),
    "a linear layer": lambda x: linear(x * torch.ones(2, 2), x * torch.ones(3, 2)),
    "recomputation": lambda x: mhc_recompute.again(torch.sin, 2 * x),
    "Mamba-3": of_mamba3,
}


@pytest.mark.parametrize("linear_loss", [True, False])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_second_derivative_is_an_error(name: str, linear_loss: bool) -> None:
    leaf = torch.tensor([0.7], requires_grad=True)

    def first() -> tuple[Tensor, Tensor]:
        out = FUNCTIONS[name](leaf)
        loss = out.sum() if linear_loss else out.square().sum()
        return loss, torch.autograd.grad(loss, leaf, create_graph=True)[0]

    loss, gradient = first()
    plain = FUNCTIONS[name](leaf)
    (plain.sum() if linear_loss else plain.square().sum()).backward()
    assert leaf.grad is not None
    torch.testing.assert_close(gradient.detach(), leaf.grad)
    # A gradient penalty beside the loss, of which another path leads to the leaf.
    with pytest.raises(RuntimeError, match="backward has no derivative"):
        torch.autograd.grad(loss + gradient.square().sum(), leaf)
    loss, gradient = first()
    with pytest.raises(RuntimeError, match="backward has no derivative"):
        (loss + gradient.square().sum()).backward()


def test_an_input_that_is_not_a_leaf() -> None:
    x = 2 * torch.tensor([0.7], requires_grad=True)
    loss = Cubed.apply(x, True).sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="backward has no derivative"):
        torch.autograd.grad(loss + gradient.square().sum(), x)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gradients_with_a_graph_accumulate() -> None:
    x = torch.tensor([0.7], requires_grad=True)
    for _ in range(2):
        Cubed.apply(2 * x, True).sum().backward(create_graph=True)
    assert x.grad is not None
    torch.testing.assert_close(x.grad.detach(), 2 * 24 * x.detach() ** 2)
    x.grad = None


def test_a_permutation_has_derivatives_of_any_order() -> None:
    rows, order = torch.randn(5, 2, dtype=torch.float64, requires_grad=True), torch.randperm(5)

    def squared(x: Tensor) -> Tensor:
        permuted: Tensor = _Permuted.apply(x, order, order.argsort())
        return permuted.square()

    assert torch.autograd.gradgradcheck(squared, (rows,))
