"""Let Megatron-FSDP of 0.15.0 name its device meshes under PyTorch 2.11.

What: `get_mesh_names` reads the flattened meshes from the root mesh, and from the registry on older
    versions of PyTorch.
Why: 0.15.0 reads `_mesh_resources.child_to_root_mapping`, which PyTorch 2.11 removed: Megatron-FSDP
    raises AttributeError as soon as it inspects a named device mesh (seen on CPU).
Upstream: https://github.com/NVIDIA/Megatron-LM/pull/2575 (in 0.15.3 and 0.16.0), of which this page
    contains the part that PyTorch 2.11 needs.
Remove: when 0.15.0 is no longer supported; 0.15.3 has the fix.
Numerics: none (bitwise)
"""

from cppmega.edits import replacing
from cppmega.page import Edit, Patch, Source

TARGET = "megatron/core/distributed/fsdp/src/megatron_fsdp/utils.py:get_mesh_names"


def _cppmega_flattened_names(device_mesh):
    """Names of the dimensions of the meshes that were made out of this one."""
    root = getattr(device_mesh, "_get_root_mesh", lambda: None)()
    if hasattr(root, "_flatten_mapping"):
        return list(root._flatten_mapping)
    from torch.distributed.device_mesh import _mesh_resources

    return [
        name
        for child, parent in _mesh_resources.child_to_root_mapping.items()
        for name in (child.mesh_dim_names or [])
        if parent == device_mesh
    ]


PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=TARGET,
            pins={"0.15.0": "a3e8104414e8ff87"},
            edit=replacing(
                """
                submesh_dim_names = [
                    submesh_dim_name
                    for child_mesh, root_mesh in _mesh_resources.child_to_root_mapping.items()
                    for submesh_dim_name in (child_mesh.mesh_dim_names or [])
                    if root_mesh == device_mesh
                ]
                """,
                "submesh_dim_names = _cppmega_flattened_names(device_mesh)",
            ),
            helpers=(_cppmega_flattened_names,),
        ),
    ),
    reached="startup",
    when=lambda args: bool(getattr(args, "use_megatron_fsdp", False)),
)


def fixed_upstream(source: Source) -> bool:
    return "_flatten_mapping" in source.text(TARGET)


def verify() -> None:
    from types import SimpleNamespace

    from megatron.core.distributed.fsdp.src.megatron_fsdp.utils import get_mesh_names

    class Mesh(SimpleNamespace):
        def _get_root_mesh(self):
            return self

    mesh = Mesh(mesh_dim_names=("dp", "cp"), _flatten_mapping={"dp_cp": None, "cp": None})
    names = get_mesh_names(mesh)
    assert list(dict.fromkeys(names)) == ["dp", "cp", "dp_cp"]  # upstream repeats some names
    assert get_mesh_names(None) == []
