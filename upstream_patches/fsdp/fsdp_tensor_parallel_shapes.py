"""Let Megatron-FSDP of 0.15.0 shard tensor-parallel parameters under PyTorch 2.11.

What: `make_fsdp_dtensor` passes the global shape of a tensor-parallel parameter as a tuple.
Why: 0.15.0 passes a list, which PyTorch 2.11 rejects: with Megatron-FSDP and tensor parallelism,
    building the model ends with "spec.tensor_meta.shape must be a tuple" (seen on CPU).
Upstream: https://github.com/NVIDIA/Megatron-LM/pull/2575 (in 0.15.3 and 0.16.0)
Remove: when 0.15.0 is no longer supported; 0.15.3 has the fix.
Numerics: none (bitwise)
"""

from cppmega.edits import replacing
from cppmega.page import Edit, Patch, Source

FILE = "megatron/core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py"
TARGET = f"{FILE}:make_fsdp_dtensor"


def _call(shape: str) -> str:
    return f"""
    param = DTensor.from_local(
        local_tensor=param,
        device_mesh=tp_mesh,
        placements=[Shard(tp_dim)],
        run_check=run_check,
        shape={shape},
        stride=torch.empty(global_shape).stride(),
    )
    """


PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=TARGET,
            pins={"0.15.0": "f741961a33bbe6d9"},
            edit=replacing(_call("global_shape"), _call("tuple(global_shape)")),
        ),
    ),
    reached="startup",
    when=lambda args: (
        bool(getattr(args, "use_megatron_fsdp", False))
        and getattr(args, "tensor_model_parallel_size", 1) > 1
    ),
)


def fixed_upstream(source: Source) -> bool:
    return "shape=tuple(global_shape)" in source.text(TARGET)


def verify() -> None:
    from types import SimpleNamespace
    from unittest import mock

    import torch
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as buffers
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    index = SimpleNamespace(tp_dim="tp", get_submesh=lambda name, **_: mesh[name])
    half = torch.nn.Parameter(torch.ones(3, 4))
    half.tensor_model_parallel, half.partition_dim, half.partition_stride = True, 1, 1
    seen: list[DTensor] = []

    def spec(param, *_, **__):
        seen.append(param)
        return mesh["dp"], [Replicate()]

    with mock.patch.object(buffers, "_get_fsdp_tensor_spec", spec):
        buffers.make_fsdp_dtensor(half.detach().flatten(), half, index)
    (whole,) = seen
    assert whole.shape == (3, 8) and whole.placements == (Shard(1),), whole
