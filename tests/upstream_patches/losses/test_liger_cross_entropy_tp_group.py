"""Megatron's loss on two tensor-parallel ranks with Liger's kernels, in Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.support import patched, pristine, python

RELEASE = "liger-kernel==0.8.5"
MODULE = "liger_kernel/megatron/monkey_patch.py"

RANKS = """
import importlib.util
import os
import sys
from types import SimpleNamespace

import torch

sys.path.append(OURS)
from tests.ops import interpreted  # noqa: F401
from cppmega.proof import cpu_shims
from liger_kernel.megatron import monkey_patch
from megatron.core import tensor_parallel
from megatron.core.models.common.language_module.language_module import LanguageModule

assert monkey_patch.__file__.startswith(OURS)
spec = importlib.util.spec_from_file_location("stock_monkey_patch", STOCK)
stock = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stock)
places = (tensor_parallel, sys.modules["megatron.core.tensor_parallel.cross_entropy"])
native = tensor_parallel.vocab_parallel_cross_entropy
torch.manual_seed(0)
logits, labels = torch.randn(3, 1, 8), torch.tensor([[1, 6, 3]])
whole = logits.clone().requires_grad_()
wanted = torch.nn.functional.cross_entropy(whole[:, 0], labels[0], reduction="none")
wanted.sum().backward()


def outcome(rank, apply):
    for place in places:
        place.vocab_parallel_cross_entropy = native
    apply(rms_norm=False, cross_entropy=True)
    model = SimpleNamespace(config=SimpleNamespace(cross_entropy_loss_fusion=False))
    mine = logits[..., 4 * rank : 4 * rank + 4].clone().requires_grad_()
    loss = LanguageModule.compute_language_model_loss(model, labels, mine)
    loss.sum().backward()
    return loss.detach(), mine.grad


def check(rank):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    cpu_shims.init_distributed(tensor=2)
    for apply, right in ((stock.apply_liger_kernel_to_megatron, False),
                         (monkey_patch.apply_liger_kernel_to_megatron, True),
                         (lambda **_: None, True)):
        loss, grad = outcome(rank, apply)
        assert torch.allclose(loss[0], wanted) is right, (loss, wanted)
        assert torch.allclose(grad, whole.grad[..., 4 * rank : 4 * rank + 4]) is right, grad


if not (other := os.fork()):  # importing Megatron takes most of the time
    check(1)
    os._exit(0)
check(0)
assert os.waitpid(other, 0)[1] == 0
"""


@pytest.mark.megatron
def test_two_ranks_have_the_loss_of_the_whole_vocabulary() -> None:
    """Megatron 0.18.2 passes no group: Liger's own function is wrong, and nothing says so."""
    ours, stock = patched(RELEASE, "liger_cross_entropy_tp_group"), pristine(RELEASE) / MODULE
    code = f"OURS, STOCK = {str(ours)!r}, {str(stock)!r}\n{RANKS}"
    done = python(pristine("0.18.2"), code, interprets=True)
    assert done.returncode == 0, done.stderr
