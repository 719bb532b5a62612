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
MODULE = "cppmega.runtime.grad_checks_no_host_sync"
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
    purpose="speed",
    edits=(
        Edit(
            target=CHECKED,
            pins={
                "0.15.3": "3831f72d7557bfa2",
                "0.16.1": "36a47d915c19d522",
                "0.17.1": "14c27088ef3cd7aa",
                "0.18.2": "8ed24ddabca51459",
                "0.19.2": "34b5d2d826f31677",
                "main-d98e8a64": "34b5d2d826f31677",
                "dev-d48bd6be": "b71584ee8b177de9",
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
                "main-d98e8a64": "6dd140b497e1ddd3",
                "dev-d48bd6be": "56b5b91209cc9bf8",
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
    from unittest import mock

    import torch
    from megatron.core import rerun_state_machine as reruns
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed import param_and_grad_buffer as buffers
    from megatron.core.transformer import TransformerConfig
    from torch.overrides import TorchFunctionMode

    from cppmega.proof import cpu_shims, host_sync

    cpu_shims.shim()
    cpu_shims.init_distributed()
    nan, inf = float("nan"), float("inf")

    class OnCpu(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            on_cpu = {"device": "cpu"} if "device" in (kwargs or {}) else {}
            return function(*args, **{**(kwargs or {}), **on_cpu})

    def chunk(**checked):  # type: ignore[no-untyped-def]
        model = torch.nn.Sequential(*(torch.nn.Linear(3, 3, bias=False) for _ in range(3)))
        model[1].weight.allreduce = False  # of an expert
        return DistributedDataParallel(
            TransformerConfig(num_layers=1, hidden_size=3, num_attention_heads=1),
            DistributedDataParallelConfig(bucket_size=9, check_for_nan_in_grad=True, **checked),
            model,
        )

    def backward(ddp, value=1.0, place=0):  # type: ignore[no-untyped-def]
        """The gradient of one layer is multiplied by a value."""
        ddp.zero_grad_buffer()
        x = torch.ones(2, 3)
        for at, layer in enumerate(ddp.module):
            weight = layer.weight * 1.0
            if at == place:
                weight.register_hook(lambda gradient: gradient * value)
            x = x @ weight.t()
        x.sum().backward()

    def refusal(finish):  # type: ignore[no-untyped-def]
        try:
            finish()
        except RuntimeError as error:
            assert "in local grad norm for bucket #0" in str(error), error
            return True
        return False

    for overlaps in (False, True):
        ddp = chunk(overlap_grad_reduce=overlaps)
        for value, place in ((1.0, 0), (nan, 0), (inf, 1), (1.0, 1), (nan, 2)):
            with host_sync.no_host_sync():
                backward(ddp, value, place)
            assert refusal(ddp.finish_grad_sync) == (value != 1.0), (overlaps, value, place)
    ddp = chunk()
    backward(ddp, nan)
    for group in ddp.bucket_groups:
        group.start_grad_sync()
        group.grad_reduce_handle = None
    backward(ddp)
    assert refusal(ddp.finish_grad_sync), "norms of a reduction that nobody finished are forgotten"
    ddp = chunk(check_for_large_grads=True)
    backward(ddp, nan)
    assert refusal(ddp.bucket_groups[-1].start_grad_sync) or refusal(
        ddp.bucket_groups[0].start_grad_sync
    ), "a check for size waits"

    # Megatron runs a step again whose results it rejects, and compares those of the same number.
    checked = []
    own_check = buffers._ParamAndGradBucketGroup.check_grads

    def check_grads(group, **chosen):  # type: ignore[no-untyped-def]
        checked.append(group)
        own_check(group, **chosen)

    def passes(value, place, repeats):  # type: ignore[no-untyped-def]
        count = 0
        while machine.should_run_forward_backward(None):
            count += 1
            checked.clear()
            backward(chunks[1], value if count == 1 or repeats else 1.0, place)
            backward(chunks[0])
            for each in chunks:
                each.finish_grad_sync()
        return count, machine.should_checkpoint_and_exit()[1:]

    counted = mock.patch.object(buffers._ParamAndGradBucketGroup, "check_grads", check_grads)
    one_pass, exits = (1, (False, 0)), {True: 16, False: 17}
    for overlaps in (False, True):
        for value, place, repeats in ((nan, 0, True), (inf, 2, False), (nan, 1, True)):
            reruns.destroy_rerun_state_machine()
            reruns.initialize_rerun_state_machine(mode=reruns.RerunMode.VALIDATE_RESULTS)
            machine = reruns.get_rerun_state_machine()
            chunks = [chunk(overlap_grad_reduce=overlaps) for _ in range(2)]
            with (
                mock.patch.object(torch.cuda, "get_rng_state", lambda *_: torch.zeros(1)),
                mock.patch.object(torch.cuda, "set_rng_state", lambda *_: None),
                OnCpu(),
                counted,
            ):
                for _ in range(2):
                    assert passes(1.0, 0, True) == one_pass, "a finite step runs again"
                    assert not checked, "finite norms are read by Megatron's check"
                found = passes(value, place, repeats)
            assert found == (2, (True, exits[repeats])), (overlaps, value, place, repeats, found)
            groups = [g for c in chunks for g in c.bucket_groups + c.expert_parallel_bucket_groups]
            assert len(checked) == len(groups), "results are compared with those of another number"
    reruns.destroy_rerun_state_machine()
    reruns.initialize_rerun_state_machine(mode=reruns.RerunMode.VALIDATE_RESULTS)
    machine = reruns.get_rerun_state_machine()
    with (
        mock.patch.object(torch.cuda, "get_rng_state", lambda *_: torch.zeros(1)),
        mock.patch.object(torch.cuda, "set_rng_state", lambda *_: None),
        OnCpu(),
    ):
        passes(1.0, 0, True)
        with (
            mock.patch.object(machine.error_injector, "should_inject_errors", True),
            mock.patch.object(machine.error_injector, "maybe_inject", lambda: True),
        ):
            assert passes(1.0, 0, True)[0] == 2, "an injected error has no check to act on"
