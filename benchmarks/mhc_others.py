"""What computes a site of hyper-connections: this package, Megatron's branch dev, and others.

Each is a `Way`: a site, and for some its ops, on its own layout of the same inputs.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor

from cppmega.host.packages import version
from cppmega.ops.mhc.naive import Parameters
from tests.ops.mhc import checks
from tests.ops.mhc.checks import Given, Shape

ITERATIONS = 20
Calls = dict[str, tuple[Callable[[], tuple[Tensor, ...]], list[Tensor]]]
"""Name of an op -> what calls it, and the tensors of which it has gradients."""


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
        return Parameters(*self[1:6])


class Way(NamedTuple):
    """A site."""

    call: Callable[..., tuple[Tensor, Tensor]]
    """The streams after it and its aggregate, from its own leaves."""
    leaves: Callable[[Inputs], tuple[Tensor, ...]] = tuple
    """Its own inputs from ours."""
    turned: Callable[[Tensor], Tensor] = lambda x: x
    """Streams, or their gradient, in our layout."""
    parameters: Callable[[list[Tensor]], list[Tensor]] = lambda found: found
    """Gradients of our five parameters from those of its own."""
    ops: Callable[[Inputs], Calls] | None = None
    """Its single ops, from its own leaves."""


def ours_by(call: checks.Call) -> Callable[..., tuple[Tensor, Tensor]]:
    """A site of the tests with these leaves, and with the output's bias if it is one of them."""

    def site(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        given, bias = Inputs(*leaves[:7]), leaves[7] if len(leaves) > 7 else None
        return call(Given(given.streams, given.parameters, given.out, bias), ITERATIONS)

    return site


ours, plain = ours_by(checks.fused_site), ours_by(checks.plain_site)


DEV: dict[str, dict[str, str]] = {
    "dev": {"MHC_DISABLE_CUTILE": "1"},
    "dev, cuTile beside Triton": {},
    "dev, cuTile alone": {"MHC_FORCE_BACKEND": "cutile"},
}
"""Kernels of the branch dev -> the environment in which it chooses them.

Without cuTile, dev projects and computes the backward of the aggregation in torch. With it, dev
takes cuTile for these two and Triton for the rest, or cuTile for everything.
"""


def cutile() -> str:
    """Versions of cuTile and of its compiler, or why there is none."""
    try:
        importlib.import_module("cuda.tile")
    except ImportError as error:
        return f"not importable: {error}"
    compiler = shutil.which("tileiras")
    if compiler is None:
        return f"cuda-tile {version('cuda-tile')}, no tileiras"
    said = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    release = said.partition(", V")[2].split()
    return f"cuda-tile {version('cuda-tile')}, tileiras {release[0] if release else 'unknown'}"


def dev(root: Path, shape: Shape, name: str) -> Way:
    """The module of Megatron's branch dev with the kernels of a name in `DEV`.

    Raises:
        RuntimeError: cuTile is to compute something, and cannot.
    """
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    module = importlib.import_module("megatron.core.transformer.hyper_connection")
    config = SimpleNamespace(
        **{"num_residual_streams": shape.n, "hidden_size": shape.c, "sequence_parallel": False},
        **{"mhc_sinkhorn_iterations": ITERATIONS, "mhc_init_gating_factor": 0.01},
        use_fused_mhc=True,
    )
    init = lambda self, config: torch.nn.Module.__init__(self)  # noqa: E731
    # Which kernels there are is read from the environment when their module is imported.
    sys.modules.pop("megatron.core.fusions.fused_mhc_kernels", None)
    with (
        mock.patch.dict(os.environ, DEV[name]),
        mock.patch.object(module.MegatronModule, "__init__", init),
    ):
        layer = module.HyperConnectionModule(config, 1).cuda()
        kernels = sys.modules["megatron.core.fusions.fused_mhc_kernels"]
    if name != "dev" and not kernels.is_cutile_available():
        raise RuntimeError(f"no cuTile ({cutile()}): {kernels._CUTILE_DEVICE_SUPPORT_ERROR}")
    names = ("mapping_proj.weight", "alpha_pre", "alpha_post", "alpha_res", "bias")

    def site(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        given = Inputs(*leaves)
        values = dict(zip(names, given.parameters, strict=True))
        streams = given.streams.flatten(-2)
        seen, h_res, h_post, kept = torch.func.functional_call(layer, values, (streams,))
        new = layer.fused_h_res_h_post_bda(h_res, kept, h_post, (given.out, None), 0.0, True, True)
        return new.view_as(given.streams), seen

    def ops(given: Inputs) -> Calls:
        streams, out = given.streams, given.out
        (s, b, n, _), dtype = shape, streams.dtype

        def weights() -> tuple[Tensor, ...]:
            flat = streams.view(s * b, -1)
            found = layer._proj_rms_compute_h_op(
                flat, *given.parameters, n, layer.norm_eps, layer.compute_h_eps
            )
            h_pre, h_post, logits = (x.view(s, b, -1) for x in found[:3])
            h_res = layer._sinkhorn_op(logits.view(s, b, n, n), ITERATIONS, layer.sinkhorn_eps)
            return h_pre.to(dtype), h_post.to(dtype), h_res.to(dtype)

        h_pre, h_post, h_res = (x.detach().requires_grad_() for x in weights())
        logits = torch.randn(s, b, n, n, device="cuda", requires_grad=True)
        return {
            "sinkhorn": (
                lambda: (layer._sinkhorn_op(logits, ITERATIONS, layer.sinkhorn_eps),),
                [logits],
            ),
            "weights": (weights, [streams, *given.parameters]),
            "aggregate": (lambda: (layer._h_aggregate_op(streams, h_pre),), [streams, h_pre]),
            "update": (
                lambda: (layer._h_post_bda_op(h_res, streams, h_post, out, None),),
                [streams, h_res, h_post, out],
            ),
        }

    return Way(site, ops=ops)


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
        total = torch.empty_like(streams, dtype=torch.float32) if one_gradient else None
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

    def single(given: Inputs) -> Calls:
        streams, phi, alpha, bias, out = (
            x.detach().contiguous().requires_grad_() for x in leaves(given)
        )
        s, b = shape[:2]

        def weights() -> tuple[Tensor, ...]:
            found, square = ops.mhc_fused_projection(streams.view(s * b, n * c), phi)
            h_pre, h_post, logits = ops.mhc_fused_scale(found, alpha, bias, square, n)
            h_res = ops.mhc_fused_sinkhorn(logits.view(s, b, n, n), n, iters=ITERATIONS)
            return h_pre.view(s, b, n), h_post.view(s, b, n), h_res

        h_pre, h_post, h_res = (x.detach().requires_grad_() for x in weights())
        logits = torch.randn(s, b, n, n, device="cuda", requires_grad=True)
        return {
            "sinkhorn": (
                lambda: (ops.mhc_fused_sinkhorn(logits, n, iters=ITERATIONS),),
                [logits],
            ),
            "weights": (weights, [streams, phi, alpha, bias]),
            "aggregate": (
                lambda: (ops.mhc_fused_aggregate(streams, h_pre, n),),
                [streams, h_pre],
            ),
            "update": (
                lambda: (ops.mhc_fused_expand_combine(out, None, h_post, streams, h_res, n),),
                [streams, h_res, h_post, out],
            ),
        }

    return Way(site, leaves, turned, parameters, None if one_gradient else single)


def liger() -> Way:
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
OWN: Ways = {
    "ours": partial(Way, ours),
    "ours, single ops": partial(Way, ours_by(checks.fused_ops)),
    "reference": partial(Way, plain),
}


def others(shape: Shape, root: Path | None) -> Ways:
    """All other implementations that are available; `root` is a checkout of the branch dev.

    Those with cuTile come after those that are known to run: an error on the GPU ends them all.
    """
    of_dev: Ways = {}
    if root is not None:
        of_dev = {name: partial(dev, root, shape, name) for name in DEV}
    ways: Ways = {"dev": of_dev.pop("dev")} if of_dev else {}
    if importlib.util.find_spec("transformer_engine"):
        for name, one in {"": False, ", one gradient buffer": True}.items():
            way = partial(transformer_engine, shape, one_gradient=one)
            ways[f"Transformer Engine{name}"] = way
    ways |= of_dev
    if importlib.util.find_spec("liger_kernel"):
        ways["Liger"] = liger
    return ways | {"torch.compile of the reference": lambda: Way(torch.compile(plain))}
