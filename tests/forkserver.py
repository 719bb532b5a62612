"""A stand-in for `python` whose processes are forks of one that has imported torch.

Importing torch takes longer than most of what the tests then do, and no test is about it. So one
server imports it, and forks for every command that it is sent. The client takes the arguments of
`python`; its environment, working folder and open files become those of the fork, and it ends as
the fork does.

The server knows what is to be known of the code of the pages, too, which is kept by the bytes of a
file: most forks load all pages, and each would parse and compile them again.

A fork does not show what a process imports, nor what Python and OpenMP read from the environment
when they start. Tests of those run `sys.executable`.
"""

from __future__ import annotations

import _imp
import ast
import atexit
import contextlib
import fcntl
import gc
import hashlib
import importlib
import marshal
import os
import pickle
import runpy
import select
import shutil
import signal
import site
import socket
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from cppmega.rewriting import code_text
from tests import huge_pages

PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch._dynamo.repro.after_dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed._symmetric_memory",
    "torch.distributed._tensor",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.fx.experimental.symbolic_shapes",
    "torch.utils.data",
    "unittest.mock",
    "libcst",
    "packaging.requirements",
    "pytest",
    "setuptools.command.build_ext",
    "yaml",
)
"""Slow to import, and the same whatever tree is tested."""
FOR_KERNELS = (
    *("torch", "torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.checkpoint"),
    *("triton", "triton.experimental.gluon", "numpy", "pytest", "tests.ops.interpreted"),
)
"""What a server imports whose forks interpret Triton's kernels; few of them import Megatron. Torch
imports its compiler, which takes as long as torch, when an operation of ours is first called."""
INTERPRETS = "TRITON_INTERPRET"
CLIENT = Path(__file__).with_name("forkclient.py")
COLLECT_AFTER = 100_000
"""New objects in a fork. With Python's own number, collections were about 7 % of what a sample of
the tests did: forks import, and build syntax trees and models, of which little is garbage."""
STDIN = 0
MOST_FILES = 16
STATUS: list[int] = []
"""With which a fork ends, once that is known."""


@cache
def executable(interprets: bool = False) -> str:
    """The file to run in place of `sys.executable`; the server is started with the first call.

    Args:
        interprets: whether Triton, which decides at its import, interprets kernels in the forks.
    """
    if Path("/dev/nvidiactl").exists():
        return sys.executable  # an import may look for GPUs, and CUDA does not survive a fork
    folder = Path(tempfile.mkdtemp(prefix="forks-", dir="/tmp"))  # a socket's path must be short
    client = folder / "python"
    here = f"'{sys.executable}' -IS '{CLIENT}' '{folder}/socket'"
    client.write_text(f'#!/bin/sh\nexec {here} "$@"\n')
    client.chmod(0o700)
    _start(folder, {INTERPRETS: "1"} if interprets else {})
    return str(client)


def _start(folder: Path, more: dict[str, str]) -> None:
    """Start the server, which ends when this process does and closes its standard input."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/socket")
        listener.listen()
        given = f"{listener.fileno()}, {str(folder)!r}"
        code = f"from tests import forkserver; forkserver.serve({given})"
        server = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
            | {"OMP_NUM_THREADS": "1", **more},
            cwd=Path(__file__).parent.parent,
            start_new_session=True,
        )
    atexit.register(_end, server)


def _end(server: subprocess.Popen[bytes]) -> None:
    assert server.stdin is not None
    server.stdin.close()
    server.wait()


# -- the server -----------------------------------------------------------------------------------


def serve(listener: int, folder: str) -> None:
    """Fork for every order, until the process that started the server ends."""
    atexit.register(leave)
    interprets = INTERPRETS in os.environ
    with warnings.catch_warnings(action="ignore"):
        for name in FOR_KERNELS if interprets else PRELOADED:
            importlib.import_module(name)
        if not interprets:
            sys.modules["torch"].compile(leave)  # it reads most of what it needs at its first call
    assert len(list(Path("/proc/self/task").iterdir())) == 1, (
        "a process with threads cannot be forked"
    )
    if not interprets:
        learn()
    share_code(Path(os.environ["TESTS_SCRATCH"], "__pycache__"))
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, 5, 20)
    huge_pages.gather()
    order = Server(socket.socket(fileno=listener)).order_of_a_fork()
    if order:
        with short_end():
            become(order)
    else:
        shutil.rmtree(folder)


def learn() -> None:
    """Have a fork load all pages, and adopt what it has found of their code, but not the pages."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        from cppmega.catalogue import loader

        loader.load()
        with os.fdopen(writer, "wb") as file:
            pickle.dump(code_text.known(), file)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        facts = pickle.load(file)
    os.waitpid(child, 0)
    code_text.remember(facts)


def share_code(kept: Path) -> None:
    """Let all forks of a session compile the same text once, whatever its file.

    Each copy of a tree is a few hundred files, which take two seconds to compile and differ from
    those of other copies in a few. Pages and recipes may write to a folder of this name.
    """
    kept.mkdir(exist_ok=True)
    compiles = SourceFileLoader.source_to_code

    def source_to_code(self: SourceFileLoader, data: Any, path: str, **how: Any) -> Any:
        file = kept / hashlib.sha256(data + repr(how).encode()).hexdigest()
        try:
            code = marshal.loads(file.read_bytes())
        except FileNotFoundError:
            code = compiles(self, data, path, **how)
            part = file.with_suffix(f".{os.getpid()}")
            part.write_bytes(marshal.dumps(code))
            part.rename(file)
        _imp._fix_co_filename(code, path)
        return code

    SourceFileLoader.source_to_code = source_to_code


class Server:
    """The running forks, each by the file that says when it has ended."""

    def __init__(self, listener: socket.socket):
        self.listener = listener
        self.forks: dict[int, tuple[int, socket.socket]] = {}

    def order_of_a_fork(self) -> dict[str, Any] | None:
        """Return in every fork with its order, and in the server at its end with nothing."""
        while True:
            clients = [client for _, client in self.forks.values()]
            ready, _, _ = select.select([STDIN, self.listener, *self.forks, *clients], [], [])
            for process, (child, client) in list(self.forks.items()):
                if client in ready or STDIN in ready:  # nobody waits for this one any more
                    os.kill(child, signal.SIGKILL)
                if process in ready:
                    self.answer(process)
            if STDIN in ready:
                return None
            if self.listener in ready and (order := self.fork()):
                return order

    def answer(self, process: int) -> None:
        """Tell the client how its fork ended."""
        child, client = self.forks.pop(process)
        _, status = os.waitpid(child, 0)
        os.close(process)
        with client, contextlib.suppress(OSError):
            client.sendall(str(os.waitstatus_to_exitcode(status)).encode())

    def fork(self) -> dict[str, Any] | None:
        """Take an order and fork; the order in the fork, nothing in the server."""
        client, _ = self.listener.accept()
        _, files, _, _ = socket.recv_fds(client, len(b"files"), MOST_FILES)
        with client.makefile("rb") as sent:
            line = sent.readline()
        if not line:  # it was killed before it had sent an order
            client.close()
            for file in files:  # whoever reads from it waits for that
                os.close(file)
            return None
        order: dict[str, Any] = ast.literal_eval(line.decode())
        child = os.fork()
        if child:
            self.forks[os.pidfd_open(child)] = child, client
        else:
            self.close(client)
            # First out of the way of the numbers that they get.
            high = [fcntl.fcntl(file, fcntl.F_DUPFD, 1 + max(order["files"])) for file in files]
            for to, file in zip(order["files"], high, strict=True):
                os.dup2(file, to)
            files = [file for file in {*files, *high} if file not in order["files"]]
        for file in files:
            os.close(file)
        return None if child else order

    def close(self, client: socket.socket) -> None:
        """In a fork: let go of what is the server's."""
        for process, (_, other) in self.forks.items():
            os.close(process)
            other.close()
        client.close()
        self.listener.close()


# -- a fork ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def short_end() -> Iterator[None]:
    """End without taking torch apart, which copies most of the server's memory.

    Python still reports errors, waits for threads and calls what is registered with `atexit`; the
    first that was registered, `leave`, is called last.
    """
    try:
        yield
    except SystemExit as end:
        if not isinstance(end.code, str):
            STATUS.append(int(end.code or 0))
        raise
    except Exception:
        STATUS.append(1)
        raise
    STATUS.append(0)


def leave() -> None:
    """Be gone, with everything written, if this is a fork that ends as most programs do."""
    if STATUS:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(STATUS[-1] & 0xFF)


def become(order: dict[str, Any]) -> None:
    """Be `python` with the arguments, the environment and the working folder of the client."""
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    sys.pycache_prefix = os.environ.get("PYTHONPYCACHEPREFIX")
    if os.environ.get("PYTHONWARNINGS") == "ignore":
        warnings.simplefilter("ignore")
    path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    safe_path = order["arguments"][0] == "-P"
    kind, what, *rest = order["arguments"][safe_path:]
    here = [] if safe_path else ["" if kind == "-c" else str(Path.cwd())]
    sys.path[:1] = [*here, *path]
    site.execsitecustomize()
    sys.argv = ["-c" if kind == "-c" else kind, *rest]
    if kind == "-m":
        sys.argv[0] = what
        runpy.run_module(what, run_name="__main__", alter_sys=True)
        return
    sys.modules["__main__"] = types.ModuleType("__main__")
    assert kind == "-c", "only -c and -m are known"
    exec(compile(what, "<string>", "exec"), sys.modules["__main__"].__dict__)
