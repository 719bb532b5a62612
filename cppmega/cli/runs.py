"""Commands on runs: launch, runs, attach, logs, stop, profile, compare."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from cppmega.cli import completion
from cppmega.cli.group import (
    FINE,
    NOT_AS_IT_MUST_BE,
    UpToDashes,
    after_dashes,
    arguments_options,
    cli,
    json_option,
)
from cppmega.host import console
from cppmega.host.table import show
from cppmega.host.wording import counted
from cppmega.training.options import options

if TYPE_CHECKING:
    from cppmega.runs.folder import Run

_runs = click.option(
    "--runs",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the run folders (default: $CPPMEGA_RUNS, else ./runs).",
)


@cli.command(cls=UpToDashes)
@click.argument("recipe", required=False, shell_complete=completion.recipes)
@options
@_runs
@click.option("--name", help="Name of the run folder (default: recipe and time).")
@click.option("--tmux", metavar="NAME", help="Run in a tmux session of that name, detached.")
@click.option(
    "--resume",
    metavar="RUN",
    help="Resume from the newest checkpoint of another run, with its launch: RECIPE, options and "
    "arguments may be left out, and replace its own where they are given.",
    shell_complete=completion.runs,
)
@click.option(
    "--nproc", type=click.IntRange(1), help="Ranks per host (default: the recipe's GPUs; CPU: 2)."
)
@click.option("--nnodes", "nodes", type=click.IntRange(1), default=1, help="Number of hosts.")
@click.option("--rdzv", metavar="HOST:PORT", help="Rendezvous address of several hosts.")
@click.option(
    "--max-restarts",
    "restarts",
    type=click.IntRange(0),
    default=0,
    metavar="TIMES",
    help="Start the ranks again, from the newest checkpoint, after one has failed.",
)
@arguments_options
@click.option(
    "--dry-run", is_flag=True, help="Check everything and print the command line; start nothing."
)
def launch(
    recipe: str | None,
    folder: Path | None,
    name: str | None,
    tmux: str | None,
    resume: str | None,
    nproc: int | None,
    nodes: int,
    rdzv: str | None,
    restarts: int,
    unknown_arguments: str,
    arguments_from: tuple[str, ...],
    dry_run: bool,
    **trainer_options: Any,
) -> None:
    """Train a recipe, or a script of your own, in a run folder, after the preflight.

    RECIPE is a shipped name, a path, or the path of a training script. The run folder keeps the
    manifest of the launch, each rank's output, the metrics, the checkpoints and the exit status.
    Without --tmux the run stays in this terminal: Ctrl-C saves a checkpoint and ends it. The words
    after `--` are Megatron's own arguments, and are added to the recipe's; those of a script are
    its own, in which {run} stands for the run folder and {load} for the checkpoint from which it
    begins.

    \b
    cppmega launch smoke_cpu --tmux demo
    cppmega launch nam56r_h200_slice --data PREFIX --tmux big
    cppmega launch --resume big --set train_iters=2000
    cppmega launch RECIPE --nnodes 2 --rdzv HOST:29500 --name big --runs SHARED   (on every host)
    cppmega launch train.py --nproc 8 --tmux mine -- --save {run}/checkpoints --load {load}
    """
    from cppmega.launch import start
    from cppmega.launch.request import LaunchRequest
    from cppmega.recipe.run_options import RunOptions

    if recipe is None and resume is None:
        raise click.UsageError("Missing argument 'RECIPE'; only --resume RUN can do without")
    named = click.get_current_context().get_parameter_source
    request = LaunchRequest(
        recipe=recipe or "",
        options=RunOptions(**trainer_options),
        given=frozenset(o for o in trainer_options if named(o) is ParameterSource.COMMANDLINE),
        arguments=after_dashes(),
        runs=folder,
        name=name,
        tmux=tmux,
        nodes=nodes,
        rdzv=rdzv,
        nproc=nproc,
        restarts=restarts,
        arguments_from=arguments_from,
        allows_unknown=unknown_arguments == "allow",
        resume=resume,
    )
    sys.exit(start.launch(request, dry_run=dry_run))


@cli.command()
@click.argument("names", metavar="[RUN]...", nargs=-1, shell_complete=completion.runs)
@_runs
@click.option(
    "--all", "everything", is_flag=True, help="Include runs older than the newest twenty."
)
@click.option(
    "--watch",
    is_flag=True,
    help="Watch the live runs, or those named, until they end.",
)
@click.option(
    "--every",
    type=click.FloatRange(0),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two lines about a watched run without problems.",
)
@click.option(
    "--stalled-after",
    type=click.FloatRange(1),
    default=10.0,
    show_default=True,
    metavar="TIMES",
    help="A watched run is stalled after this many times the usual time without a step.",
)
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Also plot into this file: .png, .svg or .pdf. Needs matplotlib.",
)
@json_option
def runs(
    names: tuple[str, ...],
    folder: Path | None,
    everything: bool,
    watch: bool,
    every: float,
    stalled_after: float,
    plot: Path | None,
    as_json: bool,
) -> None:
    """List runs, the newest first, or watch them.

    State, exit status, step, loss, the newest checkpoint, and the error of a run that crashed.
    RUN is a name, the start of a name, a tmux session, or a folder; all runs by default. --plot
    draws loss, gradient norm, throughput and memory of the runs that are listed, and their spikes.

    With --watch: step, loss, gradient norm and throughput, the time until the next checkpoint and
    until the end. A run without a step for too long is reported as stalled, with the rank of this
    host that is behind; a loss or gradient norm far above the usual is reported as a spike. The
    exit status is 1 if a watched run crashed or was killed; Ctrl-C ends the watching, not the runs.
    """
    from cppmega.runs import folder as run_folder
    from cppmega.runs import json_file, listing

    root = run_folder.root(folder)
    chosen = [run_folder.find(root, name) for name in names] or run_folder.everyone(root)
    if watch:
        if as_json:
            raise click.UsageError("--watch prints lines; cppmega runs --json prints one snapshot")
        if plot is not None:
            raise click.UsageError("--plot draws what has been logged so far; leave --watch out")
        watched = [run for run in chosen if names or run.state() in run_folder.LIVE]
        sys.exit(_watch(watched, every, stalled_after))
    shown = chosen if everything or as_json else chosen[:20]
    rows = [listing.row_of(run) for run in shown]
    if as_json:
        console.print_json({**console.ENVELOPE, "ok": True, "runs": json_file.plain(rows)})
    else:
        show(listing.table(rows))
        if not chosen:
            console.say(f"there is no run in {root.absolute()}: cppmega launch RECIPE starts one")
        if len(chosen) > len(shown):
            console.say(f"and {counted(len(chosen) - len(shown), 'older one')}: cppmega runs --all")
    if plot is not None:
        from cppmega.runs import curves

        curves.plot(shown, plot)
        console.say(f"curves: {plot}")


def _watch(watched: Sequence[Run], every: float, stalled_after: float) -> int:
    """Print lines about runs until all have ended. Returns the exit status."""
    from cppmega.runs import watch as watching

    if not watched:
        console.say("no run is live: cppmega runs lists those that ended")
        return FINE
    try:
        for line in watching.lines(watching.sights(watched, stalled_after), every):
            click.echo(line)
    except KeyboardInterrupt:
        return FINE
    ended_badly = any(run.state() in ("crashed", "killed") for run in watched)
    return NOT_AS_IT_MUST_BE if ended_badly else FINE


@cli.command()
@click.argument("run", required=False, shell_complete=completion.runs)
@_runs
def attach(run: str | None, folder: Path | None) -> None:
    """Attach to the tmux session of a run.

    RUN is a name, the start of a name, a tmux session, or a folder; the newest run by default.
    Ctrl-B D detaches and leaves the run running.
    """
    from cppmega.runs import control as run_control
    from cppmega.runs import folder as run_folder

    run_control.attach(run_folder.find(run_folder.root(folder), run))


@cli.command()
@click.argument("run", required=False, shell_complete=completion.runs)
@_runs
@click.option("-f", "--follow", is_flag=True, help="Follow the output until the run ends.")
@click.option("--rank", type=int, help="Print one rank's own output instead of the terminal's.")
def logs(run: str | None, folder: Path | None, follow: bool, rank: int | None) -> None:
    """Print the output of a run.

    RUN is a name, the start of a name, a tmux session, or a folder; the newest run by default. If
    it crashed, the failure of the rank that failed first comes first.
    """
    from cppmega.runs import folder as run_folder
    from cppmega.runs import logs as run_logs

    run_logs.show(run_folder.find(run_folder.root(folder), run), rank, follow)


@cli.command()
@click.argument("run", required=False, shell_complete=completion.runs)
@_runs
@click.option("--now", is_flag=True, help="End immediately, without a checkpoint.")
@click.option("--wait", type=float, default=600.0, show_default=True, help="Seconds to wait.")
def stop(run: str | None, folder: Path | None, now: bool, wait: float) -> None:
    """Save a checkpoint and end a run.

    RUN is a name, the start of a name, a tmux session, or a folder; the newest run by default.
    """
    from cppmega.runs import control as run_control
    from cppmega.runs import folder as run_folder

    run_control.stop(run_folder.find(run_folder.root(folder), run), now=now, wait=wait)


@cli.command()
@click.argument("run", required=False, shell_complete=completion.runs)
@_runs
@json_option
def profile(run: str | None, folder: Path | None, as_json: bool) -> None:
    """Show the profile of a run launched with --profile STEPS.

    RUN is a name, the start of a name, a tmux session, or a folder; the newest run by default.
    The step's time by kind of kernel, how long the device waited for the host, and for what. The
    trace next to it, profile/trace.json.gz, opens in ui.perfetto.dev. `cppmega compare` shows two
    profiles side by side.
    """
    from cppmega.runs import folder as run_folder
    from cppmega.runs import json_file
    from cppmega.runs import profile as run_profile

    read = run_profile.read(run_folder.find(run_folder.root(folder), run))
    if as_json:
        console.print_json({**console.ENVELOPE, "ok": True, **json_file.plain(read)})
    else:
        show(run_profile.lines(read))


@cli.command()
@click.argument("one", shell_complete=completion.runs)
@click.argument("other", shell_complete=completion.runs)
@_runs
@json_option
def compare(one: str, other: str, folder: Path | None, as_json: bool) -> None:
    """Compare two runs: what differs, losses and throughput.

    ONE and OTHER are each a name, the start of a name, a tmux session, or a folder. `cppmega runs
    ONE OTHER --plot FILE` draws both.
    """
    from cppmega.runs import compare as comparing
    from cppmega.runs import folder as run_folder
    from cppmega.runs import json_file
    from cppmega.runs import profile as profiling

    root = run_folder.root(folder)
    first, second = run_folder.find(root, one), run_folder.find(root, other)
    comparison = comparing.compare(first, second)
    text = (*comparing.lines(comparison), *profiling.of_both(first, second))
    if as_json:
        console.print_json({**console.ENVELOPE, "ok": True, **json_file.plain(comparison)})
    else:
        show(text)
    sys.exit(FINE)
