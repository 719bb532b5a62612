"""Tensor-parallel parameters of either direction on 0.15.0."""

from tests.support import patched, python

RUN = "from tests.upstream_patches.fsdp import test_fsdp_tensor_parallel_shapes as t; t.{}()"


def _shapes(dim: int) -> list[tuple[int, ...]]:
    """The shapes that a parameter's DTensor has for the whole group of two ranks."""
    import importlib
    from types import SimpleNamespace
    from unittest import mock

    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    buffers = importlib.import_module(
        "megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer"
    )
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    index = SimpleNamespace(tp_dim="tp", get_submesh=lambda name: mesh[name])
    part = torch.nn.Parameter(torch.ones(3, 4))
    part.tensor_model_parallel, part.partition_dim, part.partition_stride = True, dim, 1
    seen: list[tuple[int, ...]] = []

    def spec(param, dist_index, is_sharded_param):  # type: ignore[no-untyped-def]
        seen.append(tuple(param.shape))
        return mesh["dp"], [Replicate()]

    with mock.patch.object(buffers, "_get_fsdp_tensor_spec", spec):
        whole = buffers.make_fsdp_dtensor(part.detach().flatten(), part, index)
    return [*seen, tuple(whole.to_local().shape)]


def check() -> None:
    assert _shapes(0) == [(6, 4), (3, 4)]
    assert _shapes(1) == [(3, 8), (3, 4)]


def test_either_direction_is_sharded() -> None:
    done = python(patched("0.15.0", "fsdp_tensor_parallel_shapes"), RUN.format("check"))
    assert done.returncode == 0, done.stderr
