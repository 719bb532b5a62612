"""The layer-wise optimizer's gradient norm on two ranks that hold different experts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cppmega.catalogue import loader as catalogue
from tests.support import VERSIONS, patched, pristine, python

PAGE = "layer_wise_expert_grad_norm"

CODE = """
import math
from unittest import mock

import torch
from cppmega.proof import cpu_shims

cpu_shims.shim()
torch.distributed.init_process_group("gloo")
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from tests.upstream_patches.optimizer.distributed_optimizer import cuda_is_cpu

rank = torch.distributed.get_rank()


def outcome(experts, expert_tensor):
    "Squared norm and zeros: a norm's weight that both ranks have, and one expert bias per rank."
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=2,
        expert_model_parallel_size=experts,
        expert_tensor_parallel_size=expert_tensor,
    )
    held = parallel_state.get_expert_model_parallel_rank()
    gradients = {"dense": [1.0, 0.0, 0.0], "expert": [2.0, 0.0] if held == 0 else [4.0, 0.0]}
    params = []
    for name, gradient in gradients.items():
        param = torch.nn.Parameter(torch.zeros(len(gradient), dtype=torch.bfloat16))
        param.main_grad = torch.tensor(gradient)
        param.allreduce, param.tensor_model_parallel = name == "dense", False
        params.append(param)
    with cuda_is_cpu():
        config = OptimizerConfig(optimizer="adam", lr=0.1, bf16=True)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        base = [torch.optim.SGD([param], lr=0.1) for param in params]
        optimizer = LayerWiseDistributedOptimizer(base, config, groups)
        optimizer.prepare_grads()
        found = round(float(optimizer.get_grad_norm()) ** 2, 3), int(optimizer.count_zeros())
    parallel_state.destroy_model_parallel()
    return found


two_experts, one_expert = outcome(2, 1), outcome(1, 2)
assert one_expert == (1 + 4, 2 + 1), one_expert  # the experts' group is the attention's
if PATCHED:
    assert two_experts == (1 + 4 + 16, 2 + 1 + 1), two_experts
else:
    assert two_experts == (1 + 4, 2 + 1), two_experts  # the second rank's expert is missing
"""


@pytest.mark.megatron
def test_on_two_ranks() -> None:
    for root, is_patched in (
        (patched(VERSIONS[-1], PAGE), True),
        (pristine(VERSIONS[-1]), False),
    ):
        done = python(root, f"PATCHED = {is_patched}\n" + CODE, nproc=2)
        assert done.returncode == 0, done.stderr


def test_which_runs_must_reach_it() -> None:
    when = catalogue.load()[PAGE].patch.when
    run = {
        "optimizer": "muon",
        "use_layer_wise_distributed_optimizer": True,
        "num_experts": 8,
    }
    assert when is not None and when(SimpleNamespace(**run))
    for other in (
        {"use_layer_wise_distributed_optimizer": False},
        {"num_experts": None},
        {"skip_train": True},
    ):
        assert not when(SimpleNamespace(**(run | other))), other
