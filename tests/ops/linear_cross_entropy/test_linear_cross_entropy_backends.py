"""Which backend linear cross-entropy chooses, and what it and Liger refuse."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cppmega.errors import CppmegaError  # noqa: E402
from cppmega.ops import linear_cross_entropy as op  # noqa: E402
from cppmega.ops.linear_cross_entropy import external, linear_cross_entropy  # noqa: E402
from tests.ops.linear_cross_entropy.cases import make_case  # noqa: E402

pytestmark = pytest.mark.slow


def test_auto_says_once_what_it_chose(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(op, "_logged", set())
    monkeypatch.delenv(op.ENVIRONMENT, raising=False)
    case = make_case()
    with caplog.at_level(logging.WARNING):
        outputs = [linear_cross_entropy(*case[:3]) for _ in range(2)]
    assert {out.backend for out in outputs} == {"reference"}
    assert [r.getMessage() for r in caplog.records] == [
        "linear cross-entropy: auto chose reference: the tensors are on cpu"
    ]


def test_environment_names_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case()
    monkeypatch.setenv(op.ENVIRONMENT, "reference")
    assert linear_cross_entropy(*case[:3]).backend == "reference"
    monkeypatch.setenv(op.ENVIRONMENT, "triton")
    with pytest.raises(CppmegaError, match="linear-ce-backend"):
        linear_cross_entropy(*case[:3])
    monkeypatch.setenv(op.ENVIRONMENT, "tritn")
    with pytest.raises(CppmegaError, match="linear-ce-backend"):
        linear_cross_entropy(*case[:3])


def test_liger_refuses_the_cpu() -> None:
    case = make_case(dtype=torch.bfloat16)
    with pytest.raises(CppmegaError, match=r"linear-ce-backend: .*cpu"):
        linear_cross_entropy(*case[:3], backend="liger")


@pytest.mark.parametrize("field", ["tensor_parallel", "padded", "logit_scale", "main_grad"])
def test_liger_refuses_what_it_cannot_do(field: str) -> None:
    plain = external.Request(False, False, 1.0, False, False, -100)
    wanted = plain._replace(**{field: 2.0 if field == "logit_scale" else True})
    on_cuda = torch.empty(1, dtype=torch.bfloat16, device="meta")

    class Fake:
        device = torch.device("cuda")
        dtype = torch.bfloat16

    external._refuse(Fake(), plain)  # type: ignore[arg-type]
    with pytest.raises(CppmegaError, match="linear-ce-backend"):
        external._refuse(Fake(), wanted)  # type: ignore[arg-type]
    with pytest.raises(CppmegaError, match="meta"):
        external._refuse(on_cuda, plain)


@pytest.mark.parametrize("version", ["0.8.4", "0.5.0", None])
def test_an_old_or_missing_liger_is_refused(
    version: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(package: str) -> str:
        if version is None:
            raise external.importlib.metadata.PackageNotFoundError(package)
        return version

    monkeypatch.setattr(external.importlib.metadata, "version", installed)
    with pytest.raises(CppmegaError, match="linear-ce-backend"):
        external._require_installed()


@pytest.fixture
def fake_liger(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A Liger that is installed, runs on the CPU and returns what the test says."""

    class Function:
        returns: Any = ()

        @classmethod
        def apply(cls, *args: Any) -> Any:
            return cls.returns

    module: Any = type(sys)("liger_kernel.ops.fused_linear_cross_entropy")
    module.LigerFusedLinearCrossEntropyFunction = Function
    for name in ("liger_kernel", "liger_kernel.ops"):
        monkeypatch.setitem(sys.modules, name, type(sys)(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(external, "_refuse", lambda *a, **k: None)
    monkeypatch.setattr(external, "_require_installed", lambda: None)
    yield Function


def test_another_return_arity_of_liger_is_refused(fake_liger: Any) -> None:
    case = make_case()
    fake_liger.returns = (case.weights, None)
    with pytest.raises(CppmegaError, match="returned 2 instead of 4"):
        linear_cross_entropy(*case[:3], backend="liger")
    fake_liger.returns = (case.weights, None, None, None)
    out = linear_cross_entropy(*case[:3], backend="liger")
    assert out.backend == "liger"
    assert out.argmax is None
    assert torch.equal(out.loss, case.weights)


@pytest.mark.parametrize(
    "change",
    [
        {"weight": torch.zeros(5, 7)},
        {"targets": torch.zeros(3, dtype=torch.long)},
        {"targets": torch.zeros(4)},
        {"weight": torch.zeros(5, 6, dtype=torch.bfloat16)},
        {"loss_weights": torch.ones(4)},
        {"loss_weights": torch.ones(3), "upstream": "weighted-scalar"},
        {"upstream": "mean"},
        {"hidden_grad": "sum"},
        {"vocab_size": 6},
        {"vocab_size": 0},
    ],
)
def test_arguments_that_do_not_fit(change: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {
        "hidden": torch.zeros(4, 6),
        "weight": torch.zeros(5, 6),
        "targets": torch.zeros(4, dtype=torch.long),
    }
    with pytest.raises(CppmegaError, match="linear-ce-arguments"):
        linear_cross_entropy(**(arguments | change))
