"""`--report`, which also writes the answer of a command for another program."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from cppmega.errors import CppmegaError

if TYPE_CHECKING:
    from cppmega.cli.reports.entries import Report

F = TypeVar("F", bound=Callable[..., Any])

_FORMATS = ("sarif", "junit", "github")


@dataclass(frozen=True, slots=True)
class _Sink:
    """One requested report."""

    kind: str
    file: Path | None
    """None: stderr, which GitHub Actions reads."""


def _sink(word: str) -> _Sink:
    kind, _, file = word.partition("=")
    if kind not in _FORMATS:
        raise click.BadParameter(f"{kind!r} is not one of {', '.join(_FORMATS)}.")
    if not file and kind != "github":
        raise click.BadParameter(f"{kind} needs a file: --report {kind}=FILE.")
    return _Sink(kind, Path(file) if file else None)


@dataclass
class Reports:
    """The reports that a command has to write."""

    sinks: Sequence[_Sink]
    done: bool = field(default=False, init=False)

    def write(self, report: Callable[[], Report]) -> None:
        """Write every requested report.

        Raises:
            CppmegaError: `write-failed`.
        """
        self.done = True
        if self.sinks:
            answer = report()
            for sink in self.sinks:
                _put(_written(sink.kind, answer), sink)


def report_option(command: F) -> F:
    """Add `--report`; an error of the command is reported as well."""

    @functools.wraps(command)
    def reporting(*args: Any, report: Iterable[_Sink], **kwargs: Any) -> Any:
        reports = Reports(tuple(report))
        try:
            return command(*args, reports=reports, **kwargs)
        except CppmegaError as error:
            if not reports.done:
                from cppmega.cli.reports.answers import of_error

                answer = of_error(command.__name__, error)
                reports.write(lambda: answer)
            raise

    option = click.option(
        "--report",
        multiple=True,
        metavar="FORMAT[=FILE]",
        callback=lambda context, parameter, words: [_sink(word) for word in words],
        help="Also write the answer as sarif=FILE, junit=FILE, github=FILE, or github (annotations "
        "of GitHub Actions, on stderr); repeatable.",
    )
    return cast(F, option(reporting))


def _written(kind: str, report: Report) -> str:
    if kind == "junit":
        from cppmega.cli.reports import junit

        return junit.written(report)
    if kind == "sarif":
        from cppmega.cli.reports import sarif

        return sarif.written(report, Path.cwd())
    from cppmega.cli.reports import github

    return github.written(report, Path.cwd())


def _put(text: str, sink: _Sink) -> None:
    if sink.file is None:
        sys.stdout.flush()  # the table first
        sys.stderr.write(text)
        return
    try:
        sink.file.parent.mkdir(parents=True, exist_ok=True)
        sink.file.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise CppmegaError(
            "write-failed",
            f"{sink.file} cannot be written: {error.strerror}.",
            "A CI job would read an old report, or none.",
            f"--report {sink.kind}=FILE with a file that can be written",
        ) from error
