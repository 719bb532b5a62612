"""A fork of the server ends, speaks and dies as `python` itself would."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import forkserver
from tests.forking.server import ForkServer
from tests.support import PATIENCE

SAYS = """
import os, sys
print(sys.argv, os.environ["SAID"], os.getcwd(), sys.stdin.read(), __name__)
print("error", file=sys.stderr)
raise SystemExit(3)
"""
either = pytest.mark.parametrize("which", ["python", "fork"])


def executable(which: str) -> str:
    return sys.executable if which == "python" else forkserver.executable()


@either
def test_arguments_environment_folder_and_files(which: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [executable(which), "-c", SAYS, "a b"],
        env={"SAID": "said"},
        cwd=tmp_path,
        input="input",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3
    assert done.stdout == f"['-c', 'a b'] said {tmp_path} input __main__\n"
    assert done.stderr == "error\n"


@either
def test_a_module_and_an_error(which: str) -> None:
    command = [executable(which), "-m", "json.tool"]
    assert subprocess.run(command, input=b"[1]", capture_output=True).stdout == b"[\n    1\n]\n"
    command = [executable(which), "-c", "undefined"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.endswith("name 'undefined' is not defined\n")


@either
def test_a_file_handed_on_keeps_its_number(which: str) -> None:
    reader, writer = os.pipe()
    code = f"import os, sys; os.write({writer}, b'here' if '' not in sys.path else b'unsafe')"
    done = subprocess.run([executable(which), "-P", "-c", code], pass_fds=[writer])
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        assert pipe.read() == b"here"
    assert done.returncode == 0


def test_the_same_text_in_another_folder(tmp_path: Path) -> None:
    """It is compiled once; its code names the file that was imported, and follows an edit."""
    code = "import module; print(module.__file__, module.f.__code__.co_filename, module.f())"
    for name, number in (("a", 1), ("b", 1), ("b", 2)):
        file = tmp_path / name / "module.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"def f():\n    return {number}\n")
        env = {"PYTHONPATH": str(file.parent), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [forkserver.executable(), "-c", code], env=env, capture_output=True, text=True
        )
        assert done.stdout == f"{file} {file} {number}\n", done.stderr


@either
def test_a_sitecustomize_is_run(which: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('customized', flush=True)")
    command, env = [executable(which), "-c", "print('run')"], {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.stdout == "customized\nrun\n"


def test_a_client_that_is_killed_before_it_orders(tmp_path: Path) -> None:
    """The server still serves the others, and nobody waits for what it will not write."""
    place = str(Path(forkserver.executable()).with_name("socket"))
    reader, writer = os.pipe()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(place)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(place)
        socket.send_fds(client, [b"files"], [writer])
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        assert pipe.read() == b""
    assert subprocess.run([forkserver.executable(), "-c", "pass"]).returncode == 0


@either
@pytest.mark.parametrize(
    ("end", "status"),
    [("", 0), ("sys.exit(259)", 3), ("sys.exit('said')", 1), ("raise KeyboardInterrupt", -2)],
)
def test_what_is_left_to_do_is_done_before_the_end(which: str, end: str, status: int) -> None:
    code = """
import atexit, sys, threading, time
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.1), print("a thread"))).start()
"""
    command = [executable(which), "-c", code + end]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == status
    assert done.stdout == "a thread\nat exit\n"
    assert ("said" in done.stderr) is ("said" in end)


@either
def test_a_signal_is_the_status(which: str) -> None:
    for signal in (9, 15):
        code = f"import os; os.kill(os.getpid(), {signal})"
        assert subprocess.run([executable(which), "-c", code]).returncode == -signal


def test_forks_know_nothing_of_each_other(tmp_path: Path) -> None:
    for _ in range(2):
        code = "import sys; assert 'made_up' not in sys.modules; sys.modules['made_up'] = 1"
        assert subprocess.run([forkserver.executable(), "-c", code]).returncode == 0


def test_a_fork_ends_with_its_client() -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(1000)"
    command = [forkserver.executable(), "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        fork = int(client.stdout.readline())
        os.kill(fork, 0)
        client.kill()
    deadline = time.monotonic() + PATIENCE
    while Path(f"/proc/{fork}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Path(f"/proc/{fork}").exists()


def test_a_server_without_commands_ends_at_once(tmp_path: Path) -> None:
    """An error of the command that started it must not wait until torch is imported."""
    (tmp_path / "slow_module.py").write_text("import time\ntime.sleep(600)\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    server = ForkServer(["slow_module"], environment, tmp_path / "__pycache__")
    server.close()
    server.close()
    assert not server.folder.exists()
