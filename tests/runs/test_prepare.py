"""A launch before its first process: what is refused, and what torchrun is given."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cppmega.checkpoints.tracker import TRACKER
from cppmega.cli import main
from cppmega.errors import CppmegaError
from cppmega.launch import folder as launch_folder
from cppmega.launch import prepare as launch
from cppmega.overlay import receipt
from cppmega.preflight.context import Context
from cppmega.recipe import index as recipes_index
from cppmega.runs import json_file, tmux
from cppmega.training import data_requirements
from cppmega.training import options as trainer_options
from cppmega.tree import accepted
from tests.runs.made import asked, ended, make
from tests.support import REPOSITORY, pristine


def test_a_shell_in_a_folder_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(SystemExit) as ended_:
        main(["launch", "smoke_cpu"])
    assert ended_.value.code == 1 and "folder-gone" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ({"recipe": "smoke_cpv"}, "recipe-unknown"),
        ({"tmux": "a.b"}, "bad-name"),
        ({"tmux": "a#(touch hacked)"}, "bad-name"),
        ({"tmux": "#{host}"}, "bad-name"),
        ({"tmux": "-x"}, "bad-name"),
        ({"tmux": "a;kill-server"}, "bad-name"),
        ({"tmux": "läuft"}, "bad-name"),
        ({"name": "a b"}, "bad-name"),
        ({"nodes": 2}, "no-rendezvous"),
        ({"nodes": 2, "rdzv": "h:1"}, "no-rendezvous"),
        ({"recipe": "nam56r_h200_8gpu_bf16", "nodes": 3}, "wrong-world-size"),
        ({"recipe": "nam56r_h200_slice", "nproc": 2}, "wrong-world-size"),
        ({"resume": "nothing"}, "no-runs"),
        ({"rdzv": "h:1"}, "no-rendezvous"),
        ({"allow_fallback": ("dsa_attention_kernel",)}, "unknown-page"),
        ({"changes": ("allow_fallback=('dsa_attention_kernel',)",)}, "unknown-page"),
        ({"profile": 2, "profile_after": 199}, "profile-beyond-run"),
        ({"changes": ("name=mine",)}, "bad-assignment"),
        ({"changes": ("lr=1e999",)}, "recipe-invalid"),
        ({"changes": ("lr=-1",)}, "recipe-invalid"),
        ({"changes": ("seed=-1",)}, "recipe-invalid"),
        ({"changes": ("lrr=1",)}, "unknown-field"),
    ],
)
def test_a_launch_that_cannot_be_is_refused_before_anything_is_looked_at(
    how: dict[str, Any], error: str, tmp_path: Path
) -> None:
    with pytest.raises(CppmegaError, match=error):
        launch.prepare(asked(tmp_path / "runs", **how))
    assert not (tmp_path / "runs").exists()


def test_only_an_ended_run_with_a_checkpoint_is_resumed(tmp_path: Path) -> None:
    make(tmp_path, "fresh", 1)
    with pytest.raises(CppmegaError, match="run-still-running"):
        launch.prepare(asked(tmp_path, resume="fresh"))
    run = make(tmp_path, "crashed", 2)
    ended(run, 1)
    with pytest.raises(CppmegaError, match="nothing-to-do") as caught:
        launch.prepare(asked(tmp_path, resume="crashed"))
    assert "fresh start" in caught.value.next
    json_file.write(run.manifest_file, {**json_file.plain(run.manifest), "resumes": "earlier"})
    with pytest.raises(CppmegaError, match="nothing-to-do") as caught:
        launch.prepare(asked(tmp_path, resume="crashed"))
    assert "--resume earlier" in caught.value.next
    run.checkpoints.mkdir()
    (run.checkpoints / TRACKER).write_text("200")
    with pytest.raises(CppmegaError, match="already-trained") as caught:
        launch.prepare(asked(tmp_path, resume="crashed"))
    assert "train_iters=400" in caught.value.next
    (run.path / "recipe").mkdir()
    shutil.copy(recipes_index.folder() / "smoke_cpu.py", run.path / "recipe")
    with pytest.raises(CppmegaError, match="checkpoint-of-another-model") as caught:
        launch.prepare(asked(tmp_path, resume="crashed", changes=("hidden_size=128",)))
    assert "hidden_size 64 and 128" in caught.value.what
    with pytest.raises(CppmegaError, match="checkpoint-of-another-recipe"):
        launch.prepare(asked(tmp_path, resume="crashed", recipe="nam56r_h200_slice"))


@pytest.mark.parametrize(
    ("how", "error"),
    [({"nproc": 3}, "wrong-world-size"), ({"mock_data": True}, "not-supported")],
)
def test_what_the_loop_cannot_do_is_refused_before_it_starts(
    how: dict[str, Any], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CppmegaError, match=error), monkeypatch.context() as patched:
        patched.setattr(launch, "_examined", lambda *_: pytest.fail("it took a minute"))
        launch.prepare(asked(tmp_path / "runs", **how))
    monkeypatch.setattr(launch, "_examined", lambda *_: {})
    assert launch.prepare(asked(tmp_path / "runs")).options.load is None
    assert not (tmp_path / "runs").exists()
    # A folder of one's own that has checkpoints is gone on from, and the manifest says so.
    (tmp_path / TRACKER).write_text("7")
    again = launch.prepare(asked(tmp_path / "runs", save=tmp_path))
    assert again.options.load == again.options.save == tmp_path


def test_what_the_preflight_has_found_is_not_sought_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One data check, one receipt and one set of options for preflight, manifest and torchrun."""
    calls: list[str] = []

    def counted(module: Any, name: str) -> None:
        original = getattr(module, name)

        def call(*args: Any, **more: Any) -> Any:
            calls.append(name)
            return original(*args, **more)

        monkeypatch.setattr(module, name, call)

    def checks(context: Context, recipe: str) -> dict[str, str]:
        assert context.data and context.receipt and context.accepted == {}
        assert sorted(set(calls)) == ["check", "load", "merged"]
        calls.clear()
        return {"data": "ok"}

    monkeypatch.setattr(launch, "_examined", checks)
    for module, name in (
        (data_requirements, "check"),
        (receipt, "load"),
        (accepted, "merged"),
        (trainer_options, "read"),
    ):
        counted(module, name)
    how = {"recipe": "dsv32_h200_slice", "mock_data": True, "root": pristine("0.19.2")}
    validated = launch.prepare(asked(tmp_path / "runs", **how))
    run = launch_folder.create(validated).run
    assert calls == []
    assert run.manifest.options == validated.context.options
    words = [*validated.torchrun, "--megatron", str(how["root"])]
    words = words[words.index("cppmega.trainer") + 2 :]
    monkeypatch.undo()
    assert trainer_options.read(words) == (validated.options, ())


def test_without_tmux_it_says_how_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CppmegaError, match="no-tmux") as caught:
        launch.prepare(asked(tmp_path, tmux="demo"))
    assert "leave --tmux out" in caught.value.next
    assert not tmux.exists("demo")


def test_the_line_of_a_recipe_for_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as this machine can say it: the preflight would miss the GPU."""
    root = pristine("0.19.2")
    monkeypatch.setattr(launch, "_examined", lambda *_: {})
    alone = launch.prepare(
        asked(tmp_path / "runs", recipe="dsv32_h200_slice", mock_data=True, root=root)
    )
    # Where the host's own name has no address, torchrun would wait for ever.
    assert alone.torchrun[:3] == ("--standalone", "--local-addr", "127.0.0.1")
    how = {"recipe": "dsv32_h200_slice", "mock_data": True, "root": root}
    changes = ("gpus=4", "global_batch_size=4", "expert_model_parallel_size=4")
    made = launch.prepare(
        asked(
            tmp_path / "runs",
            **{**how, "changes": changes, "nodes": 2, "rdzv": "first:29500", "name": "both"},
            arguments=("--log-params-norm",),
        )
    )
    folder, line = tmp_path / "runs" / "both", " ".join(made.torchrun)
    assert line.startswith(
        "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint first:29500 --rdzv-id both "
        f"--nproc-per-node 2 --redirects 3 --tee 0:3,1:3 -m cppmega.run --megatron {root} "
        f"-m cppmega.trainer {folder}/recipe/dsv32_h200_slice.py "
    )
    assert " --set gpus=4 " in line and " --mock-data " in line
    assert f"--save {folder}/checkpoints" in line and f"--metrics {folder}/metrics.jsonl" in line
    assert "--profile-folder" not in line, "nothing is profiled"
    assert line.endswith(" -- --log-params-norm")
    assert "--exit-signal-handler" in made.argv  # what `stop` relies on
    assert made.argv[-1] == "--log-params-norm"
    at = made.argv.index("--rerun-mode")
    assert made.argv[at + 1] == "disabled"
    assert made.data.mock and made.environment["PYTORCH_CUDA_ALLOC_CONF"]
    assert not folder.exists()


def test_tmux_that_does_not_answer_is_not_a_free_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tmux.shutil, "which", lambda name: "/usr/bin/tmux")
    for said, found in (
        ("can't find session: a", False),
        ("no current target", False),
        ("no server running on /tmp/tmux-0/default", False),
        ("error connecting to /tmp/tmux-0/default (No such file or directory)", False),
        ("server version is too old for client", None),
        ("error connecting to /tmp/tmux-0/default (Permission denied)", None),
    ):
        done = SimpleNamespace(returncode=1, stderr=said)
        monkeypatch.setattr(tmux, "_tmux", lambda *words, done=done: done)
        if found is False:
            assert not tmux.exists("a")
            continue
        with pytest.raises(CppmegaError, match="tmux-broken"):
            tmux.exists("a")


def test_what_the_ranks_see() -> None:
    cpu = launch.environment_of(recipes_index.load("smoke_cpu"), {"A": "b"})
    assert cpu == {"A": "b", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    gpu = recipes_index.load("nam56r_h200_slice")
    given = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64", "OMP_NUM_THREADS": "4"}
    seen = launch.environment_of(gpu, given)
    assert seen["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64,expandable_segments:True"
    assert seen["OMP_NUM_THREADS"] == "4" and "CUDA_VISIBLE_DEVICES" not in seen


def test_options_become_the_same_options_again(tmp_path: Path) -> None:
    line = ["--set", "lr=1", "--set", "seed=2", "--data", "a", "--data", "b", "--mock-data"]
    line += ["--save", str(tmp_path), "--exit-interval", "3", "--wandb-project", "p"]
    line += ["--profile", "2", "--profile-after", "5", "--profile-folder", "there"]
    read, rest = trainer_options.read([*line, "--lr", "1"])
    assert trainer_options.read(read.words()) == (read, ())
    assert rest == ("--lr", "1")
    assert read.words(without=("save",)) == [
        w for w in read.words() if w not in ("--save", str(tmp_path))
    ]


def test_the_shell_script_hands_over_to_the_same_launcher(tmp_path: Path) -> None:
    script = str(REPOSITORY / "scripts" / "train.sh")
    environment = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, "NNODES": "2"}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [script, *words], cwd=tmp_path, env=environment, capture_output=True, text=True
        )

    assert run().returncode == 2
    done = run("smoke_cpu", "--set", "lr=1")
    assert done.returncode == 1 and "error: no-rendezvous" in done.stderr  # NNODES has arrived
    environment["RDZV"] = "host:1"
    done = run("smoke_cpu", "--name", "a b")
    assert done.returncode == 1 and "error: bad-name" in done.stderr
