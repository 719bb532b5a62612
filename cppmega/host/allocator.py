"""Expandable segments of PyTorch's CUDA allocator, set before torch is imported.

Without them, blocks of the many sizes that packed documents and experts take leave gaps that
nothing fits into: NAM56R runs out of memory that is free.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

NEW, OLD = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
"""torch reads the old name where the new one is not set."""
_KEY = "expandable_segments"


def set_in(environ: MutableMapping[str, str]) -> None:
    """Add it to what the user has set; an explicit False stays, and the preflight refuses it."""
    name = NEW if environ.get(NEW) else OLD
    settings = [part.strip() for part in environ.get(name, "").split(",") if part.strip()]
    if not any(part.partition(":")[0] == _KEY for part in settings):
        environ[name] = ",".join([*settings, f"{_KEY}:True"])
    # Megatron refuses CUDA graphs together with them otherwise: NCCL would keep addresses of
    # buffers in the graph that the allocator maps elsewhere.
    environ.setdefault("NCCL_GRAPH_REGISTER", "0")


def is_on(environ: Mapping[str, str]) -> bool:
    """Whether torch will read that they are on."""
    value = environ.get(NEW) or environ.get(OLD, "")
    settings = dict(part.strip().partition(":")[::2] for part in value.split(","))
    return settings.get(_KEY, "").strip().lower() == "true"
