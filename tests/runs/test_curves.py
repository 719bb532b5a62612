"""`--plot`: what is drawn is what was logged, in a format that the file's name says."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from cppmega.cli.main import main
from cppmega.errors import CppmegaError
from cppmega.runs import curves, plotting
from cppmega.runs.folder import Run
from tests.support import REPOSITORY

pytest.importorskip("matplotlib")
MADE = REPOSITORY / "tests" / "runs" / "made_at_430962d"


def run(folder: Path, name: str, steps: Iterable[dict[str, Any]]) -> Run:
    made = Run(folder / name)
    made.path.mkdir()
    made.metrics.write_text("".join(json.dumps(step) + "\n" for step in steps))
    return made


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that would be written."""
    figures: list[Any] = []
    monkeypatch.setattr(plotting, "write", lambda figure, *_: figures.append(figure))
    return figures


def panels(figure: Any) -> dict[str, dict[str, tuple[list[float], list[float]]]]:
    """Title of a panel -> name of a line -> its points."""
    return {
        axis.get_title(): {
            line.get_label(): (list(line.get_xdata()), list(line.get_ydata()))
            for line in axis.lines
            if len(line.get_xdata())
        }
        for axis in figure.axes
        if axis.get_title()
    }


def test_each_panel_has_the_values_of_each_run(tmp_path: Path, drawn: list[Any]) -> None:
    """The last of a repeated step counts, and a value that was not logged is no point."""
    first = {"step": 1, "loss": 9.0, "tokens_per_second": 1.0, "peak_gib": 2.5}
    one = run(tmp_path, "one", [first, {**first, "loss": 5.0}, {"step": 3, "loss": 4.0}])
    two = run(tmp_path, "two", [{"step": 7, "loss": 3.0}])
    curves.plot([one, two], tmp_path / "x.png")
    assert panels(drawn[0]) == {
        "loss, nats per token": {"one": ([1, 3], [5.0, 4.0]), "two": ([7], [3.0])},
        "tokens per second": {"one": ([1], [1.0])},
        "peak GPU memory, GiB": {"one": ([1], [2.5])},
    }


def test_each_depth_and_each_held_out_loss_has_a_panel(tmp_path: Path, drawn: list[Any]) -> None:
    """Of a repeated evaluation, the last counts."""
    losses = {"lm loss": 5.0, "mtp_1 loss": 6.0, "indexer loss": 0.5}
    held_out = {"evaluated": 2, "losses": {"lm loss": 5.5, "mtp_1 loss": 6.5}, "tokens": 8}
    rows = [
        *({"step": step, "loss": 5.0, "losses": losses} for step in (1, 2)),
        {**held_out, "losses": {"lm loss": 9.0}},
        held_out,
    ]
    curves.plot([run(tmp_path, "one", rows)], tmp_path / "x.png")
    assert panels(drawn[0]) == {
        "loss, nats per token": {"one": ([1, 2], [5.0, 5.0])},
        "held-out lm loss": {"one": ([2], [5.5])},
        "held-out mtp_1 loss": {"one": ([2], [6.5])},
        "mtp_1 loss": {"one": ([1, 2], [6.0, 6.0])},
        "indexer loss": {"one": ([1, 2], [0.5, 0.5])},
    }


def test_two_runs_of_one_name_are_two_lines(tmp_path: Path, drawn: list[Any]) -> None:
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
    runs = [
        run(tmp_path / folder, "one", [{"step": 1, "loss": 1.0}]) for folder in ("here", "there")
    ]
    curves.plot(runs, tmp_path / "x.png")
    assert panels(drawn[0])["loss, nats per token"].keys() == {str(one.path) for one in runs}


def test_spikes_are_marked(tmp_path: Path, drawn: list[Any]) -> None:
    steps = [{"step": at, "loss": 2.0 + at % 3 / 100, "grad_norm": 1.0} for at in range(1, 60)]
    steps[49]["loss"] = 30.0
    curves.plot([run(tmp_path, "one", steps)], tmp_path / "x.png")
    (axis, *_) = drawn[0].axes
    _, marks = axis.lines
    assert (list(marks.get_xdata()), list(marks.get_ydata())) == ([50], [30.0])


def test_runs_without_a_step_are_not_drawn(tmp_path: Path) -> None:
    with pytest.raises(CppmegaError, match="No step is logged by one"):
        curves.plot([run(tmp_path, "one", [])], tmp_path / "x.png")


def test_the_listed_runs_are_drawn(tmp_path: Path) -> None:
    picture = tmp_path / "new" / "x.svg"
    with pytest.raises(SystemExit) as done:
        main(["runs", "--runs", str(MADE), "--plot", str(picture)])
    assert done.value.code == 0 and "tokens per second" in picture.read_text()


def test_a_picture_is_of_the_format_that_its_name_says(tmp_path: Path) -> None:
    steps = [{"step": 1, "loss": 1.0}]
    made = run(tmp_path, "<one>", steps)
    for name, start in (("x.png", b"\x89PNG"), ("x.pdf", b"%PDF"), ("x.svg", b"<?xml")):
        curves.plot([made], tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(start)


@pytest.mark.parametrize(
    ("name", "error"), [("x.txt", "plot-format-unknown"), ("file/x.png", "write-failed")]
)
def test_a_picture_that_cannot_be_written_is_an_error(
    name: str, error: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CppmegaError, match=error):
        curves.plot([run(tmp_path, "one", [{"step": 1, "loss": 1.0}])], tmp_path / name)


def test_matplotlib_is_asked_for_where_something_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(CppmegaError, match="package-missing") as refused:
        curves.plot([run(tmp_path, "one", [])], tmp_path / "x.png")
    assert "pip install matplotlib" in refused.value.next


def test_a_run_is_drawn_or_watched(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as done:
        main(["runs", "--runs", str(MADE), "--watch", "--plot", str(tmp_path / "x.png")])
    assert done.value.code == 2
