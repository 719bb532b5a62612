"""Sum the gradients of a gated delta net's norm over the tensor-parallel ranks.

What: The parameters of `out_norm` are marked, and `finalize_model_grads` sums the gradients of
    marked parameters over the tensor-parallel ranks without sequence parallelism as well.
Why: The norm has one weight per element of a head, which all heads share, and each rank has part of
    the heads. Its gradient on a rank is that of its own heads. Megatron sums it with
    `--sequence-parallel` only: without, the copies of one weight get different gradients, drift
    apart, and a checkpoint keeps one of them (seen on two gloo ranks, on 0.16.1 to 0.19.2).
    Megatron sums those of `q_layernorm` and `k_layernorm` always, for the same reason.
Upstream: https://github.com/NVIDIA/Megatron-LM/issues/7452 (open)
Remove: when the gradients of `out_norm` are summed without sequence parallelism.
Numerics: changes results of gated delta nets with tensor parallelism but without sequence
    parallelism
"""

from typing import Any

from cppmega.catalogue.megatron_args import layer_pattern
from cppmega.edits import inserting, replacing
from cppmega.page import Edit, Patch, Source

UNTIL_0_18 = "megatron/core/ssm/gated_delta_net.py:GatedDeltaNet.__init__"
SINCE_0_19 = "megatron/core/ssm/gated_delta_net/common.py:_GDNBase.__init__"
REDUCE = (
    "megatron/core/distributed/finalize_model_grads.py:_allreduce_non_tensor_model_parallel_grads"
)
MARK = inserting(
    """
    for parameter in self.out_norm.parameters():
        parameter.cppmega_partial_on_tensor_parallel_ranks = True
    """,
    after="""
    self.out_norm = build_module(
        submodules.out_norm,
        config=self.config,
        hidden_size=self.value_head_dim,
        eps=self.config.layernorm_epsilon,
    )
    """,
)
SUMMED = '(config.sequence_parallel and getattr(param, "sequence_parallel", False))'


def has_it(args: Any) -> bool:
    """Whether the run has gated delta nets divided among ranks, and no sequence parallelism."""
    variant = getattr(args, "experimental_attention_variant", None) == "gated_delta_net"
    return bool(
        (variant or "G" in layer_pattern(args))
        and getattr(args, "tensor_model_parallel_size", 1) > 1
        and not getattr(args, "sequence_parallel", False)
    )


PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=UNTIL_0_18,
            pins={
                "0.16.1": "33bf1abf6e26987d",
                "0.17.1": "4fca5f53b9e76ea9",
                "0.18.2": "add84511f21d6aa3",
            },
            edit=MARK,
        ),
        Edit(
            target=SINCE_0_19,
            pins={
                "0.19.2": "19491f64a623c40e",
                "main-d98e8a64": "a3a95e29fd7d4e41",
                "dev-d48bd6be": "80fd5f841237e763",
            },
            edit=MARK,
        ),
        Edit(
            target=REDUCE,
            pins={
                "0.16.1": "1d56d77b170340e4",
                "0.17.1": "1d56d77b170340e4",
                "0.18.2": "1d56d77b170340e4",
                "0.19.2": "1d56d77b170340e4",
                "main-d98e8a64": "1d56d77b170340e4",
                "dev-d48bd6be": "1d56d77b170340e4",
            },
            edit=replacing(
                SUMMED,
                f"""(
                    {SUMMED}
                    or getattr(param, "cppmega_partial_on_tensor_parallel_ranks", False)
                )""",
            ),
            mark="",
        ),
    ),
    reached="startup",
    # Until 0.15 there are no gated delta nets.
    feature=(
        "megatron/core/models/gpt/experimental_attention_variant_module_specs.py:"
        "get_gated_delta_net_module_spec",
    ),
    when=has_it,
)


def fixed_upstream(source: Source) -> bool:
    return "out_norm" in source.text(REDUCE)


def verify() -> None:
    import inspect
    from types import SimpleNamespace
    from unittest import mock

    import torch
    from megatron.core.distributed.finalize_model_grads import (
        _allreduce_non_tensor_model_parallel_grads,
    )
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.ssm import gated_delta_net as delta
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from cppmega.proof import ranks, small_models

    def work(rank):  # type: ignore[no-untyped-def]
        """Return the gradients of the norm of a rank's heads, before and after they are reduced."""
        config = small_models.config(
            normalization="RMSNorm",
            tensor_model_parallel_size=2,
            deterministic_mode=True,
            add_bias_linear=False,
            linear_conv_kernel_dim=2,
            linear_key_head_dim=4,
            linear_value_head_dim=4,
            linear_num_key_heads=2,
            linear_num_value_heads=2,
        )
        layers = delta.GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear
        )
        groups = ProcessGroupCollection.use_mpu_process_groups()
        defining = inspect.getmodule(delta.GatedDeltaNet._apply_gated_norm)
        with mock.patch.object(defining, "HAVE_FLA", True):  # it computes what is not asked here
            net = delta.GatedDeltaNet(config, layers, layer_number=1, pg_collection=groups)
        net.ddp_config = SimpleNamespace(use_megatron_fsdp=False)
        heads, gate = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(rank))
        with torch.compiler.set_stance("force_eager"):
            (net._apply_gated_norm(heads, gate) * heads).sum().backward()
        net.dt_bias.grad = torch.full_like(net.dt_bias, 1.0 + rank)
        before = net.out_norm.weight.grad.clone()
        for param in net.parameters():
            param.main_grad = torch.zeros_like(param) if param.grad is None else param.grad
        _allreduce_non_tensor_model_parallel_grads([net], config, groups.tp)
        assert net.dt_bias.main_grad.tolist() == [1.0 + rank], "each rank has its own"
        return before, net.out_norm.weight.main_grad.clone()

    (one, after_one), (two, after_two) = ranks.on_two(work)
    for after in (after_one, after_two):
        assert torch.allclose(after, one + two), f"{after} is not the sum of {one} and {two}"
