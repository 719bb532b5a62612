"""Count each expert's gradients once in the norm of the layer-wise optimizer (Muon).

What: `LayerWiseDistributedOptimizer` passes the tensor-parallel groups to the optimizers that it
    creates and to its own count of zeros. They determine which parameters are duplicates of those
    of another rank.
Why: Without the groups, an expert's parameter counts only on the first rank of the attention's
    tensor-parallel group. If the experts have a different group (`--expert-tensor-parallel-size`),
    ranks that hold other experts are left out, or duplicates are counted twice: with TP 2, EP 2 and
    ETP 1, the biases of the second half of the experts are missing from the norm, so that gradients
    are clipped too little, and from the number of zeros (seen on two ranks, on 0.19.2). This
    requires experts with biases, and `--no-use-layer-wise-param-layout`, without which Megatron
    rejects them. Up to 0.18 all optimizers count this way (#5916).
Upstream: https://github.com/NVIDIA/Megatron-LM/pull/6099 (main, July 2026; not released)
Remove: when the optimizers of `LayerWiseDistributedOptimizer` know `expert_tp_group`.
Numerics: changes results if the experts have biases and their own tensor-parallel size: the
    gradient norm, and therefore clipping
"""

from typing import Any

from cppmega.catalogue.megatron_args import has_experts
from cppmega.edits import adding_argument, in_order, inserting
from cppmega.page import Edit, Patch, Source

CLASS = "megatron/core/optimizer/layer_wise_optimizer.py:LayerWiseDistributedOptimizer"


def makes_it(args: Any) -> bool:
    """Whether the run has experts and uses this optimizer."""
    return (
        bool(getattr(args, "use_layer_wise_distributed_optimizer", False))
        and getattr(args, "optimizer", None) == "muon"
        and has_experts(args)
        and not getattr(args, "skip_train", False)
    )


PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=f"{CLASS}.__init__",
            pins={"0.19.2": "793a1e2db02aff46"},
            edit=inserting(
                """
                # The groups by which a parameter's copies on other ranks are told from others.
                self.tp_group = getattr(pg_collection, 'tp', None)
                self.expert_tp_group = getattr(pg_collection, 'expt_tp', self.tp_group)
                for optimizer in optimizers:
                    optimizer.tp_group = self.tp_group
                    optimizer.expert_tp_group = self.expert_tp_group
                """,
                before="super().__init__(optimizers)",
            ),
        ),
        Edit(
            target=f"{CLASS}.count_zeros",
            pins={"0.19.2": "b97165e66c0ed362"},
            edit=in_order(
                adding_argument("count_zeros_fp32", "tp_group=self.tp_group"),
                adding_argument("count_zeros_fp32", "expert_tp_group=self.expert_tp_group"),
            ),
            mark="",
        ),
    ),
    reached="startup",
    # Up to 0.18 no optimizer knows the experts' group.
    feature=("megatron/core/extensions/transformer_engine.py:_set_expert_parameter_attributes",),
    when=makes_it,
)


def fixed_upstream(source: Source) -> bool:
    return "optimizer.expert_tp_group = self.expert_tp_group" in source.text(f"{CLASS}.__init__")


def verify() -> None:
    from types import SimpleNamespace
    from unittest import mock

    import torch
    from megatron.core import parallel_state
    from megatron.core.optimizer import OptimizerConfig, layer_wise_optimizer
    from megatron.core.optimizer.optimizer import FP32Optimizer
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate

    def group(rank, size):  # type: ignore[no-untyped-def]
        return SimpleNamespace(rank=lambda: rank, size=lambda: size)

    names = ("dense", "expert's")
    named = {name: torch.nn.Parameter(torch.zeros(2)) for name in names}
    for name, param in named.items():
        param.allreduce, param.tensor_model_parallel = name == "dense", False
        param.grad = torch.ones(2)

    def counting(params, tp_group=None, expert_tp_group=None, **_):  # type: ignore[no-untyped-def]
        """Replace the count of zeros, which needs CUDA, with the parameters that it would count."""
        groups = {"tp_group": tp_group, "expert_tp_group": expert_tp_group}
        kept = [p for p in params if param_is_not_tensor_parallel_duplicate(p, **groups)]
        return [name for name, param in named.items() if any(param is other for other in kept)]

    def counted(rank, expert_rank):  # type: ignore[no-untyped-def]
        """Return the parameters that count in a rank's norm and in its number of zeros."""
        groups = {"tp": group(rank, 2), "expt_tp": group(expert_rank, expert_rank + 1)}
        config = OptimizerConfig(optimizer="adam", lr=0.1)
        child = FP32Optimizer.__new__(FP32Optimizer)  # its __init__ creates a tensor on the GPU
        child.optimizer, child.config = torch.optim.SGD(named.values(), lr=0.1), config
        child.is_stub_optimizer = False
        optimizer = layer_wise_optimizer.LayerWiseDistributedOptimizer(
            [child], config, SimpleNamespace(**groups)
        )
        (child,) = optimizer.chained_optimizers
        norm = child.get_grads_for_grad_norm()
        kept = [n for n, p in named.items() if any(p.grad is gradient for gradient in norm)]
        with mock.patch.object(layer_wise_optimizer, "count_zeros_fp32", counting):
            return kept, optimizer.count_zeros()

    wanted = {(0, 0): [*names], (1, 0): ["expert's"], (0, 1): ["dense"], (1, 1): []}
    for (rank, expert_rank), own in wanted.items():
        # The rank whose parameters count if no group is given.
        with mock.patch.object(parallel_state, "_MPU_TENSOR_MODEL_PARALLEL_RANK", rank):
            got = counted(rank, expert_rank)
        assert got == (own, own), f"rank {rank}, of the experts' group {expert_rank}: {got}"
