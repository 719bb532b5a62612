"""Check local gradients for NaN and Inf without waiting for the GPU in the backward pass.

What: The norm of each bucket is taken before its reduction, as in stock, and stays on the device.
    `DistributedDataParallel.finish_grad_sync` reads all of them at once, before the optimizer's
    step, and gives those of a step that is not finite to Megatron's own check.
Why: `--check-for-nan-in-loss-and-grad`, Megatron's default, reads two comparisons per bucket on the
    host as soon as the bucket is complete: 136 waits for the GPU in a step of NAM56R on two H200,
    after each of which the host has to get ahead again while the GPU is idle.
Upstream: Not sent: measured on one host of two H200 so far.
Remove: when upstream checks gradients without reading them in the backward pass.
Numerics: none (bitwise); a step that is not finite is refused after its gradients were reduced,
    before weights change
"""

from typing import Any

from cppmega.catalogue.megatron_args import uses_fsdp
from cppmega.edits import replacing
from cppmega.page import Edit, Patch, Source

DDP = "megatron/core/distributed"
CHECKED = f"{DDP}/param_and_grad_buffer.py:_ParamAndGradBucketGroup.start_grad_sync"
FINISHED = f"{DDP}/distributed_data_parallel.py:DistributedDataParallel.finish_grad_sync"
MODULE = "cppmega.modules.grad_checks"
CHOSEN = """
    check_for_nan_or_inf=self.ddp_config.check_for_nan_in_grad,
    check_for_large=self.ddp_config.check_for_large_grads,
"""
GROUPS = "self.bucket_groups + self.expert_parallel_bucket_groups"


def checks(args: Any) -> bool:
    """Whether Megatron's own data parallelism checks the gradients of the run."""
    checked = bool(getattr(args, "check_for_nan_in_loss_and_grad", False))
    return checked and not uses_fsdp(args)


PATCH = Patch(
    edits=(
        Edit(
            target=CHECKED,
            pins={
                "0.15.3": "3831f72d7557bfa2",
                "0.16.1": "36a47d915c19d522",
                "0.17.1": "14c27088ef3cd7aa",
                "0.18.2": "8ed24ddabca51459",
                "0.19.2": "34b5d2d826f31677",
            },
            edit=replacing(f"self.check_grads({CHOSEN})", f"_cppmega_note(\n    self,{CHOSEN})"),
            imports=(f"from {MODULE} import note as _cppmega_note",),
        ),
        Edit(
            target=FINISHED,
            pins={
                "0.15.3": "666f1142a34bd8fb",
                "0.16.1": "56b5b91209cc9bf8",
                "0.17.1": "56b5b91209cc9bf8",
                "0.18.2": "56b5b91209cc9bf8",
                "0.19.2": "56b5b91209cc9bf8",
            },
            edit=replacing(GROUPS, f"_cppmega_settled({GROUPS})"),
            imports=(f"from {MODULE} import settled as _cppmega_settled",),
        ),
    ),
    reached="backward",
    when=checks,
)


def fixed_upstream(source: Source) -> bool:
    text = source.text(CHECKED)
    return bool(text) and "self.check_grads(" not in text and "_cppmega_note(" not in text


def verify() -> None:
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    from cppmega.proof import cpu_shims, host_sync

    cpu_shims.shim()
    cpu_shims.init_distributed()
    for overlaps in (False, True):
        model = torch.nn.Sequential(*(torch.nn.Linear(3, 3, bias=False) for _ in range(3)))
        ddp = DistributedDataParallel(
            TransformerConfig(num_layers=1, hidden_size=3, num_attention_heads=1),
            DistributedDataParallelConfig(
                overlap_grad_reduce=overlaps, bucket_size=9, check_for_nan_in_grad=True
            ),
            model,
        )
        for value in (1.0, float("nan"), float("inf"), 1.0):
            ddp.zero_grad_buffer()
            with host_sync.no_host_sync():
                (value * ddp(torch.ones(2, 3))).sum().backward()
            refused = ""
            try:
                ddp.finish_grad_sync()
            except RuntimeError as error:
                refused = str(error)
            if value == 1.0:
                assert not refused, refused
            else:
                assert "in local grad norm for bucket #0" in refused, (
                    f"a gradient that is {value} was accepted: {refused}"
                )
