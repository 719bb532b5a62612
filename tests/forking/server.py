"""A stand-in for `python` whose processes are forks of one that has imported torch.

Importing torch and its compiler takes longer than most proofs. So one server imports them, and
forks for every command that it is sent; it never imports Megatron. The client takes the arguments
of `python`; its environment, working folder and open files become those of the fork, and it ends as
the fork does. A fork is a session of its own, and ends with its client.

A fork does not show what a process imports, nor what Python and OpenMP read from the environment
when they start: the hash seed of all forks is the server's.
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
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from cppmega.host import process, python
from tests.forking.client import path_in

MODULES = (
    *("cppmega.guard.swaps", "cppmega.proof.hash_seeds", "cppmega.proof.mutant"),
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
    "setuptools.command.build_ext",
    "yaml",
)
"""What a proof and Megatron import: slow to import, and the same whatever tree is imported."""
HUGE_PAGES = "tests.forking.huge_pages"
"""Imported last, it takes a second, which pays off after a few dozen forks."""
CLIENT = Path(__file__).with_name("client.py")
COLLECT_AFTER = 100_000
"""New objects in a fork before a collection: imports and models leave little garbage."""
STDIN = 0
MOST_FILES = 16
STATUS: list[int] = []
"""The exit status of a fork, once it is known."""


class ForkServer:
    """A server, which ends with all its forks when it is closed or its parent ends.

    Args:
        modules: imported before the first fork; those that cannot be imported are left out.
        environment: the complete environment of the server.
        code: a folder for compiled modules, which all forks share.
        life: a file at whose end the server ends too, in place of a pipe of this object's own.
    """

    def __init__(
        self,
        modules: Sequence[str],
        environment: Mapping[str, str],
        code: Path,
        life: int = subprocess.PIPE,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="cppmega-forks-"))
        self._asked = False
        with socket.socket(socket.AF_UNIX) as listener:
            folder = os.open(self.folder, os.O_PATH)
            listener.bind(path_in(folder))
            os.close(folder)
            listener.listen()
            words = (str(listener.fileno()), str(self.folder), str(code), *modules)
            self._process = subprocess.Popen(
                python.command(__name__, *words),
                stdin=life,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
                env=environment,
                start_new_session=True,
            )

    def command(self) -> list[str]:
        """The words to start in place of `sys.executable`."""
        self._asked = True
        return [sys.executable, "-IS", str(CLIENT), str(self.folder)]

    @cached_property
    def ready(self) -> bool:
        """Whether it can be forked, once all is imported; it cannot if that started a thread."""
        assert self._process.stdout is not None
        return bool(self._process.stdout.read(1))

    def close(self) -> None:
        """End the server and its forks, and wait for them."""
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()
            if not self._asked:  # it has no forks to end, and may import for seconds
                self._process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


# -- the server -----------------------------------------------------------------------------------


def serve(listener: int, folder: str, code: str, *modules: str) -> None:
    """Fork for every order, until the process that started the server ends."""
    atexit.register(leave)
    gc.disable()
    with warnings.catch_warnings(action="ignore"):
        for name in modules:
            with contextlib.suppress(Exception):  # who needs it reports what is wrong with it
                importlib.import_module(name)
        if "torch._inductor.compile_fx" in sys.modules:
            sys.modules["torch"].compile(leave)  # it reads most of what it needs at its first call
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        return  # a process with threads cannot be forked
    share_code(Path(code))
    gc.freeze()
    gc.enable()
    gc.set_threshold(COLLECT_AFTER, 5, 20)
    sys.stdout.write("\n")
    sys.stdout.flush()
    order = Server(socket.socket(fileno=listener)).order_of_a_fork()
    if order:
        with short_end():
            become(order)
    else:
        shutil.rmtree(folder, ignore_errors=True)


def share_code(kept: Path) -> None:
    """Let all forks compile the same text once, whatever its file.

    Each copy of a tree is a few hundred files, which take seconds to compile and differ from those
    of other copies in a few. Pages may write only to a folder named `__pycache__` while they load.
    """
    kept.mkdir(exist_ok=True)
    compiles = SourceFileLoader.source_to_code

    def source_to_code(self: Any, data: Any, path: Any, **how: Any) -> Any:
        file = kept / hashlib.sha256(data + repr(how).encode()).hexdigest()
        try:
            code = marshal.loads(file.read_bytes())
        except FileNotFoundError:
            code = compiles(self, data, path, **how)
            part = file.with_suffix(f".{os.getpid()}")
            part.write_bytes(marshal.dumps(code))
            part.rename(file)
        _imp._fix_co_filename(code, path)  # type: ignore[attr-defined]
        return code

    SourceFileLoader.source_to_code = source_to_code  # type: ignore[method-assign]


class Server:
    """The running forks, each by the file that says when it has ended."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.forks: dict[int, tuple[int, socket.socket]] = {}

    def order_of_a_fork(self) -> dict[str, Any] | None:
        """Return in every fork with its order, and in the server at its end with nothing."""
        while True:
            clients = [client for _, client in self.forks.values()]
            watched: list[Any] = [STDIN, self.listener, *self.forks, *clients]
            ready, _, _ = select.select(watched, [], [])
            for file, (child, client) in list(self.forks.items()):
                if client in ready or STDIN in ready:  # nobody waits for this one any more
                    for pid in (child, *process.children(child, recursive=True)):
                        process.send(pid, signal.SIGKILL)
                if file in ready or STDIN in ready:
                    self.answer(file)
            if STDIN in ready:
                return None
            if self.listener in ready and (order := self.fork()):
                return order

    def answer(self, file: int) -> None:
        """Tell the client how its fork ended."""
        child, client = self.forks.pop(file)
        _, status = os.waitpid(child, 0)
        os.close(file)
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
            os.setsid()
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
        for file, (_, other) in self.forks.items():
            os.close(file)
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
    servers = {os.path.abspath(entry) for entry in _python_path()}  # noqa: PTH100
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    sys.pycache_prefix = os.environ.get("PYTHONPYCACHEPREFIX")
    if os.environ.get("PYTHONWARNINGS") == "ignore":
        warnings.simplefilter("ignore")
    safe_path = order["arguments"][0] == "-P"
    kind, what, *rest = order["arguments"][safe_path:]
    here = [] if safe_path else ["" if kind == "-c" else str(Path.cwd())]
    sys.path[:] = [*here, *_python_path(), *(entry for entry in sys.path if entry not in servers)]
    site.execsitecustomize()
    sys.argv = ["-c" if kind == "-c" else kind, *rest]
    if kind == "-m":
        sys.argv[0] = what
        runpy.run_module(what, run_name="__main__", alter_sys=True)
        return
    sys.modules["__main__"] = types.ModuleType("__main__")
    assert kind == "-c", "only -c and -m are known"
    exec(compile(what, "<string>", "exec"), sys.modules["__main__"].__dict__)


def _python_path() -> list[str]:
    return [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]


if __name__ == "__main__":
    serve(int(sys.argv[1]), *sys.argv[2:])
