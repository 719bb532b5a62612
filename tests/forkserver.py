"""The servers of a test session, which fork in place of `python`: `tests.forking.server`.

No test is about the import of torch. What is about what a process imports, or about what Python and
OpenMP read when they start, runs `sys.executable`.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
from filelock import FileLock

from cppmega.proof import hash_seeds, verify
from tests.forking import server as fork_server

FOR_KERNELS = (
    *("torch", "torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.checkpoint"),
    *("triton", "triton.experimental.gluon", "numpy", "pytest", "tests.ops.interpreted"),
)
"""What a server imports whose forks interpret Triton's kernels; few of them import Megatron. Torch
imports its compiler, which takes as long as torch, when an operation of ours is first called."""
INTERPRETS = "TRITON_INTERPRET"
GLOO = "tests.forking.gloo"
"""Imported by all servers, for ranks that are forks."""
LIFE = "life"
"""A pipe that the process of the session holds open, and with it the servers."""


@cache
def executable(interprets: bool = False) -> str:
    """The file to run in place of `sys.executable`; the first call in a session starts its server.

    Args:
        interprets: whether Triton, which decides at its import, interprets kernels in the forks.
    """
    if Path("/dev/nvidiactl").exists():
        return sys.executable  # an import may look for GPUs, and CUDA does not survive a fork
    scratch = Path(os.environ["TESTS_SCRATCH"])
    known = scratch / ("interpreting" if interprets else "compiling")
    with FileLock(known.with_suffix(".lock")):
        if not known.exists():
            known.write_text(str(_client_of_new_server(interprets, scratch)))
    return known.read_text()


def _client_of_new_server(interprets: bool, scratch: Path) -> Path:
    modules = FOR_KERNELS if interprets else (*fork_server.MODULES, "pytest", "tests.known_pages")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCH_WARM_POOL": "0",  # or importing Inductor starts a thread, up to torch 2.8
        "PYTHONPATH": str(Path(__file__).parents[1]),
        **({INTERPRETS: "1"} if interprets else {}),
    }
    if not (scratch / LIFE).exists():  # no session of pytest
        atexit.register(live(scratch))
    with (scratch / LIFE).open("rb") as life:
        server = fork_server.ForkServer(
            (*modules, GLOO, fork_server.HUGE_PAGES),
            environment,
            scratch / "__pycache__",
            life.fileno(),
        )
    assert server.ready
    child = server._process  # may outlive this process, which neither reads from it nor waits
    assert child.stdout is not None
    child.stdout.close()
    child.returncode = 0
    client = server.folder / "python"
    here = " ".join(f"'{word}'" for word in server.command())
    client.write_text(f'#!/bin/sh\nexec {here} "$@"\n')
    client.chmod(0o700)
    return client


def live(scratch: Path) -> Callable[[], None]:
    """Let the servers of a session live until the function that this returns is called."""
    os.mkfifo(scratch / LIFE)
    return partial(os.close, os.open(scratch / LIFE, os.O_RDWR | os.O_CLOEXEC))


def prove_in_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `verify` use the server of the session, and compare no texts.

    Forks of one process have one hash seed, so that their texts would be the same.
    """
    monkeypatch.setattr(verify, "PYTHON", executable())
    monkeypatch.setattr(hash_seeds, "SEEDS", ())
