"""Sites of hyper-connections by others, with the inputs that each takes, for `benchmarks/mhc.py`.

All compute the streams after a site and its aggregate. What a rival needs in another layout it is
given so, outside of the time: streams `[s, b, C, n]` to Transformer Engine, phi `[n * C, V]` to
Liger. Liger gets phi in the type of the streams, without which it does not use tensor cores.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor

from cppmega.ops.mhc.naive import Parameters
from tests.ops.mhc import checks
from tests.ops.mhc.checks import Given, Shape

ITERATIONS = 20


class Inputs(NamedTuple):
    """What a site is given: no bias of the sub-layer's output, which most models do not have."""

    streams: Tensor
    phi: Tensor
    alpha_pre: Tensor
    alpha_post: Tensor
    alpha_res: Tensor
    bias: Tensor
    out: Tensor

    @property
    def parameters(self) -> Parameters:
        """All but streams and output."""
        return Parameters(*self[1:6])


class Way(NamedTuple):
    """A site.

    Attributes:
        call: the streams after it and its aggregate, from its own leaves.
        leaves: its own inputs from ours.
        turned: streams, or their gradient, in our layout.
        parameters: gradients of our five parameters from those of its own.
    """

    call: Callable[..., tuple[Tensor, Tensor]]
    leaves: Callable[[Inputs], tuple[Tensor, ...]] = tuple
    turned: Callable[[Tensor], Tensor] = lambda x: x
    parameters: Callable[[list[Tensor]], list[Tensor]] = lambda found: found


def ours_by(call: checks.Call) -> Callable[..., tuple[Tensor, Tensor]]:
    """A site of the tests with these leaves, and with the output's bias if it is one of them."""

    def site(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        given, bias = Inputs(*leaves[:7]), leaves[7] if len(leaves) > 7 else None
        return call(Given(given.streams, given.parameters, given.out, bias), ITERATIONS)

    return site


ours, plain = ours_by(checks.fused_site), ours_by(checks.plain_site)


def dev(root: Path, shape: Shape) -> Way:
    """The module of Megatron's branch dev with the kernels that it chooses for this GPU."""
    sys.path.insert(0, str(root))
    module = importlib.import_module("megatron.core.transformer.hyper_connection")
    config = SimpleNamespace(
        num_residual_streams=shape.n,
        hidden_size=shape.c,
        mhc_sinkhorn_iterations=ITERATIONS,
        mhc_init_gating_factor=0.01,
        use_fused_mhc=True,
        sequence_parallel=False,
    )
    init = lambda self, config: torch.nn.Module.__init__(self)  # noqa: E731
    with mock.patch.object(module.MegatronModule, "__init__", init):
        layer = module.HyperConnectionModule(config, 1).cuda()
    names = ("mapping_proj.weight", "alpha_pre", "alpha_post", "alpha_res", "bias")

    def site(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        given = Inputs(*leaves)
        values = dict(zip(names, given.parameters, strict=True))
        streams = given.streams.flatten(-2)
        seen, h_res, h_post, kept = torch.func.functional_call(layer, values, (streams,))
        new = layer.fused_h_res_h_post_bda(h_res, kept, h_post, (given.out, None), 0.0, True, True)
        return new.view_as(given.streams), seen

    return Way(site)


def transformer_engine(shape: Shape, *, one_gradient: bool) -> Way:
    """Transformer Engine's kernels; with `one_gradient` they add up that of the streams in fp32."""
    ops = importlib.import_module("transformer_engine.pytorch.triton.mhc")
    _, _, n, c = shape

    def leaves(given: Inputs) -> tuple[Tensor, ...]:
        phi = given.phi.view(-1, n, c).transpose(1, 2).reshape(-1, n * c)
        alpha = torch.cat((given.alpha_pre, given.alpha_post, given.alpha_res))
        return turned(given.streams).contiguous(), phi, alpha, given.bias[None], given.out

    def turned(x: Tensor) -> Tensor:
        return x.transpose(-1, -2)

    def site(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        streams, phi, alpha, bias, out = leaves
        total = None
        if one_gradient:
            total = torch.empty(streams.shape, dtype=torch.float32, device=streams.device)
        seen, h_post, h_res = ops.mhc_generate_mix_and_aggregate(
            streams, phi, alpha, bias, fused_grad_x_acc_buffer=total
        )
        new = ops.mhc_fused_expand_combine(
            out, None, h_post, streams, h_res, n, fused_grad_x_acc_buffer=total
        )
        return new, seen

    def parameters(found: list[Tensor]) -> list[Tensor]:
        phi, alpha, bias = found
        own = phi.view(-1, c, n).transpose(1, 2).reshape(-1, n * c)
        return [own, *alpha.split(1), bias[0]]

    return Way(site, leaves, turned, parameters)


def liger(shape: Shape) -> Way:
    """Liger's kernels."""
    ops = importlib.import_module("liger_kernel.transformers.functional")

    def leaves(given: Inputs) -> tuple[Tensor, ...]:
        phi = given.phi.t().to(given.streams.dtype).contiguous()
        alphas = given.alpha_pre[0], given.alpha_post[0], given.alpha_res[0]
        return given.streams, phi, *alphas, given.bias, given.out

    def site(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        streams, phi, pre, post, res, bias, out = leaves
        h_pre, h_post, h_res = ops.liger_mhc_coeffs(
            streams, phi, bias, pre, post, res, tmax=ITERATIONS, pre_eps=1e-6
        )
        new = ops.liger_mhc_post_res(streams, out, h_post, h_res.transpose(-1, -2))
        return new, ops.liger_mhc_pre(streams, h_pre)

    def parameters(found: list[Tensor]) -> list[Tensor]:
        phi, pre, post, res, bias = found
        return [phi.t(), pre[None], post[None], res[None], bias]

    return Way(site, leaves, parameters=parameters)


Ways = dict[str, Callable[[], Way]]


def own_ways() -> Ways:
    """Ours and the reference."""
    return {
        "ours": lambda: Way(ours),
        "ours, single ops": lambda: Way(ours_by(checks.fused_ops)),
        "reference": lambda: Way(plain),
    }


def others(shape: Shape, root: Path | None) -> Ways:
    """All other implementations that are available; `root` is a checkout of the branch dev."""
    ways: Ways = {}
    if root is not None:
        ways["dev"] = lambda: dev(root, shape)
    if importlib.util.find_spec("transformer_engine"):
        ways["Transformer Engine"] = lambda: transformer_engine(shape, one_gradient=False)
        name = "Transformer Engine, one gradient buffer"
        ways[name] = lambda: transformer_engine(shape, one_gradient=True)
    if importlib.util.find_spec("liger_kernel"):
        ways["Liger"] = lambda: liger(shape)
    ways["torch.compile of the reference"] = lambda: Way(torch.compile(plain))
    return ways
