"""The ranks of a process group: every one carries the guard, or is reported.

A rank without the guard would not take part in the comparison of the ranks: they would wait for it
until the group's own time limit, or pair their comparison with one of its collectives. So every
guarded rank leaves a key in the group's store when it joins, and looks for the keys of all others
before anything else is exchanged.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from types import ModuleType
from typing import Any, TypeVar

from cppmega.errors import CppmegaError
from cppmega.guard import import_hook, ledger

T = TypeVar("T")

_KEY = "cppmega/guarded/{}"
_LIMIT = timedelta(minutes=5)
"""How long a rank may lag behind the others, if the group's own limit is longer."""

_ON_JOIN: list[Callable[[], None]] = []


def distributed() -> Any:
    """`torch.distributed` if this process is a rank of a group, else None."""
    module = getattr(sys.modules.get("torch"), "distributed", None)
    if module is None or not module.is_available() or not module.is_initialized():
        return None
    return module


def rank() -> int:
    """The number of this rank, also where a script has spawned it without setting RANK."""
    group = distributed()
    return group.get_rank() if group else int(os.environ.get("RANK", "0"))


def is_last() -> bool:
    """Whether this is the last rank, which prints what Megatron's loop logs."""
    group = distributed()
    return group is None or group.get_rank() == group.get_world_size() - 1


def where() -> str:
    """`host NAME, rank N`, as messages name this process."""
    return f"host {socket.gethostname()}, rank {rank()}"


def gather(mine: T) -> list[T]:
    """Collect an object from every rank; a list of one where nothing is distributed.

    Raises:
        CppmegaError: `rank-without-guard`.
    """
    group = distributed()
    if group is None:
        return [mine]
    require_everyone()
    everyone: list[Any] = [None] * group.get_world_size()
    group.all_gather_object(everyone, mine)
    return everyone


def on_join(action: Callable[[], None]) -> None:
    """Call a function in every process that becomes a rank."""
    if action not in _ON_JOIN:
        _ON_JOIN.append(action)


def watch() -> None:
    """Notice when this process, or one forked from it, becomes a rank."""
    name = "torch.distributed.distributed_c10d"
    if name in sys.modules:
        _watch_init(sys.modules[name])
    else:
        import_hook.add(import_hook.Hook(wants=import_hook.named(name), after=_watch_init))


def answer() -> None:
    """Leave this rank's key, which shows that it carries the guard."""
    store, torch_distributed = _store(), distributed()
    if store is not None:
        store.set(_KEY.format(torch_distributed.get_rank()), "1")


def require_everyone() -> None:
    """Wait until every rank has answered.

    Raises:
        CppmegaError: `rank-without-guard`, on every rank that carries it.
    """
    store, torch_distributed = _store(), distributed()
    if store is None:
        return
    answer()
    keys = [_KEY.format(rank) for rank in range(torch_distributed.get_world_size())]
    limit = min(store.timeout, _LIMIT)
    try:
        store.wait(keys, limit)
    except RuntimeError:  # from every kind and version of store
        silent = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        if not silent:
            return  # they answered at the last moment
        raise CppmegaError(
            "rank-without-guard",
            f"Within {limit.total_seconds():.0f} seconds rank {', '.join(silent[:8])} of "
            f"{len(keys)} did not answer: it does not carry the guard.",
            "One rank with different code is enough to train a wrong model.",
            "start every rank with `python -m cppmega.run`, without python -S, -I or -E, and leave "
            "PYTHONPATH and CPPMEGA_* in the environment of ranks that your script starts",
        ) from None


def _store() -> Any:
    """The store of the process group; None if there is no group, or one without a store (MPI)."""
    if distributed() is None:
        return None
    c10d = sys.modules["torch.distributed.distributed_c10d"]
    get: Callable[[], Any] | None = getattr(c10d, "_get_default_store", None)
    return get() if get is not None else None


def _watch_init(module: ModuleType) -> None:
    original = module.init_process_group

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        answer()
        torch_distributed = distributed()
        if torch_distributed is not None:
            ledger.write("joined", rank=torch_distributed.get_rank())
            for action in _ON_JOIN:
                action()

    # torch.distributed copies the name after this module has been imported, and after this hook.
    for holder in (module, sys.modules.get("torch.distributed")):
        if getattr(holder, "init_process_group", None) is original:
            setattr(holder, "init_process_group", init_process_group)  # noqa: B010
