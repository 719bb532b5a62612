"""Processes on this host: identity, liveness, relations, and shared termination."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from cppmega.host import env

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
_SET_CHILD_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_FORKED = 0x40  # PF_FORKNOEXEC of <linux/sched.h>
_OF_A_RANK = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
}


def end_with_parent(parent: int | None = None, number: signal.Signals = signal.SIGTERM) -> None:
    """Receive a signal when the parent ends: no rank may hold a GPU for a launcher that is gone.

    Args:
        parent: the process that started this one, if known: it may have ended already.
        number: the signal.
    """
    parent = os.getppid() if parent is None else parent
    _control(_SET_PARENT_DEATH_SIGNAL, number)
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), number)


def adopt_orphans() -> None:
    """Become the parent of orphans below this process, so that it can end them."""
    _control(_SET_CHILD_SUBREAPER, 1)


def _control(option: int, value: int) -> None:
    import ctypes  # most commands start without it

    with contextlib.suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None, use_errno=True).prctl(option, value)


def end_children() -> None:
    """End every process below this one, including those that others have left behind.

    A child that has ended counts until it is waited for: its own children are inherited when it
    ends, and a list taken at that moment may show neither them nor it as alive.
    """
    import psutil

    while below := psutil.Process().children():
        for child in below:
            send(child.pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child.pid, 0)


def of_a_rank(environ: Mapping[str, str]) -> list[str]:
    """The variables that make a process a rank, or configure torchrun (PET_*)."""
    return sorted(name for name, value in environ.items() if value and _is_of_a_rank(name))


def _is_of_a_rank(name: str) -> bool:
    return name in _OF_A_RANK or name.startswith(("PET_", "TORCHELASTIC_"))


def alone(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for a process that is not a rank and waits for none."""
    return {name: value for name, value in environ.items() if not _is_of_a_rank(name)}


def started(pid: int) -> str:
    """The start time of a process in ticks since boot; with its number it identifies the process.

    psutil's `create_time` is unsuitable: it adds the time of boot, which moves when the clock is
    set, and status files keep this value for as long as a run lasts. Empty if there is no such
    process, or if it has ended and only its exit status is left.
    """
    fields = _stat(pid)
    return fields[19] if fields and fields[0] not in "ZX" else ""


def alive(pid: int, since: str) -> bool:
    """Whether the process that started at that time still runs."""
    return bool(since) and started(pid) == since


def age(pid: int) -> float:
    """Seconds since a process was started; 0 if it is gone."""
    since = started(pid)
    if not since:
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(since) / os.sysconf("SC_CLK_TCK")


def boot() -> str:
    """The identity of this boot of the machine; process numbers mean nothing beyond it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def namespace() -> str:
    """The namespace that process numbers belong to; a container has its own."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def ancestors(pid: int) -> list[int]:
    """The parent of a process, its parent, and so on."""
    above: list[int] = []
    while (fields := _stat(above[-1] if above else pid)) and fields[1] != "0":
        above.append(int(fields[1]))
    return above


def children(pid: int, *, recursive: bool = False) -> list[int]:
    """The living children of a process.

    Args:
        recursive: include their children, and so on.
    """
    import psutil

    with contextlib.suppress(psutil.Error):
        below = psutil.Process(pid).children(recursive)
        return sorted(child.pid for child in below if started(child.pid))
    return []


def session(pid: int) -> int | None:
    """The number of the session that a process belongs to; None if the process is gone."""
    try:
        return os.getsid(pid)
    except OSError:
        return None


def of_session(leader: int) -> list[int]:
    """The living processes in the session of a leader, whether or not the leader itself lives."""
    import psutil

    return [pid for pid in psutil.pids() if session(pid) == leader and started(pid)]


def command(pid: int) -> list[str]:
    """The words that a process was started with; empty if it is gone."""
    import psutil

    with contextlib.suppress(psutil.Error):
        words: list[str] = psutil.Process(pid).cmdline()
        return words
    return []


def environment(pid: int) -> dict[str, str]:
    """The variables that a process was started with; empty if it is gone or another user's."""
    import psutil

    with contextlib.suppress(psutil.Error):
        variables: dict[str, str] = psutil.Process(pid).environ()
        return variables
    return {}


def forked_from(pid: int) -> int:
    """The process that called exec for the program of a process: itself, or one that forked it."""
    fields = _stat(pid)
    if fields and (int(fields[6]) & _FORKED or command(pid) == command(int(fields[1]))):
        return forked_from(int(fields[1]))
    return pid


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name; empty if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def end_helpers(run: str, ranks: Iterable[int]) -> None:
    """End the processes that the ranks of a run started, which do not notice its end.

    Args:
        run: the run folder, as `CPPMEGA_RUN` names it, since process numbers are reused.
        ranks: the ranks, each of which torchrun has put into its own session.
    """
    for rank in ranks:
        for pid in of_session(rank):
            if environment(pid).get(env.RUN.name) == run:
                send(pid, signal.SIGKILL)


def send(pid: int, number: signal.Signals) -> bool:
    """Send a signal; returns whether there was a process to receive it."""
    try:
        os.kill(pid, number)
    except (
        ProcessLookupError,
        PermissionError,
    ):  # gone, or the number now belongs to another user's process
        return False
    return True
