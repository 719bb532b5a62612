"""The options of one start of a recipe: parsed once, and shared by everything that uses them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from cppmega.checkpoints import tracker as checkpoint_tracker

_SPELLED = {"changes": "--set", "root": "--megatron"}
"""Options whose flag is not their field's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Settings of one start of a recipe, as opposed to those of the recipe."""

    changes: tuple[str, ...] = ()
    """`field=value`, for the recipe."""
    data: tuple[str, ...] = ()
    """Prefixes of indexed datasets; weight and prefix in turn for a weighted mix."""
    tokenizer: str | None = None
    """The data's tokenizer; None: the one that the data's card names."""
    eod: str | None = None
    """End token of that tokenizer, where its files do not name it."""
    data_cache: Path | None = None
    """Folder for sample indices."""
    held_out: tuple[str, ...] = ()
    """Prefixes of the datasets that a recipe with `eval_interval` is evaluated on."""
    mock_data: bool = False
    save: Path | None = None
    load: Path | None = None
    save_interval: int = 500
    """Steps between checkpoints."""
    exit_interval: int | None = None
    """Stop after a multiple of this many steps, with a checkpoint where `save` is set."""
    log_interval: int = 1
    """Steps between log lines."""
    tensorboard: Path | None = None
    wandb_project: str = ""
    wandb_name: str = ""
    metrics: Path | None = None
    """File for one JSON object per logged step."""
    profile: int | None = None
    """How many steps are profiled; None: none."""
    profile_after: int = 10
    """Number of warm-up steps before them."""
    profile_folder: Path | None = None
    """Folder for trace and summary of the profile."""
    accept: tuple[str, ...] = ()
    """Edited files of Megatron that may be trained, as `FILE=SHA256`."""
    allow_fallback: tuple[str, ...] = ()
    """Pages whose declined calls Megatron's own code may compute."""
    root: Path | None = None
    """Folder that holds megatron/; None: the one that Python would import."""

    def absolute(self) -> RunOptions:
        """The options with every path absolute, for a process in another working directory."""
        paths: dict[str, Any] = {
            field.name: value.absolute()
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Path)
        }
        data, held_out = (
            tuple(str(Path(prefix).absolute()) for prefix in prefixes)
            for prefixes in (self.data, self.held_out)
        )
        return replace(self, data=data, held_out=held_out, **paths)

    def resuming(self) -> RunOptions:
        """The options of a start that resumes from its own checkpoint if there is one.

        Ranks that torchrun has started again do so even where another checkpoint is named.
        """
        began = self.load is None or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        if self.save is not None and began and checkpoint_tracker.exists(self.save):
            return replace(self, load=self.save)
        return self

    def words(self, without: Iterable[str] = ()) -> list[str]:
        """The options as words of a command line, those with their default value left out.

        Args:
            without: fields to leave out as well.
        """
        words: list[str] = []
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in without or value == field.default:
                continue
            flag = _SPELLED.get(field.name, "--" + field.name.replace("_", "-"))
            if value is True:
                words.append(flag)
                continue
            for one in value if isinstance(value, tuple) else (value,):
                words += [flag, str(one)]
        return words
