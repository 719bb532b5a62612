"""Checks of the hyper-connections' kernels, for the interpreter and for a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cppmega.ops import mhc
from cppmega.ops.mhc import naive as reference
from cppmega.ops.mhc.naive import Parameters


class Shape(NamedTuple):
    """Sequence, batch, streams and width."""

    s: int
    b: int
    n: int
    c: int


class Given(NamedTuple):
    """What a site is given: the streams, its parameters, and the sub-layer's output and bias."""

    streams: Tensor
    parameters: Parameters
    out: Tensor
    bias: Any
    """A tensor; None for a site without, which only the benchmark has."""


Call = Callable[[Given, int], tuple[Tensor, Tensor]]
"""A site: the streams after it and its aggregate."""

NAMES = (
    "streams after", "aggregate", "of streams", "of phi", "of alpha_pre", "of alpha_post",
    "of alpha_res", "of bias", "of out", "of the output's bias",
)  # fmt: skip
"""Results, and gradients."""

SCALES = slice(4, 7)
"""The gradients of one number each."""

ORDERS = 8
"""Orders of tokens and columns in which fp32 sums up the gradient of a scale.

That gradient is one number, a sum of up to thousands of values of both signs, and the error that
fp32 makes in one order is as good as drawn: of a site of 200 tokens, 2.9e-6, where the deviation
over eight orders is 1.0e-4, so that 1.5 times the first is no bound. (Nor are the magnitudes of the
terms: their sum allows a hundred times the error.) An error is one draw as well, and may have twice
the slack of a deviation: 3 of them. What all terms have in common, `mhc_bias_checks` looks for.
"""


def drawn(shape: Shape, dtype: torch.dtype, *, device: str = "cpu", std: float = 1.0) -> Given:
    """Streams of unequal sizes in `dtype`; parameters in fp32 (fp64) with logits of about `std`."""
    made = torch.Generator().manual_seed(7)
    s, b, n, c = shape
    full = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*sizes: int, dtype: torch.dtype = full, scale: Any = 1.0) -> Tensor:
        return (torch.randn(*sizes, generator=made) * scale).to(device, dtype)

    sizes = 0.5 + torch.rand(s, b, 1, 1, generator=made) * 3
    values = n * n + 2 * n
    parameters = Parameters(
        normal(values, n * c, scale=(n * c) ** -0.5),
        *(torch.full((1,), std * part, device=device, dtype=full) for part in (0.7, 0.9, 1.1)),
        normal(values, scale=0.3),
    )
    streams = normal(s, b, n, c, dtype=dtype, scale=sizes)
    out = normal(s, b, c, dtype=dtype)
    return Given(streams, parameters, out, normal(c, dtype=dtype))


def plain_site(given: Given, iterations: int) -> tuple[Tensor, Tensor]:
    """The streams after a site and its aggregate, by the reference."""
    h_pre, h_post, h_res = reference.weights(given.streams, given.parameters, iterations)
    new = reference.update(given.streams, h_res, h_post, given.out, given.bias)
    return new, reference.aggregate(given.streams, h_pre)


def fused_site(given: Given, iterations: int) -> tuple[Tensor, Tensor]:
    """The same by `read` and `write`."""
    seen, site = mhc.read(given.streams, given.parameters, iterations)
    return mhc.write(site, given.out, given.bias), seen


def fused_ops(given: Given, iterations: int) -> tuple[Tensor, Tensor]:
    """The same by the single ops."""
    h_pre, h_post, h_res = mhc.weights(given.streams, given.parameters, iterations)
    new = mhc.update(given.streams, h_res, h_post, given.out, given.bias)
    return new, mhc.aggregate(given.streams, h_pre)


def leaves_of(given: Given) -> list[Tensor]:
    """All that has a gradient, in order."""
    return [given.streams, *given.parameters, given.out, given.bias]


def both_ways(call: Call, given: Given, upstream: list[Tensor], iterations: int) -> list[Tensor]:
    """Results and gradients."""
    streams, *parameters, out, bias = (x.detach().requires_grad_() for x in leaves_of(given))
    given = Given(streams, Parameters(*parameters), out, bias)
    found = call(given, iterations)
    gradients = torch.autograd.grad(found, leaves_of(given), upstream)
    return [x.detach() for x in (*found, *gradients)]


def cast(given: Given, dtype: torch.dtype) -> Given:
    """Everything in another type."""
    streams, *parameters, out, bias = (x.to(dtype) for x in leaves_of(given))
    return Given(streams, Parameters(*parameters), out, bias)


def upstream_of(given: Given) -> list[Tensor]:
    """Gradients of a site's results: unequal and not contiguous."""
    made = torch.Generator().manual_seed(11)

    def strided(like: Tensor) -> Tensor:
        drawn = torch.randn(like.transpose(0, 1).shape, generator=made)
        return (drawn + 0.25).to(like.device, like.dtype).transpose(0, 1)

    return [strided(given.streams), strided(given.out)]


def reordered(given: Given, upstream: list[Tensor], seed: int) -> tuple[Given, list[Tensor]]:
    """The same site with its tokens and columns in another order; scales have equal gradients."""
    streams, parameters, out, bias = given
    s, _, n, c = streams.shape
    made = torch.Generator().manual_seed(seed)
    t, k = (torch.randperm(size, generator=made).to(streams.device) for size in (s, c))
    phi = parameters.phi.view(-1, n, c)[:, :, k].reshape(-1, n * c)
    moved = Given(streams[t][..., k], parameters._replace(phi=phi), out[t][..., k], bias[k])
    return moved, [x[t][..., k] for x in upstream]


def deviations(given: Given, upstream: list[Tensor], iterations: int, exact: Tensor) -> Tensor:
    """Of the gradients of the three scales in fp32 over `ORDERS`, from the exact ones."""
    low, upstream = cast(given, torch.float32), [x.float() for x in upstream]
    errors = []
    for seed in range(ORDERS):
        found = both_ways(plain_site, *reordered(low, upstream, seed), iterations)
        errors.append(torch.cat(found[SCALES]).double() - exact)
    return torch.stack(errors).square().mean(0).sqrt()


def check(
    shape: Shape,
    dtype: torch.dtype,
    *,
    iterations: int = 3,
    std: float = 1.0,
    calls: tuple[Call, ...] = (fused_site,),
    slack: float = 1.5,
    device: str = "cpu",
) -> None:
    """Results and gradients against fp64: errors of at most `slack` times those of fp32, rounded.

    A small part of the error of fp32 is chance where there are few values: 4e-7 of the norm are
    allowed besides. Of single numbers all of it is: see `ORDERS`.
    """
    given = drawn(shape, dtype, device=device, std=std)
    upstream = upstream_of(given)
    wide = [
        both_ways(plain_site, cast(given, kind), [x.to(kind) for x in upstream], iterations)
        for kind in (torch.float64, torch.float32)
    ]
    floors = [
        (low.to(like.dtype).double() - exact).norm()
        for like, exact, low in zip((*upstream, *leaves_of(given)), *wide, strict=True)
    ]
    floors[SCALES] = 2 * deviations(given, upstream, iterations, torch.cat(wide[0][SCALES]))
    for call in calls:
        found = both_ways(call, given, upstream, iterations)
        for name, mine, exact, floor in zip(NAMES, found, wide[0], floors, strict=True):
            assert torch.isfinite(mine).all(), name
            error = (mine.double() - exact).norm()
            bound = slack * floor + 4e-7 * exact.norm()
            assert error <= bound, (call.__name__, name, shape, error, floor)


def check_sinkhorn(n: int, iterations: int, std: float, device: str = "cpu") -> None:
    """Sinkhorn alone, and its gradient, where the logits differ a lot."""
    made = torch.Generator().manual_seed(n)
    logits, upstream = (torch.randn(5, 14, n, n, generator=made).to(device) for _ in range(2))
    upstream = upstream.transpose(0, 1).contiguous().transpose(0, 1)
    found = []
    for call, kind in (
        (mhc.sinkhorn, torch.float32),
        (reference.sinkhorn, torch.float64),
        (reference.sinkhorn, torch.float32),
    ):
        leaf = (logits * std).to(kind).requires_grad_()
        out = call(leaf, iterations)
        found.append([out.detach(), *torch.autograd.grad(out, leaf, upstream.to(kind))])
    for mine, exact, low in zip(*found, strict=True):
        error, floor = (mine.double() - exact).norm(), (low.double() - exact).norm()
        assert error <= 1.5 * floor + 4e-7 * exact.norm(), (n, iterations, std, error, floor)
        smallest = exact.flatten(-2).abs().amax(-1) > 1e-30
        assert (mine.flatten(-2).abs().amax(-1) > 0)[smallest].all(), "a gradient was lost"


def assert_same(found: list[Tensor], want: list[Tensor]) -> None:
    """Results and gradients are equal to the bit."""
    different = [
        name for name, a, b in zip(NAMES, found, want, strict=True) if not torch.equal(a, b)
    ]
    assert not different, different


def check_storage(device: str = "cpu") -> None:
    """The aggregate is written where the caller wants it, with the same gradients."""
    given = drawn(Shape(2, 1, 2, 16), torch.float32, device=device)
    upstream = upstream_of(given)
    storage = torch.zeros_like(given.out)

    def into(given: Given, iterations: int) -> tuple[Tensor, Tensor]:
        seen, site = mhc.read(given.streams, given.parameters, iterations, out=storage)
        assert seen.data_ptr() == storage.data_ptr()
        return mhc.write(site, given.out, given.bias), seen

    ours, plain = (both_ways(call, given, upstream, 3) for call in (into, fused_site))
    assert_same(ours, plain)
    assert torch.equal(storage, plain[1])
    h_pre = torch.rand(2, 1, 2, device=device)
    storage = storage.detach()
    found = mhc.aggregate(given.streams, h_pre, out=storage)
    assert found.data_ptr() == storage.data_ptr()
    assert torch.equal(storage, mhc.aggregate(given.streams, h_pre))


def check_unaligned(device: str = "cpu") -> None:
    """Unaligned streams give the same results, up to the order of the sums."""
    given = drawn(Shape(2, 2, 2, 16), torch.float32, device=device)
    upstream = upstream_of(given)
    moved = torch.empty(given.streams.numel() + 1, device=device)[1:].view_as(given.streams)
    moved.copy_(given.streams)
    found = both_ways(fused_site, given._replace(streams=moved), upstream, 3)
    for name, mine, want in zip(
        NAMES, found, both_ways(fused_site, given, upstream, 3), strict=True
    ):
        torch.testing.assert_close(mine, want, rtol=1e-5, atol=1e-5, msg=name)


def check_main_grad(device: str = "cpu") -> None:
    """The gradient of phi is added to its fp32 buffer, and Megatron's hooks are told."""
    given = drawn(Shape(2, 1, 2, 16), torch.float32, device=device)
    upstream = upstream_of(given)
    want = both_ways(fused_site, given, upstream, 3)[NAMES.index("of phi")]
    phi: Any = torch.nn.Parameter(given.parameters.phi.clone())
    phi.main_grad, phi.grad_added_to_main_grad = torch.ones_like(phi), False
    parameters = given.parameters._replace(phi=phi)
    for times in (1, 2):
        seen, site = mhc.read(given.streams, parameters, 3, fuse_accumulation=True)
        torch.autograd.backward((mhc.write(site, given.out, given.bias), seen), upstream)
        torch.testing.assert_close(phi.main_grad, 1 + times * want, rtol=1e-5, atol=1e-5)
        assert phi.grad_added_to_main_grad


def check_repeats(device: str) -> None:
    """The bits are the same in every run."""
    given = drawn(Shape(700, 2, 2, 512), torch.float32, device=device)
    upstream = upstream_of(given)
    first = both_ways(fused_site, given, upstream, 3)
    for _ in range(20):
        again = both_ways(fused_site, given, upstream, 3)
        assert_same(first, again)


def check_compiled(device: str = "cpu") -> None:
    """A site is compiled without a break of its graph, both ways, to the same bits."""
    given = drawn(Shape(2, 1, 2, 16), torch.float32, device=device)
    upstream = upstream_of(given)
    compiled = torch.compile(fused_site, fullgraph=True, backend="aot_eager", dynamic=True)
    with warnings.catch_warnings():
        # Dynamo itself builds a bare Function to trace any `apply` (torch 2.11).
        said = ".*torch.autograd.function.Function.* should not be instantiated"
        warnings.filterwarnings("ignore", said, DeprecationWarning)
        ours = both_ways(compiled, given, upstream, 3)
    assert_same(ours, both_ways(fused_site, given, upstream, 3))


def check_captured() -> None:
    """A captured site gives the bits of one that is launched, for other values too."""
    given = drawn(Shape(70, 2, 4, 512), torch.bfloat16, device="cuda")
    upstream = upstream_of(given)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        both_ways(fused_site, given, upstream, 20)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both_ways(fused_site, given, upstream, 20)
    given.streams.mul_(1.5)
    graph.replay()
    assert_same(captured, both_ways(fused_site, given, upstream, 20))
