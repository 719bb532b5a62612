"""What a launch records of itself: no secret, and nothing at all where it fails."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cppmega.errors import CppmegaError
from cppmega.host import redact
from cppmega.launch import folder as launch_folder
from cppmega.launch import prepare as launch
from cppmega.launch import record as launch_record
from cppmega.launch import start
from cppmega.launch.request import ValidatedLaunch
from cppmega.preflight.context import Context
from cppmega.recipe import index as recipes_index
from cppmega.recipe.run_options import RunOptions
from cppmega.runs import json_file, tmux
from cppmega.runs.manifest import DataRecord
from tests.runs.made import asked
from tests.support.lab import Lab


def ready(lab: Lab, **how: Any) -> ValidatedLaunch:
    """A launch that has passed every check."""
    recipe = recipes_index.load("smoke_cpu")
    context = Context(
        root=lab.root,
        recipe=recipe,
        options=RunOptions(save=Path("/s")),
        environ={"NCCL_DEBUG": "1", "WANDB_api_key": "secret", "SLURM_JWT": "secret"},
    )
    context.session = lab.session()
    return ValidatedLaunch(
        request=asked(lab.root.parent / "runs", **how),
        recipe=recipe,
        name=recipe.name,
        source=recipes_index.file_of(recipe.name),
        context=context,
        folder=lab.root.parent / "runs" / "made",
        nproc=1,
        torchrun=("--standalone",),
        argv=("--lr", "1", "--hf-token", "secret", "--data-path", "http://me:secret@host/d"),
        data=DataRecord(fingerprint="f"),
    )


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    made = Lab(tmp_path, monkeypatch)
    made.wheel()
    made.page()
    made.apply()
    return made


def test_the_folder_says_what_was_launched_and_is_made_once(lab: Lab) -> None:
    one = ready(lab)
    run = launch_folder.create(one).run
    manifest = run.manifest
    assert manifest.overlay.digest == lab.receipt().digest
    assert list(manifest.overlay.pages or ()) == ["page"]
    assert json.loads((run.path / "receipt.json").read_text())["digest"] == lab.receipt().digest
    assert manifest.environment == {"NCCL_DEBUG": "1"}  # and no secret
    assert manifest.arguments[-1] == "http://(not recorded)@host/d"
    assert manifest.recipe.git and manifest.recipe.git.commit
    assert manifest.cppmega.git and manifest.cppmega.git.commit
    assert "secret" not in run.manifest_file.read_text()
    with pytest.raises(CppmegaError, match="run-exists"):
        launch_folder.create(one)
    # Several hosts: each joins once, with the same launch.
    pair = ready(lab, nodes=2, name="pair", rdzv="h:1")
    pair = replace(pair, folder=pair.folder.with_name("pair"))
    assert [launch_folder.create(pair).path.name for _ in range(2)] == ["0", "1"]
    with pytest.raises(CppmegaError, match="run-exists"):
        launch_folder.create(pair)
    with pytest.raises(CppmegaError, match="launch-differs"):
        launch_folder.create(replace(pair, argv=("--lr", "2")))


def test_a_folder_that_cannot_be_filled_is_not_left_behind(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(json_file, "write", full)
    with pytest.raises(CppmegaError, match=r"write-failed: .*No space left"):
        launch_folder.create(ready(lab))
    assert list((lab.root.parent / "runs").iterdir()) == []
    (lab.root.parent / "runs" / "made").symlink_to(lab.root / "nowhere")
    with pytest.raises(CppmegaError, match="run-exists"):
        launch_folder.create(ready(lab))


def test_a_taken_session_leaves_nothing(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was free when the launch looked; tmux itself decides who has the name."""
    monkeypatch.setattr(launch, "prepare", lambda _: ready(lab, tmux="taken"))
    refused = SimpleNamespace(returncode=1, stdout="", stderr="duplicate session: taken")
    monkeypatch.setattr(tmux, "_tmux", lambda *words: refused)
    with pytest.raises(CppmegaError, match="session-exists"):
        start.launch(asked(lab.root.parent / "runs", tmux="taken"))
    assert list((lab.root.parent / "runs").iterdir()) == []


def test_no_name_of_a_secret_is_known_beforehand() -> None:
    """What is recorded of the environment is what is listed, less what looks like a secret."""
    secrets = {
        **dict.fromkeys(("SLURM_JWT", "HF_AUTH", "WANDB_api_key", "MASTER_PASSWORD"), "x"),
        **dict.fromkeys(("NVIDIA_API_KEY", "PYTHON_INDEX_LOGIN", "HF_anything", "HOME"), "x"),
        **{"CUDA_COOKIE": "x", "NCCL_X": "a" * 40, "TORCH_X": "Ab1" * 12, "UCX_Y": "AuthX"},
    }
    kept = {
        **{"CUDA_VISIBLE_DEVICES": "GPU-8e2c1b3a-1111-2222-3333-444455556666,1"},
        **{"NCCL_IB_HCA": "mlx5_0:1,mlx5_1:1", "PYTHONPATH": "/a:/b", "MASTER_ADDR": "h"},
        **{"OMP_NUM_THREADS": "1", "SLURM_JOB_ID": "7", "WANDB_PROJECT": "p", "HF_HOME": "/h"},
    }
    assert redact.environment({**secrets, **kept}) == {**kept, "UCX_Y": "AuthX"}
    url = redact.environment(
        {"WANDB_BASE_URL": "https://me:pw@host/x", "NCCL_Z": "hf_abcdefghijklm"}
    )
    assert url == {"WANDB_BASE_URL": f"https://{redact.HIDDEN}@host/x", "NCCL_Z": redact.HIDDEN}


def test_secrets_in_words_and_none_where_tokens_are_meant() -> None:
    hidden = redact.HIDDEN
    line = ["--hf-token", "a", "--api-key=b", "--wandb-api-key", "c", "--password", "d", "e"]
    safe = ["--hf-token", "?", "--api-key=?", "--wandb-api-key", "?", "--password", "?", "e"]
    assert redact.words(line) == [word.replace("?", hidden) for word in safe]
    token = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2ln"
    for word, safe in (
        ("http://me:pw@host:80/x", f"http://{hidden}@host:80/x"),
        ("s3://b/k?X-Amz-Signature=f00&y=1", f"s3://b/k?X-Amz-Signature={hidden}&y=1"),
        (f"prefix {token}", f"prefix {hidden}"),
        ("Authorization: Bearer abcdefgh", f"Authorization: {hidden}"),
    ):
        assert redact.text(word) == safe
        assert redact.everywhere({"a": [word, {"b": word}], "n": 1}) == {
            "a": [safe, {"b": safe}],
            "n": 1,
        }
    plain = [
        "--eod-token",
        "3",
        "--tokenizer-type",
        "GPT",
        "--moe-token-dispatcher-type",
        "alltoall",
    ]
    plain += ["--calculate-per-token-loss", "--token", "--lr", "1e-4", "--save", "/a@b/c"]
    plain += ["--special-tokens", "x", "https://host/a@b", "git@host:x", "--kv-channels", "64"]
    assert redact.words(plain) == plain


def test_git_state_of_files_that_git_does_not_know(tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text("")
    assert launch_record.git_state(tmp_path / "recipe.py") is None


def test_looking_at_a_repository_runs_nothing_that_it_names(tmp_path: Path) -> None:
    recipe, mark, hook = (tmp_path / name for name in ("recipe.py", "hacked", "hook"))
    recipe.write_text("")
    hook.write_text(f"#!/bin/sh\ntouch {mark}\n")
    hook.chmod(0o755)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "recipe.py"], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True)
    subprocess.run([*git, "config", "core.fsmonitor", str(hook)], check=True)
    state = launch_record.git_state(recipe)
    assert state is not None and not state.changed and not mark.exists()
