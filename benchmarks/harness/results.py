"""The files that a benchmark writes: a JSON result, and a page with tables made from it alone."""

from __future__ import annotations

import contextlib
import functools
import json
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import click
import filelock

from benchmarks import RESULTS
from cppmega.host.packages import version
from cppmega.runs import json_file, plotting

Page = str | Iterable[str]
FOLDER = click.Path(path_type=Path)
SITE = (
    "Folder with a pristine megatron/ and its dist-info, as pip or an unpacked wheel leave them, "
    "which is copied and never changed. Everything else must be importable."
)


def out_option(default: Path | None = RESULTS) -> Callable[..., Any]:
    """`--out DIR`, the folder of the results."""
    must = default is None
    about = "folder for the results"
    return click.option("--out", type=FOLDER, required=must, default=default, help=about)


def folder_option(name: str, about: str, required: bool = False) -> Callable[..., Any]:
    """An option that names an existing folder."""
    kind = click.Path(path_type=Path, exists=True, file_okay=False)
    return click.option(name, type=kind, required=required, help=about)


class Places(NamedTuple):
    """The folders of a benchmark that trains; `site` has a pristine megatron/, which is copied."""

    site: Path
    work: Path
    out: Path
    data: Any
    """A prefix, or None where `--data` may be left out."""

    def create(self) -> None:
        """Create the folders that are written to."""
        for folder in (self.work, self.out):
            folder.mkdir(parents=True, exist_ok=True)


def places(data: str, required: bool = True) -> Callable[[Any], Any]:
    """`--site`, `--work`, `--out` and `--data`, which the command is given as one `Places`."""

    def decorated(command: Any) -> Any:
        @functools.wraps(command)
        def given(site: Path, work: Path, out: Path, data: Path | None, **named: Any) -> Any:
            # As an exception, so that a call that is ended ends the runs that it has started.
            signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
            folders = site.resolve(), work.resolve(), out.resolve()
            return command(Places(*folders, data and data.resolve()), **named)

        for name, about, must in (
            ("--data", data, required),
            ("--out", "Results, logs, profiles and curves.", True),
            ("--work", "Scratch: trees, checkpoints, datasets, indices.", True),
            ("--site", SITE, True),
        ):
            given = click.option(name, type=FOLDER, required=must, help=about)(given)
        return given

    return decorated


def chosen(names: str | None, known: Iterable[str], what: str) -> list[str]:
    """The names of `--only A,B`, or all that are known."""
    every = list(known)
    found = names.split(",") if names else every
    if unknown := sorted(set(found) - set(every)):
        raise click.BadParameter(f"{', '.join(unknown)}: the {what} are {', '.join(every)}")
    return found


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
    """The same for a result whose page has them in a sentence; all must be installed."""
    found, every = stack(), {name: metadata.version(name) for name in packages}
    return {"date": found["date"], "gpu": found["GPU"], **every}


def versions(stack: Mapping[str, Any], *names: str) -> str:
    """`torch 2.11, triton 3.6`: these of a header, or all."""
    return ", ".join(f"{name} {stack[name]}" for name in names or stack)


def bullets(found: Mapping[str, Any]) -> Iterator[str]:
    """A list of names and values."""
    return (f"- {name}: {value}" for name, value in found.items())


Columns = Iterable[str | tuple[str, str]]


def table(columns: Columns, rows: Iterable[str | Iterable[Any]]) -> Iterator[str]:
    """The lines of a table.

    A column is a name, or a name with a format of its values. A row has a value per column, of
    which strings are cells already and None is missing; or it is a line already.
    """
    named = [(column, "") if isinstance(column, str) else column for column in columns]
    yield _line(name or None for name, _ in named)
    yield "|---" * len(named) + "|"
    for row in rows:
        if not isinstance(row, str):
            cells = zip(row, named, strict=True)
            row = _line(x if isinstance(x, str | None) else format(x, of) for x, (_, of) in cells)
        yield row


def _line(cells: Iterable[str | None]) -> str:
    return "|" + "".join(" |" if cell is None else f" {cell} |" for cell in cells)


def by_kernel(title: str, times: Mapping[str, float]) -> Iterator[Page]:
    """The kernels that take at least a hundredth of the time."""
    whole = sum(times.values())
    yield f"## {title}, by kernel: {whole:.2f} ms"
    yield table(
        ["kernel", ("ms", ".3f"), ("share", ".0%")],
        [(f"`{k[:70]}`", ms, ms / whole) for k, ms in times.items() if ms >= 0.01 * whole],
    )


def page(*blocks: Page) -> str:
    """Texts and tables as one page, with an empty line between them; empty ones are left out."""
    return "\n\n".join(filter(None, map(_text, blocks))) + "\n"


def _text(page: Page) -> str:
    return page if isinstance(page, str) else "\n".join(page)


def save(out: Path, name: str, report: Any, page: Page | None = None) -> str:
    """Write NAME.json and, if there is a page, NAME.md; return the page, or else the JSON."""
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report, indent=1) + "\n"
    (out / f"{name}.json").write_text(text)
    if page is not None:
        text = _text(page)
        (out / f"{name}.md").write_text(text)
    return text


def write(out: Path, name: str, report: Any, page: Page | None = None) -> None:
    """Save a result and print it; a benchmark that measures for long does so after each case."""
    print(save(out, name, report, page), flush=True)


def read(out: Path, name: str) -> dict[str, Any]:
    """NAME.json of the folder; empty if there is no such file."""
    file = out / f"{name}.json"
    return dict(json.loads(file.read_text())) if file.is_file() else {}


@contextlib.contextmanager
def changing(out: Path, name: str) -> Iterator[dict[str, Any]]:
    """What `read` returns, to be changed and written while no other call does the same."""
    with filelock.FileLock(out / f"{name}.lock"):
        result = read(out, name)
        yield result
        json_file.write(out / f"{name}.json", result)


@contextlib.contextmanager
def drawing(target: Path, rows: int, columns: int, **options: Any) -> Iterator[Any]:
    """The panels of a figure, `[rows][columns]`, which is then written."""
    options = {"figsize": (5.5 * columns, 4.0 * rows), **options}
    figure, panels = plotting.pyplot().subplots(rows, columns, squeeze=False, **options)
    yield panels
    figure.tight_layout()
    plotting.write(figure, target)
