"""Every end of a guarded process is one: a status of 0 means that its steps were checked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cppmega.runs import failures, json_file
from cppmega.runs import folder as run_folder
from cppmega.runs.folder import Run
from tests.guard.bench import Bench
from tests.support import PATIENCE, REPOSITORY, made

pytestmark = pytest.mark.slow

MEGATRON = {
    "megatron/training/__init__.py": "",
    "megatron/training/global_vars.py": (
        "from types import SimpleNamespace\n"
        "ARGS = SimpleNamespace()\n"
        "def get_args():\n    return ARGS\n"
    ),
}
HEAD = """
import atexit, os, sys, threading
from cppmega import guard
from megatron.core.thing import double, half
def train(count=2, args=None):
    for step in guard.steps(range(count), args):
        double(step)
"""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    bench = Bench(tmp_path_factory.mktemp("ends"))
    made.page(bench.pages)
    bench.tree(files=MEGATRON)
    return bench


def run(
    bench: Bench, body: str, *words: str, options: tuple[str, ...] = (), **environment: str
) -> tuple[int, str, str]:
    script = bench.folder / "script.py"
    script.write_text(HEAD + body)
    place = ["--megatron", str(bench.folder / "root"), *options, str(script), *words]
    done = subprocess.run(
        [sys.executable, "-m", "cppmega.run", *place],
        env={**bench.environment, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    return done.returncode, done.stdout, done.stderr


UNSEEN = {
    "sys.exit(main())": "double(1)\nsys.exit(None)",
    "exit inside the first step": "for step in guard.steps(range(3)):\n    double(1)\n    exit()",
    "a status that wraps to 0": "sys.exit(256)",
    "a left loop": "for step in guard.steps(range(3)):\n    double(1)\n    break",
    "an exit that hides a refusal": "atexit.register(lambda: os._exit(0))",
    "a nested script": (
        "import runpy, tempfile\n"
        "with tempfile.NamedTemporaryFile('w', suffix='.py') as file:\n"
        "    file.write('raise SystemExit(0)'); file.flush()\n"
        "    runpy.run_path(file.name, run_name='__main__')"
    ),
    "a signal handler": (
        "import signal\n"
        "signal.signal(signal.SIGTERM, lambda *a: sys.exit(0))\n"
        "os.kill(os.getpid(), signal.SIGTERM)"
    ),
    "nothing imported": "for name in [n for n in sys.modules if n.startswith('megatron')]:\n"
    "    del sys.modules[name]",
    "a thread that trains unseen": (
        "import time\n"
        "threading.Thread(target=lambda: (time.sleep(0.5), double(1))).start()\nsys.exit(0)"
    ),
    "a thread that is refused": (
        "def refused():\n    for step in guard.steps(range(1)): half(1)\n"
        "threading.excepthook = lambda *a: None\n"
        "thread = threading.Thread(target=refused)\nthread.start()\nthread.join()"
    ),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_an_end_without_a_step_is_no_success(bench: Bench, name: str) -> None:
    code, _, err = run(bench, UNSEEN[name])
    assert code == 1 and "Traceback" not in err, err
    assert ("page-not-reached" if "refused" in name else "no-step-seen") in err


def test_an_exception_that_means_success_to_click_is_one_to_python(bench: Bench) -> None:
    code, _, err = run(bench, "import click\nraise click.exceptions.Exit(0)")
    assert code == 1 and "click.exceptions.Exit: 0" in err


def test_a_refusal_that_the_script_catches_still_ends_the_run(bench: Bench) -> None:
    body = (
        "try:\n    for step in guard.steps(range(1)): half(1)\n"
        "except Exception: pass\ntrain()\nprint('went on')"
    )
    code, out, err = run(bench, body)
    assert code == 1 and "went on" in out and "page-not-reached" in err


WORKER = """
import multiprocessing, signal, time
def fails(*_):
    raise RuntimeError("a worker was killed")
def works():
    while True:
        time.sleep(1)
signal.signal(signal.SIGCHLD, fails)
signal.signal(signal.SIGTERM, lambda *_: print("asked to end"))
multiprocessing.get_context("fork").Process(target=works, daemon=True).start()
"""
"""A worker as those of a data loader are, with the handler of `--exit-signal-handler`."""


def test_a_run_ends_though_a_worker_does_not_end_when_asked_to(bench: Bench) -> None:
    code, _, err = run(bench, WORKER + "train()")
    assert (code, "Traceback" in err) == (0, False), err
    code, _, err = run(bench, WORKER + "for step in guard.steps(range(1)): half(1)")
    assert code == 1 and "page-not-reached" in err and "Traceback" not in err, err


def test_what_is_replaced_after_the_first_step_is_seen_at_the_end(bench: Bench) -> None:
    body = (
        "train()\nimport megatron.core.thing as thing\n"
        "def double(x):\n    return x\nthing.double = double\nsys.exit(0)"
    )
    code, _, err = run(bench, body)
    assert code == 1 and "stale-code" in err and "thing.py:double" in err


SEEN = {
    "an exit after the steps": ("train()\nsys.exit()", 0),
    "a status of the script's own": ("train()\nsys.exit(7)", 7),
    "a thread that trains to its end": (
        "import time\nthreading.Thread(target=lambda: (time.sleep(0.5), train())).start()",
        0,
    ),
    "a pool of idle threads": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "pool = ThreadPoolExecutor(1)\npool.submit(train).result()",
        0,
    ),
    "a fork that ends like its parent": ("train()\nos.fork()", 0),
}


@pytest.mark.parametrize("name", SEEN)
def test_a_whole_run_keeps_its_status(bench: Bench, name: str) -> None:
    body, status = SEEN[name]
    code, _, err = run(bench, body)
    assert code == status and "error:" not in err, err
    assert err.count("reached: double_doubles") == 1


EXCUSED = {
    "--no-steps": ("pass", (), ("--no-steps",), "--no-steps"),
    "--help": ("sys.exit(0)", ("--help",), (), "--help was requested"),
    "evaluation": (
        "from megatron.training.global_vars import ARGS\nARGS.skip_train = True\nsys.exit(0)",
        (),
        (),
        "only evaluation",
    ),
    "a resume at its last step": (
        "from megatron.training import global_vars\n"
        "vars(global_vars.ARGS).update(iteration=20, train_iters=20)",
        (),
        (),
        "the checkpoint has 20 steps, and 20 are requested",
    ),
    "the same in a loop of one's own": (
        "train(0, {'iteration': 5, 'train_iters': 5})",
        (),
        (),
        "the checkpoint has 5 steps",
    ),
}


@pytest.mark.parametrize("name", EXCUSED)
def test_a_run_that_needs_no_step_says_why(bench: Bench, name: str) -> None:
    body, words, options, said = EXCUSED[name]
    code, _, err = run(bench, body, *words, options=options)
    assert code == 0 and f"no step was seen: {said}" in err, err


def test_a_resume_with_steps_left_is_no_excuse(bench: Bench) -> None:
    body = "train(0, {'iteration': 5, 'train_iters': 9})"
    code, _, err = run(bench, body)
    assert code == 1 and "no-step-seen" in err


def test_the_process_may_not_be_replaced(bench: Bench) -> None:
    """What a script starts anew in its own place trains without the guard, and ends with 0."""
    for body in (
        "os.execv(sys.executable, [sys.executable, '-c', 'print(1)'])",
        "os.execve(sys.executable, [sys.executable, '-c', 'print(1)'], {})",
    ):
        code, out, err = run(bench, body)
        assert code == 1 and "guard-replaced" in err and not out


def test_what_is_left_over_in_a_shell_switches_nothing_off(bench: Bench) -> None:
    made.page(
        bench.pages,
        "gated",
        patch='reached="never", gate="CPPMEGA_MADE"',
        target="megatron/core/thing.py:half",
        source="def half(x):\n    return x / 2\n",
        edit='replacing("return x / 2", "return x * 0.5")',
    )
    try:
        bench.apply(bench.folder / "root")
        left = {
            "CPPMEGA_OVERLAY": "junk",
            "CPPMEGA_ROOT": "/nowhere",
            "CPPMEGA_GUARDED_BY": f"{os.getpid()}.1.3",
            "CPPMEGA_RUN": str(bench.folder),
        }
        code, _, err = run(bench, "train()", CPPMEGA_MADE="1", **left)
        assert code == 1 and "gate-differs" in err
        # with the folder by which children join, too: it was a child's environment
        path = f"{REPOSITORY}/cppmega/guard/bootstrap:{bench.environment['PYTHONPATH']}"
        code, _, err = run(bench, "train()", PYTHONPATH=path, **left)
        assert code == 0 and "reached: double_doubles" in err, err
        assert "ignoring CPPMEGA_OVERLAY, CPPMEGA_ROOT, CPPMEGA_GUARDED_BY: left over" in err
        assert "ignoring CPPMEGA_RUN: the launch of that run has not started" in err
    finally:
        (bench.pages / "gated.py").unlink()
        bench.apply(bench.folder / "root")


OPTIONS = {
    "-O": "optimized-python",
    "-OO": "optimized-python",
    "-I": "isolated-python",
    "-E": "isolated-python",
    "-P": "",
}


@pytest.mark.parametrize("option", OPTIONS)
def test_the_interpreters_options(bench: Bench, option: str, tmp_path: Path) -> None:
    script = bench.folder / "script.py"
    script.write_text(HEAD + "train()")
    path = bench.environment["PYTHONPATH"].split(":")
    # -I and -E read no PYTHONPATH: what it would have done is done by hand.
    start = (
        f"import sys; sys.path[:0] = {path!r}\n"
        "import sitecustomize, runpy\n"
        f"sys.argv = ['run', '--megatron', {str(bench.folder / 'root')!r}, {str(script)!r}]\n"
        "runpy.run_module('cppmega.run', run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, option, "-c", start],
        env=bench.environment,
        capture_output=True,
        text=True,
    )
    error = OPTIONS[option]
    assert done.returncode == bool(error), done.stderr
    assert (f"error: {error}" if error else "reached: double_doubles") in done.stderr


@pytest.mark.parametrize("level", ["1", "2"])
def test_pages_are_read_whole_by_an_optimizing_python(bench: Bench, level: str) -> None:
    """Their header is a docstring, and their proof is made of assertions."""
    root = made.tree(bench.folder / f"root-{level}")
    bench.cppmega("apply", root, PYTHONOPTIMIZE=level)
    bench.cppmega("verify", root, PYTHONOPTIMIZE=level)
    bench.cppmega("status", root, PYTHONOPTIMIZE=level)


class Launched:
    """Run folders whose ranks are guarded, as `cppmega launch` makes them."""

    def __init__(self, bench: Bench, runs: Path) -> None:
        self.bench, self.runs = bench, runs

    def run(self, name: str, body: str, *supervisor: str) -> tuple[int, Run]:
        script = self.bench.folder / f"{name}.py"
        script.write_text(HEAD + body)
        run = run_folder.create(self.runs, name)
        node = run_folder.claim_node(run, 1)
        assert node is not None
        words = ["--standalone", "--nproc-per-node", "2", "--redirects", "3", "-m", "cppmega.run"]
        place = ["--megatron", str(self.bench.folder / "root")]
        manifest = {"nodes": 1, "nproc": 2, "torchrun": [*words, *place, str(script)]}
        json_file.write(run.manifest_file, manifest)
        done = subprocess.run(
            [sys.executable, *(supervisor or ("-m", SUPERVISE)), str(node.path)],
            env=self.bench.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        return done.returncode, run


SUPERVISE = "cppmega.launch.supervise"
SLOW_DISK = f"""
import time
from {SUPERVISE} import Supervisor, main, process
update = Supervisor._update

def late(self, **changes):
    while process.started(changes.get("agent", 0)):
        time.sleep(0.05)
    update(self, **changes)

Supervisor._update = late
main()
"""
"""Torchrun has come to its end before the disk takes the status that names it."""


def test_a_launched_rank_leaves_a_record_of_its_end(bench: Bench, tmp_path: Path) -> None:
    launched = Launched(bench, tmp_path)
    code, run = launched.run("whole", "train()", "-c", SLOW_DISK)
    assert (code, run.state(), run.exit()) == (0, "finished", 0), failures.first_failure(run)
    hidden = "train()\nif os.environ['RANK'] == '1': os._exit(0)"
    code, run = launched.run("hidden", hidden)
    assert (code, run.state(), run.exit()) == (1, "crashed", 1)
    assert "ended without an end record" in failures.in_one_line(run)
    assert failures.in_one_line(run).startswith("rank 1:")


def test_an_application_in_a_folder(bench: Bench) -> None:
    """As `python FOLDER` does: its folder is first on the path."""
    folder = bench.folder / "application"
    folder.mkdir()
    (folder / "beside.py").write_text("NAME = 'beside'\n")
    (folder / "__main__.py").write_text(HEAD + "import beside\ntrain()\nprint(beside.NAME)\n")
    for chosen, status in ((folder, 0), (bench.folder, 1), (bench.folder / ("x" * 3000), 1)):
        ((code, out, err),) = bench.run(bench.folder / "root", script=chosen)
        assert code == status and ("beside" in out) == (not status), err
        assert "Traceback" not in err and ("no-script" in err) == bool(status)


def test_what_exit_handlers_replace_is_seen(bench: Bench) -> None:
    body = (
        "import megatron.core.thing as thing\n"
        "train()\natexit.register(lambda: setattr(thing, 'double', len))"
    )
    code, _, err = run(bench, body)
    assert code == 1 and "after its exit handlers" in err and "thing.py:double" in err, err


def test_a_loop_outside_of_the_guard_is_an_error(bench: Bench) -> None:
    script = bench.folder / "alone.py"
    script.write_text(
        "import sys\nfrom cppmega import guard\n"
        "for step in guard.steps(range(1), unguarded=sys.argv[1:] == ['parameter']):\n"
        "    print('trained')\n"
    )
    for words, trains in ((), False), (("--unguarded",), True), (("parameter",), True):
        done = subprocess.run(
            [sys.executable, str(script), *words],
            env=bench.environment,
            capture_output=True,
            text=True,
        )
        assert (done.returncode == 0) == trains == (done.stdout == "trained\n"), done.stderr
        assert ("not-guarded" in done.stderr) == (not trains)
