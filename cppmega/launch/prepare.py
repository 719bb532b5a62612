"""Validate a launch before anything is written."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from cppmega import calls
from cppmega.errors import CppmegaError
from cppmega.host import allocator, console
from cppmega.launch import resume as launch_resume
from cppmega.launch.request import LaunchRequest, ValidatedLaunch
from cppmega.preflight.context import Context
from cppmega.preflight.examine import examine
from cppmega.recipe import Recipe
from cppmega.recipe import index as recipes_index
from cppmega.recipe.render import render
from cppmega.recipe.run_options import RunOptions
from cppmega.rules import starts
from cppmega.runs import folder as run_folder
from cppmega.runs import tmux
from cppmega.runs.manifest import DataRecord
from cppmega.training.requirements import Start

_LOOP_RANKS = 2
"""So that a CPU launch, like a GPU launch, has process groups and ranks that must agree."""


def prepare(request: LaunchRequest) -> ValidatedLaunch:
    """Validate the request and resolve every input; writes nothing.

    Raises:
        CppmegaError: one named reason for each requirement that is not met.
    """
    # Ranks may have another working directory; and a manifest must mean something later.
    request = replace(request, options=request.options.absolute())
    runs = run_folder.root(request.runs).absolute()
    environ, earlier = {**os.environ}, None
    if request.resume is not None:
        old = run_folder.find(runs, request.resume)
        # A tmux session's name may be another run's later.
        request = replace(request, resume=old.name if old.path.parent == runs else str(old.path))
        earlier = launch_resume.earlier(old)
        request = launch_resume.continued(request, earlier)
        environ = {**earlier.environment, **environ}
    recipe = recipes_index.with_text(recipes_index.load(request.recipe), request.options.changes)
    if earlier is not None:
        launch_resume.check(recipe, earlier)
    if request.tmux is not None:
        _check_session(request.tmux, request.recipe)
    start = Start(
        recipe, nodes=request.nodes, nproc=request.nproc, rdzv=request.rdzv, name=request.name
    )
    start.check(*starts.DIVISION, *starts.HOSTS)
    nproc = recipe.gpus // request.nodes or request.nproc or _LOOP_RANKS
    folder = _folder(request, recipe, runs)
    if earlier is not None:
        launch_resume.report(request, recipe, earlier, environ)
        load = request.options.load or earlier.run.checkpoints
        request = replace(request, options=replace(request.options, load=load))
    options = _options(request.options, recipe, folder)
    Start(recipe.plus(*request.arguments), options).check(*starts.STEPS, *starts.PROFILE)
    _check_loop(recipe, options, nproc * request.nodes)
    context = Context(
        root=options.root,
        recipe=recipe,
        recipe_file=recipes_index.file_of(request.recipe),
        options=options,
        arguments=request.arguments,
        environ=environment_of(recipe, environ),
        nodes=request.nodes,
        folder=folder,
    )
    calls.check_allowed(context.session.pages, context.fallbacks)  # the preflight takes a minute
    checks = _examined(context, request.recipe)
    argv, data = _rendered(context, recipe)
    return ValidatedLaunch(
        request=request,
        recipe=recipe.plus(*request.arguments),
        context=context,
        folder=folder,
        nproc=nproc,
        torchrun=_torchrun(request, options, folder, recipe.name, nproc),
        argv=argv,
        data=data,
        checks=checks,
    )


def _check_session(name: str, recipe: str) -> None:
    tmux.check_name(name)
    tmux.require(f"cppmega launch {recipe} ... (leave --tmux out), with nohup or screen")
    tmux.refuse_existing(name)


def _folder(request: LaunchRequest, recipe: Recipe, runs: Path) -> Path:
    """Where the run folder will be.

    Raises:
        RunExistsError: `run-exists`.
        CppmegaError: `bad-name`.
    """
    if request.name is None:
        return runs / run_folder.fresh_name(runs, recipe.name)
    run_folder.check_name(request.name)
    folder = runs / request.name
    if folder.exists() and request.nodes == 1:
        raise run_folder.already_exists(folder)
    return folder


def _options(options: RunOptions, recipe: Recipe, folder: Path) -> RunOptions:
    """The trainer's options with this run's own folders."""
    data = options.data
    if recipe.kind == "loop" and not data:
        data = (str(folder / "data"),)
    return replace(
        options,
        save=options.save or folder / "checkpoints",
        metrics=options.metrics or folder / "metrics.jsonl",
        profile_folder=options.profile_folder or (folder / "profile" if options.profile else None),
        data=data,
    ).resuming()  # as the trainer will; the manifest must record it


def _check_loop(recipe: Recipe, options: RunOptions, world: int) -> None:
    """Check what the loop on CPU supports, before the preflight, which takes a minute.

    Raises:
        CppmegaError: `wrong-world-size`, `not-supported`.
    """
    if recipe.kind != "loop":
        return
    from cppmega.smoke import loop as smoke_loop

    smoke_loop.recipe_of_rank(recipe, world)
    smoke_loop.refuse_options(recipe, options)


def environment_of(recipe: Recipe, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of the ranks."""
    environment = dict(environ)
    environment.setdefault("OMP_NUM_THREADS", "1")  # torchrun's own default, which it warns of
    for name, value in recipe.environment:
        environment.setdefault(name, value)
    if recipe.gpus == 0:
        environment["CUDA_VISIBLE_DEVICES"] = ""  # a loop on CPU, also if there is a GPU
    else:
        allocator.set_in(environment)
    return environment


def _examined(context: Context, recipe: str) -> dict[str, str]:
    """Run the preflight. Returns the state of every check.

    Raises:
        CppmegaError: the first check that does not hold, or `preflight-incomplete`.
    """
    with console.Progress("preflight") as progress:
        examined = examine(context, progress)
    for finding in examined.findings:
        if finding.is_remark:
            console.say(f"  {finding.check}: {finding.what}")
    if not examined.ok:
        failures = examined.failures
        if len(failures) > 1:
            for failure in reversed(failures[1:]):
                console.say(failure.error.render())
            console.say(f"{len(failures)} problems were found; the first of them:")
        if failures:
            raise failures[0].error
        raise CppmegaError(
            "preflight-incomplete",
            "Some checks were not run.",
            "What was not inspected may be wrong.",
            f"cppmega preflight {recipe}",
        )
    return {finding.check: finding.state for finding in examined.findings}


def _rendered(context: Context, recipe: Recipe) -> tuple[tuple[str, ...], DataRecord]:
    """Megatron's arguments, and the data by name, from what the preflight has found."""
    options = context.options
    if recipe.kind == "loop":
        from cppmega.smoke import corpus
        from cppmega.smoke import loop as smoke_loop

        fingerprint = corpus.fingerprint(smoke_loop.folder_of(options.data, recipe))
        return (), DataRecord(paths=options.data, fingerprint=fingerprint)
    version, data = context.session.read_tree().version, context.data
    rendered = render(recipe.plus(*context.arguments), version, options, data.eod)
    return rendered.argv, DataRecord(
        paths=options.data, fingerprint=data.fingerprint, mock=options.mock_data
    )


def _torchrun(
    request: LaunchRequest, options: RunOptions, folder: Path, recipe: str, nproc: int
) -> tuple[str, ...]:
    """torchrun's command line, without the log folder of each host."""
    if request.nodes > 1:
        where = [
            *("--nnodes", str(request.nodes), "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", str(request.rdzv), "--rdzv-id", folder.name),
        ]
    else:
        # If the host's own name has no address, ranks would wait for each other forever.
        where = ["--standalone", "--local-addr", "127.0.0.1"]
    # Every rank has log files; the first and the last, which print Megatron's lines, are also
    # shown.
    shown = ",".join(f"{rank}:3" for rank in sorted({0, nproc - 1}))
    chosen = ["--megatron", str(options.root)] if options.root is not None else []
    kept = folder / "recipe" / f"{recipe}.py"
    return (
        *where,
        *("--nproc-per-node", str(nproc), "--redirects", "3", "--tee", shown),
        *("-m", "cppmega.run", *chosen, "-m", "cppmega.trainer", str(kept)),
        *options.words(without=("root",)),
        *(("--", *request.arguments) if request.arguments else ()),
    )
