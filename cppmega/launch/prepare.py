"""Start a recipe so that it is known afterwards exactly what ran.

Preflight, run folder with a manifest, torchrun with logs per rank, in a tmux session or here.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cppmega.checkpoints import tracker as checkpoint_tracker
from cppmega.errors import CppmegaError
from cppmega.host import console
from cppmega.launch import folder as launch_folder
from cppmega.launch import resume as launch_resume
from cppmega.launch.folder import Launch, Ready
from cppmega.preflight.context import Context
from cppmega.preflight.examine import examine
from cppmega.recipe import Recipe
from cppmega.recipe import index as recipes_index
from cppmega.recipe.render import render
from cppmega.recipe.run_options import RunOptions
from cppmega.runs import folder as run_folder
from cppmega.runs import tmux
from cppmega.runs.folder import Node, Run

_LOOP_RANKS = 2
"""So that a launch on CPU has what one on GPUs has: process groups, ranks that must agree."""


def launch(asked: Launch, *, dry_run: bool = False) -> int:
    """Check, write the folder, start. Answers the exit status of what runs in this terminal.

    Raises:
        CppmegaError: one named reason for each thing that is not as it must be.
    """
    ready = prepare(asked)
    if dry_run:
        print(shlex.join(["torchrun", *ready.torchrun]))
        console.say(f"nothing was started; the run folder would be {ready.folder}")
        return 0
    return _here(ready) if asked.tmux is None else _in_session(ready, asked.tmux)


def _here(ready: Ready) -> int:
    """In this terminal."""
    from cppmega.launch.supervise import Supervisor

    node = launch_folder.make(ready)
    run = node.run
    console.say(f"run {run.name} in {run.path}; in this terminal: Ctrl-C saves and ends it")
    os.environ.clear()
    os.environ.update(ready.environment)
    return Supervisor(node, ready.torchrun).run()


def _in_session(ready: Ready, name: str) -> int:
    """In a tmux session, which is there before the run folder is: see `tmux.reserve`."""
    with tmux.reserve(name) as session:
        node = launch_folder.make(ready)
        command = [
            sys.executable,
            "-m",
            "cppmega.launch.supervise",
            str(node.path),
            *ready.torchrun,
        ]
        session.run(command, Path.cwd(), ready.environment)
    _await_start(node)
    run = node.run
    print(run.path)
    for what in ("attach", "logs -f", "stop", "runs"):
        word = "" if what == "runs" else f" {run.name}"
        console.say(f"  cppmega {what}{word}{_runs_word(ready.asked)}")
    return 0


def prepare(asked: Launch) -> Ready:
    """Everything up to the first thing that is written.

    Raises:
        CppmegaError: see `launch`.
    """
    # Ranks may have another working directory; and a manifest must mean something later.
    asked = replace(asked, options=asked.options.absolute())
    recipe = recipes_index.with_text(recipes_index.load(asked.recipe), asked.options.changes)
    runs = run_folder.root(asked.runs).absolute()
    if asked.tmux is not None:
        tmux.check_name(asked.tmux)
        tmux.require(f"cppmega launch {asked.recipe} ... (leave --tmux out), with nohup or screen")
        tmux.refuse_existing(asked.tmux)
    nproc = _ranks(asked, recipe)
    _check_nodes(asked)
    if asked.name is not None:
        run_folder.check_name(asked.name)
        if (runs / asked.name).exists() and asked.nodes == 1:
            raise run_folder.exists(runs / asked.name)
    folder = runs / (asked.name or run_folder.fresh_name(runs, recipe.name))
    old = run_folder.find(runs, asked.resume) if asked.resume is not None else None
    if old is not None:  # a tmux session's name may be another run's later
        asked = replace(asked, resume=old.name if old.path.parent == runs else str(old.path))
    options = _options(asked, recipe, folder, old)
    _check_left(recipe, options.load)
    _check_loop(recipe, options, nproc * asked.nodes)
    environment = environment_of(recipe, os.environ)
    context, checks = _preflight(asked, recipe, options, environment, folder)
    rendered, data = _rendered(context)
    ready = Ready(
        asked=asked,
        recipe=recipe.plus(*asked.arguments),
        folder=folder,
        session=context.session,
        options=options,
        environment=environment,
        nproc=nproc,
        torchrun=(),
        rendered=rendered,
        data=data,
        checks=checks,
    )
    return replace(ready, torchrun=_torchrun(ready))


def _ranks(asked: Launch, recipe: Recipe) -> int:
    """Processes on this host."""
    if recipe.gpus == 0:
        return asked.nproc or _LOOP_RANKS
    if asked.nproc is not None and asked.nproc * asked.nodes != recipe.gpus:
        raise CppmegaError(
            "wrong-world-size",
            f"Recipe {recipe.name} takes {recipe.gpus} GPUs, not {asked.nproc * asked.nodes}.",
            "Another number of replicas is another batch and another layout.",
            f"leave --nproc out, or --set gpus={asked.nproc * asked.nodes} with a batch that fits",
        )
    each, rest = divmod(recipe.gpus, asked.nodes)
    if rest or not each:
        raise CppmegaError(
            "wrong-world-size",
            f"The {recipe.gpus} GPUs of {recipe.name} cannot be spread over {asked.nodes} hosts.",
            "torchrun starts the same number of processes on each.",
            f"--nnodes with a divisor of {recipe.gpus}",
        )
    return each


def _check_nodes(asked: Launch) -> None:
    if asked.nodes == 1 and asked.rdzv is not None:
        raise CppmegaError(
            "rendezvous-of-one",
            f"--rdzv {asked.rdzv} is given, and --nnodes is not.",
            "This host would train alone, and the others would wait for it.",
            "--nnodes with the number of hosts, or leave --rdzv out",
        )
    if asked.nodes > 1 and (asked.rdzv is None or asked.name is None):
        raise CppmegaError(
            "no-rendezvous",
            f"--nnodes {asked.nodes} needs --rdzv and --name.",
            "The hosts find each other at one address, and write to one run folder.",
            "on every host: cppmega launch RECIPE --nnodes N --rdzv FIRST_HOST:29500 --name NAME "
            "--runs A_SHARED_FOLDER",
        )


def _options(asked: Launch, recipe: Recipe, folder: Path, old: Run | None) -> RunOptions:
    """The trainer's options with this run's own places."""
    options = asked.options
    if old is not None:
        options = launch_resume.options(asked, recipe, old)
    save = options.save or folder / "checkpoints"
    load = options.load
    if load is None and checkpoint_tracker.newest_step(save) is not None:
        load = save  # as the trainer does it; the manifest must say so
    data = options.data
    if recipe.kind == "loop" and not data:
        data = (str(folder / "data"),)
    metrics = options.metrics or folder / "metrics.jsonl"
    return replace(options, save=save, load=load, metrics=metrics, data=data)


def _check_left(recipe: Recipe, load: Path | None) -> None:
    """Is there anything left to train?

    Raises:
        CppmegaError: `already-trained`.
    """
    step = checkpoint_tracker.newest_step(load) if load is not None else None
    if step is not None and step >= recipe.train_iters:
        raise CppmegaError(
            "already-trained",
            f"The checkpoint in {load} has {step} steps, and {recipe.train_iters} are asked for.",
            "The run would end at once, with a folder and no step.",
            f"--set train_iters={step + recipe.train_iters} trains on",
        )


def _check_loop(recipe: Recipe, options: RunOptions, world: int) -> None:
    """Can a loop of our own do what it is asked for? The checks take a minute; this does not.

    Raises:
        CppmegaError: `wrong-world-size`, `not-supported`.
    """
    if recipe.kind != "loop":
        return
    from cppmega.smoke import loop as smoke_loop

    smoke_loop.of_a_rank(recipe, world)
    smoke_loop.refuse_options(recipe, options)


def environment_of(recipe: Recipe, given: Mapping[str, str]) -> dict[str, str]:
    """What the ranks will see."""
    from cppmega.host import allocator

    environment = dict(given)
    environment.setdefault("OMP_NUM_THREADS", "1")  # torchrun's own default, which it warns of
    for name, value in recipe.environment:
        environment.setdefault(name, value)
    if recipe.gpus == 0:
        environment["CUDA_VISIBLE_DEVICES"] = ""  # a loop on CPU, also where there is a GPU
    else:
        allocator.set_in(environment)
    return environment


def _preflight(
    asked: Launch,
    recipe: Recipe,
    options: RunOptions,
    environment: Mapping[str, str],
    folder: Path,
) -> tuple[Context, dict[str, str]]:
    """Every check; the launch ends here where one does not hold."""
    context = Context(
        root=options.root,
        recipe=recipe,
        recipe_file=recipes_index.file_of(asked.recipe),
        options=options,
        arguments=asked.arguments,
        environ=environment,
        nodes=asked.nodes,
        folder=folder,
    )
    with console.Progress("preflight") as progress:
        found = examine(context, progress)
    for finding in found.findings:
        if finding.is_remark:
            console.say(f"  {finding.check}: {finding.what}")
    if not found.ok:
        failures = found.failures
        if len(failures) > 1:
            for failure in reversed(failures[1:]):
                console.say(failure.error.render())
            console.say(f"{len(failures)} things are wrong; the first of them:")
        if failures:
            raise failures[0].error
        raise CppmegaError(
            "preflight-incomplete",
            "Some checks were not run.",
            "What was not looked at may be wrong.",
            f"cppmega preflight {asked.recipe}",
        )
    return context, {finding.check: finding.state for finding in found.findings}


def _rendered(context: Context) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The arguments as they will reach the parser, and the name of the data's contents."""
    recipe, options = context.recipe, context.options
    assert recipe is not None
    paths = list(options.data)
    if recipe.kind == "loop":
        from cppmega.smoke import corpus
        from cppmega.smoke import loop as smoke_loop

        fingerprint = corpus.fingerprint(smoke_loop.folder_of(options.data, recipe))
        return (), {"paths": paths, "fingerprint": fingerprint, "mock": False}
    version = context.session.tree.version
    rendered = render(recipe.plus(*context.arguments), version, options, context.data.eod)
    data = {"paths": paths, "fingerprint": context.data.fingerprint, "mock": options.mock_data}
    return rendered.argv, data


def _torchrun(ready: Ready) -> tuple[str, ...]:
    """torchrun's words, without the log folder of each host."""
    asked, last = ready.asked, ready.nproc - 1
    if asked.nodes > 1:
        where = [
            *("--nnodes", str(asked.nodes), "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", str(asked.rdzv), "--rdzv-id", ready.folder.name),
        ]
    else:
        # The host's own name may have no address: then ranks would wait for each other for ever.
        where = ["--standalone", "--local-addr", "127.0.0.1"]
    # Every rank has its files; the first and the last, which Megatron's lines come from, are shown.
    shown = ",".join(f"{rank}:3" for rank in sorted({0, last}))
    root = ready.options.root
    chosen = ["--megatron", str(root)] if root is not None else []
    recipe = ready.folder / "recipe" / f"{ready.recipe.name}.py"
    options = ready.options.words(without=("root",))
    return (
        *where,
        *("--nproc-per-node", str(ready.nproc), "--redirects", "3", "--tee", shown),
        *("-m", "cppmega.run", *chosen, "-m", "cppmega.trainer", str(recipe), *options),
        *_further(asked),
    )


def _further(asked: Launch) -> tuple[str, ...]:
    """Megatron's own arguments, after the trainer's options."""
    return ("--", *asked.arguments) if asked.arguments else ()


def _await_start(node: Node) -> None:
    """Until the process in charge has taken over: a session that dies at once is no start."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if node.status():
            return
        if not tmux.exists(str(node.run.manifest["tmux"])) and not node.status():
            break
        time.sleep(0.05)
    raise CppmegaError(
        "session-not-started",
        f"The tmux session {node.run.manifest['tmux']} ended before the run began.",
        "Nothing is running.",
        f"python -m cppmega.launch.supervise {node.path} shows why",
    )


def _runs_word(asked: Launch) -> str:
    return f" --runs {asked.runs}" if asked.runs is not None else ""
