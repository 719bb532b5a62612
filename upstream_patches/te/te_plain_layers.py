"""Call Transformer Engine's linear layers, experts and norms in 16 bits without its preparations.

What: A `TELinear` that nothing quantizes, without a bias and with TP 1, is a product of PyTorch,
    whose weight gradient is added to `main_grad` where that is on. Such a `TEGroupedLinear` calls
    the products of Transformer Engine itself. Every other call is Transformer Engine's, as are all
    while its functions are replaced, by which ModelOpt quantizes. The `RMSNorm` that `TENorm`
    builds runs its operation without a fuser, and keeps its class.
Why: Each call of such a linear layer takes 0.4 ms on the host, each norm 0.6 (while a profiler ran,
    NAM56R on two H200). In the forward pass the GPU waits for the host, and 222 such calls were a
    fifth of its time. The products of the experts began 0.9 ms after their last token had arrived,
    as the host can prepare them only once it knows how many each expert has.
Upstream: Not sent: Transformer Engine would have to shorten its own calls.
Remove: when these calls no longer take longer than the kernels that they start.
Numerics: reorders sums: PyTorch may choose other kernels for a product; experts and norms bitwise
"""

import gc
import sys
from typing import Any

from cppmega.edits import inserting, replacing
from cppmega.page import Edit, Patch, Source

EXTENSION = "megatron/core/extensions/transformer_engine.py"
MODULE = EXTENSION.removesuffix(".py").replace("/", ".")
LINEAR = f"{EXTENSION}:TELinear.forward"
EXPERTS = f"{EXTENSION}:TEGroupedLinear.forward"
NORM = f"{EXTENSION}:TENorm.__new__"
IMPORTS = ("from cppmega.runtime import te_plain_layers as _cppmega_te",)


def has_its_layers(args: Any) -> bool:
    """Whether this process has built linear layers of Transformer Engine.

    The arguments do not tell: `transformer_engine` is the parser's default, whatever `--spec`, a
    script or ModelOpt builds, and hybrid models ignore it. Before Megatron is imported, as in
    `cppmega advise`, there is nothing else to go by.
    """
    if "megatron.core" not in sys.modules:
        return getattr(args, "transformer_impl", None) == "transformer_engine"
    kind = getattr(sys.modules.get(MODULE), "TELinear", None)
    if not isinstance(kind, type):  # without the package, Megatron has a mock in its place
        return False
    return any(issubclass(type(each), kind) for each in gc.get_objects())


def _calling(call: str) -> Any:
    """Return what a function of `te_layers` computes; where that is None, go on."""
    return inserting(
        f"""
        plain = _cppmega_te.{call}
        if plain is not None:
            return plain, None
        """,
        before="""
        _is_first_microbatch = (
            None if self.disable_parameter_transpose_cache else self.is_first_microbatch
        )
        """,
    )


PATCH = Patch(
    purpose="speed",
    edits=(
        Edit(
            target=LINEAR,
            pins={
                "0.15.3": "3663527670687bbe",
                "0.16.1": "f3142d718db71163",
                "0.17.1": "f3142d718db71163",
                "0.18.2": "58db2de31739dcdc",
                "0.19.2": "58db2de31739dcdc",
                "main-d98e8a64": "58db2de31739dcdc",
            },
            edit=_calling("linear(self, x)"),
            imports=IMPORTS,
        ),
        Edit(
            target=EXPERTS,
            pins={
                "0.15.3": "c083515c445df921",
                "0.16.1": "4d02673a6f4f348b",
                "0.17.1": "4d02673a6f4f348b",
                "0.18.2": "4d02673a6f4f348b",
                "0.19.2": "4d02673a6f4f348b",
                "main-d98e8a64": "4d02673a6f4f348b",
            },
            edit=_calling("experts(self, x, m_splits)"),
            imports=IMPORTS,
            mark="",  # a model may have no experts
        ),
        Edit(
            target=NORM,
            pins={
                "0.15.3": "ad88d1cc3804cc54",
                "0.16.1": "ad88d1cc3804cc54",
                "0.17.1": "45d2bb55d66ef2d6",
                "0.18.2": "45d2bb55d66ef2d6",
                "0.19.2": "45d2bb55d66ef2d6",
                "main-d98e8a64": "67945aa17d101e6a",
            },
            edit=replacing("te.pytorch.RMSNorm", "_cppmega_te.norm(te.pytorch.RMSNorm)"),
            imports=IMPORTS,
            mark="",  # building a model does not show that its layers are called
        ),
    ),
    reached="forward",
    when=has_its_layers,
)


def fixed_upstream(source: Source) -> bool:
    return False  # the time is spent in Transformer Engine, whose text Megatron does not have


def verify() -> None:
    import functools
    import sys
    from types import SimpleNamespace
    from unittest import mock

    import torch

    from cppmega.runtime import te_plain_layers as te_layers

    from . import _te_modules

    prepared = []

    class _Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight, x):  # type: ignore[no-untyped-def]
            return x @ weight.t()

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            raise NotImplementedError

    class Linear(torch.nn.Module):
        def forward(self, x, **ignored):  # type: ignore[no-untyped-def]
            prepared.append(self)
            return x @ self.weight.t().to(x.dtype)

    class GroupedLinear(torch.nn.Module):
        def forward(self, x, splits, **ignored):  # type: ignore[no-untyped-def]
            prepared.append(self)
            return torch.cat([part @ self.weight0.t() for part in x.split(splits)])

    class RMSNorm(torch.nn.Module):
        def __init__(self, hidden_size=None, eps=1e-5, normalized_shape=None, **ignored):  # type: ignore[no-untyped-def]
            super().__init__()
            self.weight = torch.nn.Parameter(torch.rand(normalized_shape or hidden_size) + 1)

        def forward(self, x, *more, **named):  # type: ignore[no-untyped-def]
            prepared.append(self)
            return x

        def op_forward(self, ctx, x, before, after):  # type: ignore[no-untyped-def]
            scale = x.square().mean(-1, keepdim=True).rsqrt()
            ctx.save_for_backward(x, scale)
            return x * scale * self.weight

        def op_backward(self, ctx, gradient):  # type: ignore[no-untyped-def]
            x, scale = ctx.saved_tensors
            normed, own = x * scale, gradient * self.weight
            d_x = scale * (own - normed * (own * normed).mean(-1, keepdim=True))
            return d_x, ((gradient * normed).flatten(0, -2).sum(0),)

    te = _te_modules.extension(Linear=Linear, GroupedLinear=GroupedLinear, RMSNorm=RMSNorm)

    def layer(kind=te.TELinear, names=("weight",), **changed):  # type: ignore[no-untyped-def]
        made = kind.__new__(kind)
        torch.nn.Module.__init__(made)
        for name in names:
            setattr(made, name, torch.nn.Parameter(torch.randn(3, 4, dtype=torch.bfloat16)))
        settings = {
            "config": SimpleNamespace(cpu_offloading=False),
            **dict.fromkeys(("use_bias", "te_return_bias", "fuse_wgrad_accumulation"), False),
            **dict.fromkeys(("disable_parameter_transpose_cache", "te_quant_params")),
            "tp_size": 1,
            "num_gemms": len(names),
            "is_first_microbatch": True,
        }
        for name, value in {**settings, **changed}.items():
            setattr(made, name, value)
        return made

    x = torch.randn(5, 2, 4, dtype=torch.bfloat16, requires_grad=True)
    yes, no = (lambda: True), (lambda: False)
    states = SimpleNamespace(is_fp8_enabled=no, is_fp8_calibration=no)
    debug = SimpleNamespace(debug_enabled=False)
    module = SimpleNamespace(
        FP8GlobalStateManager=states, TEDebugState=debug, is_cpu_offload_enabled=no
    )
    on_gpu = mock.patch.object(torch.Tensor, "is_cuda", True)
    loaded = mock.patch.dict(sys.modules, {te_layers._LINEAR: module})
    quantized = mock.patch.object(
        te, "_get_fp8_autocast_for_quant_params", mock.MagicMock(), create=True
    )

    def calls(called, *given, **named):  # type: ignore[no-untyped-def]
        """How often Transformer Engine computes a call itself."""
        before = len(prepared)
        called(*given, **named)
        return len(prepared) - before

    class Quantized(torch.nn.Parameter):
        pass

    class Gathered(torch.Tensor):
        pass

    gathered = layer()
    gathered.weight.__fsdp_param__ = True
    wide = layer().float()
    late = SimpleNamespace(delay_wgrad_compute=yes)
    with on_gpu, loaded, quantized:
        mine = layer()
        out, bias = mine(x)
        assert not prepared, "Transformer Engine prepares for quantization"
        assert bias is None and out.equal(x @ mine.weight.t())
        fused = layer(fuse_wgrad_accumulation=True)
        fused.weight.main_grad = torch.ones(3, 4)
        sums = fused(x)[0]
        assert not prepared, "Transformer Engine prepares for quantization"
        for other in (
            {"tp_size": 2},
            {"use_bias": True},
            {"te_quant_params": object()},
            {"fsdp_group": object()},
            {"wgrad_store": late},
            {"config": SimpleNamespace(cpu_offloading=True)},
            {"weight": Quantized(torch.randn(3, 4, dtype=torch.bfloat16))},
        ):
            assert calls(layer(**other), x) == 1, f"a product alone cannot compute {other}"
        assert not calls(layer(wgrad_store=SimpleNamespace(delay_wgrad_compute=no)), x)
        assert calls(gathered, x) == calls(wide, x.float()) == calls(mine, x.half()) == 1
        assert calls(mine, x.as_subclass(Gathered)) == 1
        for now in (
            mock.patch.object(states, "is_fp8_enabled", yes),
            mock.patch.object(states, "is_fp8_calibration", yes),
            mock.patch.object(module, "is_cpu_offload_enabled", yes),
            mock.patch.object(debug, "debug_enabled", True),
            torch.autocast("cpu", torch.bfloat16),
            mock.patch.object(torch.compiler, "is_compiling", yes),
            mock.patch.object(torch.Tensor, "is_cuda", False),
        ):
            with now:
                assert calls(mine, x) == 1, "a product alone is not what happens now"
            assert not calls(mine, x)
        with mock.patch.object(module, "TEDebugState", None):  # before it could debug
            assert not calls(mine, x)
        # As ModelOpt quantizes: in the call of a layer, the function that it calls is replaced.
        gemm, own_backward = mock.Mock(), _Linear.backward
        own = {"Linear": Linear, "_Linear": _Linear, "general_gemm": gemm}
        theirs = {te_layers._PRODUCTS: SimpleNamespace(general_gemm=gemm)}
        other = type("Other", (_Linear,), {"__module__": __name__})
        with (
            mock.patch.multiple(module, create=True, **own),
            mock.patch.dict(sys.modules, theirs),
        ):
            assert not calls(mine, x), "Transformer Engine prepares for quantization"
            for replaced in (
                mock.patch.object(_Linear, "apply", mock.Mock()),
                mock.patch.object(_Linear, "forward", lambda *given: None),
                mock.patch.object(_Linear, "backward", functools.partial(own_backward)),
                mock.patch.object(module, "general_gemm", mock.Mock()),
                mock.patch.object(module, "_Linear", other),
            ):
                with replaced:
                    assert calls(mine, x) == 1, "a function that quantizes is left out"
            forward = Linear.forward
            with mock.patch.object(Linear, "forward", lambda *given, **more: forward(*given)):
                assert calls(mine, x) == 1, "a layer that quantizes is left out"
    upstream = torch.randn(5, 2, 3)
    exact = upstream.double().flatten(0, 1).t() @ x.detach().double().flatten(0, 1)
    torch.autograd.backward((out, sums), (upstream.bfloat16(),) * 2)
    for found, wanted in ((mine.weight.grad, exact), (fused.weight.main_grad, 1 + exact)):
        torch.testing.assert_close(found.double(), wanted, rtol=5e-2, atol=5e-2)

    added = []

    def products(a, b, out, *ignored, layout, accumulate=False, **more):  # type: ignore[no-untyped-def]
        if layout == "NT":  # weight gradients
            added.append(accumulate)
            for given, rows, total in zip(b, a, out, strict=True):
                total.copy_(given.t().to(total) @ rows.to(total) + accumulate * total)
            return
        found = [
            part @ (weight.t() if layout == "TN" else weight)
            for weight, part in zip(a, b, strict=True)
        ]
        out[0].copy_(torch.cat(found))

    theirs = {te_layers._PRODUCTS: SimpleNamespace(general_grouped_gemm=products)}
    rows, names = torch.randn(5, 4, dtype=torch.bfloat16), ("weight0", "weight1")
    upstream = torch.randn(5, 3, dtype=torch.bfloat16)

    def experts(**changed):  # type: ignore[no-untyped-def]
        return layer(te.TEGroupedLinear, names, **changed)

    for changed, adds in (
        ({"fuse_wgrad_accumulation": True}, [False, True]),
        ({"fuse_wgrad_accumulation": True, "is_first_microbatch": False}, [True, True]),
        ({"fuse_wgrad_accumulation": True, "disable_parameter_transpose_cache": True}, [True] * 2),
        ({}, [False, False]),
    ):
        two = experts(**changed)
        for name in names if changed else ():
            getattr(two, name).main_grad = torch.ones(3, 4)
        for _ in range(2):  # micro-batches
            with on_gpu, loaded, quantized, mock.patch.dict(sys.modules, theirs):
                before = len(prepared)
                out, bias = two(rows, [2, 3])
                assert len(prepared) == before, "Transformer Engine prepares for quantization"
            wanted = [rows[:2] @ two.weight0.t(), rows[2:] @ two.weight1.t()]
            assert bias is None and out.equal(torch.cat(wanted)) and not two.is_first_microbatch
            out.backward(upstream)
        assert added == [each for each in adds for _ in range(1)], (changed, added)
        added.clear()
    with on_gpu, loaded, quantized, mock.patch.dict(sys.modules, theirs):
        for other in (
            {"use_bias": True},
            {"single_grouped_weight": True},
            {"use_grouped_tensor": True},
        ):
            assert calls(experts(**other), rows, [2, 3]) == 1, f"products cannot compute {other}"
        assert not calls(experts(), rows, [2, 3])
        assert calls(experts(), rows[:, None], [2, 3]) == 1, "rows of more dimensions"
        assert calls(experts(), rows, (2, 3)) == 1, "counts that stay on the device"
        with mock.patch.object(states, "is_fp8_enabled", yes):
            assert calls(experts(), rows, [2, 3]) == 1, "quantized products"
    config = SimpleNamespace(
        **dict.fromkeys(("sequence_parallel", "layernorm_zero_centered_gamma"), False),
        **dict.fromkeys(("fused_residual_rmsnorm",), False),
        normalization="RMSNorm",
    )
    with mock.patch.object(te, "_get_extra_te_kwargs", lambda config: {}):
        norm = te.TENorm(config, 4)
    assert type(norm) is RMSNorm, "ModelOpt does not find what it prunes"
    values = torch.randn(5, 2, 4, requires_grad=True)
    upstream = torch.randn(5, 2, 4)
    found = torch.autograd.grad(norm(values), (values, norm.weight), upstream)
    exact = torch.nn.functional.rms_norm(values, (4,), norm.weight, eps=0.0)
    wanted = torch.autograd.grad(exact, (values, norm.weight), upstream)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
    assert not calls(norm, values), "a fuser is built for a single norm"
    assert calls(norm, values, None) == calls(norm, values, named=None) == 1
    with mock.patch.object(torch.compiler, "is_compiling", yes):
        assert calls(norm, values) == 1, "the operation cannot be traced"
    with mock.patch.object(RMSNorm, "forward", lambda self, x: prepared.append(x)):
        assert calls(norm, values) == 1, "somebody's own forward is left out"
    norm.to("meta")
    assert calls(norm, values) == 1, "a weight without values"
