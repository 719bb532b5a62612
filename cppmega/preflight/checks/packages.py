"""The packages that the run imports late, and the compilers that its kernels need, are there."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from cppmega.errors import CppmegaError
from cppmega.preflight.context import Context
from cppmega.preflight.findings import NotApplicable, refuse
from cppmega.training import requirements as trainer_checks

AFTER: tuple[str, ...] = ("one_root", "recipe_complete")

_WANDB_KEY = "api.wandb.ai"


def check(context: Context) -> str:
    """Look for packages and programs.

    Raises:
        CppmegaError: `package-missing`, `compiler-missing`, `wandb-not-logged-in`.
        NotApplicable: nothing of Megatron's trainer is launched.
    """
    line, recipe = context.line, context.recipe
    if recipe is None:
        raise NotApplicable("no recipe is named")
    trainer_checks.check_packages(recipe, line.options)
    refuse(_found(context))
    return "what is imported late is there"


def _found(context: Context) -> Iterator[CppmegaError]:
    environ, recipe, options = context.environ, context.recipe, context.line.options
    assert recipe is not None
    path = environ.get("PATH")
    compilers = [environ[name] for name in ("CC",) if environ.get(name)] or ["gcc", "clang", "cc"]
    if context.training_machine and not any(shutil.which(c, path=path) for c in compilers):
        yield CppmegaError(
            "compiler-missing",
            f"No C compiler is on PATH ({', '.join(compilers)}).",
            "Triton compiles a small C file for every kernel that it launches.",
            "install gcc, or export CC",
        )
    wants_nvcc = recipe.uses_dsa and recipe.dsa_kernel_backend == "tilelang"
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH") or "/usr/local/cuda"
    nvcc = shutil.which("nvcc", path=path) or (Path(home) / "bin" / "nvcc").is_file()
    if context.training_machine and wants_nvcc and not nvcc:
        yield CppmegaError(
            "compiler-missing",
            "TileLang compiles with nvcc, and none is on PATH or in CUDA_HOME.",
            "The first DSA layer would end the run.",
            "install the CUDA toolkit and export CUDA_HOME, or --set dsa_kernel_backend=none",
        )
    if options.wandb_project and environ.get("WANDB_MODE") not in ("offline", "disabled", "dryrun"):
        home = environ.get("HOME", "")
        known = Path(home) / ".netrc"
        logged_in = known.is_file() and _WANDB_KEY in known.read_text(errors="replace")
        if not environ.get("WANDB_API_KEY") and not logged_in:
            yield CppmegaError(
                "wandb-not-logged-in",
                "--wandb-project is given, and there is no key for Weights & Biases.",
                "It would ask for one on a terminal that nobody looks at, and the run would wait.",
                "wandb login, or export WANDB_MODE=offline",
            )
