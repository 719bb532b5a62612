"""Judge a guarded process when it ends, in whatever way: was every step of it checked?

A script ends by returning, by `sys.exit`, by an exception, or later: when its last thread or its
last worker process ends. The first three are judged at once, the last when Python itself ends.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cppmega.errors import CppmegaError
from cppmega.guard import end_record as end_record
from cppmega.guard import error_file, ledger, ranks, rules
from cppmega.guard import session as guard
from cppmega.guard.held import Guard
from cppmega.guard.ledger import Entry
from cppmega.host import env

if TYPE_CHECKING:
    from cppmega.runs.folder import Node


@dataclass
class _End:
    """The end of a run's first process, as far as it is known."""

    pid: int
    words: Sequence[str]
    no_steps: bool
    node: Node | None
    status: int = 0
    judged: bool = False
    reason: str = ""
    """Why no step was seen; empty if steps were."""
    help_shown: bool = False


_END: _End | None = None


def watch(words: Sequence[str], *, no_steps: bool) -> None:
    """Judge this process at its end, unless it ends by `os._exit`.

    Args:
        words: the script's arguments.
        no_steps: whether the user declared that it does not train.
    """
    global _END
    _END = _End(os.getpid(), words, no_steps, end_record.node_of_this_rank())
    if _END.node is not None:
        end_record.begin(_END.node)
    elif env.RUN.read():
        left = f"ignoring {env.RUN.name}: the launch of that run has not started this process"
        print(f"cppmega: {left}", file=sys.stderr, flush=True)
    watch_ranks()
    atexit.register(_judge_at_exit)
    _end_workers_at_exit()


def returned(stop: SystemExit | None) -> int:
    """Judge a script that has ended by itself.

    Args:
        stop: how it ended, if not by returning.

    Returns:
        The exit status.

    Raises:
        CppmegaError: what `guard.finish` raises, and the error that refused a child process.
    """
    assert _END is not None
    status = _status(stop)
    if os.getpid() != _END.pid:
        return status  # a fork that has reached the script's end
    _END.status = status
    # A click command that was called as a function returns; there, `-h` may mean something else.
    _END.help_shown = "--help" in _END.words or (stop is not None and "-h" in _END.words)
    if status == 0 and not _has_running_work():
        _judge(_END)
    return status


def failed() -> None:
    """Make sure that the process ends with an error, which has been printed already."""
    if _END is None or os.getpid() != _END.pid:
        return
    _END.status, _END.judged = 1, True
    # The script's atexit handlers still run; its forks may end in any way.
    leave, me = os._exit, os.getpid()
    os._exit = lambda status: leave(status or int(os.getpid() == me))


def _status(stop: SystemExit | None) -> int:
    """Turn the argument of `sys.exit` into a status, as Python does."""
    if stop is None or stop.code is None:
        return 0
    return stop.code & 0xFF if isinstance(stop.code, int) else 1


def _has_running_work() -> bool:
    """Whether Python would wait, before it ends, for threads or processes of the script."""
    threads = [t for t in threading.enumerate() if not t.daemon]
    return len(threads) > 1 or any(not worker.daemon for worker in _workers())


def _judge(end: _End) -> None:
    end.judged = True
    entries = ledger.below(end.pid)
    for entry in entries:
        if entry.what == "refused" and entry.error is not None:
            what = f"process {entry.pid} ({entry.where}): {entry.error['what']}"
            raise CppmegaError.from_json({**entry.error, "what": what})
    held = guard.active()
    if held is not None and not held.stepped:
        end.reason = "--no-steps" if end.no_steps else _reason(held, entries, end.help_shown)
    if not end.no_steps:
        _refuse_silent_ranks(entries)
    guard.finish(end.reason)
    if end.reason:
        print(f"cppmega: no step was seen: {end.reason}", file=sys.stderr, flush=True)


def _refuse_silent_ranks(entries: Sequence[Entry]) -> None:
    """Refuse ranks that took no step and gave no reason.

    Raises:
        CppmegaError: `no-step-seen`.
    """
    fine = {entry.pid for entry in entries if entry.what in ("stepped", "excused")}
    silent = {entry.pid: entry.rank for entry in entries if entry.what == "joined"}
    silent = {pid: rank for pid, rank in silent.items() if pid not in fine}
    if silent:
        named = ", ".join(f"process {pid} (rank {rank})" for pid, rank in silent.items())
        raise CppmegaError(
            "no-step-seen",
            f"{ranks.where()}: {named} joined a process group and ended, and no step was seen.",
            "Neither the imports nor the ranks nor the reached patches were checked there.",
            "write `for batch in cppmega.guard.steps(loader, config):` in the function that is "
            "spawned, or pass --no-steps for a script that does not train",
        )


def _reason(held: Guard, entries: Sequence[Entry], help_shown: bool) -> str:
    """Why a process had no step to take; empty if it should have taken one."""
    stepped = {entry.pid for entry in entries if entry.what == "stepped"}
    if stepped:
        return f"processes that this one started took their own ({len(stepped)} of them)"
    if held.excuse:
        return held.excuse
    if help_shown:
        return "--help was requested"
    for entry in entries:
        if entry.what == "excused":
            return entry.reason
    return _reason_of_arguments(rules.arguments_of(held))


def _reason_of_arguments(args: Any) -> str:
    if getattr(args, "skip_train", None):
        return "only evaluation was requested (--skip-train)"
    done, asked = (getattr(args, name, None) for name in ("iteration", "train_iters"))
    if isinstance(done, int) and isinstance(asked, int) and done >= asked:
        return f"the checkpoint has {done} steps, and {asked} are requested"
    return ""


def _judge_at_exit() -> None:
    """Judge the process when Python ends, after its threads, workers and exit handlers."""
    end = _END
    if end is None or os.getpid() != end.pid:
        return
    refused = False
    if end.status == 0:
        try:
            # What ran last are the script's own exit handlers, which may train or save.
            guard.recheck_memory("after its exit handlers") if end.judged else _judge(end)
        except CppmegaError as error:
            refused, end.status = True, 1
            error_file.report(error)
    close_gloo()
    if end.node is not None:
        end_record.write(end.node, end.status, end.reason)
    if refused:
        _exit(1)


def _exit(status: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def close_gloo() -> None:
    """Close the process group that a script left open: gloo's threads abort a process that ends.

    One run in five ended with SIGABRT after its last step. NCCL does not do so, and closing it in
    a rank that failed would wait for the others.
    """
    distributed = ranks.distributed()
    if distributed is not None and distributed.get_backend() == "gloo":
        distributed.destroy_process_group()


def watch_ranks() -> None:
    """Also judge the processes that a script starts, once they have become ranks."""
    ranks.on_join(_watch_end_of_rank)


def _watch_end_of_rank() -> None:
    if _END is not None and os.getpid() == _END.pid:
        return  # its end is judged together with everything that it started
    atexit.register(_end_of_rank)
    if "multiprocessing.process" in sys.modules:
        from multiprocessing import util

        # A forked worker ends without running atexit handlers.
        util.Finalize(None, _end_of_rank, exitpriority=-1)
    _end_workers_at_exit()


def _end_workers_at_exit() -> None:
    """Let this process end whatever its workers make of SIGTERM."""
    from multiprocessing import util  # registers the wait for them: after that, they are judged

    util.Finalize(None, _end_workers, exitpriority=0)  # after those of the script


def _end_workers() -> None:
    """Kill the daemonic processes that Python, next, asks to end by SIGTERM and waits for.

    With `--exit-signal-handler`, Megatron gives its data loader's workers a handler that only takes
    note of the signal, in place of torch's, which ends them: a rank whose loader still exists,
    because of a traceback that has been kept, for example, would wait for them without end.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler takes them for crashed
    for worker in _workers():
        if worker.daemon:
            worker.kill()


def _workers() -> list[Any]:
    """The processes of `multiprocessing` that Python waits for when this one ends."""
    multiprocessing = sys.modules.get("multiprocessing")
    return multiprocessing.active_children() if multiprocessing is not None else []


def _end_of_rank() -> None:
    """Judge a rank that the script started, and write the verdict to the ledger."""
    held, error = guard.active(), sys.exc_info()[1]
    fails = error is not None and not (isinstance(error, SystemExit) and _status(error) == 0)
    if held is None or fails:
        return
    reason = "" if held.stepped else _reason_of_arguments(rules.arguments_of(held))
    if reason:
        ledger.write("excused", reason=reason)
    if not (held.stepped or reason):
        return  # the first process knows that this one joined a group, and reports it
    try:
        guard.finish(reason)
    except CppmegaError as refusal:
        guard.refuse(refusal)
        error_file.report(refusal)
        _exit(1)
