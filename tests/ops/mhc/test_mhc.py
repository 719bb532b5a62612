"""Hyper-connections: plain torch against their definition, the kernels against plain torch."""

from __future__ import annotations

import json
from functools import cache

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from cppmega.errors import CppmegaError  # noqa: E402
from cppmega.ops import mhc  # noqa: E402
from cppmega.ops.mhc import naive as reference  # noqa: E402
from tests.ops.in_interpreter import run  # noqa: E402
from tests.ops.mhc.checks import Shape, drawn  # noqa: E402

pytestmark = pytest.mark.slow


def scaled_in_turn(logits: Tensor, iterations: int) -> Tensor:
    """Sinkhorn of one matrix as scales of its rows and columns, the way the papers state it."""
    start = torch.exp(logits - logits.amax())
    start = start / start.sum(1, keepdim=True) + 1e-6
    rows, columns = torch.ones(len(start)).double(), torch.ones(len(start)).double()
    for turn in range(2 * iterations - 1):
        if turn % 2 == 0:
            columns = columns / (columns * (rows @ start) + 1e-6)
        else:
            rows = rows / (rows * (start @ columns) + 1e-6)
    return rows[:, None] * start * columns


@pytest.mark.parametrize("n", [1, 2, 4, 8])
@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_sinkhorn_scales_columns_and_rows_in_turn(n: int, iterations: int) -> None:
    logits = torch.randn(n, n, dtype=torch.float64) * 3
    found = reference.sinkhorn(logits, iterations)
    torch.testing.assert_close(found, scaled_in_turn(logits, iterations), rtol=1e-12, atol=0)


def test_columns_sum_to_one_and_rows_nearly() -> None:
    logits = torch.randn(20000, 4, 4, generator=torch.Generator().manual_seed(0))
    found = reference.sinkhorn(logits, 20)
    assert (found.sum(-2) - 1).abs().max() < 1e-5
    assert 1e-4 < (found.sum(-1) - 1).abs().max() < 1e-2  # not a fault: 20 iterations do that


def test_large_logits_give_neither_nan_nor_lost_gradients() -> None:
    logits = 60 * torch.randn(500, 4, 4, generator=torch.Generator().manual_seed(0))
    logits.requires_grad_()
    found = reference.sinkhorn(logits, 20)
    (gradient,) = torch.autograd.grad(found, logits, torch.rand(500, 4, 4))
    assert torch.isfinite(found).all() and torch.isfinite(gradient).all()
    assert (gradient.flatten(1).abs().amax(1) > 0).all()


def test_weights_are_those_of_the_normed_streams() -> None:
    given = drawn(Shape(3, 2, 4, 8), torch.float64)
    found = reference.weights(given.streams, given.parameters, 5)
    x = given.streams[2, 1].flatten()
    phi, alpha_pre, alpha_post, alpha_res, bias = given.parameters
    values = phi @ (x / (x.square().mean().sqrt() + 1e-6))
    pre, post, res = values.tensor_split((4, 8))
    h_pre = 1 / (1 + torch.exp(-(alpha_pre * pre + bias[:4]))) + 1e-6
    h_post = 1 + torch.tanh((alpha_post * post + bias[4:8]) / 2)
    h_res = scaled_in_turn((alpha_res * res + bias[8:]).view(4, 4), 5)
    for mine, exact in zip(found, (h_pre, h_post, h_res), strict=True):
        torch.testing.assert_close(mine[2, 1], exact, rtol=1e-12, atol=1e-12)


def test_a_site_reads_a_sum_and_writes_to_all_streams() -> None:
    given = drawn(Shape(3, 2, 4, 8), torch.float64)
    h_pre, h_post, h_res = reference.weights(given.streams, given.parameters, 5)
    found = reference.aggregate(given.streams, h_pre)
    torch.testing.assert_close(found, torch.einsum("sbn,sbnc->sbc", h_pre, given.streams))
    found = reference.update(given.streams, h_res, h_post, given.out, given.bias)
    mixed = torch.einsum("sbij,sbic->sbjc", h_res, given.streams)  # by the transpose
    added = torch.einsum("sbj,sbc->sbjc", h_post, given.out + given.bias)
    torch.testing.assert_close(found, mixed + added)
    torch.manual_seed(3)
    found = reference.update(given.streams, h_res, h_post, given.out, given.bias, 0.25)
    torch.manual_seed(3)
    kept = torch.nn.functional.dropout(torch.ones_like(added), 0.25)  # of each stream apart
    torch.testing.assert_close(found, mixed + added * kept)


def test_one_stream_with_weights_of_one_is_the_plain_residual() -> None:
    streams, out = torch.randn(2, 5, 3, 1, 8, dtype=torch.bfloat16)
    one = torch.ones(5, 3, 1)
    assert torch.equal(reference.aggregate(streams, one), streams[:, :, 0])
    found = reference.update(streams, one[..., None], one, out[:, :, 0])
    assert torch.equal(found, streams + out)


def test_identity_leaves_the_streams() -> None:
    streams, out = torch.randn(5, 3, 4, 8, dtype=torch.bfloat16), torch.randn(5, 3, 8).bfloat16()
    same = torch.eye(4).expand(5, 3, 4, 4)
    assert torch.equal(reference.update(streams, same, torch.zeros(5, 3, 4), out), streams)


def test_the_gradient_is_that_of_numbers() -> None:
    given = drawn(Shape(2, 1, 2, 2), torch.float64)
    leaves = [x.requires_grad_() for x in (given.streams, *given.parameters, given.out, given.bias)]

    def site(streams: Tensor, *rest: Tensor) -> Tensor:
        *parameters, out, bias = rest
        h_pre, h_post, h_res = reference.weights(streams, reference.Parameters(*parameters), 4)
        seen = reference.aggregate(streams, h_pre)
        return reference.update(streams, h_res, h_post, out + seen.tanh(), bias)

    assert torch.autograd.gradcheck(site, leaves)


PROGRAMS = {
    "sites and ops": """
check(Shape(3, 2, 4, 24), full, calls=(fused_site, fused_ops))
check(Shape(34, 2, 2, 8), half)  # more than one program of tokens
check(Shape(1, 1, 8, 8), full)
check(Shape(2, 1, 2, 1032), bf16, slack=4.0)  # the interpreter truncates to bf16
check(Shape(2, 1, 1, 8), full)
""",
    "no direction of rounding": """
with truncating():
    for dtype in (bf16, full):
        check_sums(Shape(256, 1, 2, 256), dtype)
check_signs(Shape(40, 1, 4, 128), half)
""",
    "sinkhorn": """
for n, iterations, std in ((2, 1, 5.0), (2, 6, 5.0), (8, 2, 60.0), (4, 6, 60.0), (8, 14, 5.0)):
    check_sinkhorn(n, iterations, std)
""",
    "storage": "check_storage(); check_unaligned()",
    "accumulation": "check_main_grad()",
    "compilation": "check_compiled()",
}


@cache
def interpreted() -> dict[str, str]:
    """What stopped each program where Triton interprets its kernels; one process runs them all."""
    text = f"""
import json, traceback
import torch
from tests.ops.mhc.bias_checks import *
from tests.ops.mhc.checks import *
bf16, half, full = torch.bfloat16, torch.float16, torch.float32
stopped = {{}}
for name, program in {PROGRAMS!r}.items():
    try:
        exec(program)
    except Exception:
        stopped[name] = traceback.format_exc()
print(json.dumps(stopped))
"""
    return dict(json.loads(run(text, warnings="error").splitlines()[-1]))


@pytest.mark.parametrize("name", PROGRAMS)
def test_in_the_interpreter(name: str) -> None:
    pytest.importorskip(
        "triton.tools.tensor_descriptor", reason="the kernels need Triton 3.4 or later"
    )
    assert name not in interpreted(), interpreted()[name][-3000:]


def test_what_has_no_kernel_is_said_and_not_done_otherwise() -> None:
    cuda, bf16 = torch.device("cuda"), torch.bfloat16
    assert "torch.float64" in str(mhc.obstacle(cuda, torch.float64, 4, 64))
    assert "3 streams" in str(mhc.obstacle(cuda, bf16, 3, 64))
    assert "width of 60" in str(mhc.obstacle(cuda, bf16, 4, 60))
    assert "on cpu" in str(mhc.obstacle(torch.device("cpu"), bf16, 4, 64))
    given = drawn(Shape(2, 1, 4, 8), bf16)
    with pytest.raises(CppmegaError, match="no-kernel"):
        mhc.read(given.streams.to("meta"), given.parameters, 20)


def test_a_triton_without_descriptors_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: "tools" not in name or None)
    monkeypatch.setattr(triton, "__version__", "3.3.1")
    why = mhc.obstacle(torch.device("cuda"), torch.bfloat16, 4, 64)
    assert why == "Triton 3.3.1 has no descriptors of tensors, which 3.4 has"


def test_the_reference_computes_on_a_cpu() -> None:
    given = drawn(Shape(3, 2, 3, 5), torch.float64)  # neither number nor width has a kernel
    x, site = mhc.read(given.streams, given.parameters, 20, out=torch.empty(3, 2, 5).double())
    h_pre, h_post, h_res = reference.weights(given.streams, given.parameters, 20)
    assert torch.equal(x, reference.aggregate(given.streams, h_pre))
    after = reference.update(given.streams, h_res, h_post, given.out)
    assert torch.equal(mhc.write(site, given.out), after)


def test_shapes_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mhc, "obstacle", lambda *call: None)
    streams, parameters, out, _ = drawn(Shape(2, 1, 4, 8), torch.bfloat16)
    with pytest.raises(ValueError, match="0 iterations"):
        mhc.read(streams, parameters, 0)
    with pytest.raises(ValueError, match="for streams"):
        mhc.read(streams, parameters._replace(bias=parameters.bias[1:]), 20)
    with pytest.raises(CppmegaError, match=r"torch.bfloat16.*not fp32"):
        mhc.read(streams, parameters._replace(bias=parameters.bias.bfloat16()), 20)
    with pytest.raises(ValueError, match="h_pre"):
        mhc.aggregate(streams, torch.ones(2, 1, 3))
    with pytest.raises(ValueError, match="storage"):
        mhc.aggregate(streams, torch.ones(2, 1, 4), out=torch.empty(2, 1, 8))
    with pytest.raises(ValueError, match="contiguous"):
        mhc.aggregate(streams, torch.ones(2, 1, 4), out=torch.empty(2, 1, 16).bfloat16()[..., ::2])
    with pytest.raises(ValueError, match=r"no bias for \(2, 1, 4, 8\)"):
        mhc.update(streams, torch.ones(2, 1, 4, 4), torch.ones(2, 1, 4), out[1:])
    with pytest.raises(CppmegaError, match="main-grad-missing"):
        mhc.read(streams, parameters, 20, fuse_accumulation=True)
    with pytest.raises(ValueError, match="square"):
        mhc.sinkhorn(torch.ones(4, 3), 20)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 4, 7168), (333, 3, 4, 4096), (257, 1, 4, 7168), (100, 2, 2, 512), (65, 2, 8, 1000)],
)
def test_errors_on_cuda(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    from tests.ops.mhc.checks import check

    for std in (1.0, 5.0):
        check(Shape(*shape), dtype, iterations=20, std=std, device="cuda")


@pytest.mark.gpu
def test_everything_else_on_cuda() -> None:
    from tests.ops.mhc import bias_checks as biases
    from tests.ops.mhc import checks

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        biases.check_sums(Shape(4096, 2, 4, 4096), dtype, device="cuda")
    for dtype in (torch.bfloat16, torch.float16):
        biases.check_signs(Shape(400, 2, 4, 1024), dtype, device="cuda")
    for n in (2, 4, 8):
        for std in (1.0, 20.0, 60.0):
            checks.check_sinkhorn(n, 20, std, device="cuda")
    checks.check_storage(device="cuda")
    checks.check_unaligned(device="cuda")
    checks.check_main_grad(device="cuda")
    checks.check_repeats(device="cuda")
    checks.check_compiled(device="cuda")
    checks.check_captured()
