"""Return the sum over tensor-parallel ranks also for a tensor that is not contiguous.

What: `_reduce` returns the tensor that it has reduced.
Why: Up to 0.18 it reduces `input_.contiguous()` and returns `input_`. For a transposed or expanded
    tensor the former is a copy, so that the caller gets its own, unreduced values and no error.
    Megatron's own layers pass contiguous tensors. A model of one's own that transposes after
    `copy_to_tensor_model_parallel_region`, or sums its output, has gradients without the other
    ranks' part (seen on two gloo ranks, on 0.16.1 to 0.18.2).
Upstream: https://github.com/NVIDIA/Megatron-LM/pull/5338 (in 0.19.0)
Remove: when 0.18 is no longer supported; 0.19 has the fix.
Numerics: changes results of such calls, which returned one rank's values
"""

from cppmega.edits import replacing
from cppmega.page import Edit, Patch, Source

TARGET = "megatron/core/tensor_parallel/mappings.py:_reduce"

PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=TARGET,
            pins={
                "0.15.3": "d1682bdfeff2ae9a",
                "0.16.1": "d1682bdfeff2ae9a",
                "0.17.1": "d1682bdfeff2ae9a",
                "0.18.2": "d1682bdfeff2ae9a",
            },
            edit=replacing(
                "torch.distributed.all_reduce(input_.contiguous(), group=group)",
                """
                input_ = input_.contiguous()
                torch.distributed.all_reduce(input_, group=group)
                """,
            ),
        ),
    ),
    reached="never",  # with sequence parallelism, no layer of Megatron may call it
)


def fixed_upstream(source: Source) -> bool:
    return "input_ = input_.contiguous()" in source.text(TARGET)


def verify() -> None:
    import torch
    from megatron.core.tensor_parallel import mappings

    from cppmega.proof import ranks

    def work(rank):  # type: ignore[no-untyped-def]
        hidden = torch.ones(2, 3, requires_grad=True)
        weight = torch.arange(1.0, 7.0).view(3, 2) * (1 + rank)
        copied = mappings.copy_to_tensor_model_parallel_region(hidden)
        (copied.t() * weight).sum().backward()
        whole = mappings.reduce_from_tensor_model_parallel_region(weight.t())
        plain = mappings.reduce_from_tensor_model_parallel_region(weight.t().contiguous())
        return hidden.grad, whole, plain

    for rank, (gradient, whole, plain) in enumerate(ranks.on_two(work)):
        wanted = [[3.0, 9.0, 15.0], [6.0, 12.0, 18.0]]  # 1 + 2 times the first rank's weight
        assert gradient.tolist() == wanted, f"rank {rank} has a gradient of {gradient}"
        assert whole.tolist() == wanted, f"rank {rank} has a sum of {whole}"
        assert plain.tolist() == wanted, f"rank {rank} has a sum of {plain}"
