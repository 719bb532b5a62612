"""Save the correct optimizer state of each parameter in fully reshardable checkpoints.

What: `sharded_param_state_fully_reshardable` subtracts the padding of all previous buckets from a
    parameter's position in the buffer before it slices the gathered state.
Why: The gathered fp32 parameters and moments contain no padding, but the positions include it. With
    more than one bucket (`--overlap-grad-reduce`), each parameter after the first bucket is saved
    with states that are shifted by the padding, the last one with zeros at its end, and a run that
    resumes trains on them: the states of 6 of 8 parameters were wrong after one step (seen on CPU,
    0.16.1 to 0.19.2). The model weights in the checkpoint are correct, so the loss of the first
    step after the resume is, too.
Upstream: https://github.com/NVIDIA/Megatron-LM/pull/5077 (main, August 2026; not released)
Remove: when the method accounts for the bucket of a parameter.
Numerics: changes results of runs that resume from a checkpoint saved with the page; checkpoints
    saved without it are not repaired
"""

from typing import Any

from cppmega.edits import in_order, inserting, replacing
from cppmega.page import Edit, Patch, Source

TARGET = (
    "megatron/core/optimizer/distrib_optimizer.py:"
    "DistributedOptimizer.sharded_param_state_fully_reshardable"
)


def saves_it(args: Any) -> bool:
    """Whether the run saves fully reshardable optimizer states."""
    return (
        getattr(args, "use_distributed_optimizer", False)
        and getattr(args, "dist_ckpt_optim_fully_reshardable", False)
        and not getattr(args, "no_save_optim", None)
    )


PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=TARGET,
            pins={
                "0.15.3": "1f473b58f435ae5d",
                "0.16.1": "1f473b58f435ae5d",
                "0.17.1": "1f473b58f435ae5d",
                "0.18.2": "1f473b58f435ae5d",
                "0.19.2": "1f473b58f435ae5d",
                "dev-d48bd6be": "1f473b58f435ae5d",
            },
            edit=in_order(
                replacing(
                    "(param_world_start, param_world_end, _)",
                    "(param_world_start, param_world_end, bucket_id)",
                ),
                inserting(
                    """
                    # The world tensors have no padding at the ends of buckets, the indices do.
                    padding = sum(
                        bucket.grad_data.numel() - bucket.numel_unpadded
                        for bucket in buffer.buckets[:bucket_id]
                    )
                    param_world_start -= padding
                    param_world_end -= padding
                    """,
                    before="tensors = {}",
                ),
            ),
        ),
    ),
    reached="save",
    when=saves_it,
    wanted_by=lambda recipe: recipe.dist_ckpt_optim_fully_reshardable,
)


def fixed_upstream(source: Source) -> bool:
    text = source.text(TARGET)
    return "bucket_id" in text and "world_tensors[state_key][param_world_start:" not in text


def verify() -> None:
    from types import SimpleNamespace

    import torch
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    # Two parameters of 3 and one of 2 elements, each in a bucket padded to 4.
    params = [torch.nn.Parameter(torch.zeros(n)) for n in (3, 3, 2)]
    buckets = [SimpleNamespace(grad_data=torch.empty(4), numel_unpadded=p.numel()) for p in params]
    places = {p: (4 * i, 4 * i + p.numel(), i) for i, p in enumerate(params)}
    gathered = {"param": torch.arange(8.0), "exp_avg": -torch.arange(8.0), "numel_unpadded": 8}
    optimizer = SimpleNamespace(
        gbuf_ranges=[{torch.float32: [None] * 3}],
        buffers=[SimpleNamespace(buckets=buckets, param_index_map=places, numel_unpadded=8)],
        get_parameter_state_dp_zero=lambda **_: {0: {torch.float32: gathered}},
    )
    model = {i: ShardedTensor.from_rank_offsets(str(i), p) for i, p in enumerate(params)}
    saved = DistributedOptimizer.sharded_param_state_fully_reshardable(
        optimizer, model, metadata={}
    )
    masters = [saved[i]["param"].data.tolist() for i in range(3)]
    assert masters == [[0, 1, 2], [3, 4, 5], [6, 7]], (
        f"saved with the state of another parameter: {masters}"
    )
    assert [saved[i]["exp_avg"].data.tolist() for i in range(3)] == [
        [-value for value in values] for values in masters
    ]
