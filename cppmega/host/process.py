"""Processes of a run on this host: which live, whose children they are, how they end together."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
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
    """Get a signal when the parent ends: no rank may hold a GPU for a launcher that is gone.

    Args:
        parent: who started this process, where that is known: it may have ended already.
        number: the signal.
    """
    parent = os.getppid() if parent is None else parent
    _control(_SET_PARENT_DEATH_SIGNAL, number)
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), number)


def adopt_orphans() -> None:
    """Become the parent of what the processes below leave behind, so that it can be ended."""
    _control(_SET_CHILD_SUBREAPER, 1)


def _control(option: int, value: int) -> None:
    import ctypes  # most commands start without it

    with contextlib.suppress(OSError, AttributeError):  # another system than Linux
        ctypes.CDLL(None, use_errno=True).prctl(option, value)


def end_children() -> None:
    """End every process below this one, also what others left behind."""
    while below := children(os.getpid()):
        for child in below:
            send(child, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)


def of_a_rank(environ: Mapping[str, str]) -> list[str]:
    """The variables by which a process is a rank, or torchrun another's: PET_* are its options."""
    return sorted(name for name, value in environ.items() if value and _is_of_a_rank(name))


def _is_of_a_rank(name: str) -> bool:
    return name in _OF_A_RANK or name.startswith(("PET_", "TORCHELASTIC_"))


def alone(environ: Mapping[str, str]) -> dict[str, str]:
    """The same environment for a process that waits for no other rank."""
    return {name: value for name, value in environ.items() if not _is_of_a_rank(name)}


def started(pid: int) -> str:
    """When a process started, in ticks since boot: tells it from a later one of the same number.

    Empty where there is no such process, or only its exit status waits to be read.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def alive(pid: int, since: str) -> bool:
    """Whether that process still runs."""
    return bool(since) and started(pid) == since


def ancestors(pid: int) -> list[int]:
    """The parent of a process, its parent, and so on."""
    found: list[int] = []
    while pid > 1:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            break
        pid = int(fields[1])
        found.append(pid)
    return found


def boot() -> str:
    """Names the time since this machine was started; process numbers mean nothing beyond it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def namespace() -> str:
    """Names what our numbers of processes belong to: a container has its own."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def children(pid: int) -> list[int]:
    """The direct children of a process."""
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, file.read_text().split())
    return sorted(child for child in found if started(child))


def of_session(leader: int) -> list[int]:
    """The processes in the session of one that led it, whether that lives or not."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = file.read_text().rpartition(")")[2].split()
            if int(fields[3]) == leader and fields[0] not in "ZX":
                found.append(int(file.parent.name))
    return found


def command(pid: int) -> list[str]:
    """The words that a process was started with; none where it is gone."""
    try:
        data = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return [os.fsdecode(word) for word in data.split(b"\0")[:-1]]


def only_forked(pid: int) -> bool:
    """Whether a process runs the program of its parent still: it was forked, and became no other.

    True where it is gone.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return True
    return bool(int(fields[6]) & _FORKED) or command(pid) == command(int(fields[1]))


def age(pid: int) -> float:
    """Seconds since a process was started; 0 where it is gone."""
    since = started(pid)
    if not since:
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(since) / os.sysconf("SC_CLK_TCK")


def leads_session(pid: int) -> bool:
    """Whether a process was started in a session of its own."""
    try:
        return os.getsid(pid) == pid
    except OSError:
        return False


def end_helpers(run: str, ranks: Iterable[int]) -> None:
    """End what the ranks of a run had started: a writer of checkpoints does not hear of its end.

    Args:
        run: its folder, as `CPPMEGA_RUN` names it: numbers of processes are used again.
        ranks: which torchrun has given a session of its own each.
    """
    for rank in ranks:
        for pid in of_session(rank):
            if environment(pid).get(env.RUN.name) == run:
                send(pid, signal.SIGKILL)


def environment(pid: int) -> dict[str, str]:
    """The variables that a process was started with; empty where it is gone or another user's."""
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(pair.split("=", 1) for pair in data.split("\0") if "=" in pair)


def send(pid: int, number: signal.Signals) -> bool:
    """Send a signal; whether there was somebody to get it."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):  # gone, or its number is another user's now
        return False
    return True


def hold_standard_streams() -> None:
    """Open /dev/null in place of a standard stream that is closed (`>&-`).

    The next file to be opened would get its number, and take what is printed.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115
