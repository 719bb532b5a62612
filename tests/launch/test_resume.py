"""A resumed run has the launch of the earlier one, but for what its own command line names."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cppmega.checkpoints.tracker import TRACKER
from cppmega.cli import main
from cppmega.errors import CppmegaError
from cppmega.host import redact
from cppmega.launch import folder as launch_folder
from cppmega.launch import prepare as launch
from cppmega.launch import resume, start
from cppmega.launch.request import LaunchRequest, ValidatedLaunch
from cppmega.runs.folder import Run
from cppmega.runs.status import Status
from tests.runs.made import asked
from tests.support import pristine

GPU = "dsv32_h200_slice"


@pytest.fixture(autouse=True)
def without_preflight(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would miss a GPU, and takes a minute."""
    monkeypatch.setattr(launch, "_examined", lambda *_: {})


def began(runs: Path, name: str, **how: Any) -> Run:
    """A run that was launched, saved step 20, and ended."""
    return crashed(launch.prepare(asked(runs, name=name, **how)))


def crashed(validated: ValidatedLaunch) -> Run:
    node = launch_folder.create(validated)
    run = Run(node.run.path)
    folder = validated.options.save
    assert folder is not None
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TRACKER).write_text("20")
    node.write(Status(host="h", ended=time.time(), exit=1))
    return run


def of_gpus(runs: Path, **how: Any) -> Run:
    return began(runs, "first", recipe=GPU, root=pristine("0.19.2"), **how)


def resumed(runs: Path, **how: Any) -> ValidatedLaunch:
    return launch.prepare(asked(runs, **{"resume": "first", "recipe": "", **how}))


def test_resume_takes_over_the_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")  # of that machine
    first = of_gpus(
        tmp_path,
        changes=("train_iters=900", "lr=1e-5"),
        arguments=("--log-params-norm", "--clip-grad", "0.5"),
        mock_data=True,
        save_interval=7,
        log_interval=3,
        exit_interval=1000,
        wandb_project="p",
        accept=(f"megatron/core/a.py={'0' * 64}",),
        profile=2,
    )
    monkeypatch.delenv("NVTE_FUSED_ATTN")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    capsys.readouterr()
    again, before = resumed(tmp_path), first.manifest.options
    assert again.recipe.train_iters == 900 and again.recipe.lr == 1e-5
    assert again.argv[-3:] == ("--log-params-norm", "--clip-grad", "0.5")
    assert again.request.arguments == again.torchrun[-3:] == again.argv[-3:]
    for name in ("changes", "save_interval", "log_interval", "exit_interval", "wandb_project"):
        assert getattr(again.options, name) == getattr(before, name), name
    assert (again.options.accept, again.options.root) == (before.accept, before.root)
    assert again.options.mock_data and again.options.profile is None
    assert again.environment["NVTE_FUSED_ATTN"] == "0"
    assert "NCCL_SOCKET_IFNAME" not in again.environment
    # Its own folders are the new run's; the checkpoint is the old one's.
    assert again.options.save == again.folder / "checkpoints" != before.save
    assert again.options.load == first.checkpoints
    said = capsys.readouterr().err
    for word in ("--set train_iters=900", "-- --clip-grad 0.5", "NVTE_FUSED_ATTN=0"):
        assert word in said
    assert "first had" not in said
    # A resumed run is resumed in the same way.
    third = resumed(tmp_path, resume=crashed(again).name)
    assert third.options.changes == before.changes and third.recipe == again.recipe


OVERRIDDEN: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a field": (
        {"changes": ("train_iters=900", "lr=1e-5")},
        {"changes": ("train_iters=1200",)},
        "--set train_iters=1200; first had --set train_iters=900",
    ),
    "an argument": (
        {"arguments": ("--clip-grad", "0.5", "--log-params-norm")},
        {"arguments": ("--clip-grad=2",)},
        "-- --clip-grad 2; first had -- --clip-grad 0.5",
    ),
    "an option with its default": (
        {"save_interval": 7},
        {"save_interval": 500, "given": frozenset({"save_interval"})},
        "no --save-interval; first had --save-interval 7",
    ),
    "a folder for checkpoints": (
        {"save": Path("/tmp/elsewhere")},
        {"save": Path("/tmp/other")},
        "--save /tmp/other; first had --save /tmp/elsewhere",
    ),
}


@pytest.mark.parametrize("case", OVERRIDDEN)
def test_resume_reports_what_replaces_the_earlier(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    how, instead, said = OVERRIDDEN[case]
    moved = {key: tmp_path / str(one).lstrip("/") for key, one in how.items() if key == "save"}
    of_gpus(tmp_path / "runs", mock_data=True, **{**how, **moved})
    capsys.readouterr()
    again = resumed(tmp_path / "runs", **instead)
    assert said in capsys.readouterr().err.replace(str(tmp_path), "")
    if case == "a field":
        assert again.options.changes == ("train_iters=1200", "lr=1e-5")
    if case == "an argument":
        assert again.argv[-2:] == ("--clip-grad=2", "--log-params-norm")
    if case.startswith("an option"):
        assert again.options.save_interval == 500


def test_resume_saves_where_the_earlier_chose(tmp_path: Path) -> None:
    first = of_gpus(tmp_path / "runs", mock_data=True, save=tmp_path / "disk")
    assert not (first.path / "checkpoints").exists()
    again = resumed(tmp_path / "runs")
    assert again.options.save == again.options.load == tmp_path / "disk"


@pytest.mark.parametrize(
    ("given", "data", "tokenizer", "held_out", "mock"),
    [
        ({}, ("a",), "t", ("h",), False),
        ({"data": ("b",)}, ("b",), None, ("h",), False),
        ({"data": ("b",), "tokenizer": "u"}, ("b",), "u", ("h",), False),
        ({"mock_data": True}, (), None, (), True),
    ],
)
def test_resume_on_other_data(
    given: dict[str, Any],
    data: tuple[str, ...],
    tokenizer: str | None,
    held_out: tuple[str, ...],
    mock: bool,
    tmp_path: Path,
) -> None:
    before = resume.earlier(began(tmp_path, "first"))
    options = replace(before.options, data=("a",), tokenizer="t", held_out=("h",))
    old = replace(before, options=options)
    now = resume.continued(asked(tmp_path, recipe="", **given), old).options
    assert (now.data, now.tokenizer, now.held_out, now.mock_data) == (
        *(data, tokenizer, held_out),
        mock,
    )


def test_resume_of_a_loop_has_its_ranks(tmp_path: Path) -> None:
    began(tmp_path, "first", nproc=4, changes=("train_iters=900", "global_batch_size=16"))
    again = resumed(tmp_path)
    assert (again.nproc, again.recipe.train_iters) == (4, 900)
    assert again.options.data == (str(tmp_path / "first" / "data"),)


def test_resume_keeps_the_recipe_unless_one_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.py"
    text = f"""from cppmega.recipe.index import load
RECIPE = load("{GPU}").with_(name="mine", purpose="p", lr=1e-5)
"""
    mine.write_text(text)
    how = {"recipe": str(mine), "mock_data": True, "root": pristine("0.19.2")}
    began(tmp_path / "runs", "first", **how, changes=("min_lr=1e-6",))
    mine.write_text(text.replace("lr=1e-5", "lr=2e-5"))
    capsys.readouterr()
    assert resumed(tmp_path / "runs").recipe.lr == 1e-5
    assert "first had" not in capsys.readouterr().err
    named = resumed(tmp_path / "runs", recipe=str(mine))
    assert (named.recipe.lr, named.recipe.min_lr) == (2e-5, 1e-6)
    assert "lr=2e-05; first had --set lr=1e-05" in capsys.readouterr().err
    with pytest.raises(CppmegaError, match="checkpoint-of-another-recipe"):
        resumed(tmp_path / "runs", recipe=GPU)


def test_resume_refuses_values_that_were_not_recorded(tmp_path: Path) -> None:
    of_gpus(tmp_path, mock_data=True, arguments=("--some-api-key", "abc", "--clip-grad", "1"))
    assert redact.HIDDEN in (tmp_path / "first" / "manifest.json").read_text()
    with pytest.raises(CppmegaError, match="value-not-recorded"):
        resumed(tmp_path)
    assert resumed(tmp_path, arguments=("--some-api-key", "x")).argv[-4:-2] == (
        "--some-api-key",
        "x",
    )


@pytest.mark.parametrize(
    ("line", "recipe", "arguments", "given"),
    [
        (["--resume", "first"], "", (), set()),
        (["--resume", "first", "--", "--lr", "1"], "", ("--lr", "1"), set()),
        (["smoke_cpu", "--resume", "first"], "smoke_cpu", (), set()),
        (["--resume", "first", "--save-interval", "500"], "", (), {"save_interval"}),
    ],
)
def test_the_command_line_of_a_resume(
    line: list[str],
    recipe: str,
    arguments: tuple[str, ...],
    given: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[LaunchRequest] = []

    def launched(request: LaunchRequest, *, dry_run: bool) -> int:
        seen.append(request)
        return 0

    monkeypatch.setattr(start, "launch", launched)
    with pytest.raises(SystemExit) as stop:
        main(["launch", *line])
    assert not stop.value.code
    (request,) = seen
    assert (request.recipe, request.arguments, request.given) == (recipe, arguments, given)


def test_a_launch_needs_a_recipe_or_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["launch", "--", "--lr", "1"])
    assert stop.value.code == 2 and "RECIPE" in capsys.readouterr().err
