"""The servers of a test session, which fork in place of `python`: `cppmega.proof.fork_server`.

No test is about the import of torch. What is about what a process imports, or about what Python and
OpenMP read when they start, runs `sys.executable`.
"""

from __future__ import annotations

import atexit
import os
import sys
from functools import cache
from pathlib import Path

import pytest

from cppmega.proof import fork_server, hash_seeds, verify

FOR_KERNELS = (
    *("torch", "torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.checkpoint"),
    *("triton", "triton.experimental.gluon", "numpy", "pytest", "tests.ops.interpreted"),
)
"""What a server imports whose forks interpret Triton's kernels; few of them import Megatron. Torch
imports its compiler, which takes as long as torch, when an operation of ours is first called."""
INTERPRETS = "TRITON_INTERPRET"


@cache
def executable(interprets: bool = False) -> str:
    """The file to run in place of `sys.executable`; the server is started with the first call.

    Args:
        interprets: whether Triton, which decides at its import, interprets kernels in the forks.
    """
    if Path("/dev/nvidiactl").exists():
        return sys.executable  # an import may look for GPUs, and CUDA does not survive a fork
    modules = FOR_KERNELS if interprets else (*fork_server.MODULES, "pytest", "tests.known_pages")
    modules = (*modules, fork_server.HUGE_PAGES)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[1]),
        **({INTERPRETS: "1"} if interprets else {}),
    }
    server = fork_server.ForkServer(
        modules, environment, Path(os.environ["TESTS_SCRATCH"], "__pycache__")
    )
    atexit.register(server.close)
    assert server.ready
    client = server.folder / "python"
    here = " ".join(f"'{word}'" for word in server.command())
    client.write_text(f'#!/bin/sh\nexec {here} "$@"\n')
    client.chmod(0o700)
    return str(client)


class Shared:
    """The server of the session, in place of one for each `verify`."""

    ready = True

    def __init__(self, *_: object) -> None:
        """It has started already."""

    def command(self) -> list[str]:
        """The words to start in place of `sys.executable`."""
        return [executable()]

    def close(self) -> None:
        """Other tests go on with it."""


def prove_in_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `verify` use the server of the session, and compare no texts.

    Forks of one process have one hash seed, so that their texts would be the same.
    """
    if Path(executable()) != Path(sys.executable):
        monkeypatch.setattr(verify, "ForkServer", Shared)
    monkeypatch.setattr(hash_seeds, "SEEDS", ())
