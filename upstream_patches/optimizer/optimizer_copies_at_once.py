"""Copy all updated parameters of the distributed optimizer at once, and cut gradients once.

What: The parts of gradients and of the parameter buffer that belong to a rank are views that are
    kept from step to step, and `_copy_main_params_to_model_params` copies all parts of a type in
    one call.
Why: Both loops of `DistributedOptimizer` make several calls for every parameter. With the 758
    parameters of NAM56R on a rank they took 44 ms of a step of 3 s on the host (while a profiler
    ran, on two H200), after the gradients were checked and the GPU has nothing left to do.
Upstream: Not sent: not measured alone yet.
Remove: when upstream no longer makes views and copies for every parameter in each step.
Numerics: none (bitwise)
"""

from typing import Any

from cppmega.catalogue.megatron_args import uses_fsdp
from cppmega.edits import in_order, inserting, replacing
from cppmega.page import Edit, Patch, Source

OPTIMIZER = "megatron/core/optimizer/distrib_optimizer.py:DistributedOptimizer"
GRADS = f"{OPTIMIZER}._copy_model_grads_to_main_grads"
PARAMS = f"{OPTIMIZER}._copy_main_params_to_model_params"
IMPORTS = ("from cppmega.runtime import optimizer_copies_at_once as _cppmega_shards",)


def copies_here(args: Any) -> bool:
    """Whether the run's optimizer makes these copies, and FSDP does not."""
    distributed = bool(getattr(args, "use_distributed_optimizer", False))
    precise = getattr(args, "use_precision_aware_optimizer", False)
    return distributed and not uses_fsdp(args) and not precise


PATCH = Patch(
    purpose="speed",
    edits=(
        Edit(
            target=GRADS,
            pins={
                "0.15.3": "4e76e2d179d7557a",
                "0.16.1": "4e76e2d179d7557a",
                "0.17.1": "4e76e2d179d7557a",
                "0.18.2": "4e76e2d179d7557a",
                "0.19.2": "4e76e2d179d7557a",
                "dev-d48bd6be": "4e76e2d179d7557a",
            },
            edit=replacing(
                "model_grad.view(-1)[param_range.start : param_range.end]",
                '_cppmega_shards.part(self, "grad", model_param, model_grad, param_range)',
            ),
            imports=IMPORTS,
        ),
        Edit(
            target=PARAMS,
            pins={
                "0.15.3": "367e66e3fbc81c6f",
                "0.16.1": "367e66e3fbc81c6f",
                "0.17.1": "24b5a8d0afa1ba00",
                "0.18.2": "b8baa7d3f9a2a8d6",
                "0.19.2": "b8baa7d3f9a2a8d6",
                "dev-d48bd6be": "28f25bae5a97ca81",
            },
            edit=in_order(
                replacing(
                    "model_param_buffer.view(-1)[world_range.start : world_range.end]",
                    "_cppmega_shards.part(\n"
                    '    self, "param", model_param, model_param_buffer, world_range\n'
                    ")",
                ),
                replacing(
                    "shard_model_param.data.copy_(shard_main_param)",
                    "_cppmega_copies.add(shard_model_param, shard_main_param)",
                ),
                inserting(
                    "_cppmega_copies = _cppmega_shards.Copies()",
                    before="copy_group_params(self.shard_fp32_from_float16_groups, "
                    "self.model_float16_groups)",
                ),
                inserting(
                    "_cppmega_copies.make()",
                    after="copy_group_params(self.shard_fp32_groups, self.model_fp32_groups)",
                ),
            ),
            imports=IMPORTS,
        ),
    ),
    reached="backward",
    when=copies_here,
    asked_by=("--use-distributed-optimizer",),
)


def fixed_upstream(source: Source) -> bool:
    text = source.text(PARAMS)
    return bool(text) and ".copy_(" not in text and "_cppmega_copies" not in text


def verify() -> None:
    from types import SimpleNamespace

    import torch
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, Range

    from cppmega.proof import operations, stand_ins

    # Two parameters in bf16 and one in fp32, of which this rank has the middle.
    buffer = {torch.bfloat16: torch.zeros(24, dtype=torch.bfloat16), torch.float32: torch.zeros(8)}
    places = [(torch.bfloat16, 0, 12), (torch.bfloat16, 12, 24), (torch.float32, 0, 8)]
    models = [torch.nn.Parameter(buffer[dtype][a:b].view(2, -1)) for dtype, a, b in places]
    mains = [torch.arange(float(b - a - 4)) + a for _, a, b in places]
    for parameter in models:
        parameter.main_grad = torch.randn(parameter.shape)
    ranges = {}
    optimizer = stand_ins.Arguments(
        unset=False,
        config=stand_ins.Arguments(unset=False),
        ddp_config=stand_ins.Arguments(unset=False),
        model_float16_groups=[models[:2]],
        model_fp32_groups=[models[2:]],
        shard_fp32_from_float16_groups=[mains[:2]],
        shard_fp32_groups=[mains[2:]],
        buffers=[SimpleNamespace(buckets=[SimpleNamespace(param_data=b)]) for b in buffer.values()],
        model_param_gbuf_map={p: (int(p is models[2]), None, 0) for p in models},
        _get_model_param_range_map=ranges.__getitem__,
        _get_fp8_params_and_shard_fp32_from_fp8=lambda: ([], [], []),
        _is_distopt_quantized_param=lambda parameter: False,
        # Of dev, whose optimizer may keep its state on the host.
        ensure_master_weights_for_param_sync=lambda: None,
        assert_master_weights_resident=lambda caller: None,
    )
    for step in range(4):
        first = 2 - step // 3  # the last step is of another part
        for parameter, (_, a, b) in zip(models, places, strict=True):
            last = b - a - 4 + first
            ranges[parameter] = {
                "param": Range(first, last),
                "gbuf_world_in_bucket": Range(a + first, a + last),
            }
        for each in buffer.values():
            each.zero_()
        with operations.counted() as calls:
            DistributedOptimizer._copy_model_grads_to_main_grads(optimizer)
            DistributedOptimizer._copy_main_params_to_model_params(optimizer)
        assert calls["_foreach_copy_"] == 2 and not calls["copy_"], calls
        if step == 1:
            assert not calls["view"] and not calls["slice"], f"cut again: {calls}"
        for model, main, (dtype, a, b) in zip(models, mains, places, strict=True):
            mine = model.main_grad.view(-1)[first : b - a - 4 + first]
            assert main.grad.data_ptr() == mine.data_ptr() and main.grad.equal(mine)
            wanted = torch.zeros(b - a, dtype=dtype)  # nothing else is written
            wanted[first : b - a - 4 + first] = main
            assert buffer[dtype][a:b].equal(wanted), "not copied"
            main.mul_(-3)
            main.grad = None
        if step == 1:
            models[0].main_grad = torch.randn(2, 6)  # the next step has to see the new buffer
