"""The files that a benchmark writes: a JSON result, and a page with tables made from it alone."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import click
import filelock

from benchmarks import RESULTS
from cppmega.host.packages import version
from cppmega.runs import json_file

Page = str | Iterable[str]


def out_option(default: Path | None = RESULTS) -> Callable[..., Any]:
    """`--out DIR`, the folder of the results."""
    return click.option(
        "--out",
        type=click.Path(path_type=Path),
        required=default is None,
        default=default,
        help="folder for the results",
    )


def folder_option(name: str, about: str, required: bool = False) -> Callable[..., Any]:
    """An option that names an existing folder."""
    kind = click.Path(path_type=Path, exists=True, file_okay=False)
    return click.option(name, type=kind, required=required, help=about)


FOLDER = click.Path(path_type=Path)


def places(data: str, required: bool = True) -> Callable[[Any], Any]:
    """`--site`, `--work`, `--out` and `--data` of a benchmark that trains.

    Args:
        data: the help of `--data`.
        required: whether there must be a `--data`.
    """

    def decorated(command: Any) -> Any:
        for name, about, must in (
            ("--data", data, required),
            ("--out", "Results, logs, profiles and curves.", True),
            ("--work", "Scratch: trees, checkpoints, datasets, indices.", True),
            ("--site", "Folder with a pristine megatron/.", True),
        ):
            command = click.option(name, type=FOLDER, required=must, help=about)(command)
        return command

    return decorated


def stack(*packages: str) -> dict[str, str]:
    """Date, GPU, and versions of torch and of these packages, for the header of a report."""
    import torch

    return {
        "date": date.today().isoformat(),
        "GPU": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        **{name: version(name) or "not installed" for name in packages},
    }


def facts(*packages: str) -> dict[str, Any]:
    """Date, GPU and the versions of these packages, all of which must be installed."""
    import torch

    return {
        "date": date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        **{name: metadata.version(name) for name in packages},
    }


Columns = Iterable[str | tuple[str, str]]


def table(columns: Columns, rows: Iterable[str | Iterable[Any]]) -> Iterator[str]:
    """The lines of a table.

    Args:
        columns: names, or names with a format of the values.
        rows: a value per column; strings are cells already, and None is a value that is missing. A
            row that is a string is a line already.
    """
    named = [(column, "") if isinstance(column, str) else column for column in columns]
    yield _line(name or None for name, _ in named)
    yield "|---" * len(named) + "|"
    for row in rows:
        yield (
            row
            if isinstance(row, str)
            else _line(
                cell if cell is None or isinstance(cell, str) else format(cell, form)
                for cell, (_, form) in zip(row, named, strict=True)
            )
        )


def _line(cells: Iterable[str | None]) -> str:
    return "|" + "".join(" |" if cell is None else f" {cell} |" for cell in cells)


def text_of(page: Page) -> str:
    """A page as text, which ends in a newline."""
    return page if isinstance(page, str) else "\n".join(page)


def write(out: Path, name: str, report: Any, page: Page | None = None) -> None:
    """Write NAME.json and, if there is a page, NAME.md into the folder, and print what was written.

    The folder is created. A benchmark that measures for long calls this after each case.
    """
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report, indent=1) + "\n"
    (out / f"{name}.json").write_text(text)
    if page is not None:
        text = text_of(page)
        (out / f"{name}.md").write_text(text)
    print(text, flush=True)


def earlier(out: Path, name: str, key: str) -> dict[str, Any]:
    """What NAME.json of the folder has under a key; nothing if there is no such file."""
    file = out / f"{name}.json"
    found: dict[str, Any] = json.loads(file.read_text()).get(key, {}) if file.is_file() else {}
    return found


def shared(target: Path, key: str) -> dict[str, Any]:
    """A result that several calls write together; with nothing under the key, if there is none."""
    return json.loads(target.read_text()) if target.is_file() else {key: {}}


@contextlib.contextmanager
def changing(target: Path, key: str) -> Iterator[dict[str, Any]]:
    """What `shared` returns, to be changed and written while no other call does the same."""
    with filelock.FileLock(target.with_suffix(".lock")):
        result = shared(target, key)
        yield result
        json_file.write(target, result)
