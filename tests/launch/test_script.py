"""A training script of one's own is launched, watched and resumed like a recipe."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cppmega.errors import CppmegaError
from cppmega.guard import step_log
from cppmega.launch import prepare as launch
from cppmega.launch import script as launch_script
from cppmega.preflight.examine import Preflight
from cppmega.preflight.findings import Finding
from cppmega.runs import compare as comparing
from cppmega.runs import control as run_control
from cppmega.runs import placeholders, tmux
from cppmega.runs.folder import Node, Run
from tests.guard.bench import Bench
from tests.launch.bench import needs_tmux, until
from tests.launch.test_resume import crashed
from tests.runs import made as runs_made
from tests.runs.made import asked
from tests.support import PATIENCE, free_port, made, pristine

SCRIPT = """
import argparse, os, signal, sys
from pathlib import Path
from cppmega import guard
from megatron.core.thing import double
together = int(os.environ["WORLD_SIZE"]) > 1
if together:  # one rank waits for nobody, and an import of torch takes longer than all its steps
    import torch
    torch.distributed.init_process_group("gloo")
parser = argparse.ArgumentParser()
for name in ("--save", "--load"):
    parser.add_argument(name, type=Path)
parser.add_argument("--steps", type=int)
parser.add_argument("--fail-at", type=int)
args = parser.parse_args()
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
rank, tracker = int(os.environ["RANK"]), "latest_checkpointed_iteration.txt"
found = args.load / tracker
done = int(found.read_text()) if found.exists() else 0
print(f"begins after {done}", flush=True)
for step in guard.steps(range(done + 1, args.steps + 1)):
    double(step)
    guard.log_step(step, loss=1 / step)
    if together:
        torch.distributed.barrier()
    if rank == 0:
        args.save.mkdir(exist_ok=True)
        (args.save / tracker).write_text(str(step))
    if together:
        torch.distributed.barrier()
    if step == args.fail_at and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        sys.exit(7)
    if asked:
        break
"""
OWN = ("--save", "{run}/checkpoints", "--load", "{load}")
COMMAND = """
from cppmega.launch import prepare
prepare._examined = lambda *_: {}  # it takes a minute
from cppmega.cli.main import main
main()
"""


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    bench = Bench(tmp_path)
    made.page(bench.pages)
    (tmp_path / "mine.py").write_text(SCRIPT)
    return bench


def start(
    bench: Bench, root: Path, *words: str, script: bool = True, on: Sequence[str] = ()
) -> subprocess.Popen[str]:
    chosen = [str(bench.folder / "mine.py"), "--megatron", str(root)] if script else []
    before, _, own = " ".join(words).partition(" -- ")
    return subprocess.Popen(
        [
            *(*on, sys.executable, "-c", COMMAND, "launch"),
            *(*chosen, *before.split(), "--", *own.split()),
        ],
        cwd=bench.folder,
        env=bench.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(*started: subprocess.Popen[str]) -> list[tuple[int, str]]:
    try:
        said = [one.communicate(timeout=PATIENCE)[0] for one in started]
        return [(one.returncode, text) for one, text in zip(started, said, strict=True)]
    finally:
        for one in started:
            one.kill()


def test_a_script_runs_restarts_and_resumes(bench: Bench) -> None:
    root = bench.tree()
    line = "--name first --nproc 1 --max-restarts 1 -- --steps 3 --fail-at 2 " + " ".join(OWN)
    ((code, said),) = ended(start(bench, root, line))
    first = Run(bench.folder / "runs" / "first")
    assert code == 0, said
    assert "begins after 2" in said, "started again, from its own checkpoint"
    assert (first.state(), first.checkpoint()) == ("finished", 3)
    assert [step.step for step in first.steps()] == [1, 2, 3]
    assert (first.path / "recipe" / "mine.py").read_text() == SCRIPT
    reached, idle = (first.path / "patches.txt").read_text().splitlines()
    assert reached.startswith("reached: ") and idle.startswith("idle: ")

    again = "--resume first --name second -- --steps 5"
    ((code, said),) = ended(start(bench, root, again, script=False))
    second = Run(bench.folder / "runs" / "second")
    assert code == 0 and "begins after 3" in said, said
    assert "-- --steps 5; first had -- --steps 3" in said
    assert second.checkpoint() == 5 and second.outline.resumes == "first"
    assert first.checkpoint() == 3, "its folder is left as it was"


@needs_tmux
def test_scripts_are_compared_and_stopped_and_run_in_tmux(
    bench: Bench,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bench.environment["TMUX_TMPDIR"] = str(tmp_path)  # a tmux server of this test's own
    monkeypatch.setenv("TMUX_TMPDIR", str(tmp_path))
    root, own = bench.tree(), " ".join(OWN)
    ((code, said),) = ended(start(bench, root, f"--name short --nproc 1 -- --steps 3 {own}"))
    assert code == 0, said
    line = f"--name long --tmux mine --nproc 1 -- --steps 100000 {own}"
    ((code, said),) = ended(start(bench, root, line))
    assert code == 0, said
    short, long = (Run(bench.folder / "runs" / name) for name in ("short", "long"))
    try:
        assert tmux.exists("mine") and "cppmega attach" in said
        until(lambda: len([*long.steps()]) > 3, long)
        run_control.stop(long, now=False, wait=PATIENCE)
    finally:
        subprocess.run(["tmux", "kill-server"], capture_output=True, check=False)
    assert capsys.readouterr().out == f"stopped long, checkpoint of step {long.checkpoint()}\n"
    found = comparing.compare(short, long)
    assert (found.common_steps, found.largest_loss_difference) == (3, 0)
    assert found.arguments == ["--steps: 3 | 100000"] and not found.overlay + found.recipe


HOSTS = ("10.77.0.1", "10.77.0.2")
JOIN = """
ip link add to-b type veth peer name to-a netns "$2" && ip link set lo up &&
ip addr add 10.77.0.1/24 dev to-b && ip link set to-b up && hostname host-a &&
nsenter -t "$2" -n -u sh -c "ip link set lo up && hostname host-b && \\
    ip addr add 10.77.0.2/24 dev to-a && ip link set to-a up" &&
for host in "$1" "$2"; do nsenter -t "$host" -m mount --bind "$3" /etc/hosts || exit 1; done
"""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[list[str]]]:
    """The beginning of a command line for each of two hosts.

    They have networks of their own, joined by a cable, and names; files and processes are shared.
    """
    names = tmp_path / "hosts"
    names.write_text(f"127.0.0.1 localhost\n{HOSTS[0]} host-a\n{HOSTS[1]} host-b\n")
    made = [
        subprocess.Popen(
            ["unshare", "--net", "--uts", "--mount", "sh", "-c", "echo && exec sleep 1000"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in HOSTS
    ]
    try:
        pids = [str(one.pid) for one in made if one.stdout is not None and one.stdout.readline()]
        if len(pids) < len(HOSTS):
            pytest.skip("this machine does not allow namespaces of a network")
        command = ["nsenter", "-t", pids[0], "-n", "-u", "sh", "-c", JOIN, "-", *pids, str(names)]
        joined = subprocess.run(command, capture_output=True, text=True, check=False)
        if joined.returncode:
            pytest.skip(f"two namespaces cannot be joined here: {joined.stderr.strip()}")
        yield [["nsenter", "-t", pid, "-n", "-u", "-m", f"--wd={tmp_path}"] for pid in pids]
    finally:
        for one in made:
            one.kill()
            one.communicate()


def test_two_hosts_with_networks_of_their_own_train_one_run(
    bench: Bench, hosts: list[list[str]]
) -> None:
    root, own = bench.tree(), " ".join(OWN)
    where = f"--nnodes 2 --nproc 1 --rdzv {HOSTS[0]}:29511 --name both -- --steps 2 {own}"
    answers = ended(*(start(bench, root, where, on=host) for host in hosts))
    assert [code for code, _ in answers] == [0, 0], answers
    run = Run(bench.folder / "runs" / "both")
    assert (run.state(), run.checkpoint(), len(run.nodes())) == ("finished", 2, 2)
    assert {node.status().host for node in run.nodes()} == {"host-a", "host-b"}


def test_two_hosts_must_have_one_overlay(bench: Bench) -> None:
    """Each host is a process here; the folder of runs is shared, as it has to be."""
    root, other = bench.tree("root"), bench.tree("other", apply=False)
    where = f"--nnodes 2 --nproc 1 --rdzv 127.0.0.1:{free_port()} --name "
    own = " -- --steps 2 " + " ".join(OWN)
    made.second_page(bench.pages, "never")
    bench.apply(other)
    first = start(bench, root, where + "differ" + own)
    run = Run(bench.folder / "runs" / "differ")
    while not run.manifest_file.exists() and first.poll() is None:
        time.sleep(0.05)
    ((code, said),) = ended(start(bench, other, where + "differ" + own))
    first.terminate()
    ended(first)
    assert code == 1 and "launch-differs" in said and "overlay" in said, said


@pytest.fixture
def without_preflight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_examined", lambda *_: {})


def prepared(tmp_path: Path, script: str = SCRIPT, **how: Any) -> Any:
    file = tmp_path / "mine.py"
    file.write_text(script)
    how = {"root": pristine("0.19.2"), "recipe": str(file), "arguments": OWN, **how}
    return launch.prepare(asked(tmp_path / "runs", **how))


def test_a_script_is_told_from_a_recipe(tmp_path: Path) -> None:
    for text, is_script in {
        SCRIPT: True,
        "from cppmega.recipe.index import load\nRECIPE = load('smoke_cpu')": False,
        "from cppmega.recipe import Recipe\nRECIP = Recipe()": False,
        "def broken(": False,
    }.items():
        file = tmp_path / "one.py"
        file.write_text(text)
        assert (launch_script.find(str(file)) is not None) == is_script
    assert launch_script.find("smoke_cpu") is None


def test_the_line_of_a_script(tmp_path: Path, without_preflight: None) -> None:
    validated = prepared(tmp_path, nproc=2)
    script = str(tmp_path / "mine.py")
    assert validated.torchrun[-8:-4] == (
        "cppmega.run",
        "--megatron",
        str(pristine("0.19.2")),
        script,
    )
    assert validated.torchrun[-4:] == validated.argv == OWN
    assert validated.context.arguments == (), "it parses them itself"
    of_megatron = prepared(tmp_path, "from megatron.training import pretrain")
    folder = of_megatron.folder
    assert of_megatron.context.arguments == (
        *("--save", f"{folder}/checkpoints", "--load", f"{folder}/checkpoints"),
    )


@pytest.mark.parametrize(
    ("how", "name"),
    [
        ({"mock_data": True}, "not-supported"),
        ({"recipe": "smoke_cpu", "arguments_from": ("a",)}, "not-supported"),
        ({"nodes": 2}, "no-rendezvous"),
        ({"resume": "first", "arguments": ("--load", "here")}, "load-not-stated"),
    ],
)
def test_what_a_script_cannot_be_launched_with(
    tmp_path: Path, without_preflight: None, how: dict[str, Any], name: str
) -> None:
    if "resume" in how:
        crashed(prepared(tmp_path, name="first", arguments=("--load", "there")))
    with pytest.raises(CppmegaError) as error:
        prepared(tmp_path, **how)
    assert error.value.name == name


def test_a_script_is_run_by_its_ranks_alone(tmp_path: Path, without_preflight: None) -> None:
    """A resuming launch does not execute it to see whether it is a recipe."""
    crashed(prepared(tmp_path, "import megatron, sys\nsys.modules['ran'] = sys", name="first"))
    assert (tmp_path / "runs" / "first" / "recipe" / "mine.py").exists()
    again = launch.prepare(asked(tmp_path / "runs", recipe="", resume="first"))
    assert again.name == "mine" and "ran" not in sys.modules


def test_one_refusal_of_a_launch_is_printed_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [
        Finding("files", "failed", "file-changed", f"{n} is edited.", "Why.", "") for n in "ab"
    ]
    found += [Finding("data", "failed", "no-data", "None.", "Why else.", "next")]
    monkeypatch.setattr(launch, "examine", lambda *_: Preflight(tuple(found), None, ""))
    with pytest.raises(CppmegaError) as error:
        launch._examined(SimpleNamespace(), "recipe")
    assert error.value.what == "a is edited.\nb is edited."
    said = capsys.readouterr().err
    assert said.count("error: ") == 1 and "2 problems were found" in said and "edited" not in said


def test_a_script_begins_at_its_own_checkpoint_once_it_has_one(tmp_path: Path) -> None:
    words, old = ("{load}", "--save={run}/x"), tmp_path / "old"
    assert placeholders.filled(words, tmp_path, old) == (str(old), f"--save={tmp_path}/x")
    own = tmp_path / "checkpoints"
    assert placeholders.filled(words, tmp_path, None)[0] == str(own)
    own.mkdir()
    (own / "latest_checkpointed_iteration.txt").write_text("3")
    assert placeholders.filled(words, tmp_path, old)[0] == str(own)


LINE = (
    " [2026-11-28 10:00:00] iteration       10/      50 | consumed samples:          640 | "
    "elapsed time per iteration (ms): 500.0 | learning rate: 1.000000E-05 | global batch size: 64"
    " | lm loss: 2.500000E+00 | loss scale: 1.0 | grad norm: 0.750 | number of skipped iterations: "
    "  0 |"
)


@pytest.mark.parametrize(
    ("trainer", "rank", "logged"), [(False, 1, 1), (False, 0, 0), (True, 1, 0)]
)
def test_what_megatrons_loop_prints_is_logged_for_the_plots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainer: bool, rank: int, logged: int
) -> None:
    """The last rank logs; cppmega's trainer has a log of its own."""
    line = ["-m", "cppmega.trainer" if trainer else "train.py"]
    run = runs_made.make(tmp_path, "run", 1.0, torchrun=line)
    monkeypatch.setattr(
        step_log.end_record, "node_of_this_rank", lambda: Node(run.path / "nodes/0")
    )
    monkeypatch.setattr(step_log.ranks, "is_last", lambda: rank == 1)
    variables = ModuleType("megatron.training.global_vars")
    vars(variables)["get_args"] = lambda: SimpleNamespace(global_batch_size=64, seq_length=128)
    monkeypatch.setitem(sys.modules, variables.__name__, variables)
    training = ModuleType("megatron.training.training")
    said: list[str] = []
    vars(training)["print_rank_last"] = said.append
    step_log.watch(training)
    for message in ("-----", LINE):
        training.print_rank_last(message)
    assert said == ["-----", LINE]
    assert len(run.steps()) == logged
    for step in run.steps():
        assert (step.step, step.loss, step.grad_norm, step.seconds) == (10, 2.5, 0.75, 0.5)
        assert step.tokens_per_second == 64 * 128 / 0.5
