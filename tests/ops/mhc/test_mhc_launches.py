"""How much a site launches, at any size, and that it never waits for the GPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton.tools.tensor_descriptor", reason="the kernels need Triton 3.4 or later")

from cppmega.ops import mhc  # noqa: E402
from cppmega.proof.host_sync import no_host_sync  # noqa: E402
from tests.ops.launch_counts import Launches, kernels_of, modules_of  # noqa: E402
from tests.ops.mhc.checks import Shape, drawn  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """The kernels' path, without a GPU."""
    counted = Launches()
    for module in modules_of("mhc"):
        for name in kernels_of(module):
            monkeypatch.setattr(module, name, counted.recorder(name))
    monkeypatch.setattr(mhc, "_device_obstacle", lambda name: None)
    return counted


def taken(launches: Launches) -> list[str]:
    """The launches since the last call; torch's dispatcher also sees the ops that launch them."""
    return [name for name in launches.taken() if not name.startswith("mhc_")]


def site(
    launches: Launches, shape: Shape, *, bias: bool = False, dtype: torch.dtype = torch.bfloat16
) -> list[list[str]]:
    """What one site launches forward and backward."""
    streams, parameters, out, of_out = drawn(shape, dtype)
    leaves = [streams, *parameters, out, *([of_out] if bias else [])]
    for leaf in leaves:
        leaf.requires_grad_()
    upstream = torch.empty_like(streams), torch.empty_like(out)
    launches.taken()
    with no_host_sync(), launches:
        seen, kept = mhc.read(streams, parameters, 20)
        new = mhc.write(kept, out, of_out if bias else None)
        forward = taken(launches)
        torch.autograd.grad((new, seen), leaves, upstream)
        return [forward, taken(launches)]


FORWARD = [
    "_phi_parts_kernel",
    "_projection_kernel",
    "_weights_kernel",
    "_aggregate_kernel",
    "_update_kernel",
]
BACKWARD = [
    "_update_backward_kernel",
    "_aggregate_backward_kernel",
    "_phi_parts_kernel",
    "_weights_backward_kernel",
    "_parameters_kernel",
    "_streams_gradient_kernel",
    "_phi_gradient_kernel",
]


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("s, b", [(1, 1), (70, 3), (1000, 4)])
def test_twelve_launches_at_any_size(s: int, b: int, n: int, launches: Launches) -> None:
    assert site(launches, Shape(s, b, n, 24)) == [FORWARD, BACKWARD]


def test_streams_that_are_not_bf16_need_no_parts_of_phi(launches: Launches) -> None:
    others = [[name for name in names if "parts" not in name] for names in (FORWARD, BACKWARD)]
    assert site(launches, Shape(70, 3, 4, 24), dtype=torch.float16) == others


def test_a_bias_is_another_pass_and_a_sum(launches: Launches) -> None:
    forward, backward = site(launches, Shape(70, 3, 4, 24), bias=True)
    assert forward == FORWARD
    assert set(backward) - set(BACKWARD) == {"_bias_gradient_kernel", "sum", "_to_copy"}
    assert len(backward) == len(BACKWARD) + 4  # torch counts a sum twice


def test_no_tokens_launch_what_needs_none(launches: Launches) -> None:
    forward, backward = site(launches, Shape(0, 2, 4, 24))
    assert forward == ["_phi_parts_kernel"]
    assert set(backward) == {"_phi_parts_kernel", "_parameters_kernel", "_phi_gradient_kernel"}
