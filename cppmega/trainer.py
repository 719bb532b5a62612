"""Train a recipe with the installed Megatron: `python -m cppmega.run scripts/train.py RECIPE ...`.

Works from the wheel alone from megatron-core 0.17 on. Whatever files can tell is checked first,
before torch is imported and before any GPU memory is taken.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from cppmega import guard
from cppmega.catalogue import gates
from cppmega.errors import CppmegaError
from cppmega.live import live_code
from cppmega.overlay import receipt
from cppmega.overlay import record as overlay_record
from cppmega.overlay.verbs import Session
from cppmega.rank import error_file, imported
from cppmega.recipe import Recipe
from cppmega.recipe import index as recipes_index
from cppmega.recipe.arithmetic import flops, megatron_flops, parameters
from cppmega.recipe.render import Rendered, render
from cppmega.recipe.run_options import RunOptions
from cppmega.training import nonfinite
from cppmega.training import options as trainer_options
from cppmega.training import requirements as checks
from cppmega.training.batch import DataTokens, dataset_provider
from cppmega.training.log import MOCK, Log, append
from cppmega.tree import accepted


@dataclass(frozen=True, slots=True)
class Plan:
    """A run that everything on disk agrees with."""

    recipe: Recipe
    options: RunOptions
    rendered: Rendered
    data: DataTokens
    session: Session
    overlay: str
    """Digest of what is applied; empty until the machine was inspected."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("recipe")
@trainer_options.options
@click.option("--dry-run", is_flag=True, help="Check everything files can tell, print the line.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def train(
    recipe: str,
    arguments: tuple[str, ...],
    dry_run: bool,
    **values: Any,
) -> None:
    """Train RECIPE, a shipped name or a path. See `cppmega recipes`.

    ARGUMENTS after `--` are Megatron's own, and are added to the recipe's.
    """
    options = RunOptions(**values).resuming()
    changed = recipes_index.with_text(recipes_index.load(recipe), options.changes).plus(*arguments)
    accepted.accept(accepted.asked(changed.accepted_edits, options.accept))
    if changed.kind == "loop" and not dry_run:
        from cppmega.smoke import loop as smoke_loop

        checks.check_checkpoint(options.load)
        smoke_loop.train(changed, options)
        return
    ready = plan(changed, options, _session(options.root))
    if dry_run:
        click.echo(shlex.join(ready.rendered.argv))
        guard.no_step_because("--dry-run was asked for")
    ready = on_this_machine(ready)
    if not dry_run:
        launch(ready)


def _session(root: Path | None) -> Session:
    """The tree that this process imports megatron from.

    Raises:
        CppmegaError: `two-roots`.
    """
    active = guard.active()
    if active is not None:  # cppmega.run has chosen it already, and armed its patches
        chosen = active.session.tree.root
        if root is not None and root.resolve() != chosen.resolve():
            raise CppmegaError(
                "two-roots",
                f"cppmega.run imports megatron from {chosen}, --megatron names {root}.",
                "The tree that was checked would not be the one that trains.",
                f"python -m cppmega.run --megatron {root} scripts/train.py ...",
            )
        return active.session
    session = Session(root)
    if root is not None:
        imported.only_from(root)
    return session


def plan(recipe: Recipe, options: RunOptions, session: Session) -> Plan:
    """Check recipe, data and checkpoint. Imports no torch, takes no GPU memory.

    Raises:
        CppmegaError: one named reason for each thing that is not as it must be.
    """
    if recipe.kind == "loop":
        raise CppmegaError(
            "recipe-is-a-loop",
            f"Recipe {recipe.name} runs in a loop of our own, not in Megatron's pretrain.",
            "Megatron's training loop and optimizer insist on CUDA.",
            "cppmega recipes lists the loops that run on CPU",
        )
    gates.check(session.pages.values())
    version = session.tree.version
    checks.check_complete(recipe, render(recipe, version, options))  # refuses versions below 0.17
    checks.check_gates(recipe, os.environ)
    data = checks.check_data(recipe, options)
    checks.check_checkpoint(options.load)
    return Plan(
        recipe=recipe,
        options=options,
        rendered=render(recipe, version, options, data.eod),
        data=data,
        session=session,
        overlay="",
    )


def on_this_machine(ready: Plan) -> Plan:
    """Check the installation, and set what the run relies on. Imports no torch either.

    Raises:
        CppmegaError: one named reason for each thing that is not as it must be.
    """
    checks.check_tree(ready.session.tree)
    digest = checks.check_patches(ready.recipe, ready.session)
    checks.check_packages(ready.recipe, ready.options)
    checks.check_world(ready.recipe, os.environ)
    checks.set_environment(ready.rendered.environment)
    active = guard.active()
    digest = active.receipt.digest if active is not None else digest
    return replace(ready, overlay=accepted.name_of_code(digest, accepted.in_this_process()))


def launch(ready: Plan) -> None:
    """Hand over to Megatron's training loop; returns when it has ended.

    Raises:
        CppmegaError: `no-gpu`, `argument-refused`, and what `check_arguments` raises.
    """
    started = time.time()
    import torch

    _check_gpus(torch)
    sys.argv = [sys.argv[0], *ready.rendered.argv]
    from megatron.training import (
        arguments,
        checkpointing,
        pretrain,
        set_startup_timestamps,
        training,
    )

    checks.check_arguments(ready.recipe, ready.options, parse(arguments, ready))
    _announce(ready)
    set_startup_timestamps(program_start=started, main_entry=time.time())

    from megatron.core.enums import ModelType

    from cppmega.training.model import model_config, model_provider
    from cppmega.training.step import ForwardStep

    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    step = ForwardStep(ready.recipe, ready.data.eod, device, fresh=ready.options.load is None)
    _hear(training, checkpointing, ready, step, torch)
    cache = str(ready.options.data_cache) if ready.options.data_cache is not None else None
    data = dataset_provider(ready.recipe, ready.data, ready.options.data, cache)
    kind = ModelType.encoder_or_decoder
    own = _own_arguments(ready)
    if "cfg_container" not in inspect.signature(pretrain).parameters:  # 0.17
        pretrain(data, model_provider(ready.recipe), kind, step, extra_args_provider=own)
    else:
        from megatron.training.argument_utils import pretrain_cfg_container_from_args

        args = arguments.parse_and_validate_args(extra_args_provider=own)
        model = model_config(ready.recipe, args)
        container = pretrain_cfg_container_from_args(args, model)
        if model is None:  # 0.18
            pretrain(container, data, model_provider(ready.recipe), kind, step)
        else:
            pretrain(container, data, kind, step)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def parse(arguments: Any, ready: Plan) -> Any:
    """The line through Megatron's parser, without its three hundred lines of usage.

    Raises:
        CppmegaError: `argument-refused`.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return arguments.parse_args(extra_args_provider=_own_arguments(ready))
    except SystemExit as stop:
        reason = said.getvalue().strip().rpartition("\n")[2]
        raise CppmegaError(
            "argument-refused",
            f"megatron-core {ready.rendered.version} refuses the line: {reason}",
            "It knows no such argument or value.",
            "correct what was added with plus() or --set arguments",
        ) from stop


def _own_arguments(ready: Plan) -> Any:
    """Recipe, overlay and data among Megatron's arguments: so they are in every checkpoint."""

    def provide(parser: Any) -> Any:
        group = parser.add_argument_group("cppmega")
        group.add_argument("--cppmega-recipe", default=ready.recipe.name)
        group.add_argument("--cppmega-overlay", default=ready.overlay)
        group.add_argument("--cppmega-patches", default=overlay_record.dump(_record(ready)))
        group.add_argument("--cppmega-data", default=ready.data.fingerprint)
        return parser

    return provide


def _check_gpus(torch: Any) -> None:
    wanted = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < wanted:
        raise CppmegaError(
            "no-gpu",
            f"{wanted} processes were started on this host and it has {found} usable GPUs.",
            "Megatron's training loop and optimizer insist on CUDA.",
            "look at nvidia-smi; cppmega recipes lists the recipes that run on CPU",
        )


def _hear(training: Any, checkpointing: Any, ready: Plan, step: Any, torch: Any) -> None:
    """Take Megatron's log line on its way out, and a step's failure on its way up.

    train() looks both functions up in its module.
    """

    def last_rank() -> bool:
        return bool(torch.distributed.get_rank() == torch.distributed.get_world_size() - 1)

    log = Log(
        ready.recipe,
        int(os.environ.get("WORLD_SIZE", "1")),
        mock=ready.options.mock_data,
        squares=step.taken_squares,
        peak=lambda: float(torch.cuda.max_memory_allocated() / 2**30),
        metrics=ready.options.metrics,
    )
    replaced = log.around(training.print_rank_last, last_rank)
    live_code.replace(training, "print_rank_last", replaced)
    live_code.replace(training, "train_step", nonfinite.around_train_step(training.train_step))
    # Megatron hands it the arguments of the run that wrote the checkpoint, in every release.
    told = _telling_overlay(checkpointing.check_checkpoint_args, _record(ready))
    live_code.replace(checkpointing, "check_checkpoint_args", told)


def _telling_overlay(check: Callable[..., None], now: overlay_record.Record) -> Callable[..., None]:
    """Megatron's look at a checkpoint's arguments, with a line on the overlay they were made by."""

    def told(saved: Any, **options: Any) -> None:
        then = overlay_record.parse(getattr(saved, "cppmega_patches", ""))
        line = overlay_record.said_of_checkpoint(then, now)
        if line and int(os.environ.get("RANK", "0")) == 0:
            print(line, flush=True)
        check(saved, **options)

    return told


def _record(ready: Plan) -> overlay_record.Record:
    """What the checkpoint says of the code that made it."""
    active = guard.active()
    if active is not None:
        return overlay_record.of(active.receipt, accepted.in_this_process())
    if ready.session is None:
        return {"digest": ready.overlay}
    return overlay_record.of(receipt.load(ready.session.tree).receipt, accepted.in_this_process())


def _announce(ready: Plan) -> None:
    """One line for people and one object for machines: what is about to be trained."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    recipe, count = ready.recipe, parameters(ready.recipe)
    data = MOCK if ready.options.mock_data else f"data {ready.data.fingerprint}"
    if rank == 0:
        print(
            f"cppmega: recipe {recipe.name}, {recipe.precision}, megatron-core "
            f"{ready.rendered.version}, overlay {ready.overlay}, {data}, "
            f"{count.total / 1e9:.3f} B parameters ({count.mtp / 1e9:.3f} B of MTP), "
            f"{flops(recipe) / 1e9:.2f} GFLOP per token (Megatron counts "
            f"{megatron_flops(recipe) / 1e9:.2f})",
            flush=True,
        )
    if rank == world - 1 and ready.options.metrics is not None:
        append(
            ready.options.metrics,
            {
                "start": recipe.name,
                "megatron": ready.rendered.version,
                "overlay": ready.overlay,
                "data": ready.data.fingerprint,
                "mock_data": ready.options.mock_data,
                "parameters": count.total,
                "load": str(ready.options.load) if ready.options.load else None,
                "arguments": list(ready.rendered.argv),
            },
        )


def main() -> None:
    """Run the command; errors name the host and the rank."""
    with error_file.reported():
        train.main(prog_name="train", standalone_mode=False)


if __name__ == "__main__":
    main()
