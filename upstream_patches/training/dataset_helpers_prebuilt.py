"""Use the dataset helpers that ship with the wheel instead of building them.

What: `compile_helpers` returns if the compiled `helpers_cpp` can be imported, and runs make only if
    it cannot.
Why: The wheel ships the compiled module but no Makefile, so `make` fails and every training run
    that uses Megatron's datasets exits with status 1 before its first step (seen on 0.19.2 with
    upstream's own `pretrain_hybrid.py`; the function is the same in every release).
Upstream: Not sent: a checkout needs the build and the wheel does not; upstream trains from
    checkouts.
Remove: when the wheel ships the Makefile and the sources, or `compile_helpers` checks for the
    module before it builds.
Numerics: none (bitwise)
"""

from cppmega.edits import body_of
from cppmega.page import Edit, Patch, Source

TARGET = "megatron/core/datasets/utils.py:compile_helpers"


def compile_helpers():  # type: ignore[no-untyped-def]
    import importlib
    import os
    import subprocess

    package = __name__.rpartition(".")[0]
    try:
        importlib.import_module(f"{package}.helpers_cpp")
    except ImportError:
        command = ["make", "-C", os.path.abspath(os.path.dirname(__file__))]  # noqa: PTH100, PTH120
        if subprocess.run(command).returncode != 0:
            raise RuntimeError(
                f"{package}.helpers_cpp cannot be imported and `{' '.join(command)}` failed; "
                "reinstall megatron-core from its wheel, or install make, g++ and pybind11"
            ) from None


PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=TARGET,
            pins={
                "0.15.3": "21e643c8a22291ed",
                "0.16.1": "21e643c8a22291ed",
                "0.17.1": "21e643c8a22291ed",
                "0.18.2": "21e643c8a22291ed",
                "0.19.2": "21e643c8a22291ed",
            },
            edit=body_of(compile_helpers),
        ),
    ),
    reached="never",  # only a run that would build the helpers needs it
)


def fixed_upstream(source: Source) -> bool:
    return "helpers_cpp" in source.text(TARGET)


def verify() -> None:
    import subprocess
    import sys
    from types import ModuleType
    from unittest import mock

    from megatron.core.datasets import utils

    # A stand-in: wheels up to 0.16 have helpers compiled for a different Python than newer wheels.
    compiled = ModuleType("megatron.core.datasets.helpers_cpp")
    for helpers, builds in ((compiled, False), (None, True)):
        ran = mock.Mock(return_value=mock.Mock(returncode=0))
        with (
            mock.patch.dict(sys.modules, {compiled.__name__: helpers}),
            mock.patch.object(subprocess, "run", ran),
        ):
            utils.compile_helpers()
        assert ran.called == builds, f"make was run: {ran.called}, helpers: {helpers}"
