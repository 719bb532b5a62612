"""Former names of modules are the modules of their present names."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import cppmega.ops

MOVED = {f"cppmega.ops.{old}": new for old, new in cppmega.ops._moved()}


@pytest.mark.megatron
@pytest.mark.filterwarnings("ignore")  # of Megatron, as it is imported
@pytest.mark.parametrize("old", MOVED)
def test_a_former_name_has_all_that_the_module_has(old: str) -> None:
    pytest.importorskip("triton")
    former, module = importlib.import_module(old), importlib.import_module(MOVED[old].split()[0])
    for name in vars(module):
        assert name.startswith("__") or getattr(former, name) is getattr(module, name)
    with pytest.raises(AttributeError):
        _ = former.no_such_name


def test_former_names_load_nothing_until_they_are_used() -> None:
    code = (
        "import sys, cppmega.ops.rope_triton as old, cppmega.ops.hadamard\n"
        "assert not {'torch', 'triton'} & sys.modules.keys()\n"
        "assert not hasattr(old, '__path__')\n"
        "assert not {'torch', 'triton'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
