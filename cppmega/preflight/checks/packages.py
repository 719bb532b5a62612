"""The packages that the run imports late and the compilers of its kernels are installed."""

from __future__ import annotations

import shutil
from pathlib import Path

from cppmega.errors import CppmegaError
from cppmega.preflight.context import Context
from cppmega.preflight.findings import NotApplicable, Problems
from cppmega.training.requirements import Start

AFTER: tuple[str, ...] = ("one_root", "recipe_complete")

_WANDB_KEY = "api.wandb.ai"


def check(context: Context) -> Problems:
    """Search for packages and programs.

    Yields:
        `compiler-missing`, `wandb-not-logged-in`.

    Raises:
        CppmegaError: `package-missing`.
        NotApplicable: Megatron's trainer is not launched.
    """
    line, recipe = context.launch_line, context.recipe
    if recipe is None:
        raise NotApplicable("no recipe is named")
    Start(recipe, line.options).check("packages")
    options, environ, trains_here = line.options, context.environ, context.training_machine
    path = environ.get("PATH")
    compilers = [environ[name] for name in ("CC",) if environ.get(name)] or ["gcc", "clang", "cc"]
    if trains_here and not any(shutil.which(c, path=path) for c in compilers):
        yield CppmegaError(
            "compiler-missing",
            f"No C compiler is on PATH ({', '.join(compilers)}).",
            "Triton compiles a small C file for every kernel that it launches.",
            "install gcc, or export CC",
        )
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH") or "/usr/local/cuda"
    nvcc = shutil.which("nvcc", path=path) or (Path(home) / "bin" / "nvcc").is_file()
    first = "DSA" if recipe.uses_tilelang else "Mamba-3" if recipe.uses_mimo else ""
    if trains_here and first and not nvcc:
        otherwise = ", or --set dsa_kernel_backend=none" if not recipe.uses_mimo else ""
        yield CppmegaError(
            "compiler-missing",
            "TileLang compiles with nvcc, and none is on PATH or in CUDA_HOME.",
            f"The first {first} layer would end the run.",
            f"install the CUDA toolkit and export CUDA_HOME{otherwise}",
        )
    if options.wandb_project and environ.get("WANDB_MODE") not in ("offline", "disabled", "dryrun"):
        home = environ.get("HOME", "")
        known = Path(home) / ".netrc"
        logged_in = known.is_file() and _WANDB_KEY in known.read_text(errors="replace")
        if not environ.get("WANDB_API_KEY") and not logged_in:
            yield CppmegaError(
                "wandb-not-logged-in",
                "--wandb-project is set, and there is no API key for Weights & Biases.",
                "It would ask for one on a terminal that no one watches, and the run would wait.",
                "wandb login, or export WANDB_MODE=offline",
            )
    return "packages and compilers are installed"
