"""M2RNN and its convolution: plain torch against their definition, the kernels against plain."""

from __future__ import annotations

import math
from functools import partial

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from cppmega.errors import CppmegaError  # noqa: E402
from cppmega.ops import m2rnn as op  # noqa: E402
from cppmega.ops.m2rnn import naive as reference  # noqa: E402
from cppmega.ops.packed_conv import packed_conv  # noqa: E402
from tests.ops.in_interpreter import run  # noqa: E402
from tests.ops.kernel_memory import check_fits, record  # noqa: E402
from tests.ops.launch_counts import modules_of  # noqa: E402
from tests.ops.m2rnn.checks import (  # noqa: E402
    CONVOLUTION,
    RECURRENCE,
    Shape,
    both_ways,
    check,
    check_clipping,
    check_empty,
    check_parts,
    check_repeats,
    drawn,
    drawn_conv,
)

FULL = torch.float64


def test_a_step_mixes_the_state_and_its_candidate() -> None:
    """Two steps of one head, written out."""
    q, k, v, transition, log_decay = (x.to(FULL) for x in drawn(Shape(2, 1, 3, 2, 2), FULL))
    found = reference.m2rnn(q, k, v, transition, log_decay)
    state = torch.zeros(2, 2, dtype=FULL)
    for t in range(2):
        f = math.exp(log_decay[t, 0, 1])
        before = [sum(state[i, n] * transition[1, n] for n in range(2)) for i in range(2)]
        rows = [torch.tanh(before[i] + k[t, 0, i] * v[t, 0, 1]) for i in range(2)]
        state = f * state + (1 - f) * torch.stack(rows)
        expected = q[t, 0, 0] * state[0] + q[t, 0, 1] * state[1]
        torch.testing.assert_close(found[t, 0, 1], expected, rtol=1e-12, atol=1e-14)


def test_the_convolution_is_torchs_within_each_document() -> None:
    x, weight, bias = drawn_conv(9, 1, 6, 4, FULL)
    bounds = torch.tensor([0, 1, 3, 3, 8, 9])
    found = packed_conv(x, weight, bias, bounds)
    for start, end in ((0, 1), (1, 3), (3, 8), (8, 9)):
        rows = x[start:end].permute(1, 2, 0)
        padded = torch.nn.functional.pad(rows, (3, 0))
        plain = torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=6)
        expected = torch.nn.functional.silu(plain).permute(2, 0, 1)
        torch.testing.assert_close(found[start:end], expected)


def test_documents_have_the_gradients_that_they_have_alone() -> None:
    bounds = torch.tensor([0, 1, 4, 9])
    for call, given in (
        (op.m2rnn, drawn(Shape(9, 1, 3, 4, 2), FULL)),
        (packed_conv, drawn_conv(9, 1, 6, 4, FULL)),
    ):
        *before, x = (x.detach().requires_grad_() for x in given[: 3 if call is op.m2rnn else 1])
        out = call(*before, x, *given[len(before) + 1 :], bounds)
        (gradient,) = torch.autograd.grad(out[4:].sum(), x)
        assert not gradient[:4].any() and (gradient[4:] != 0).all()


def test_the_gradient_is_that_of_numbers() -> None:
    bounds = torch.tensor([0, 2, 5])
    for call, given in (
        (op.m2rnn, drawn(Shape(5, 1, 3, 2, 2), FULL)),
        (packed_conv, drawn_conv(5, 1, 3, 3, FULL)),
    ):
        leaves = [x.to(FULL).detach().requires_grad_() for x in given]

        def outputs(*x: Tensor, call: object = call) -> Tensor:
            return call(*x, bounds)  # type: ignore[operator]

        assert torch.autograd.gradcheck(outputs, leaves)


def step_by_step(
    given: list[Tensor], bounds: list[int], upstream: Tensor, bound: float
) -> list[Tensor]:
    """All gradients, from those of one step at a time; that of a state is clamped."""
    q, k, v, transition, log_decay = given

    def step(state: Tensor, key: Tensor, value: Tensor, weight: Tensor, log: Tensor) -> Tensor:
        decay = log.exp()[..., None, None]
        moved = state @ weight + key[:, None, :, None] * value[:, :, None, :]
        return decay * state + (1 - decay) * torch.tanh(moved)

    states = [torch.zeros(v.size(1), v.size(2), k.size(2), v.size(3), dtype=v.dtype)]
    for t in range(len(v)):
        states[t] = states[t] * (t not in bounds)
        states.append(step(states[t], k[t], v[t], transition, log_decay[t]))
    found, of_state = [torch.zeros_like(x) for x in given], torch.zeros_like(states[0])
    for t in reversed(range(len(v))):
        leaves = [x.clone().requires_grad_() for x in (states[t], k[t], v[t], transition)]
        leaves.append(log_decay[t].clone().requires_grad_())
        state = step(*leaves)
        found[0][t] = torch.einsum("bhkv,bhv->bk", state, upstream[t])
        of_state = of_state + q[t, :, None, :, None] * upstream[t, :, :, None, :]
        of_state, found[1][t], found[2][t], of_weight, found[4][t] = torch.autograd.grad(
            state, leaves, of_state.clamp(-bound, bound)
        )
        found[3] += of_weight
        of_state = of_state * (t not in bounds)
    return found


@pytest.mark.parametrize("bound", [0.2, 1.0, 1e9])
@pytest.mark.parametrize(("b", "bounds"), [(2, [0]), (1, [0, 3, 4, 9])])
def test_the_gradient_of_each_state_is_clipped(bound: float, b: int, bounds: list[int]) -> None:
    given = [x.to(FULL) for x in drawn(Shape(9, b, 3, 4, 2), FULL)]
    leaves = [x.clone().requires_grad_() for x in given]
    documents = torch.tensor(bounds) if b == 1 else None
    gradients = []
    for clipping in (bound, None):
        out = reference.m2rnn(*leaves, documents, clipping)
        upstream = torch.linspace(-1, 2, out.numel(), dtype=FULL).view_as(out).sin()
        gradients.append(torch.autograd.grad(out, leaves, upstream))
    found, free = gradients
    for mine, exact in zip(found, step_by_step(given, bounds, upstream, bound), strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-12, atol=1e-14)
    same = [torch.equal(a, b) for a, b in zip(found, free, strict=True)]
    assert same == [True, *[bound == 1e9] * 4]


@pytest.mark.parametrize("bound", [0.0, -1.0, math.nan])
def test_a_bound_that_is_not_above_zero_is_refused(bound: float) -> None:
    with pytest.raises(ValueError, match="not above 0"):
        op.m2rnn(*drawn(Shape(3, 1, 3, 4, 2), FULL), gradient_clipping=bound)


def test_what_follows_the_last_document_is_one_more() -> None:
    found = op.document_bounds(torch.tensor([0, 3, 7]), 9)
    assert found.tolist() == [0, 3, 7, 9] and found.dtype == torch.int32


def interpreted(program: str) -> None:
    """Run a program where Triton interprets its kernels, with chunks of four steps."""
    pytest.importorskip("triton")
    run(
        "from tests.ops.m2rnn.checks import *\n"
        "from cppmega.ops.m2rnn import backward_triton, forward_triton\n"
        "forward_triton.CHUNK, backward_triton.PROGRAMS = 4, 2\n"
        "forward_triton.ROWS = 16\n"
        f"half, full = torch.float16, torch.float32\n{program}"
    )


@pytest.mark.slow
def test_the_recurrence_in_the_interpreter() -> None:
    interpreted(
        """
check(RECURRENCE, drawn(Shape(1, 1, 3, 16, 16), full))
check(RECURRENCE, drawn(Shape(3, 2, 3, 5, 3), full))
check(RECURRENCE, drawn(Shape(17, 2, 3, 20, 16), half))
packs = drawn(Shape(23, 1, 3, 20, 7), full)
check(RECURRENCE, packs, (0, 1, 1, 4, 8, 17, 23))
check_repeats(RECURRENCE, packs, (0, 1, 1, 4, 8, 17, 23))
check_parts(packs, (0, 1, 4, 8, 17, 23))
"""
    )


@pytest.mark.slow
def test_the_convolution_in_the_interpreter() -> None:
    interpreted(
        """
check(CONVOLUTION, drawn_conv(1, 1, 70, 4, full))
check(CONVOLUTION, drawn_conv(35, 2, 70, 4, full))
check(CONVOLUTION, drawn_conv(17, 1, 8, 2, half), (0, 17))
packs = drawn_conv(70, 1, 70, 4, full)
check(CONVOLUTION, packs, (0, 1, 1, 4, 21, 33, 70))
check_repeats(CONVOLUTION, packs, (0, 1, 1, 4, 21, 33, 70))
"""
    )


@pytest.mark.slow
def test_clipping_in_the_interpreter() -> None:
    interpreted("check_clipping(full)\ncheck_clipping(half)")


def test_empty_tensors_in_plain_torch() -> None:
    check_empty(1, FULL, "cpu")


@pytest.mark.slow
def test_empty_tensors_in_the_interpreter() -> None:
    interpreted("check_empty(0, full, 'cpu')")


@pytest.mark.slow
def test_second_derivatives_of_kernels_are_errors() -> None:
    interpreted(
        """
import pytest
for (op, _), given in (
    (RECURRENCE, drawn(Shape(2, 1, 1, 1, 1), full)),
    (CONVOLUTION, drawn_conv(2, 1, 1, 1, full)),
):
    for number in range(len(given)):
        leaves = list(given)
        leaves[number] = leaves[number].detach().requires_grad_()
        (gradient,) = torch.autograd.grad(op(*leaves).sum(), leaves[number], create_graph=True)
        with pytest.raises(RuntimeError, match="first derivatives only"):
            torch.autograd.grad(gradient.sum(), leaves[number])
"""
    )


@pytest.mark.gpu
def test_empty_tensors_on_cuda() -> None:
    check_empty(0, torch.bfloat16, "cuda")


def test_what_has_no_kernel_is_said() -> None:
    cuda = torch.device("cuda")
    assert "torch.float64" in str(op.obstacle(cuda, FULL, 64, 16))
    assert "larger than the 128 x 64" in str(op.obstacle(cuda, torch.bfloat16, 129, 16))
    assert "larger than the 128 x 64" in str(op.obstacle(cuda, torch.bfloat16, 64, 65))
    assert "on cpu" in str(op.obstacle(torch.device("cpu"), torch.bfloat16, 64, 16))
    meta = [x.to("meta") for x in drawn(Shape(3, 1, 3, 4, 4), torch.bfloat16)]
    with pytest.raises(CppmegaError, match=r"no-kernel.*on meta"):
        op.m2rnn(*meta)
    with pytest.raises(CppmegaError, match=r"no-kernel.*on meta"):
        packed_conv(*(x.to("meta") for x in drawn_conv(3, 1, 8, 4, torch.bfloat16)))


def test_shapes_and_types_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "obstacle", lambda *call: None)
    q, k, v, transition, decay = drawn(Shape(3, 2, 3, 4, 4), torch.bfloat16)
    with pytest.raises(ValueError, match="for values"):
        op.m2rnn(q, k[..., :2], v, transition, decay)
    with pytest.raises(ValueError, match="transition"):
        op.m2rnn(q, k, v, transition[1:], decay)
    with pytest.raises(ValueError, match="2 sequences"):
        op.m2rnn(q, k, v, transition, decay, torch.tensor([0, 3]))
    with pytest.raises(CppmegaError, match=r"decay is torch.bfloat16, not fp32"):
        op.m2rnn(q, k, v, transition, decay.bfloat16())
    with pytest.raises(CppmegaError, match=r"k torch.float32, but"):
        op.m2rnn(q, k.float(), v, transition, decay)
    x, weight, bias = drawn_conv(3, 2, 8, 4, torch.bfloat16)
    with pytest.raises(ValueError, match="bias"):
        packed_conv(x, weight, bias[1:])
    with pytest.raises(ValueError, match=r"weight \(8, 0\)"):
        packed_conv(x, weight[:, :0], bias)
    with pytest.raises(ValueError, match="2 sequences"):
        packed_conv(x, weight, bias, torch.tensor([0, 3]))


@pytest.mark.slow
def test_every_kernel_compiles_and_fits_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    modules = [*modules_of("m2rnn"), *modules_of("packed_conv")]
    found = record(monkeypatch, modules)
    for name in ("cppmega.ops.m2rnn.obstacle", "cppmega.ops.packed_conv.kernel_obstacle"):
        monkeypatch.setattr(name, lambda *call: None)
    packed = torch.tensor([0, 64])
    # Without packs, and for sizes of one, which Triton compiles in, kernels are others.
    for shape, dtype, bounds, clipping, targets in (
        # 80 has more memory than 120.
        (Shape(64, 1, 51, 64, 16), torch.bfloat16, packed, 1.0, (100, 120)),
        (Shape(64, 1, 51, 128, 64), torch.float32, packed, 1.0, (120,)),
        (Shape(64, 2, 51, 64, 16), torch.float16, None, None, (90,)),
        (Shape(1, 1, 1, 16, 16), torch.bfloat16, None, None, (90,)),
    ):
        found.clear()
        recurrence = partial(op.m2rnn, gradient_clipping=clipping)
        both_ways(recurrence, drawn(shape, dtype), bounds)
        both_ways(packed_conv, drawn_conv(shape.s, shape.b, 944, 4, dtype), bounds)
        check_fits(found, modules, targets)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_errors_on_cuda(dtype: torch.dtype) -> None:
    for shape in (Shape(333, 3, 51, 64, 16), Shape(65, 2, 3, 128, 64), Shape(3, 1, 3, 5, 3)):
        check(RECURRENCE, drawn(shape, dtype, "cuda"))
    documents = (0, 1, 1, 4, 21, 150, 214, 333)
    packs = drawn(Shape(333, 1, 51, 64, 16), dtype, "cuda")
    check(RECURRENCE, packs, documents)
    check_repeats(RECURRENCE, packs, documents)
    check_parts(packs, (0, 1, 4, 21, 150, 214, 333))
    check_clipping(dtype, "cuda")
    conv = drawn_conv(333, 1, 944, 4, dtype, "cuda")
    check(CONVOLUTION, conv, documents)
    check_repeats(CONVOLUTION, conv, documents)
