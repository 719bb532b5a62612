"""Transformer Engine's layers as plain torch ones with the same parameters, for a CPU process.

Installed before a release's specs are read, so that its own models and builders can be built. For
counting and for small forward passes; not for numbers of any other kind.
"""

from __future__ import annotations

import importlib
from typing import Any
from unittest import mock


def kernels_of_experts() -> None:
    """Let a configuration find the kernels that permute and route tokens; none of them computes."""
    from megatron.core.transformer.moe import moe_utils

    for name in [name for name in vars(moe_utils) if name.startswith("fused_")]:
        setattr(moe_utils, name, mock.MagicMock())


def read_options_once() -> None:
    """Let the source of a class with options be read once, and not again by each parser."""
    from megatron.training import argument_utils

    factory = argument_utils.ArgumentGroupFactory
    read, known = factory._get_field_docstrings, dict[type, dict[str, str]]()

    def once(self: Any, of: type) -> dict[str, str]:
        if of not in known:
            known[of] = read(self, of)
        return dict(known[of])

    factory._get_field_docstrings = once


def of_sequence_parts(parameters: Any, config: Any) -> None:
    """Mark parameters that see only part of a sequence; Megatron reduces their gradients."""
    for parameter in parameters:
        parameter.sequence_parallel = config.sequence_parallel


def install(attention: Any = None) -> None:
    """Replace Transformer Engine in every module of the imported megatron that names it.

    Args:
        attention: in place of its core attention; None: Megatron's own.
    """
    import torch

    from cppmega.proof import cpu_shims

    cpu_shims.init_distributed()
    te: Any = importlib.import_module("megatron.core.extensions.transformer_engine")
    layers: Any = importlib.import_module("megatron.core.tensor_parallel.layers")
    plain: Any = importlib.import_module("megatron.core.transformer.dot_product_attention")

    class NormLinear(layers.ColumnParallelLinear):  # type: ignore[misc]
        def __init__(self, input_size: int, *args: Any, **kwargs: Any) -> None:
            super().__init__(input_size, *args, **kwargs)
            self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size))
            of_sequence_parts([self.layer_norm_weight], self.config)

        def forward(self, input_: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            weight = self.layer_norm_weight
            normed = torch.nn.functional.rms_norm(input_, weight.shape, weight)
            return super().forward(normed, *args, **kwargs)

    class Duplicated(torch.nn.Linear):
        def __init__(self, input_size: int, output_size: int, **kwargs: Any) -> None:
            super().__init__(input_size, output_size, bias=False)
            of_sequence_parts(self.parameters(), kwargs["config"])

        def forward(self, input: torch.Tensor) -> Any:  # noqa: A002
            return super().forward(input), None

    class Norm:
        def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> Any:
            rms = config.normalization == "RMSNorm"
            norm = (torch.nn.RMSNorm if rms else torch.nn.LayerNorm)(hidden_size, eps=eps)
            of_sequence_parts(norm.parameters(), config)
            return norm

    class Core(plain.DotProductAttention):  # type: ignore[misc]
        def __init__(
            self, *args: Any, k_channels: Any = None, v_channels: Any = None, **kwargs: Any
        ) -> None:
            super().__init__(*args, **kwargs)
            if v_channels is not None:
                self.hidden_size_per_partition = v_channels * self.config.num_attention_heads

    classes = {
        "TEColumnParallelLinear": layers.ColumnParallelLinear,
        "TERowParallelLinear": layers.RowParallelLinear,
        "TELayerNormColumnParallelLinear": NormLinear,
        "TELinear": Duplicated,
        "TENorm": Norm,
        "TEDotProductAttention": attention or Core,
    }
    for name, own in classes.items():
        setattr(te, name, own)
    provider: Any = importlib.import_module(
        "megatron.core.extensions.transformer_engine_spec_provider"
    )
    classes |= {"FusedLayerNorm": Norm, "TESpecProvider": provider.TESpecProvider}
    for name in _MODULES:
        try:
            module = importlib.import_module(f"megatron.core.{name}")
        except ModuleNotFoundError:
            continue  # other releases have it
        for attribute, own in classes.items():
            if hasattr(module, attribute):
                setattr(module, attribute, own)
        if name.startswith("models.gpt"):
            module.HAVE_TE, module.TESpecProvider = True, provider.TESpecProvider  # type: ignore[attr-defined]
        if hasattr(module, "get_backend"):
            module.get_backend = lambda impl: provider.TESpecProvider()
        if hasattr(module, "is_te_min_version"):
            module.is_te_min_version = lambda *args, **kwargs: True
        if hasattr(module, "rotate_activation"):
            module.rotate_activation = lambda x: x  # its package is not on any index


def before_ranks() -> None:
    """Install them in a process whose forks are ranks, which initialize torch.distributed."""
    from cppmega.proof import cpu_shims
    from tests.configurations import stand_ins

    with mock.patch.object(cpu_shims, "init_distributed", cpu_shims.shim):
        install(stand_ins.Attention)


_MODULES = (
    "extensions.transformer_engine_spec_provider",
    "transformer.transformer_config",
    "transformer.multi_latent_attention",
    "transformer.mla_qk_norm_config",
    "transformer.experimental_attention_variant.absorbed_mla",
    "transformer.experimental_attention_variant.dsa",
    "models.gpt.experimental_attention_variant_module_specs",
    "models.gpt.gpt_layer_specs",
    "models.hybrid.hybrid_block",
    "ssm.mamba_block",
)
