"""Mamba-3: plain torch against its definition, the kernels' surroundings against plain torch."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from cppmega.errors import CppmegaError  # noqa: E402
from cppmega.ops import mamba3  # noqa: E402
from cppmega.ops.mamba3 import external as kernels  # noqa: E402
from cppmega.ops.mamba3 import naive as reference  # noqa: E402
from tests.ops.mamba3 import stand_ins as mamba3_stand_ins  # noqa: E402
from tests.ops.mamba3.checks import Shape, drawn, leaves, token_by_token  # noqa: E402
from tests.ops.mamba3.errors import WIDE  # noqa: E402
from tests.ops.mamba3.scan_checks import check  # noqa: E402
from tests.support.processes import python_path  # noqa: E402

MIMO = Shape()
NORM = MIMO._replace(out_norm=True)
SISO = MIMO._replace(rank=1)
SISO_NORM = SISO._replace(out_norm=True)


@pytest.mark.parametrize("shape", [MIMO, NORM, SISO, SISO_NORM], ids=str)
def test_it_is_the_recurrence_whatever_the_chunk(shape: Shape) -> None:
    inputs, parameters = drawn(shape._replace(length=6))
    wanted = token_by_token(inputs, parameters)
    for chunk in (1, 4, 64):
        found = reference.mixed(inputs, parameters, chunk=chunk)
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("definition", ["softplus", "heavy_tail"])
def test_its_gradients_are_those_of_small_steps(definition: reference.Definition) -> None:
    inputs, parameters = drawn(Shape(1, 5, 2, 1, 2, 4, 2, out_norm=True))
    every = leaves(inputs, parameters)

    def of(*tensors: Tensor) -> Tensor:
        named = dict(zip(every, tensors, strict=True))
        return reference.mixed(
            reference.Inputs(**{name: named[name] for name in inputs._fields}),
            reference.Parameters(**{name: named[name] for name in parameters._fields}),
            definition,
            chunk=2,
        )

    assert torch.autograd.gradcheck(of, tuple(every.values()))


def test_both_functions_of_a_are_positive_and_different() -> None:
    decay = torch.tensor([-60.0, -1.0, 0.0, 1.0, 60.0], dtype=torch.float64)
    soft, heavy = (reference.decay_rate(decay, name) for name in ("softplus", "heavy_tail"))
    floor = reference.A_FLOOR
    wanted = [floor, 0.31326168751822286, 0.6931471805599453, 1.3132616875182228, 60.0]
    torch.testing.assert_close(soft, torch.tensor(wanted, dtype=torch.float64))
    wanted = [1 / 61, 0.5, 1.0, 2.0, 61.0]
    torch.testing.assert_close(heavy, torch.tensor(wanted, dtype=torch.float64))


def test_the_heavy_tail_has_one_derivative_at_zero() -> None:
    decay = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64, requires_grad=True)
    reference.decay_rate(decay, "heavy_tail").sum().backward()
    assert decay.grad is not None and decay.grad.tolist() == [0.25, 1.0, 1.0]


@pytest.mark.parametrize("shape", [MIMO, SISO], ids=str)
def test_documents_of_a_pack_are_mixed_as_if_alone(shape: Shape) -> None:
    inputs, parameters = drawn(shape._replace(batch=1))
    bounds = [0, 1, 6, 11]  # the last two tokens belong to no document
    packed = reference.mixed(inputs, parameters, bounds=bounds, chunk=4)
    whole = reference.mixed(inputs, parameters, chunk=4)
    for start, end in ((0, 1), (1, 6), (6, 11), (11, 13)):
        part = reference.Inputs(*(each[:, start:end] for each in inputs))
        alone = reference.mixed(part, parameters)
        torch.testing.assert_close(packed[:, start:end], alone, rtol=1e-11, atol=1e-11)
    assert (packed - whole)[:, 1:].abs().amin((0, 2, 3)).gt(1e-6).all()


def test_a_group_serves_neighbouring_heads() -> None:
    inputs, parameters = drawn(MIMO)
    each = MIMO.heads // MIMO.groups
    alike = inputs._replace(
        keys=inputs.keys.repeat_interleave(each, 2),
        queries=inputs.queries.repeat_interleave(each, 2),
    )
    grouped = reference.mixed(inputs, parameters)
    torch.testing.assert_close(reference.mixed(alike, parameters), grouped)
    swapped = inputs._replace(keys=inputs.keys.flip(2), queries=inputs.queries.flip(2))
    assert not torch.allclose(reference.mixed(swapped, parameters), grouped)


@pytest.mark.parametrize("dt", [-30.0, 30.0])
def test_a_decay_near_one_or_zero_leaves_finite_gradients(dt: float) -> None:
    inputs, parameters = drawn(MIMO._replace(length=40), torch.float32, dt=dt)
    out = reference.mixed(inputs, parameters, chunk=16)
    gradients = torch.autograd.grad(out.square().sum(), [*leaves(inputs, parameters).values()])
    assert all(torch.isfinite(each).all() for each in (out, *gradients))


def both(shape: Shape, bounds: list[int] | None) -> list[dict[str, Tensor]]:
    """Output and gradients by plain torch, and by what surrounds the kernels."""
    found = []
    boundaries = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    for of in (mamba3.mixed, kernels.mixed):
        inputs, parameters = drawn(shape)
        out = of(inputs, parameters, "softplus", boundaries, 4)
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        named = leaves(inputs, parameters)
        gradients = torch.autograd.grad(out, [*named.values()], upstream.double())
        found.append({"out": out, **dict(zip(named, gradients, strict=True))})
    return found


@pytest.mark.parametrize("bounds", [None, [0, 5, 13]], ids=["one document", "packed"])
@pytest.mark.parametrize("shape", [MIMO, NORM, SISO, SISO_NORM], ids=str)
def test_what_surrounds_the_kernels_gives_them_what_they_take(
    shape: Shape, bounds: list[int] | None
) -> None:
    with mamba3_stand_ins.installed():
        plain, surrounded = both(shape._replace(batch=1) if bounds else shape, bounds)
    for name, wanted in plain.items():
        torch.testing.assert_close(surrounded[name], wanted, rtol=1e-9, atol=1e-9, msg=name)


def test_mimo_keeps_nothing_but_the_projection() -> None:
    inputs, parameters = drawn(MIMO._replace(length=12))
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with mamba3_stand_ins.installed(), hooks:
        kernels.mixed(inputs, parameters, "softplus", None, 4)
    given = {each.untyped_storage().data_ptr() for each in leaves(inputs, parameters).values()}
    assert kept.keys() == given


def test_what_no_kernel_can_do_is_said() -> None:
    inputs, parameters = drawn(MIMO, torch.bfloat16)

    def why(device: str = "cuda", chunk: int = 16, **changed: Any) -> str:
        return kernels.obstacle(torch.device(device), inputs._replace(**changed), parameters, chunk)

    assert why("cpu") == "the tensors are on cpu"
    assert "mamba-ssm is not installed" in why()
    on_meta = mamba3.Inputs(*(each.detach().to("meta") for each in inputs))
    with pytest.raises(CppmegaError) as caught:
        mamba3.mixed(on_meta, parameters, "softplus", None, 16)
    assert caught.value.name == "no-kernel"


def test_mamba_ssm_is_imported_without_the_compiled_scan_of_mamba_1(tmp_path: Path) -> None:
    """In a process of its own, for a package that asks for the scan as mamba-ssm does."""
    (tmp_path / "scanning.py").write_text("import selective_scan_cuda as scan\n")
    code = """
    import importlib.util
    from cppmega.ops.mamba3.external import of_mamba_ssm

    scan = of_mamba_ssm("scanning").scan
    assert importlib.util.find_spec("selective_scan_cuda") is not None
    assert not hasattr(scan, "__path__")
    scan.fwd
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": python_path(tmp_path)},
        capture_output=True,
        text=True,
    )
    said = "ImportError: selective_scan_cuda.fwd: mamba-ssm was installed without"
    assert said in done.stderr, done.stderr


KINDS = {
    "norm": (WIDE._replace(length=100, out_norm=True), None, 0.0),
    "siso": (WIDE._replace(length=300, rank=1), None, 0.0),
    "siso, packed": (WIDE._replace(batch=1, length=300, rank=1), [0, 1, 16, 117, 300], 0.0),
}
"""What mamba-ssm's kernels compute; the tests of the scan have its own."""


@pytest.mark.gpu
@pytest.mark.parametrize("name", KINDS)
def test_errors_of_mamba_ssm_are_those_of_bf16_products(name: str) -> None:
    shape, bounds, dt = KINDS[name]
    mix = partial(mamba3.mixed, chunk=16 if shape.rank > 1 else 64)
    check(shape, torch.bfloat16, "softplus", bounds, dt, "cuda", mix=mix)
