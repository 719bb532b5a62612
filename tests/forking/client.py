"""The stand-in for `python` itself: it sends its command to the server of `server`.

It is started for every command, so it imports little: an order is text that `repr` writes.
"""

from __future__ import annotations

import os
import socket
import sys


def path_in(folder: int) -> str:
    """The socket in an open folder. The path of a socket may not be long; this one is not."""
    return f"/proc/self/fd/{folder}/socket"


def ask(folder: str, arguments: list[str]) -> None:
    """Have a command run, and end as it ends."""
    files = inherited()
    order = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),  # noqa: PTH109
        "files": files,
    }
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path_in(os.open(folder, os.O_PATH)))
        socket.send_fds(connection, [b"files"], files)
        connection.sendall(ascii(order).encode() + b"\n")
        code = int(connection.recv(16) or b"1")
    if code < 0:
        die(-code)
    os._exit(code)


def inherited() -> list[int]:
    """The files that this process was started with; its own are closed on exec."""
    return [
        number
        for number in map(int, os.listdir("/proc/self/fd"))  # noqa: PTH208
        if number < 3 or (_is_open(number) and os.get_inheritable(number))
    ]


def _is_open(number: int) -> bool:
    """Not so for the folder that was just listed."""
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def die(number: int) -> None:
    """End by the signal that ended the fork."""
    import signal

    if number != signal.SIGKILL:  # which has no handler
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    ask(sys.argv[1], sys.argv[2:])
