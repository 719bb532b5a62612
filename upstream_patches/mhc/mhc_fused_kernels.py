"""Compute the hyper-connections of dev and 0.20 with fused kernels, or refuse the run.

What: With `--use-fused-mhc`, the `HyperConnectionModule` of a Megatron that has one (dev, and 0.20
    as announced) computes weights, aggregation and update with `cppmega.ops.mhc`, also where `mhc`
    is recomputed. The three gradients of the streams are summed in place. A model for which no
    kernel can run is refused when it is built. With dropout between a sub-layer and the streams,
    the end of a site remains Megatron's own code.
Why: Megatron selects a backend for each op; where it has none, it warns and computes in plain
    torch, so that a run may set `--use-fused-mhc` and use no fused kernel at all. On Hopper without
    cuTile the projection is compiled in fp32, and the backward of the aggregation is eager: forward
    and backward of one site take 23.5 ms, and 8.9 ms with cuTile, compared with 5.9 ms (s 8192,
    b 4, n 4, C 7168, one H200; benchmarks/results/mhc_cutile_h200.md).
Upstream: Not sent: the kernels are those of `cppmega.ops`. Written for dev at d48bd6be0a, and for
    #6401 (0.20) at 2651afeebe.
Remove: when Megatron's kernels for the projection and for the aggregation's backward on Hopper are
    as fast: `verify` times a site on such a GPU, and passes without the page.
Numerics: changes results: the weights of the streams stay in fp32, where Megatron rounds them to
    the dtype of the streams; sums are in a different order
"""

from __future__ import annotations

from typing import Any

from cppmega.edits import appending, in_order, inserting, replacing
from cppmega.page import Edit, Patch, Source

MODULE = "megatron/core/transformer/hyper_connection.py:HyperConnectionModule"
BACKENDS = "megatron/core/fusions/fused_mhc_kernels.py:_mhc_backend_status"

USED = """
if config.use_fused_mhc:
    from cppmega.runtime import mhc_fused_kernels as mhc_in_megatron

    mhc_in_megatron.use_kernels(self)
"""
WEIGHTS = """
def cppmega_weights():
    from cppmega.runtime import mhc_fused_kernels as mhc_in_megatron

    return tuple(mhc_in_megatron.weights(self, x))
if self.config.use_fused_mhc:
    return cppmega_weights()
"""
READ = """
def cppmega_read():
    from cppmega.runtime import mhc_fused_kernels as mhc_in_megatron

    return mhc_in_megatron.read(self, hidden_states)
if self.config.use_fused_mhc:
    return cppmega_read()
"""


def uses_kernels(args: Any) -> bool:
    """Whether the run requests fused kernels for its hyper-connections."""
    return bool(getattr(args, "use_fused_mhc", False))


PATCH = Patch(
    purpose="feature",
    edits=(
        Edit(
            target=f"{MODULE}.__init__",
            pins={"dev-d48bd6be": "7d29d508262f398a", "pr6401-2651afee": "8246cc545d6e451d"},
            # Megatron's log line that names its backends would be wrong.
            edit=in_order(replacing("log_fused_mhc_backend_once()", ""), appending(USED)),
            mark="",
        ),
        Edit(
            target=f"{MODULE}.compute_mappings",
            pins={"dev-d48bd6be": "4b15c77c8168495c", "pr6401-2651afee": "4b15c77c8168495c"},
            edit=inserting(WEIGHTS, before="s, b, _ = x.shape"),
            mark="cppmega_weights",
        ),
        Edit(
            target=f"{MODULE}._forward_normal",
            pins={"dev-d48bd6be": "f90a77210b5c2fc9", "pr6401-2651afee": "f90a77210b5c2fc9"},
            edit=inserting(
                READ,
                before="""
                hs_for_mappings, hs_for_aggregate, hs_for_residual = BroadcastTensorFused.apply(
                    hidden_states, self._fused_add_3_op
                )
                """,
            ),
            mark="cppmega_read",
        ),
        Edit(
            target=f"{MODULE}._apply_h_post",
            pins={"dev-d48bd6be": "462f3ef895ecf741", "pr6401-2651afee": "462f3ef895ecf741"},
            edit=replacing("h_post.unsqueeze(-1)", "h_post.to(x.dtype).unsqueeze(-1)"),
            mark="",
        ),
        Edit(
            target=f"{MODULE}.apply_h_res",
            pins={"dev-d48bd6be": "b8adf2bcc96fce3d", "pr6401-2651afee": "b8adf2bcc96fce3d"},
            edit=replacing("h_res.view(s * b, n, n)", "h_res.to(residual.dtype).view(s * b, n, n)"),
            mark="",
        ),
    ),
    reached="forward",
    when=uses_kernels,
    feature=(BACKENDS,),
)


def fixed_upstream(source: Source) -> bool:
    # The two ops whose only kernels are cuTile's; without cuTile they run in plain torch.
    text = source.text(BACKENDS).replace("'", '"')
    return bool(text) and '"cutile" if is_cutile_available() else "native"' not in text


def verify() -> None:
    import contextlib
    from unittest import mock

    import torch

    from cppmega.errors import CppmegaError
    from cppmega.ops import mhc

    plain = contextlib.ExitStack()
    if not torch.cuda.is_available():
        try:
            _site(16, torch.bfloat16)
        except CppmegaError as error:
            assert error.name == "no-kernel", error
        else:
            raise AssertionError("the model is built although no kernel can run")
        # The reference instead of the kernels: tests/ops/mhc/test_mhc.py compares the two.
        plain.enter_context(mock.patch.object(mhc, "obstacle", lambda *sizes: None))
    with plain, torch._dynamo.config.patch(disable=True):
        _assert_reference(_site(16, torch.float32), 1e-3)
        # Megatron's own code at the end of a site, which needs weights of the streams' dtype.
        _assert_reference(_site(16, torch.bfloat16, hidden_dropout=0.5), 0.1)
    if torch.cuda.is_available():
        _assert_fast(_site(4096, torch.bfloat16))


def _site(width: int, dtype: Any, **options: Any) -> Any:
    """A module with four streams, as a model with fused kernels builds it."""
    import dataclasses

    import torch
    from megatron.core.transformer.hyper_connection import HyperConnectionModule
    from megatron.core.transformer.transformer_config import TransformerConfig

    from cppmega.proof import small_models

    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    names = "enable_mhc_connections", "mhc_num_residual_streams"
    if names[0] not in fields:  # dev
        names = "enable_hyper_connections", "num_residual_streams"
    config = small_models.config(
        **dict(zip(names, (True, 4), strict=True)),
        hidden_size=width,
        use_fused_mhc=True,
        params_dtype=dtype,
        **options,
    )
    torch.manual_seed(0)
    site = HyperConnectionModule(config, layer_number=1)
    for parameter in site.parameters():  # as far from their initial values as after training
        torch.nn.init.normal_(parameter, std=0.5)
    return site.to("cuda" if torch.cuda.is_available() else "cpu")


def _assert_reference(site: Any, bound: float) -> None:
    """Compare the output and gradients of a site around a sub-layer with fp64."""
    from unittest import mock

    import torch

    from cppmega.ops.mhc import naive as mhc_reference

    def dropout(x, p=0.5, training=True, inplace=False):  # of known values
        return x * (p + 1)

    place = {"device": site.bias.device, "dtype": site.config.params_dtype}
    streams = torch.randn(3, 2, 4 * site.hidden_size, **place, requires_grad=True)
    bias, factors = torch.randn(site.hidden_size, **place), torch.randn_like(streams)
    inputs = [
        *(streams, site.mapping_proj.weight, site.alpha_pre, site.alpha_post, site.alpha_res),
        site.bias,
    ]
    p = site.config.hidden_dropout
    with mock.patch.object(torch.nn.functional, "dropout", dropout):
        x, h_res, h_post, residual = site._forward_normal(streams)
        end = site.fused_h_res_h_post_bda
        found = end(h_res, residual, h_post, (x.sin(), bias), p, True, False)
    (found * factors).sum().backward()

    exact = [each.detach().double().requires_grad_() for each in inputs]
    apart, learned = exact[0].unflatten(-1, (4, -1)), mhc_reference.Parameters(*exact[1:])
    h_pre, h_post, h_res = mhc_reference.weights(apart, learned, site.sinkhorn_iterations)
    out = mhc_reference.aggregate(apart, h_pre).sin() * (p + 1)
    want = mhc_reference.update(apart, h_res, h_post, out, bias.double() * (p + 1)).flatten(-2)
    (want * factors.double()).sum().backward()

    for mine, other in (
        (found, want),
        *((a.grad, b.grad) for a, b in zip(inputs, exact, strict=True)),
    ):
        error = (mine.double() - other).norm() / other.norm()
        assert error < bound, f"an output or a gradient is off by {error:.1%}"


def _assert_fast(site: Any) -> None:
    """Assert that a site takes at most twice as long as copying what it must read and write.

    That is 45 times one of its four streams, forward and backward; a copy moves its tensor twice.
    """
    import torch

    streams = torch.randn(4096, 4, 4 * 4096, device="cuda", dtype=torch.bfloat16)
    streams.requires_grad_()
    gradient, copy = torch.randn_like(streams), torch.empty_like(streams)

    def step():
        x, h_res, h_post, residual = site._forward_normal(streams)
        end = site.fused_h_res_h_post_bda
        end(h_res, residual, h_post, (x, None), 0.0, True, False).backward(gradient)

    def milliseconds(run):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        times = []
        for _ in range(13):
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return sorted(times[3:])[5]

    least = milliseconds(lambda: copy.copy_(streams)) * 45 / 8
    time = milliseconds(step)
    assert time < 2 * least, f"a site takes {time:.2f} ms, {time / least:.1f} times a copy"
