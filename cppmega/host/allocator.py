"""Expandable segments of PyTorch's CUDA allocator, set before torch is imported.

Without them, the blocks of many sizes that packed documents and experts need leave gaps that are
too small for any other: a model of NAM56R's size runs out of memory although enough is free.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

NEW, OLD = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
"""torch reads the old name if the new one is not set."""
_KEY = "expandable_segments"


def set_in(environ: MutableMapping[str, str]) -> None:
    """Enable them in an environment; an explicit False stays, and the preflight refuses it."""
    name = NEW if environ.get(NEW) else OLD
    settings = [part.strip() for part in environ.get(name, "").split(",") if part.strip()]
    if not any(part.partition(":")[0] == _KEY for part in settings):
        environ[name] = ",".join([*settings, f"{_KEY}:True"])
    # Otherwise Megatron refuses CUDA graphs together with them: NCCL would keep addresses of
    # buffers in the graph that the allocator maps elsewhere.
    environ.setdefault("NCCL_GRAPH_REGISTER", "0")


def is_on(environ: Mapping[str, str]) -> bool:
    """Whether torch will enable them in this environment."""
    value = environ.get(NEW) or environ.get(OLD, "")
    settings = dict(part.strip().partition(":")[::2] for part in value.split(","))
    return settings.get(_KEY, "").strip().lower() == "true"
