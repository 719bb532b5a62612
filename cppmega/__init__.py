"""Patches for an installed Megatron-LM, and the proof that they are in the code that trains.

`cppmega.apply()` and `cppmega.status()` are the commands of these names; `cppmega.guard` is what a
training loop calls; `cppmega.kernels` needs none of them.
"""

TYPE_CHECKING = False  # as in `typing`, which a module of the working directory could be here
if TYPE_CHECKING:
    from cppmega.api import apply, status

__version__ = "0.1.0"
__all__ = ["__version__", "apply", "status"]


def __getattr__(name: str) -> object:
    """Import what is offered here where it is first used: the kernels need nothing of the rest."""
    import importlib

    if name in ("guard", "kernels"):
        return importlib.import_module(f"{__name__}.{name}")
    if name in ("apply", "status"):
        return getattr(importlib.import_module(f"{__name__}.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
