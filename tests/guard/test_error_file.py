"""The error that ends a rank: its exit status, its report, and torchrun's error file."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest

from cppmega.errors import CppmegaError
from cppmega.guard import error_file, ranks


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The error file that torchrun would name for this rank."""
    path = tmp_path / "error.json"
    monkeypatch.setenv(error_file.VARIABLE, str(path))
    monkeypatch.setenv("RANK", "3")
    return path


def message(file: Path) -> str:
    written = json.loads(file.read_text())["message"]
    assert float(written["extraInfo"]["time"]) >= int(written["extraInfo"]["timestamp"])
    return str(written["message"])


def test_an_error_ends_a_rank_with_its_parts_and_its_place(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = CppmegaError("some-error", "What.", "Why.", "next")
    failures: list[int] = []
    with pytest.raises(SystemExit) as stop, error_file.reported(lambda: failures.append(1)):
        raise error
    assert stop.value.code == 1 and failures == [1]
    assert capsys.readouterr().err == f"[{ranks.where()}]\n{error.render()}\n"
    assert ranks.where().endswith(", rank 3")
    assert message(file) == "some-error: What."


def test_wrong_usage_is_two_and_leaves_no_error_file(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failures: list[int] = []
    with pytest.raises(SystemExit) as stop, error_file.reported(lambda: failures.append(1)):
        raise click.UsageError("no such option")
    assert stop.value.code == 2 and failures == [1] and not file.exists()
    assert "no such option" in capsys.readouterr().err


@pytest.mark.parametrize("error", [ZeroDivisionError("by zero"), KeyboardInterrupt()])
def test_any_other_exception_is_recorded_and_raised(file: Path, error: BaseException) -> None:
    failures: list[int] = []
    with (
        pytest.raises(type(error)) as raised,
        error_file.reported(lambda: failures.append(1)),
    ):
        raise error
    assert raised.value is error and failures == [1]
    assert message(file).startswith(type(error).__name__)


def test_an_exit_passes_unreported(file: Path) -> None:
    failures: list[int] = []
    with pytest.raises(SystemExit) as stop, error_file.reported(lambda: failures.append(1)):
        raise SystemExit(7)
    assert stop.value.code == 7 and not failures and not file.exists()


def test_the_first_error_of_a_rank_counts(file: Path) -> None:
    error_file.record(ValueError("first"))
    error_file.record(ValueError("second"))
    assert message(file) == "ValueError: first"


def test_a_process_outside_of_a_group_gathers_its_own_object() -> None:
    assert ranks.distributed() is None and ranks.gather("mine") == ["mine"]
