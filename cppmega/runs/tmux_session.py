"""The first program of a new tmux session: it waits for the command of its launch.

A tmux server keeps the environment that it was started with, perhaps days ago in another virtual
environment, and gives it to new sessions. So the session reads folder, environment and command from
a file that only its user can read, and becomes that command with exactly that environment. If the
launch ends before it has written the file, the session ends too.

tmux starts this file by its path under `python -I`: it imports only the standard library.
"""

import json
import os
import shutil
import sys
import time
from pathlib import Path

PLACE = "_CPPMEGA_ORDER"
"""The variable that names the folder of the order."""
ORDER = "order.json"
_FROM_TMUX = ("TMUX", "TMUX_PANE", "TERM", "TERM_PROGRAM", "TERM_PROGRAM_VERSION", "COLORTERM")


def main() -> None:
    """Wait for the command and become it."""
    place, launch = Path(os.environ[PLACE]), int(sys.argv[1])
    file = place / ORDER
    while not file.exists():
        if not _alive(launch) and not file.exists():
            shutil.rmtree(place, ignore_errors=True)
            sys.exit("cppmega: the launch ended before it started anything here")
        time.sleep(0.05)
    order = json.loads(file.read_text())
    shutil.rmtree(place)
    environment = order["environment"]
    environment |= {name: os.environ[name] for name in _FROM_TMUX if name in os.environ}
    os.chdir(order["folder"])
    os.execve(order["command"][0], order["command"], environment)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError:  # gone, or its number is another user's
        return False
    return True


if __name__ == "__main__":
    main()
