"""manifest.json: what was launched."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from cppmega.overlay.record import OverlayRecord
from cppmega.recipe.run_options import RunOptions
from cppmega.runs import json_file

SCHEMA = 1

Count = Annotated[int, msgspec.Meta(ge=1)]


class _Part(msgspec.Struct, frozen=True, kw_only=True):
    """An object in the manifest. Fields that another release wrote are ignored."""


class GitState(_Part, frozen=True, kw_only=True):
    """The commit of a repository, and whether a path in it differs from that commit."""

    commit: str
    changed: bool


class SourceFile(_Part, frozen=True, kw_only=True):
    """A file at the time of the launch."""

    path: str = ""
    sha256: str = ""
    git: GitState | None = None


class RecipeRecord(SourceFile, frozen=True, kw_only=True):
    """The recipe and the changes made to it with `--set`."""

    name: str = ""
    changes: tuple[str, ...] = ()


class ToolRecord(_Part, frozen=True, kw_only=True):
    """The cppmega that launched the run."""

    version: str = ""
    git: GitState | None = None


class MegatronRecord(_Part, frozen=True, kw_only=True):
    """The Megatron that was to be trained with."""

    version: str = ""
    root: str = ""


class DataRecord(_Part, frozen=True, kw_only=True):
    """The datasets of a run."""

    paths: tuple[str, ...] = ()
    fingerprint: str = ""
    mock: bool = False


class Outline(_Part, frozen=True, kw_only=True):
    """The fields needed to list, follow and stop a run; each may be missing."""

    created: float | None = None
    tmux: str | None = None
    resumes: str | None = None
    recipe: RecipeRecord = RecipeRecord()
    overlay: OverlayRecord | None = None
    megatron: MegatronRecord = MegatronRecord()
    data: DataRecord = DataRecord()
    torchrun: tuple[str, ...] = ()
    nodes: Count | None = None
    nproc: Count | None = None
    save: str | None = None
    load: str | None = None
    metrics: str | None = None

    @property
    def digest(self) -> str:
        """The overlay digest; empty if it was not recorded."""
        return self.overlay.digest if self.overlay is not None else ""


class Manifest(Outline, frozen=True, kw_only=True):
    """A complete manifest: what every launch writes."""

    schema: int = SCHEMA
    name: str = ""
    command: tuple[str, ...] = ()
    folder: str = ""
    cppmega: ToolRecord = ToolRecord()
    gpus: tuple[str, ...] = ()
    preflight: dict[str, str] = {}
    created: float
    recipe: RecipeRecord
    overlay: OverlayRecord
    megatron: MegatronRecord
    data: DataRecord
    nodes: Count
    nproc: Count
    arguments: tuple[str, ...]
    options: RunOptions
    environment: dict[str, str]
    stack: dict[str, str]


def read(path: Path) -> tuple[Outline, str]:
    """Read a manifest as far as it can be read, and what is wrong with it.

    Returns:
        A `Manifest` if the file is complete, else an `Outline`; and the problem, or an empty text.
    """
    raw = json_file.read_object(path)
    if not raw:
        return Outline(), f"{path.name} cannot be read"
    schema = raw.get("schema", SCHEMA)
    if schema != SCHEMA:
        return Outline(), (
            f"{path.name} has schema {schema}, and this release of cppmega reads {SCHEMA}: upgrade "
            "cppmega"
        )
    try:
        return json_file.convert(raw, Outline if _missing(raw) else Manifest), ""
    except msgspec.ValidationError as error:
        return Outline(), f"{path.name} is damaged ({error})"


def missing(path: Path) -> list[str]:
    """The fields that every launch writes and a manifest lacks."""
    return _missing(json_file.read_object(path))


def _missing(raw: object) -> list[str]:
    fields = msgspec.structs.fields(Manifest)
    known = raw if isinstance(raw, dict) else {}
    return [field.name for field in fields if field.required and field.name not in known]
