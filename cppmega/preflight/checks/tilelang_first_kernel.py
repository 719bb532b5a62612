"""A TileLang kernel that is compiled first in a process does not return zeros on this GPU.

Mamba-3's MIMO kernel did on a GB10 (https://github.com/tile-ai/tilelang/issues/3071), without an
error: every rank compiles its kernels in its own order, so that some train and others do not. The
reporter could not repeat it after a system and driver update, and it is not known which releases of
TileLang have it. So the kernel is run, in a separate process and without TileLang's cache, where
a GPU of that kind and the kernel are present. This is a spot check, and proves nothing about other
kernels and shapes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from cppmega.errors import CppmegaError
from cppmega.host.importable import folder_of
from cppmega.preflight.ask import ask
from cppmega.preflight.checks.kernel_parity import SMALL
from cppmega.preflight.context import Context
from cppmega.preflight.findings import NotApplicable
from cppmega.preflight.messages import FirstKernelAnswer, FirstKernelOrder

AFTER: tuple[str, ...] = ("gpus",)


def check(context: Context) -> str:
    """Compile and run the kernel in a separate process.

    Raises:
        CppmegaError: `tilelang-first-kernel`.
        NotApplicable: the GPU is another one, or the kernel is not installed.
    """
    architectures = context.devices.architectures
    if not architectures & SMALL:
        raise NotApplicable(f"not seen on {', '.join(sorted(architectures)) or 'a CPU'}")
    if not _has_kernel():
        raise NotApplicable("mamba_ssm has no TileLang kernel of Mamba-3 here")
    worker = "cppmega.preflight.workers.first_kernel"
    with tempfile.TemporaryDirectory() as folder:
        environ = {**context.environ, "TILELANG_CACHE_DIR": folder}
        answer = ask(worker, FirstKernelOrder(device="cuda"), FirstKernelAnswer, environ)
    return judge(answer)


def judge(answer: FirstKernelAnswer) -> str:
    """Refuse zeros, and values that are not finite.

    Raises:
        CppmegaError: `tilelang-first-kernel`.
        NotApplicable: the kernel cannot be imported, so that no run uses it.
    """
    if answer.missing:
        raise NotApplicable(f"mamba_ssm cannot be imported: {answer.missing}")
    if answer.largest:
        return f"the largest output is {answer.largest:.2g}"
    found = "zeros" if answer.largest == 0 else "values that are not finite"
    raise CppmegaError(
        "tilelang-first-kernel",
        f"Mamba-3's TileLang kernel, compiled first in a process, returns {found}.",
        "A rank that compiles it first would train on that without an error.",
        "update the GPU's driver and empty TileLang's cache (~/.tilelang/cache), then run the "
        "preflight again; cppmega explain tilelang_3071",
    )


def _has_kernel() -> bool:
    folder: Path | None = folder_of("mamba_ssm")
    return folder is not None and (folder / "ops" / "tilelang" / "mamba3").is_dir()
