"""The detector finds what waits for a device and leaves alone what does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from cppmega.proof.host_sync import HostSyncError, no_host_sync  # noqa: E402  (needs torch)

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


def backward_that_fills() -> None:
    """The backward pass makes a tensor of the host's numbers."""

    class Fills(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x * 2

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            return grad * torch.tensor(2.0, device=grad.device)

    Fills.apply(torch.ones(3, device="meta").requires_grad_()).sum().backward()


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

G = torch.ones(3, device="meta")  # stands for a tensor of the GPU
H = torch.ones(3)

WAITS_FOR_THE_GPU: dict[str, Case] = {
    "item": lambda: G.sum().item(),
    "if": lambda: 1 if G.sum() > 0 else 0,
    "tolist": lambda: G.tolist(),
    "to the host": lambda: G.to("cpu"),
    "cpu": lambda: G.cpu(),
    "to the GPU": lambda: H.to("meta"),
    "like another": lambda: H.to(G),
    "copy_": lambda: torch.empty_like(G).copy_(H),
    "an element": lambda: torch.empty_like(G).__setitem__(0, H[0]),
    "a list": lambda: torch.tensor([1.0, 2.0], device="meta"),
    "a number": lambda: torch.tensor(1.0, device="meta"),
    "as_tensor": lambda: torch.as_tensor([1.0], device="meta"),
    "new_tensor": lambda: G.new_tensor([1.0]),
    "nonzero": lambda: torch.nonzero(G > 0),
    "mask as index": lambda: G[G > 0],
    "repeat_interleave": lambda: torch.repeat_interleave(G.long(), G.long()),
    "equal": lambda: torch.equal(G, G),
    "a number in the backward": backward_that_fills,
}

GOES_ON: dict[str, Case] = {
    "values of the host": lambda: (H.tolist(), H.sum().item(), H[H > 0], torch.tensor([1.0, 2.0])),
    "comparing on the host": lambda: (torch.allclose(H, H), torch.equal(H, H), bool(H.sum() > 0)),
    "an empty tensor": lambda: torch.tensor([], device="meta").new_full((1,), 2.0),
    "a full tensor": lambda: torch.full((), 2.0, device="meta"),
    "a number of the host in an operator": lambda: G * 2.0 + H[0],
    "one value under a mask": lambda: torch.empty_like(G).__setitem__(G > 0, 0.0),
    "change of type": lambda: G.to(device="meta", dtype=torch.int64),
    "assert_async": lambda: torch._assert_async((G > 0).all(), "not positive"),
    "backward": lambda: (G.clone().requires_grad_() ** 2).sum().backward(),
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


@pytest.mark.parametrize("case", WAITS_FOR_THE_GPU)
def test_finds_what_waits_for_meta_tensors(case: str) -> None:
    with pytest.raises(HostSyncError), no_host_sync("meta"):
        WAITS_FOR_THE_GPU[case]()


@pytest.mark.parametrize("case", GOES_ON)
def test_the_host_s_own_tensors_are_free(case: str) -> None:
    with no_host_sync("meta"):
        GOES_ON[case]()


def test_meta_tensors_count_as_the_gpu_s() -> None:
    with no_host_sync("meta"):
        assert G.is_cuda and not H.is_cuda
    assert not G.is_cuda


def test_is_gone_afterwards() -> None:
    with pytest.raises(HostSyncError), no_host_sync():
        ONE.item()
    assert ONE.item() == 3
