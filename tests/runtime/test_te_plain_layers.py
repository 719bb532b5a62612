"""When a linear layer of Transformer Engine is one product, and both layers against its own."""

from __future__ import annotations

import copy
import functools
import pickle
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cppmega.ops.common import weight_gradient  # noqa: E402
from cppmega.runtime import te_plain_layers as te_layers  # noqa: E402


def quiet(state: str = "") -> ModuleType:
    """Transformer Engine's module of linear layers, in a run for which only `state` is on."""
    names = ("is_fp8_enabled", "is_fp8_calibration", "is_cpu_offload_enabled")
    fp8, calibrates, offloads = ((lambda on=name == state: on) for name in names)
    made: Any = ModuleType("linear")
    made.FP8GlobalStateManager = SimpleNamespace(is_fp8_enabled=fp8, is_fp8_calibration=calibrates)
    made.is_cpu_offload_enabled = offloads
    made.TEDebugState = SimpleNamespace(debug_enabled=state == "debug_enabled")
    return made  # type: ignore[no-any-return]


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take CPU tensors for GPU tensors."""
    monkeypatch.setattr(te_layers, "_on_gpu", lambda x: True)
    monkeypatch.setitem(sys.modules, te_layers._LINEAR, quiet())


def layer(weight: Any = None, **changed: Any) -> Any:
    """What is asked of a `TELinear`, and what it has for that."""
    if weight is None:
        weight = torch.nn.Parameter(torch.randn(3, 4, dtype=torch.bfloat16))
    plain = {"use_bias": False, "tp_size": 1, "fuse_wgrad_accumulation": False}
    config = SimpleNamespace(cpu_offloading=False)
    return SimpleNamespace(**{"weight": weight, "config": config, **plain, **changed})


X = torch.randn(5, 4, dtype=torch.bfloat16)
TE = """
from torch import autograd, nn

class _{0}(autograd.Function):
    @staticmethod
    def forward(ctx, weight, x):
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, gradient

class {0}(nn.Module):
    @no_torch_dynamo
    def forward(self, x):
        return _{0}.apply(self.weight, x)
"""
JIT = """
from functools import wraps

def no_torch_dynamo(function):
    return wraps(function)(lambda *given: function(*given))
"""


class Quantized(torch.nn.Parameter):
    """A weight with a type of its own."""


def test_a_plain_layer_is_a_product(on_gpu: None) -> None:
    plain = layer()
    out = te_layers.linear(plain, X)
    assert out is not None and out.equal(X @ plain.weight.t())
    plain.tp_size = 2  # what does not change after the first call is not asked again
    assert te_layers.linear(plain, X) is not None


@pytest.mark.parametrize(
    "changed",
    [
        {"use_bias": True},
        {"tp_size": 2},
        {"te_quant_params": object()},
        {"fsdp_group": object()},
        {"wgrad_store": SimpleNamespace(delay_wgrad_compute=lambda: True)},
        {"config": SimpleNamespace(cpu_offloading=True)},
        {"weight": Quantized(torch.randn(3, 4).bfloat16())},
        {"weight": torch.nn.Parameter(torch.randn(3, 4))},
        {"weight": torch.nn.Parameter(torch.randn(3, 4).half())},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_layer_that_is_more_than_a_product_stays(on_gpu: None, changed: dict[str, Any]) -> None:
    assert te_layers.linear(layer(**changed), X) is None


def test_a_weight_of_megatrons_fsdp_stays(on_gpu: None) -> None:
    own = layer()
    own.weight.__fsdp_param__ = True
    assert te_layers.linear(own, X) is None


@pytest.mark.parametrize(
    "state", ["is_fp8_enabled", "is_fp8_calibration", "is_cpu_offload_enabled", "debug_enabled"]
)
def test_what_transformer_engine_does_now_is_asked_in_each_call(
    on_gpu: None, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    own = layer()
    assert te_layers.linear(own, X) is not None
    monkeypatch.setitem(sys.modules, te_layers._LINEAR, quiet(state))
    assert te_layers.linear(own, X) is None


def test_nothing_is_taken_on_a_cpu_or_under_autocast(
    on_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = layer()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert te_layers.linear(own, X) is None
    monkeypatch.undo()
    assert te_layers.linear(own, X) is None


def experts(**changed: Any) -> Any:
    """What is asked of a `TEGroupedLinear` of two experts."""
    weights = {
        f"weight{at}": torch.nn.Parameter(torch.randn(3, 4, dtype=torch.bfloat16)) for at in (0, 1)
    }
    own = {"num_gemms": 2, "_parameters": weights, "is_first_microbatch": True}
    plain = {"disable_parameter_transpose_cache": False, "single_grouped_weight": False}
    return layer(**{**own, **plain, **changed})


@pytest.fixture
def products(on_gpu: None, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The calls of Transformer Engine's products, which compute nothing."""
    calls: list[dict[str, Any]] = []

    def general_grouped_gemm(a: Any, b: Any, out: Any, *quantized: Any, **more: Any) -> None:
        calls.append({"sizes": [len(each) for each in b], "to": out, **more})

    made: Any = ModuleType("cpp_extensions")
    made.general_grouped_gemm = general_grouped_gemm
    monkeypatch.setitem(sys.modules, te_layers._PRODUCTS, made)
    return calls


def test_plain_experts_are_products(products: list[dict[str, Any]]) -> None:
    own = experts()
    out = te_layers.experts(own, X, [2, 3])
    assert out is not None and out.shape == (5, 3) and out.requires_grad
    assert products[0]["sizes"] == [2, 3] and not own.is_first_microbatch


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_the_first_micro_batch_replaces_gradients(
    products: list[dict[str, Any]], cached: bool, first: bool
) -> None:
    state = {"is_first_microbatch": first, "disable_parameter_transpose_cache": not cached}
    own = experts(fuse_wgrad_accumulation=True, **state)
    buffers = []
    for weight in own._parameters.values():
        weight.main_grad = torch.zeros(3, 4)
        buffers.append(weight.main_grad)
    out = te_layers.experts(own, X, [2, 3])
    assert out is not None
    out.backward(torch.ones_like(out))
    assert products[-1]["accumulate"] is not (first and cached)
    assert [id(each) for each in products[-1]["to"]] == [id(buffer) for buffer in buffers]


@pytest.mark.parametrize(
    "changed",
    [
        {"use_bias": True},
        {"tp_size": 2},
        {"wgrad_store": SimpleNamespace(delay_wgrad_compute=lambda: True)},
        {"single_grouped_weight": True},
        {"use_grouped_tensor": True},
        {"_parameters": {"weight": torch.nn.Parameter(torch.randn(2, 3, 4).bfloat16())}},
        {"_parameters": {f"weight{at}": Quantized(torch.randn(3, 4).bfloat16()) for at in (0, 1)}},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_experts_that_are_more_than_products_stay(
    products: list[dict[str, Any]], changed: dict[str, Any]
) -> None:
    own = experts(**changed)
    assert te_layers.experts(own, X, [2, 3]) is None
    assert own.is_first_microbatch and not products


def test_numbers_of_tokens_on_a_device_are_not_read(products: list[dict[str, Any]]) -> None:
    assert te_layers.experts(experts(), X, torch.tensor([2, 3])) is None
    assert not products


CALLS: dict[str, tuple[str, str, Callable[[], Any]]] = {
    "Linear": (te_layers._LINEAR, "general_gemm", lambda: te_layers.linear(layer(), X)),
    "GroupedLinear": (
        *(te_layers._EXPERTS, "general_grouped_gemm"),
        lambda: te_layers.experts(experts(), X, [2, 3]),
    ),
}


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        *(("_{}", "apply"), ("_{}", "forward"), ("_{}", "backward")),  # ModelOpt: the first two
        *(("{}", "forward"), ("", "_{}"), ("", "product")),
    ],
)
def test_a_replaced_function_of_transformer_engine_is_called(
    products: Any, monkeypatch: pytest.MonkeyPatch, kind: str, owner: str, name: str
) -> None:
    module, product, call = CALLS[kind]
    jit: Any = ModuleType("transformer_engine.pytorch.jit")
    exec(JIT, vars(jit))
    te: Any = quiet()
    te.__name__, te.no_torch_dynamo = module, jit.no_torch_dynamo
    exec(TE.format(kind), vars(te))
    setattr(te, product, vars(sys.modules[te_layers._PRODUCTS]).setdefault(product, len))
    monkeypatch.setitem(sys.modules, module, te)
    assert call() is not None

    replaced = getattr(te, owner.format(kind)) if owner else te
    name = product if name == "product" else name.format(kind)
    theirs = getattr(replaced, name)
    another: Any = functools.wraps(theirs)(lambda *given: theirs(*given))
    if isinstance(theirs, type):
        another = type(theirs)(name, (theirs,), {})
    with monkeypatch.context() as patch:
        patch.setattr(replaced, name, another)
        assert call() is None
    assert call() is not None


def test_a_sum_of_another_type_needs_a_product_of_two_types(
    on_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed, own, without = (layer(fuse_wgrad_accumulation=True) for _ in range(3))
    mixed.weight.main_grad, own.weight.main_grad = torch.zeros(3, 4), torch.zeros(3, 4).bfloat16()
    assert all(te_layers.linear(each, X) is not None for each in (mixed, own, without))
    monkeypatch.setattr(weight_gradient, "MIXED", False)  # PyTorch up to 2.7
    assert te_layers.linear(mixed, X) is None
    assert all(te_layers.linear(each, X) is not None for each in (own, without))


class Norm(torch.nn.Module):
    """As Transformer Engine's: an operation whose `forward` builds a fuser."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.weight, self.fused = torch.nn.Parameter(torch.rand(size) + 1), 0

    def forward(self, x: Any) -> Any:
        self.fused += 1
        return self.op_forward(SimpleNamespace(save_for_backward=lambda *_: None), x, None, None)

    def op_forward(self, ctx: Any, x: Any, before: Any, after: Any) -> Any:
        ctx.save_for_backward(x)
        return x * self.weight

    def op_backward(self, ctx: Any, gradient: Any) -> Any:
        (x,) = ctx.saved_tensors
        return gradient * self.weight, ((gradient * x).sum(0),)


def test_a_norm_keeps_its_class_and_runs_without_a_fuser() -> None:
    norm = te_layers.norm(Norm)(size=4)
    assert type(norm) is Norm and "forward" not in norm.state_dict()
    x = torch.randn(5, 4, requires_grad=True)
    upstream = torch.randn(5, 4)
    for each in (norm, copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        out = each(x)
        assert out.equal(x * norm.weight)
        found = torch.autograd.grad(out, (x, each.weight), upstream) if each.fused == 0 else ()
        wanted = torch.autograd.grad(x * norm.weight, (x, norm.weight), upstream)
        assert all(mine.equal(other) for mine, other in zip(found, wanted, strict=bool(found)))
    assert norm.fused == 0 and copy.deepcopy(norm).weight is not norm.weight


def test_a_norm_with_another_forward_is_called_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = te_layers.norm(Norm)(size=4)
    x = torch.ones(2, 4)

    class Quantized(Norm):
        def forward(self, x: Any) -> Any:
            return super().forward(2 * x)

    norm.__class__ = Quantized  # as ModelOpt does
    assert norm(x).equal(2 * norm.weight.expand(2, 4)) and norm.fused == 1
    norm.__class__ = Norm
    assert norm(x).equal(norm.weight.expand(2, 4)) and norm.fused == 1
    monkeypatch.setattr(Norm, "forward", lambda self, x: 3 * x)
    assert norm(x).equal(3 * x)


def test_a_norm_without_operations_stays_as_it_is() -> None:
    assert te_layers.norm(torch.nn.RMSNorm) is torch.nn.RMSNorm


@pytest.mark.gpu
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_norm_has_the_bits_of_its_own_call(dtype: Any, zero_centered: bool) -> None:
    te = pytest.importorskip("transformer_engine.pytorch")
    torch.manual_seed(1)
    settings = {"zero_centered_gamma": zero_centered, "device": "cuda", "dtype": dtype}
    theirs = te.RMSNorm(4096, **settings)
    ours = te_layers.norm(te.RMSNorm)(4096, **settings)
    assert type(ours) is te.RMSNorm
    with torch.no_grad():
        theirs.weight.add_(0.1 * torch.randn_like(theirs.weight))
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(77, 3, 4096, device="cuda", dtype=dtype)
    upstream = torch.randn_like(x)
    found = []
    for norm in (ours, theirs):
        own = x.clone().requires_grad_()
        out = norm(own)
        found.append((out, *torch.autograd.grad(out, (own, norm.weight), upstream)))
    assert all(mine.equal(other) for mine, other in zip(*found, strict=True))
    with torch.no_grad():
        assert ours(x).equal(theirs(x))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("tokens", "width"), [(4096, 1024), (333, 72)])
def test_a_linear_layer_is_as_exact_as_its_own_call(
    dtype: Any, fused: bool, tokens: int, width: int
) -> None:
    te = pytest.importorskip("transformer_engine.pytorch")
    torch.manual_seed(2)
    x = torch.randn(tokens, 2, 512, device="cuda", dtype=dtype)
    upstream = torch.randn(tokens, 2, width, device="cuda", dtype=dtype)
    settings = {"bias": False, "params_dtype": dtype, "fuse_wgrad_accumulation": fused}
    own: Any = te.Linear(512, width, **settings)
    own.config = SimpleNamespace(cpu_offloading=False)

    def results(call: Any) -> list[Any]:
        own.weight.main_grad = torch.full((width, 512), 0.5, device="cuda")
        own.weight.grad_added_to_main_grad, own.weight.grad = False, None
        given = x.clone().requires_grad_()
        out = call(given)
        out.backward(upstream)
        assert own.weight.grad_added_to_main_grad is fused
        weight = own.weight.main_grad if fused else own.weight.grad
        return [out, given.grad, weight]

    def taken(given: Any) -> Any:
        out = te_layers.linear(own, given)
        assert out is not None, "Transformer Engine computes it"
        return out

    rows, of_rows = x.flatten(0, 1).double(), upstream.flatten(0, 1).double()
    exact = [
        x.double() @ own.weight.double().t(),
        upstream.double() @ own.weight.double(),
        of_rows.t() @ rows + 0.5 * fused,
    ]
    ours, theirs, again = results(taken), results(own), results(taken)
    for mine, other, wanted in zip(ours, theirs, exact, strict=True):
        error, allowed = ((each.double() - wanted).norm() for each in (mine, other))
        assert mine.dtype == other.dtype
        assert error <= 1.02 * allowed + 1e-7 * wanted.norm(), (float(error), float(allowed))
    assert all(mine.equal(other) for mine, other in zip(ours, again, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("together", ["0", "1"])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("splits", [[700, 4, 0, 320], [1, 0, 0, 0], [1024] * 4])
def test_experts_have_the_bits_of_their_own_call(
    splits: list[int], fused: bool, first: bool, together: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    te = pytest.importorskip("transformer_engine.pytorch")
    monkeypatch.setenv("NVTE_USE_CUTLASS_GROUPED_GEMM", together)
    torch.manual_seed(3)
    x = torch.randn(sum(splits), 512, device="cuda", dtype=torch.bfloat16)
    upstream = torch.randn(sum(splits), 256, device="cuda", dtype=torch.bfloat16)
    settings = {"bias": False, "params_dtype": torch.bfloat16, "fuse_wgrad_accumulation": fused}
    own: Any = te.GroupedLinear(len(splits), 512, 256, **settings)
    own.config = SimpleNamespace(cpu_offloading=False)
    own.disable_parameter_transpose_cache = False
    weights = [getattr(own, f"weight{at}") for at in range(len(splits))]

    def results(call: Any) -> list[Any]:
        for weight in weights:
            weight.main_grad = torch.full((256, 512), 0.0 if first else 0.5, device="cuda")
            weight.grad_added_to_main_grad, weight.grad = False, None
        given = x.clone().requires_grad_()
        out = call(given)
        out.backward(upstream)
        assert all(weight.grad_added_to_main_grad is fused for weight in weights)
        return [out, given.grad, *(w.main_grad if fused else w.grad for w in weights)]

    def taken(given: Any) -> Any:
        own.is_first_microbatch = first
        out = te_layers.experts(own, given, splits)
        assert out is not None, "Transformer Engine prepares it"
        return out

    ours = results(taken)
    theirs = results(lambda given: own(given, splits, is_first_microbatch=first))
    assert all(mine.equal(other) for mine, other in zip(ours, theirs, strict=True))
    exact = torch.cat(
        [part @ w.double().t() for part, w in zip(x.double().split(splits), weights, strict=True)]
    )
    assert (ours[0].double() - exact).norm() <= 4e-3 * exact.norm()
