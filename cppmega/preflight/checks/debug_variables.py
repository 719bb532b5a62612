"""No variable of a debugging session is left that changes what is computed, or how fast."""

from __future__ import annotations

from collections.abc import Iterator

from cppmega.errors import CppmegaError
from cppmega.preflight.context import Context
from cppmega.preflight.findings import refuse

AFTER: tuple[str, ...] = ()

_OFF = ("", "0", "false", "off", "no")
_LEFT = {
    "PYTHONOPTIMIZE": "Megatron checks its arguments with assert, and Python leaves them out",
    "PYTHONINSPECT": "a process stays at a prompt when it ends, and a failed rank with it",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every allocation waits for the driver",
    "CUDA_LAUNCH_BLOCKING": "every kernel waits for the one before: several times slower",
    "TRITON_INTERPRET": "Triton's kernels run as Python on the CPU",
    "TORCHDYNAMO_DISABLE": "nothing is compiled: slower, and not what was measured",
    "TORCH_COMPILE_DISABLE": "nothing is compiled: slower, and not what was measured",
    "PYTORCH_JIT_DEBUG": "fused functions run unfused",
    "NVIDIA_TF32_OVERRIDE": "it changes the precision of matrix products behind everybody's back",
    "NCCL_P2P_DISABLE": "GPUs talk through the host's memory",
    "NCCL_SHM_DISABLE": "ranks of one host talk through the network",
    "TILELANG_DISABLE_CACHE": "every rank compiles every kernel again",
}


def check(context: Context) -> str:
    """Look for them.

    Raises:
        CppmegaError: `debug-variable`, `bad-variable`.
    """
    refuse(_found(context))
    return "none is set"


def _found(context: Context) -> Iterator[CppmegaError]:
    recipe = context.recipe
    wanted = {name for name, _ in recipe.environment} if recipe is not None else set()
    level = context.environ.get("TORCH_DISTRIBUTED_DEBUG", "")
    if level.upper() not in ("", "OFF", "INFO"):
        yield CppmegaError(
            "debug-variable",
            f"TORCH_DISTRIBUTED_DEBUG={level} is set: "
            + (
                "every collective is checked on every rank: slower."
                if level.upper() == "DETAIL"
                else "torch knows OFF, INFO and DETAIL, and cannot be imported."
            ),
            "The run would not be the one that was proved and measured, or not start.",
            "unset TORCH_DISTRIBUTED_DEBUG",
        )
    if "error" in context.environ.get("PYTHONWARNINGS", ""):
        yield CppmegaError(
            "debug-variable",
            f"PYTHONWARNINGS={context.environ['PYTHONWARNINGS']} is set: torch and Megatron warn "
            "when they are imported, and each warning ends the process.",
            "Every rank would end before its first step.",
            "unset PYTHONWARNINGS",
        )
    threads = context.environ.get("OMP_NUM_THREADS", "1")
    if not all(part.strip().isdigit() and int(part) for part in threads.split(",")):
        yield CppmegaError(
            "bad-variable",
            f"OMP_NUM_THREADS={threads} is no number of threads.",
            "OpenMP says so once and takes every core, in every rank: they fight for them.",
            "export OMP_NUM_THREADS=1",
        )
    for name, effect in _LEFT.items():
        value = context.environ.get(name, "")
        # TF32 is switched off by 0: any value overrides.
        unset = not value if name == "NVIDIA_TF32_OVERRIDE" else value.lower() in _OFF
        if not unset and name not in wanted:
            yield CppmegaError(
                "debug-variable",
                f"{name}={value} is set: {effect}.",
                "The run would not be the one that was proved and measured.",
                f"unset {name}; a recipe that wants it names it in its environment",
            )
