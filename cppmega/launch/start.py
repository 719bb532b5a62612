"""Start a recipe with an exact record of what ran.

Preflight, run folder with a manifest, torchrun with logs per rank, in a tmux session or here.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from pathlib import Path

from cppmega.errors import CppmegaError
from cppmega.host import console
from cppmega.launch import folder as launch_folder
from cppmega.launch import prepare
from cppmega.launch.request import LaunchRequest, ValidatedLaunch
from cppmega.runs import tmux
from cppmega.runs.folder import Node

_BEGINS = 120.0
"""Seconds within which a session must have its process in charge."""


def launch(request: LaunchRequest, *, dry_run: bool = False) -> int:
    """Validate the request, write the run folder and start.

    Returns:
        The exit status of the process that runs in this terminal.

    Raises:
        CppmegaError: see `prepare.prepare`.
    """
    validated = prepare.prepare(request)
    if dry_run:
        print(shlex.join(["torchrun", *validated.torchrun]))
        console.say(f"nothing was started; the run folder would be {validated.folder}")
        return 0
    if request.tmux is None:
        return _start_here(validated)
    return _start_in_session(validated, request.tmux)


def _start_here(validated: ValidatedLaunch) -> int:
    """Run in this terminal until the run ends."""
    from cppmega.launch.supervise import Supervisor

    node = launch_folder.create(validated)
    run = node.run
    console.say(f"run {run.name} in {run.path}; in this terminal: Ctrl-C saves and ends it")
    os.environ.clear()
    os.environ.update(validated.environment)
    return Supervisor(node, validated.torchrun).run()


def _start_in_session(validated: ValidatedLaunch, name: str) -> int:
    """Run in a tmux session; without one, the new run folder is removed."""
    node = launch_folder.create(validated)
    command = [sys.executable, "-m", "cppmega.launch.supervise", str(node.path)]
    try:
        tmux.start(name, [*command, *validated.torchrun], Path.cwd(), validated.environment)
    except CppmegaError:
        shutil.rmtree(node.run.path if validated.request.nodes == 1 else node.path)
        raise
    _await_start(node, name)
    print(node.run.path)
    runs = validated.request.runs
    where = f" --runs {runs}" if runs is not None else ""
    for verb in (f"attach {node.run.name}", f"logs -f {node.run.name}", f"stop {node.run.name}"):
        console.say(f"  cppmega {verb}{where}")
    console.say(f"  cppmega runs{where}")
    return 0


def _await_start(node: Node, session: str) -> None:
    """Wait until a process is in charge: a session that dies immediately has started nothing."""
    deadline = time.monotonic() + _BEGINS
    while time.monotonic() < deadline:
        if node.status():
            return
        if not tmux.exists(session) and not node.status():
            break
        time.sleep(0.05)
    raise CppmegaError(
        "session-not-started",
        f"The tmux session {session} ended before the run began.",
        "Nothing is running.",
        f"python -m cppmega.launch.supervise {node.path} shows why",
    )
