"""cppmega's kernels in Megatron's own hyper-connection module, which dev and 0.20 have.

`cppmega.features.mhc` adds hyper-connections to a release without them. Here the module, its
parameters and its callers are Megatron's own, and only the computation comes from
`cppmega.ops.mhc`. The weights stay in fp32 where Megatron rounds them to the type of the streams.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cppmega.calls import passed, served
from cppmega.features.mhc import connections as mhc
from cppmega.ops import mhc as kernels
from cppmega.ops.common.main_grad import MainGrad
from cppmega.ops.mhc import naive as reference


def use_kernels(module: Any) -> None:
    """Set the ops that a `HyperConnectionModule` calls in `aggregate` and at the end of a site.

    Raises:
        CppmegaError: `no-kernel`: the kernels cannot run where this model will run.
        ValueError: the module's epsilons are not those of the kernels.
    """
    mhc.require_kernels(module.config.params_dtype, module.n, module.hidden_size)
    epsilons = {module.sinkhorn_eps, module.compute_h_eps, module.norm_eps}
    if epsilons != {reference.EPS}:
        raise ValueError(f"hyper-connections with epsilons {epsilons}, not {reference.EPS}")
    module._h_aggregate_op = kernels.aggregate
    module._h_aggregate_into_op = _aggregate_into
    module._h_post_bda_op = _update


def _aggregate_into(streams: Tensor, h_pre: Tensor, out: Tensor) -> Tensor:
    return kernels.aggregate(streams, h_pre, out=out)


def _update(
    h_res: Tensor, streams: Tensor, h_post: Tensor, out: Tensor, bias: Tensor | None
) -> Tensor:
    return kernels.update(streams, h_res, h_post, out, bias)


def weights(module: Any, streams: Tensor) -> reference.Weights:
    """Replace `compute_mappings`: the weights of `[s, b, n * C]`, in fp32."""
    return kernels.weights(
        mhc.split(streams, module.n),
        mhc.learned(module),
        module.sinkhorn_iterations,
        fuse_accumulation=_accumulates(module),
    )


def read(module: Any, streams: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Replace `_forward_normal`: the start of a site, from `[s, b, n * C]`.

    Returns:
        The input `[s, b, C]` of the sub-layer, `h_res`, `h_post`, and the streams for the end of
        the site. If that is the update, the gradient of these streams is completed in place and
        never summed from three tensors.
    """
    if module.training and module.config.hidden_dropout > 0:
        passed("mhc_fused_kernels", "dropout precedes the streams")
        # The site ends in Megatron's own code, which applies dropout between its steps.
        h_pre, h_post, h_res = weights(module, streams)
        return module.aggregate(streams, h_pre), h_res, h_post, streams
    served("mhc_fused_kernels")
    x, site = kernels.read(
        mhc.split(streams, module.n),
        mhc.learned(module),
        module.sinkhorn_iterations,
        fuse_accumulation=_accumulates(module),
    )
    return x, site.h_res, site.h_post, site.streams.flatten(-2)


def _accumulates(module: Any) -> bool:
    """Whether the gradient of phi goes to its `main_grad`, which Megatron's module never checks."""
    if not (module.config.gradient_accumulation_fusion and torch.is_grad_enabled()):
        return False
    found = MainGrad.of(module.mapping_proj.weight)
    return found is not None and found.buffer.dtype == torch.float32
