"""Names of real device meshes on 0.15.0, which fails without the page on this PyTorch."""

from tests.support import patched, pristine, python

RUN = "from tests.upstream_patches.fsdp import test_fsdp_device_mesh_names as t; t.{}()"
MODULE = "megatron.core.distributed.fsdp.src.megatron_fsdp.utils"


def _names():
    import importlib

    from torch.distributed.device_mesh import init_device_mesh

    from cppmega.proof import cpu_shims

    cpu_shims.init_distributed()
    utils = importlib.import_module(MODULE)
    mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("dp", "cp", "tp"))
    before = utils.get_mesh_names(mesh)
    mesh["dp", "cp"]._flatten("dp_cp")
    assert utils.contains_submesh(mesh, "dp_cp") and not utils.contains_submesh(mesh, "ep")
    return before, utils.get_mesh_names(mesh), utils.get_mesh_names(mesh["dp", "cp"])


def check() -> None:
    from unittest import mock

    from torch.distributed import device_mesh

    before, after, part = _names()
    assert before == ["dp", "cp", "tp"] and after == ["dp", "cp", "tp", "dp_cp"]
    assert part == ["dp", "cp", "dp_cp"]

    # An older PyTorch keeps them in a registry.
    import importlib
    from types import SimpleNamespace

    root, child = (SimpleNamespace(mesh_dim_names=names) for names in (("dp", "cp"), ("dp_cp",)))
    registry = SimpleNamespace(child_to_root_mapping=_Pairs([(child, root)]))
    with mock.patch.object(device_mesh, "_mesh_resources", registry):
        assert importlib.import_module(MODULE).get_mesh_names(root) == ["dp", "cp", "dp_cp"]


class _Pairs(list):
    def items(self):
        return self


def check_stock() -> None:
    try:
        _names()
    except AttributeError as error:
        assert "child_to_root_mapping" in str(error)
    else:
        raise AssertionError("stock can name the dimensions: the page is no longer needed")


def test_meshes_have_names() -> None:
    done = python(patched("0.15.0", "fsdp_device_mesh_names"), RUN.format("check"))
    assert done.returncode == 0, done.stderr
    done = python(pristine("0.15.0"), RUN.format("check_stock"))
    assert done.returncode == 0, done.stderr
