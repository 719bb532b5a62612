"""`scripts/train.sbatch` under a stand-in for Slurm: two nodes that record their calls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import REPOSITORY

SRUN = """\
#!/bin/bash
# One process for each task, all at once, with their output labelled as `srun --label` does.
tasks=1 label=
while [ $# -gt 0 ]; do
  case $1 in
    --nodes | --ntasks-per-node) shift 2 ;;
    --ntasks) tasks=$2; shift 2 ;;
    --label) label=yes; shift ;;
    --kill-on-bad-exit=1 | --cpu-bind=none) shift ;;
    -*) echo "srun: unrecognized option '$1'" >&2; exit 1 ;;
    *) break ;;
  esac
done
pids=()
for ((task = 0; task < tasks; task++)); do
  (set -o pipefail; SLURM_NODEID=$task "$@" | sed "s/^/${label:+$task: }/") & pids+=($!)
done
worst=0
for pid in "${pids[@]}"; do wait "$pid" || worst=$?; done
exit $worst
"""
SCONTROL = '#!/bin/bash\n[ "$1 $2" = "show hostnames" ] && printf "%s\\n" first second\n'
PYTHON = """\
#!/bin/bash
# A node's interpreter: it records its words, and answers as the test wants.
if [ "$1" = -c ]; then exec "$REAL" "$@"; fi
node=$WORK/$SLURM_NODEID
printf '%s\\n' "$*" >> "$node.calls"
case "$*" in
  *" --dry-run "* | *" --dry-run") [ ! -e "$node.refuses" ] ;;
  *" status "*) cat "$node.status" ;;
  *" launch "*) [ ! -e "$node.crashes" ] ;;
esac
"""


class Cluster:
    """Two nodes and a job on them."""

    def __init__(self, work: Path) -> None:
        self.work = work
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("python", PYTHON)):
            (work / name).write_text(text)
            (work / name).chmod(0o755)
        self.overlays("d1ce5", "d1ce5")

    def overlays(self, *digests: str) -> None:
        for node, digest in enumerate(digests):
            answer = {"schema": 1, "digest": digest, "ok": True}
            (self.work / f"{node}.status").write_text(json.dumps(answer))

    def submit(self, *words: str, nodes: int = 2) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": f"{self.work}:{os.environ['PATH']}",
            "WORK": str(self.work),
            "REAL": sys.executable,
            "SLURM_NNODES": str(nodes),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "first,second",
            "SLURM_SUBMIT_DIR": "/shared",
        }
        return subprocess.run(
            [REPOSITORY / "scripts" / "train.sbatch", *words],
            env=environment,
            cwd=self.work,
            capture_output=True,
            text=True,
            check=False,
        )

    def calls(self, node: int) -> list[str]:
        path = self.work / f"{node}.calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.removeprefix("-m cppmega ") for line in lines]


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def test_each_node_is_checked_once_and_then_starts(cluster: Cluster) -> None:
    done = cluster.submit("recipes/mine.py", "--data", "/d", "--megatron", "/m", "--set", "lr=1")
    assert done.returncode == 0, done.stderr
    words = "--data /d --megatron /m --set lr=1"
    where = "--nnodes 2 --rdzv first:29500 --name mine-7 --runs /shared/runs"
    for node in (0, 1):
        assert cluster.calls(node) == [
            f"launch recipes/mine.py {where} --dry-run {words}",
            "status --json --megatron /m",
            f"launch recipes/mine.py {where} {words}",
        ]


def test_a_script_has_arguments_of_its_own(cluster: Cluster) -> None:
    done = cluster.submit("train.py", "--nproc", "8", "--", "--megatron", "mine")
    assert done.returncode == 0, done.stderr
    assert cluster.calls(0)[1] == "status --json"
    assert cluster.calls(0)[2].endswith("--nproc 8 -- --megatron mine")


def test_a_node_that_refuses_keeps_all_from_starting(cluster: Cluster) -> None:
    (cluster.work / "1.refuses").touch()
    assert cluster.submit("smoke_cpu").returncode == 1
    assert [len(cluster.calls(node)) for node in (0, 1)] == [1, 1]


def test_nodes_with_different_overlays_do_not_start(cluster: Cluster) -> None:
    cluster.overlays("d1ce5", "0dd")
    done = cluster.submit("smoke_cpu")
    assert done.returncode == 1 and "error: overlays-differ" in done.stderr
    assert "0: d1ce5" in done.stderr and "1: 0dd" in done.stderr
    calls = [call for node in (0, 1) for call in cluster.calls(node)]
    assert all("--dry-run" in call for call in calls if "launch" in call)


def test_a_node_without_an_overlay_does_not_start(cluster: Cluster) -> None:
    (cluster.work / "1.status").write_text("error")
    assert cluster.submit("smoke_cpu").returncode != 0
    assert [cluster.calls(node)[1:] for node in (0, 1)] == [["status --json"]] * 2


def test_one_node_needs_no_rendezvous(cluster: Cluster) -> None:
    assert cluster.submit("smoke_cpu", nodes=1).returncode == 0
    assert cluster.calls(0)[-1] == "launch smoke_cpu --name smoke_cpu-7 --runs /shared/runs"
    assert cluster.calls(1) == []


def test_a_run_that_fails_fails_the_job(cluster: Cluster) -> None:
    (cluster.work / "0.crashes").touch()
    assert cluster.submit("smoke_cpu").returncode == 1


def test_without_a_recipe_it_says_how_it_is_used(cluster: Cluster) -> None:
    done = cluster.submit()
    assert done.returncode == 2 and done.stderr.startswith("Train a recipe, or a script")
    assert "PYTHON=..." in done.stderr and "#SBATCH" not in done.stderr
