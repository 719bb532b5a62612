"""A team's settings: `cppmega.toml`, or `[tool.cppmega]` in `pyproject.toml`.

The nearest one, in the working directory or above it, holds for every command: each setting becomes
the options of the same name, before those that were typed, so that these win or add to them.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from cppmega.errors import CppmegaError

OWN, SHARED = "cppmega.toml", "pyproject.toml"

Reasons = dict[str, str]
"""Name -> why; the reason is required, and shown where the setting has an effect."""


class Configuration(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """The settings; paths are relative to the file.

    Attributes:
        megatron: `--megatron`, the folder that holds megatron/.
        patches: `--patches`, further catalogues: folders, or names of installed ones.
        kind: `--kind` of apply.
        without: `--without` of apply: patches that are left out.
        accept: `--accept`: an edited file of Megatron -> its SHA-256.
        allow_wrapper: `--allow-wrapper` of cppmega.run.
        allow_fallback: `--allow-fallback` of cppmega.run.
        skip_checks: checks of the preflight that are not run.
        launch: further options of launch, without their dashes.
    """

    megatron: str = ""
    patches: list[str] = []
    kind: list[str] = []
    without: Reasons = {}
    accept: dict[str, str] = {}
    allow_wrapper: Reasons = {}
    allow_fallback: Reasons = {}
    skip_checks: Reasons = {}
    launch: dict[str, str | int | bool | list[str]] = {}
    file: str = ""
    """Where it was read; set by `read`."""

    def words(self, options: Collection[str]) -> list[str]:
        """The settings as words of a command line.

        Args:
            options: those of the command, such as `--patches`; others are left out.
        """
        home = Path(self.file).parent
        places = {each: (home / each).resolve() for each in (self.megatron, *self.patches)}
        folders = [str(places[each]) if places[each].is_dir() else each for each in self.patches]
        given: dict[str, Sequence[str]] = {
            "--megatron": [str(places[self.megatron])] if self.megatron else [],
            "--patches": folders,
            "--kind": self.kind,
            "--without": [*self.without],
            "--accept": [f"{path}={digest}" for path, digest in self.accept.items()],
            "--allow-wrapper": [*self.allow_wrapper],
            "--allow-fallback": [*self.allow_fallback],
        }
        return [
            word
            for option, values in given.items()
            if option in options
            for value in values
            for word in (option, value)
        ]

    def launch_words(self) -> list[str]:
        """The options of a launch as words of its command line."""
        return [*_words(self.launch)]

    def said(self, words: Sequence[str]) -> str:
        """The line that says which settings took effect, and why some are there."""
        reasons = {**self.without, **self.allow_wrapper, **self.allow_fallback}
        why = [f"{word}: {reasons[word]}" for word in words if word in reasons]
        return f"configuration: {self.file}: {' '.join([*words])}" + "".join(
            f"\n  {each}" for each in why
        )


def _words(options: Mapping[str, str | int | bool | list[str]]) -> Iterator[str]:
    for name, value in options.items():
        for each in value if isinstance(value, list) else [value]:
            if each is True:
                yield f"--{name}"
            elif each is not False:
                yield from (f"--{name}", str(each))


def read(start: Path | None = None) -> Configuration:
    """Read the nearest configuration; the settings are empty where there is none.

    Raises:
        CppmegaError: `bad-configuration`.
    """
    try:
        here = (start or Path.cwd()).resolve()
    except FileNotFoundError:  # the working directory is gone
        return Configuration()
    for folder in (here, *here.parents):
        for name in (OWN, SHARED):
            table = _table(folder / name)
            if table is not None:
                return checked(table, folder / name)
    return Configuration()


def _table(path: Path) -> dict[str, Any] | None:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError):
        return None
    if path.name == SHARED and "tool.cppmega" not in text:
        return None
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _bad(path, str(error)) from None
    table = table if path.name == OWN else table.get("tool", {}).get("cppmega")
    return table if isinstance(table, dict) else None


def checked(table: dict[str, Any], path: Path) -> Configuration:
    if "file" in table:
        raise _bad(path, "Object contains unknown field `file`")
    owner, me = path.stat().st_uid, os.geteuid()
    if owner not in (0, me) and me != 0:
        raise _bad(path, f"belongs to user {owner}, and its catalogues are code that would run")
    try:
        return msgspec.convert({**table, "file": str(path)}, Configuration)
    except msgspec.ValidationError as error:
        raise _bad(path, str(error)) from None


def _bad(path: Path, what: str) -> CppmegaError:
    return CppmegaError(
        "bad-configuration",
        f"{path} cannot be used: {what}.",
        "A misspelled setting would be ignored, and colleagues and CI would get something else.",
        "mend the file; docs/environment.md lists the settings",
    )
