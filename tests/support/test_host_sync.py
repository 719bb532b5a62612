"""The detector finds what waits for a device and leaves alone what does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from tests.support.host_sync import HostSyncError, no_host_sync  # noqa: E402  (needs torch)

Case = Callable[[], object]


def values(*shape: int) -> torch.Tensor:
    """Numbers 0, 1, 2... as float32."""
    count = torch.Size(shape).numel()
    return torch.arange(count, dtype=torch.float32).reshape(shape)


X = values(6)
INDEX = torch.arange(6)
MASK = X > 2
COUNTS = torch.tensor([1, 2, 3])
ONE = torch.tensor(3)


def backward_that_waits() -> None:
    """The wait is in the backward pass, below the autograd engine."""

    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x * 2

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            return grad * grad.sum().item()

    Waits.apply(values(3).requires_grad_()).sum().backward()


WAITS: dict[str, Case] = {
    "item": lambda: ONE.item(),
    "int": lambda: int(ONE),
    "float": lambda: float(ONE),
    "if": lambda: 1 if ONE > 0 else 0,
    "slice": lambda: X[: COUNTS[1]],
    "range": lambda: range(ONE),
    "split": lambda: torch.split(X, COUNTS.tolist()),
    "tolist": lambda: COUNTS.tolist(),
    "numpy": lambda: COUNTS.numpy(),
    "cpu": lambda: COUNTS.cpu(),
    "nonzero": lambda: torch.nonzero(MASK),
    "where with one argument": lambda: torch.where(MASK),
    "argwhere": lambda: torch.argwhere(MASK),
    "masked_select": lambda: torch.masked_select(X, MASK),
    "mask as index": lambda: X[MASK],
    "mask as index, assigned": lambda: X.clone().index_put_((MASK,), values(3)),
    "equal": lambda: torch.equal(X, X),
    "allclose": lambda: torch.allclose(X, X),
    "is_nonzero": lambda: torch.is_nonzero(ONE),
    "unique": lambda: torch.unique(X),
    "unique rows": lambda: torch.unique(X[None], dim=0),
    "unique_consecutive": lambda: torch.unique_consecutive(X),
    "bincount": lambda: torch.bincount(COUNTS),
    "repeat_interleave": lambda: torch.repeat_interleave(COUNTS, COUNTS),
    "repeat_interleave, counts only": lambda: torch.repeat_interleave(COUNTS),
    "tensor": lambda: torch.tensor([1, 2]),
    "new_tensor": lambda: X.new_tensor(0.0),
    "backward": backward_that_waits,
}

RUNS_ON: dict[str, Case] = {
    "repeat_interleave with output_size": lambda: torch.repeat_interleave(
        COUNTS, COUNTS, output_size=6
    ),
    "repeat_interleave by a number": lambda: torch.repeat_interleave(COUNTS, 2),
    "where": lambda: torch.where(X > 2, X / 2, 0.0),
    "masked_fill": lambda: X.masked_fill(MASK, 0.0),
    "one value under a mask": lambda: X.clone().__setitem__(MASK, 0.0),
    "index": lambda: X[INDEX],
    "index_put": lambda: X.clone().index_put_((INDEX,), X),
    "index_fill": lambda: X.clone().index_fill_(0, INDEX, 0.0),
    "searchsorted": lambda: torch.searchsorted(COUNTS, INDEX, right=True),
    "cumsum": lambda: torch.cumsum(COUNTS, 0),
    "numbers": lambda: (X * 2 + 1).clamp(min=0).to(torch.bfloat16),
    "factories": lambda: (torch.zeros(2), torch.arange(3), torch.full((2,), 7)),
    "shape": lambda: X.reshape(2, 3).size(0) + X.numel() + len(X),
    "assert_async": lambda: torch._assert_async((X >= 0).all()),
    "backward": lambda: (values(3).requires_grad_() ** 2).sum().backward(),
}


@pytest.mark.parametrize("case", WAITS)
def test_finds_what_waits(case: str) -> None:
    WAITS[case]()  # works without the detector: it is no error of another kind
    with pytest.raises(HostSyncError), no_host_sync():
        WAITS[case]()


@pytest.mark.parametrize("case", RUNS_ON)
def test_leaves_alone_what_runs_on(case: str) -> None:
    with no_host_sync():
        RUNS_ON[case]()


def test_is_gone_afterwards() -> None:
    with pytest.raises(HostSyncError), no_host_sync():
        ONE.item()
    assert ONE.item() == 3
