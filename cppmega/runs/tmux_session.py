"""The first program of a new tmux session: it receives its command from the launch.

A tmux server keeps the environment that it was started with, perhaps days ago in another virtual
environment, and gives it to new sessions. So the session asks its launch for folder, environment
and command over a socket that has no file, and becomes that command with exactly that environment.
If the launch ends before it has answered, the session ends too.

tmux starts this file by its path under `python -I`: it imports only the standard library.
"""

import json
import os
import socket
import struct
import sys

_FROM_TMUX = ("TMUX", "TMUX_PANE", "TERM", "TERM_PROGRAM", "TERM_PROGRAM_VERSION", "COLORTERM")


def same_user(link: socket.socket) -> bool:
    """Whether the peer is a process of this user: any local user can find the socket."""
    size = struct.calcsize("3i")
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return bool(struct.unpack("3i", credentials)[1] == os.getuid())


def main() -> None:
    """Receive the command and become it."""
    with socket.socket(socket.AF_UNIX) as link:
        link.connect("\0" + sys.argv[1])
        if not same_user(link):
            sys.exit("cppmega: another user's process answered instead of the launch")
        with link.makefile("rb") as answer:
            text = answer.read()
    if not text:
        sys.exit("cppmega: the launch ended before it started anything here")
    order = json.loads(text)
    environment = order["environment"]
    environment |= {name: os.environ[name] for name in _FROM_TMUX if name in os.environ}
    os.chdir(order["folder"])
    os.execve(order["command"][0], order["command"], environment)


if __name__ == "__main__":
    main()
