"""Every folder that the run writes to is writable, and no other run saves into the same one.

Checkpoints and their copies have room.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import psutil

from cppmega.checkpoints import tracker as checkpoint_tracker
from cppmega.errors import CppmegaError
from cppmega.host import memory, redact
from cppmega.preflight.context import Context
from cppmega.preflight.devices import gib
from cppmega.preflight.findings import NotApplicable, Problems, Remark
from cppmega.recipe import Recipe
from cppmega.recipe.memory import checkpoint_bytes
from cppmega.recipe.run_options import RunOptions

AFTER: tuple[str, ...] = ("recipe_complete",)

_LOG = 2**30
"""Bytes that logs and caches need."""


def check(context: Context) -> Problems:
    """Try to write to each folder, or to the nearest one above it that exists.

    Yields:
        `folder-not-writable`, `disk-full`, `host-limit`, `save-folder-of-another-run`,
        `save-folder-in-use`.
    """
    metrics = context.options.metrics
    if metrics is not None and metrics.is_dir():
        yield CppmegaError(
            "folder-not-writable",
            f"{metrics} (--metrics) is a folder, and must be a file.",
            "The run would end at its first logged step.",
            f"--metrics {metrics / 'metrics.jsonl'}",
        )
    usable = []
    for purpose, folder, room in _written_folders(context):
        there = nearest(folder)
        if not there.is_dir() or not _can_create_files(there):
            yield CppmegaError(
                "folder-not-writable",
                f"{folder} ({purpose}) cannot be created or written to: {there} is "
                f"{'read-only for this user' if there.is_dir() else 'a file'}.",
                "The run would fail when it first writes there, perhaps after hours.",
                "--runs FOLDER, or export CPPMEGA_RUNS=FOLDER"
                if purpose == "run folder"
                else f"another folder for {purpose}, or fix its permissions",
            )
            continue
        free = shutil.disk_usage(there).free
        if free < room:
            yield CppmegaError(
                "disk-full",
                f"{folder} ({purpose}) is on a disk with {gib(free)} free; it needs {gib(room)}.",
                "A checkpoint that is cut off cannot be loaded.",
                "another disk, or remove what is no longer needed (never a checkpoint without "
                "inspecting it)",
            )
        usable.append(f"{purpose} {folder} ({gib(free)} free)")
    options = _options(context)
    if options.save is not None:
        yield from _unheld_copies(context)
        yield from _other_runs(options.save, options.load)
    if not usable:
        return "the run writes nowhere"
    short = _room_remark(context, options)
    return Remark(", ".join([*usable, short])) if short else ", ".join(usable)


def _options(context: Context) -> RunOptions:
    """The trainer's options; with `load` set to `save` where the run resumes from there."""
    try:
        return context.launch_line.options
    except NotApplicable:  # a loop, or nothing is launched
        return context.options


def _written_folders(context: Context) -> Iterator[tuple[str, Path, int]]:
    """Purpose and path of each folder, and the bytes that the run may need there."""
    options, trained = _options(context), None if context.is_loop else context.recipe
    if context.folder is not None:
        yield "run folder", context.folder, _LOG
    if options.save is not None:
        room = _LOG if trained is None else _checkpoint(context, trained)
        yield "--save", options.save, room
    if options.metrics is not None and context.recipe is not None:
        yield "--metrics", options.metrics.parent, _LOG
    if trained is not None:
        yield from _folders_of_megatron(options)
    if context.needs_gpu and context.training_machine:
        yield from _caches(context.environ)


def _checkpoint(context: Context, recipe: Recipe) -> int:
    """Bytes of a checkpoint as this launch writes it."""
    bare = not context.is_loop and "--no-save-optim" in context.launch_line.flags
    return checkpoint_bytes(recipe, optimizer=not bare)


def _unheld_copies(context: Context) -> Iterator[CppmegaError]:
    """An asynchronous save copies what the ranks of this host write."""
    recipe = context.recipe
    if recipe is None or not recipe.async_save or not context.training_machine:
        return
    copied = _checkpoint(context, recipe) * context.gpus_here // recipe.gpus
    available = memory.available()
    if copied > available:
        yield CppmegaError(
            "host-limit",
            f"An asynchronous save copies {gib(copied)} to this host, which has {gib(available)} "
            "of memory available.",
            "The kernel would kill a process of the run at its first save.",
            "--set async_save=False saves without copies",
        )


def _other_runs(save: Path, load: Path | None) -> Iterator[CppmegaError]:
    """Runs that save there, too: an earlier one, and the ranks on this host."""
    if checkpoint_tracker.exists(save) and load is not None and not _same(load, save):
        yield CppmegaError(
            "save-folder-of-another-run",
            f"{save} already holds checkpoints, and the run resumes from {load}.",
            "Steps of two runs would share one folder, and a restart would resume from the "
            "newest of either.",
            f"an empty --save folder, or leave out --load to resume from {save}",
        )
    for pid, words in _other_ranks():
        for flag, value in pairwise(words):
            if flag == "--save" and Path(value).absolute() == save.absolute():
                yield CppmegaError(
                    "save-folder-in-use",
                    f"Process {pid} of another run saves into {save}.",
                    "Two runs would overwrite each other's checkpoints.",
                    f"stop it (its command line: {' '.join(redact.words(words))[:120]}), "
                    "or another --save",
                )


def _same(one: Path, other: Path) -> bool:
    return one.absolute() == other.absolute() or (one.exists() and one.samefile(other))


def _other_ranks() -> Iterator[tuple[int, list[str]]]:
    """Processes that run `cppmega.run`, with their words, other than this one's ancestors."""
    this = psutil.Process()
    own = {this.pid, *(parent.pid for parent in this.parents())}
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []  # None where it is another user's
        if process.pid not in own and any("cppmega.run" in word for word in words):
            yield process.pid, words


def _room_remark(context: Context, options: RunOptions) -> str:
    """A remark on a disk that has room for one checkpoint, but not for all; empty: no remark.

    Where some are kept, there is temporarily one more: the oldest is removed once the newest is
    complete.
    """
    recipe = context.recipe
    if recipe is None or options.save is None:
        return ""
    done, kept = checkpoint_tracker.newest_step(options.save) or 0, recipe.keep_checkpoints
    written = -(-(recipe.train_iters - done) // options.save_interval)
    needed = min(written, 1 if done else kept + 1) if kept else written
    one = _checkpoint(context, recipe)
    room = shutil.disk_usage(nearest(options.save)).free // one
    if room >= needed:
        return ""
    weights = gib(checkpoint_bytes(recipe, optimizer=False))
    why = "one more than is kept" if kept else "--set keep_checkpoints=1 removes old ones"
    return (
        f"room for {room} of the {needed} checkpoints that will exist at once ({why}), each of "
        f"{gib(one)}, of which {weights} are weights"
    )


def _folders_of_megatron(options: RunOptions) -> Iterator[tuple[str, Path, int]]:
    if options.tensorboard is not None:
        yield "--tensorboard", options.tensorboard, _LOG
    if options.data_cache is not None:
        yield "--data-cache", options.data_cache, _LOG
    else:
        for folder in dict.fromkeys(
            Path(prefix).parent for prefix in (*options.data[:1], *options.held_out[:1])
        ):
            yield "sample indices next to the data", folder, _LOG


def _caches(environ: Mapping[str, str]) -> Iterator[tuple[str, Path, int]]:
    triton = environ.get("TRITON_CACHE_DIR") or f"{environ.get('HOME', '/nonexistent')}/.triton"
    yield "Triton's cache", Path(triton), _LOG
    yield "temporary files", Path(environ.get("TMPDIR") or "/tmp"), _LOG


def _can_create_files(folder: Path) -> bool:
    """Whether a file can be created: permissions do not show a read-only mount or a quota."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def nearest(folder: Path) -> Path:
    """The folder, or the first above it that exists."""
    there = folder.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    return there
