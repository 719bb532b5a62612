"""No variable that is not cppmega's changes what is computed, or how fast.

Such variables are left over from a debugging session, or configure the CUDA allocator, whose
expandable segments must be on in the training process.
"""

from __future__ import annotations

from cppmega.errors import CppmegaError
from cppmega.host import allocator
from cppmega.preflight.context import Context
from cppmega.preflight.findings import Problems

APART: tuple[str, ...] = ("allocator-differs",)

_OFF = ("", "0", "false", "off", "no")
_LEFT = {
    "PYTHONOPTIMIZE": "Megatron checks its arguments with assert, which Python then leaves out",
    "PYTHONINSPECT": "a process that ends, such as a failed rank, drops into an interactive prompt",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every allocation waits for the driver",
    "CUDA_LAUNCH_BLOCKING": "every kernel waits for the previous one: several times slower",
    "TRITON_INTERPRET": "Triton's kernels run as Python on the CPU",
    "TORCHDYNAMO_DISABLE": "nothing is compiled: slower, and not what was measured",
    "TORCH_COMPILE_DISABLE": "nothing is compiled: slower, and not what was measured",
    "PYTORCH_JIT_DEBUG": "fused functions run unfused",
    "NVIDIA_TF32_OVERRIDE": "it overrides the precision of matrix products",
    "NCCL_P2P_DISABLE": "GPUs communicate through host memory",
    "NCCL_SHM_DISABLE": "ranks on one host communicate through the network",
    "TILELANG_DISABLE_CACHE": "every rank recompiles every kernel",
}


def check(context: Context) -> Problems:
    """Compare the environment with the variables known to do so.

    Yields:
        `debug-variable`, `bad-variable`, `allocator-differs`.
    """
    environ, recipe = dict(context.environ), context.recipe
    wanted = {name for name, _ in recipe.environment} if recipe is not None else set()
    level = environ.get("TORCH_DISTRIBUTED_DEBUG", "")
    if level.upper() not in ("", "OFF", "INFO"):
        yield CppmegaError(
            "debug-variable",
            f"TORCH_DISTRIBUTED_DEBUG={level} is set: "
            + (
                "every collective is checked on every rank: slower."
                if level.upper() == "DETAIL"
                else "torch accepts only OFF, INFO and DETAIL, and cannot be imported."
            ),
            "The run would not be the one that was proved and measured, or would not start.",
            "unset TORCH_DISTRIBUTED_DEBUG",
        )
    if "error" in environ.get("PYTHONWARNINGS", ""):
        yield CppmegaError(
            "debug-variable",
            f"PYTHONWARNINGS={environ['PYTHONWARNINGS']} is set: torch and Megatron warn "
            "when they are imported, and each warning ends the process.",
            "Every rank would end before its first step.",
            "unset PYTHONWARNINGS",
        )
    threads = environ.get("OMP_NUM_THREADS", "1")
    if not all(part.strip().isdigit() and int(part) for part in threads.split(",")):
        yield CppmegaError(
            "bad-variable",
            f"OMP_NUM_THREADS={threads} is not a number of threads.",
            "OpenMP warns once and uses every core in every rank, and the ranks compete for them.",
            "export OMP_NUM_THREADS=1",
        )
    for name, effect in _LEFT.items():
        value = environ.get(name, "")
        # 0 switches TF32 off: any value is an override.
        unset = not value if name == "NVIDIA_TF32_OVERRIDE" else value.lower() in _OFF
        if not unset and name not in wanted:
            yield CppmegaError(
                "debug-variable",
                f"{name}={value} is set: {effect}.",
                "The run would not be the one that was proved and measured.",
                f"unset {name}; a recipe that needs it lists it in its environment",
            )
    if recipe is not None and not context.needs_gpu:
        return "none is set"
    allocator.set_in(environ)  # as cppmega.run does
    read = allocator.NEW if environ.get(allocator.NEW) else allocator.OLD
    if not allocator.is_on(environ):
        yield CppmegaError(
            "allocator-differs",
            f"{read}={environ[read]} switches expandable segments off.",
            "Free memory is fragmented into gaps too small to use: the run goes out of memory with "
            "much of it free.",
            f"unset {read} (cppmega.run sets expandable_segments:True)",
        )
    return f"none is set; {read}={environ[read]}"
