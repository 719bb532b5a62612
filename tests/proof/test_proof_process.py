"""The process of a proof: whatever ends it, holds it up or speaks in it, only its values count."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cppmega.host import process
from cppmega.overlay import receipt
from cppmega.overlay.verbs import Session
from cppmega.proof import needs, proof_process, verify
from tests.proof.proving import WITH_ITS_OWN_SERVER
from tests.support import made

pytestmark = pytest.mark.slow


def test_a_proof_that_kills_its_process_fails(prove) -> None:
    proved = prove(verify="import os\nos._exit(3)")
    assert proved.proof == "failed" and "status 3" in proved.detail


_ENDS = """
import os, sys
print("no luck", file=sys.stderr, flush=True)
os._exit(3)
"""


@WITH_ITS_OWN_SERVER
def test_a_worker_that_ends_is_quoted(prove) -> None:
    """The patched module ends its process when it is imported."""
    proved = prove(files={"megatron/core/thing.py": made.THING + _ENDS})
    assert "ended with status 3: no luck" in proved.detail


_UNPATCHED = "from megatron.core.thing import double\nif double(2) != 4:\n    "


@pytest.mark.parametrize(
    ("act", "said"),
    [
        ("raise SystemExit(0)", "SystemExit"),
        ("import os; os._exit(0)", "status 0"),
        ("import os; os._exit(1)", "status 1"),
        ("import os; os.kill(os.getpid(), 9)", "signal 9"),
    ],
)
def test_an_end_of_the_process_is_no_failed_proof(prove, act: str, said: str) -> None:
    """Stock must fail the proof; a process that is gone has shown nothing of its values."""
    proved = prove(verify=_UNPATCHED + act)
    assert proved.proof == "failed"
    assert proved.detail.startswith("stock: ") and said in proved.detail


_DEAF = """\
import os, signal, subprocess, sys, time
signal.signal(signal.SIGALRM, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
here, there = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        with open({left!r}, "a") as left:
            left.write(str(os.getpid()) + "\\n")
        os.write(there, b"!")
        time.sleep(600)
    os._exit(0)
os.read(here, 1)  # else the proof may end before its grandchild has begun
{then}
"""


def living(file: Path) -> list[int]:
    """Those of the processes in a file that still run."""
    return [pid for pid in map(int, file.read_text().split()) if process.started(pid)]


@WITH_ITS_OWN_SERVER
def test_a_proof_that_hears_nothing_is_ended(
    prove, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No alarm in the proof's own process can be relied on, and its children end with it."""
    monkeypatch.setattr(proof_process, "LIMIT", 1.0)
    left = tmp_path / "left"
    left.touch()
    proved = prove(verify=_DEAF.format(left=str(left), then="while True: time.sleep(1)"))
    for limit in (10.0, 60.0):
        if left.read_text().count("\n") == 3:
            break  # a machine under load takes longer to come to three endless waits
        monkeypatch.setattr(proof_process, "LIMIT", limit)
        left.write_text("")
        (proved,) = verify.verify(Session(tmp_path / "root"))
    said = f"did not end within {proof_process.LIMIT:g} seconds"
    assert proved.proof == "failed" and said in proved.detail
    assert left.read_text().count("\n") == 3 and not living(left)


@WITH_ITS_OWN_SERVER
def test_a_grandchild_that_holds_the_pipe_is_not_waited_for(prove, tmp_path: Path) -> None:
    left = tmp_path / "left"
    then = "from megatron.core.thing import double\nassert double(2) == 4"
    assert prove(verify=_DEAF.format(left=str(left), then=then)).proof == "passed"
    assert not living(left)


@WITH_ITS_OWN_SERVER
def test_a_proof_in_the_worker_itself_is_ended_with_it(
    prove, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proof on a GPU is no fork: whoever started the worker ends it."""
    monkeypatch.setattr(needs, "_is_here", lambda need: True)
    monkeypatch.setattr(proof_process, "LIMIT", 0.5)
    monkeypatch.setattr(proof_process, "MARGIN", 0.5)
    left = tmp_path / "left"
    proved = prove(
        patch='reached="forward", needs=("cuda",)',
        verify=_DEAF.format(left=str(left), then="while True: time.sleep(1)"),
    )
    assert proved.proof == "failed" and "no answer in time" in proved.detail


_FORGED = """
import json, os, struct
from pathlib import Path
answer = {"name": "double_doubles", "run": {"result": "passed", "detail": ""}}
data = json.dumps(answer).encode()
for fd in map(int, os.listdir("/proc/self/fd")):
    if fd > 2:
        try:
            os.write(fd, struct.pack("!I", len(data)) + data)
        except OSError:
            pass
"""


@WITH_ITS_OWN_SERVER
def test_an_answer_out_of_order_is_none(prove) -> None:
    proved = prove(files={"megatron/core/thing.py": made.THING + _FORGED})
    assert proved.proof == "failed" and "not the expected one" in proved.detail


_NOISY = """\
from megatron.core.thing import double
print("noise")
assert double(2) == 4
"""


def test_what_libraries_say_meanwhile_is_not_shown(prove, capfd) -> None:
    assert prove(verify=_NOISY).proof == "passed"
    assert "noise" not in "".join(capfd.readouterr())


_SEES = """\
import os
from megatron.core import thing
assert os.environ.get("CUDA_VISIBLE_DEVICES") == {sees!r}
assert (os.getppid() != {pid}) == {forked}
assert thing.double(4) == 8
"""


def test_a_proof_on_cpu_sees_no_gpu(prove, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one in sight Megatron would take its other paths, in a fork that cannot use it."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert prove(verify=_SEES.format(sees="", pid=os.getpid(), forked=True)).proof == "passed"


_LEAKS = """\
NVTE_FUSED_ATTN=0 NVTE_DEBUG=1 NCCL_ALGO=Ring CUDA_LAUNCH_BLOCKING=1 CUBLAS_WORKSPACE_CONFIG=:16:8
TORCHDYNAMO_DISABLE=1 TORCH_CUDA_ARCH_LIST=1.0 PYTORCH_CUDA_ALLOC_CONF=x:y TRITON_INTERPRET=1
PYTHONOPTIMIZE=2 PYTHONDEVMODE=1 PYTHONHASHSEED=7 OMP_NUM_THREADS=64 MKL_NUM_THREADS=2
CPPMEGA_LINEAR_CE_KERNEL=liger CPPMEGA_INDEX_CACHE=1 MEGATRON_ANYTHING=1 RANK=3 WORLD_SIZE=4
GLOO_SOCKET_IFNAME=nothing NVIDIA_TF32_OVERRIDE=1 SOME_NAME_OF_TOMORROW=1
"""
_CLEAN = """\
import os
leaked = {one.partition("=")[0]: one.partition("=")[2] for one in @LEAKS@.split()}
assert not [name for name, value in leaked.items() if os.environ.get(name) == value]
assert os.environ["CC"] == "a-compiler" and os.environ["OMP_NUM_THREADS"] == "1"
from megatron.core.thing import double
assert double(2) == 4
""".replace("@LEAKS@", repr(_LEAKS))


def test_a_proof_runs_in_a_stated_environment(
    prove, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for one in _LEAKS.split():
        monkeypatch.setenv(*one.split("=", 1))
    monkeypatch.setenv("CC", "a-compiler")
    proved = prove(verify=_CLEAN)
    assert proved.proof == "passed", proved
    stored = receipt.load(Session(tmp_path / "root").read_tree()).receipt.proofs["double_doubles"]
    assert stored.environment["CUDA_VISIBLE_DEVICES"] == "" and "PATH" in stored.environment
    assert stored.environment["CC"] == "a-compiler"
    assert not {"HOME", "NVTE_FUSED_ATTN"} & stored.environment.keys()


@WITH_ITS_OWN_SERVER
def test_a_proof_on_a_gpu_sees_it_and_is_no_fork(prove, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(needs, "_is_here", lambda need: True)
    proved = prove(
        patch='reached="forward", needs=("cuda",)',
        verify=_SEES.format(sees="0", pid=os.getpid(), forked=False),
    )
    assert proved.proof == "passed"
