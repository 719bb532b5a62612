"""Every process of a guarded run: each holds the guard, is a helper, or ends the run."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from cppmega.host import process
from tests import forkserver
from tests.guard.bench import Bench, finish
from tests.support import PATIENCE, free_port, made

pytestmark = pytest.mark.slow

HEAD = """
import multiprocessing, os, subprocess, sys, time
from cppmega import guard

def train(count=2):
    from megatron.core.thing import double
    for step in guard.steps(range(count)):
        double(step)

def no_match(count=2):
    from megatron.core.thing import half
    for step in guard.steps(range(count)):
        half(step)

def tell(queue):
    queue.put(1)
    time.sleep(60)
"""


def _elsewhere(name: str) -> str | None:
    """A program on the path whose Python runs here, and is of another environment."""
    code = "import sys; sys.stdout.write(sys.prefix)"
    found = shutil.which(name)
    if found is None:
        return None
    done = subprocess.run([found, "-S", "-c", code], capture_output=True, text=True)
    return found if done.returncode == 0 and done.stdout != sys.prefix else None


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    bench = Bench(tmp_path_factory.mktemp("children"))
    made.page(bench.pages)
    bench.tree()
    return bench


def start(bench: Bench, body: str, **environment: str) -> tuple[int, str, str]:
    """Run a script whose functions its spawned processes can import."""
    script = bench.folder / "script.py"
    lines = "\n".join("    " + line for line in body.splitlines())
    script.write_text(f"{HEAD}\nif __name__ == '__main__':\n{lines}\n")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "cppmega.run",
            "--megatron",
            str(bench.folder / "root"),
            str(script),
        ],
        env={**bench.environment, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_a_spawned_process_that_trains_is_checked_like_any_rank(bench: Bench, method: str) -> None:
    body = (
        f"context = multiprocessing.get_context({method!r})\n"
        "worker = context.Process(target={})\nworker.start()\n{}"
    )
    # Its exit status is nobody's concern: neither the script's, nor Python's.
    code, _, err = start(bench, body.format("no_match", "worker.join()"))
    assert code == 1 and "page-not-reached" in err and "process " in err, err
    # Python itself waits for it when the script has ended.
    code, _, err = start(bench, body.format("train", ""))
    assert code == 0 and "reached: double_doubles" in err, err
    assert "no step was seen: processes that this one started took their own (1 of them)" in err


OTHERS = ("python2.7", "python3.6", "python3.9", "python3.11", "python3.13", "python3")
"""Names of programs that may be Pythons of another environment than this one."""


@pytest.mark.parametrize("flags", [(), ("-s",)])
def test_a_python_of_another_environment_finds_itself_as_it_is(
    bench: Bench, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """As make's, Slurm's and a cloud's tools are: they fail on stderr, or on others' packages."""
    venv.create(tmp_path / "other", with_pip=False)
    tells = "import json, sys; print(json.dumps([sys.path, sorted(sys.modules)]))"
    found = filter(None, map(_elsewhere, OTHERS))
    for other in (str(tmp_path / "other" / "bin" / "python"), *found):
        body = f"""
kept = {{k: v for k, v in os.environ.items() if k != "PYTHONPATH"}}
guarded = {{**kept, "PYTHONPATH": os.environ["PYTHONPATH"].partition(os.pathsep)[0]}}
for environment in (guarded, kept):
    told = subprocess.run([{other!r}, *{flags!r}, "-c", {tells!r}], env=environment,
                          capture_output=True, text=True)
    print("TOLD", json.dumps([told.returncode, told.stderr, json.loads(told.stdout)]))
train()"""
        code, out, err = start(bench, f"import json{body}")
        assert code == 0, err
        told = [json.loads(line[5:]) for line in out.splitlines() if line.startswith("TOLD ")]
        (status, said, (path, modules)), alone = told
        assert (status, said, path) == (0, "", alone[2][0])
        assert not [name for name in modules if name.startswith("cppmega")]


def test_a_child_behind_a_broken_sitecustomize_joins(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        (bench.folder / "site" / "sitecustomize.py").read_text() + "raise ValueError('broken')\n"
    )
    path = f"{tmp_path}:{bench.environment['PYTHONPATH']}"
    body = (
        "train()\n"
        "code = 'from cppmega import guard; print(guard.active() is not None)'\n"
        "subprocess.run([sys.executable, '-c', code])"
    )
    code, out, err = start(bench, body, PYTHONPATH=path)
    assert code == 0 and out == "True\n" and "broken" in err, err


def test_helpers_are_no_false_alarm(bench: Bench) -> None:
    body = (
        "train()\n"
        "subprocess.run(['git', '--version'])\n"
        "subprocess.run('true', shell=True)\n"
        "subprocess.run([sys.executable, '-c', 'pass'])\n"
        "subprocess.run([sys.executable, '-W', 'ignore', '-u', '-m', 'this'], cwd='/')\n"
        "with multiprocessing.get_context('spawn').Manager() as manager: manager.list([1])\n"
        "os.environ['PYTHONPATH'] = ''\n"
        "with multiprocessing.get_context('spawn').Manager() as manager: guard.finish()"
    )
    code, _, err = start(bench, body)
    assert code == 0 and "error:" not in err, err


@pytest.mark.parametrize(
    "change", ["os.environ['PYTHONPATH'] = ''", "os.environ.pop('CPPMEGA_GUARDED_BY')"]
)
def test_a_worker_without_the_guard_ends_the_run(bench: Bench, change: str) -> None:
    body = (
        f"{change}\n"
        "context = multiprocessing.get_context('spawn')\nqueue = context.Queue()\n"
        "worker = context.Process(target=tell, args=(queue,), daemon=True)\nworker.start()\n"
        "queue.get()\ntrain()\nprint('trained')"
    )
    code, out, err = start(bench, body)
    assert code == 1 and "rank-without-guard" in err and "trained" not in out, err


RANK = """
import os
from datetime import timedelta
import torch
torch.distributed.init_process_group("gloo")
{}
"""
TRAIN = """
from cppmega import guard
torch.distributed.distributed_c10d._get_default_store().set_timeout(timedelta(seconds=1))
from megatron.core.thing import double
for step in guard.steps(range(2)):
    double(step)
"""


def test_a_rank_without_the_guard_is_named_by_the_others(bench: Bench) -> None:
    guarded = bench.folder / "guarded.py"
    guarded.write_text(RANK.format(TRAIN))
    root = str(bench.folder / "root")
    bare = RANK.format("import time; time.sleep(600)")
    words = [["-m", "cppmega.run", "--megatron", root, str(guarded)], ["-c", bare]]
    together = bench.together(2)
    ranks = [
        subprocess.Popen(
            [forkserver.executable(), *words[rank]],
            env={**together, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    (code, _, err), _ = finish(ranks, waiting=(1,))
    assert code == 1 and "rank-without-guard" in err and "rank 1 of 2" in err, err


SPAWNED = """
import os, sys
import torch
from cppmega import guard

def rank(number, port, trains):
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=number, world_size=2
    )
    torch.distributed.barrier()
    if trains == "trains":
        from megatron.core.thing import double
        for step in guard.steps(range(2)):
            double(step)
    torch.distributed.destroy_process_group()

if __name__ == "__main__":
    torch.multiprocessing.spawn(rank, (int(sys.argv[1]), sys.argv[2]), nprocs=2)
"""


@pytest.mark.parametrize("trains", ["trains", "idles"])
def test_ranks_that_torch_spawns(bench: Bench, trains: str) -> None:
    script = bench.folder / "spawned.py"
    script.write_text(SPAWNED)
    root = str(bench.folder / "root")
    words = ["--megatron", root, str(script), str(free_port()), trains]
    done = subprocess.run(
        [forkserver.executable(), "-m", "cppmega.run", *words],
        env=bench.environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    if trains == "trains":
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("reached: double_doubles") == 1, done.stderr
        assert "took their own (2 of them)" in done.stderr
    else:
        assert done.returncode == 1 and "no-step-seen" in done.stderr, done.stderr
        assert "(rank 0)" in done.stderr and "(rank 1)" in done.stderr


def test_a_preflight_that_hangs_up_takes_its_worker_along(tmp_path: Path) -> None:
    """The terminal is closed while the worker imports what a rank imports."""
    bench = Bench(tmp_path)
    made.page(bench.pages)
    begun = tmp_path / "begun"
    slow = f"import os, time\nopen({str(begun)!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)\n"
    root = bench.tree(files={"megatron/core/thing.py": made.THING + slow})
    ask = (
        "import os\nfrom cppmega.preflight.ask import ask\n"
        "from cppmega.preflight.messages import RankAnswer, RankOrder\n"
        f"order = RankOrder(root={str(root)!r}, expected={str(root)!r})\n"
        "ask('cppmega.preflight.workers.rank', order, RankAnswer, dict(os.environ))"
    )
    asking = subprocess.Popen([sys.executable, "-c", ask], env=bench.environment)
    try:
        until(lambda: begun.exists() and begun.read_text())
        asking.send_signal(signal.SIGHUP)
        assert asking.wait(PATIENCE) == -signal.SIGHUP
        until(lambda: not process.started(int(begun.read_text())))
    finally:
        asking.kill()
        asking.wait()


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)
