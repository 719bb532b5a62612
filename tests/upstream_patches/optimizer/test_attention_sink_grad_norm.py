"""Transformer Engine's attention, whose base class is replaced: it needs a GPU."""

from __future__ import annotations

import pytest

from tests.support import VERSIONS, patched, python

PAGE = "attention_sink_grad_norm"

CODE = """
import inspect
import ast

import torch
from packaging.version import Version

from cppmega.proof import cpu_shims, small_models

cpu_shims.init_distributed()
from megatron.core.extensions import transformer_engine as extension
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType


class Base(torch.nn.Module):
    def __init__(self, softmax_type="vanilla", **options):
        super().__init__()
        if softmax_type == "learnable":
            self.softmax_offset = torch.nn.Parameter(torch.zeros(2))


# Without Transformer Engine, the class in the module is a mock.
tree = ast.parse(inspect.getsource(extension))
(found,) = [n for n in ast.walk(tree)
            if isinstance(n, ast.ClassDef) and n.name == "TEDotProductAttention"]
found.bases = [ast.Name("Base", ast.Load())]
names = vars(extension) | {
    "Base": Base,
    "HAVE_TE": True,
    "is_te_min_version": lambda *_, **__: True,
    "get_te_version": lambda: Version("2.20"),
}
exec(compile(ast.fix_missing_locations(ast.Module([found], [])), "attention", "exec"), names)
groups = ProcessGroupCollection.use_mpu_process_groups()
for kind in ("vanilla", "learnable"):
    config = small_models.config(softmax_type=kind)
    attention = names["TEDotProductAttention"](
        config, 1, AttnMaskType.causal, "self", pg_collection=groups
    )
    for param in attention.parameters():
        assert kind == "learnable" and param.tensor_model_parallel
        assert (param.partition_dim, param.partition_stride) == (0, 1)
assert len(list(attention.parameters())) == 1
"""


@pytest.mark.megatron
@pytest.mark.parametrize("version", [VERSIONS[0], VERSIONS[-1]])
def test_sinks_of_transformer_engine_are_marked(version: str) -> None:
    done = python(patched(version, PAGE), CODE)
    assert done.returncode == 0, done.stderr
