"""Validate a launch before anything is written."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cppmega import calls
from cppmega.errors import CppmegaError
from cppmega.host import allocator, console, gpus
from cppmega.launch import resume as launch_resume
from cppmega.launch import script as launch_script
from cppmega.launch.request import LaunchRequest, ValidatedLaunch
from cppmega.launch.script import Script
from cppmega.preflight.checks import ORDER
from cppmega.preflight.context import Context
from cppmega.preflight.examine import examine
from cppmega.preflight.findings import merged
from cppmega.recipe import Recipe
from cppmega.recipe import index as recipes_index
from cppmega.recipe.render import render
from cppmega.recipe.run_options import RunOptions
from cppmega.runs import folder as run_folder
from cppmega.runs import placeholders, tmux
from cppmega.runs.manifest import DataRecord
from cppmega.training import own_loop
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
    script = launch_script.find(request.recipe)
    recipe = None
    if script is None:
        kept = recipes_index.load(request.recipe)
        recipe = recipes_index.with_text(kept, request.options.changes)
        launch_script.refuse_options_of_scripts(request)
    else:
        launch_script.refuse_options(script, request.options)
    named: Any = script or recipe
    if earlier is not None:
        launch_resume.check(named.name, recipe, earlier)
    if request.tmux is not None:
        _check_session(request.tmux, request.recipe)
    start = Start(
        named, nodes=request.nodes, nproc=request.nproc, rdzv=request.rdzv, name=request.name
    )
    start.check(*(["division into hosts"] if recipe is not None else []), "hosts")
    nproc = _ranks(request, recipe)
    folder = _folder(request, named.name, runs)
    if earlier is not None:
        if script is not None:
            launch_script.refuse_without_load(script, request.arguments)
        launch_resume.report(request, recipe, earlier, environ)
        load = request.options.load or earlier.run.checkpoints
        request = replace(request, options=replace(request.options, load=load))
    options = _options(request.options, recipe, folder)
    if recipe is not None:
        Start(recipe.plus(*request.arguments), options).check("steps", "the profiler")
        _check_loop(recipe, options, nproc * request.nodes)
    context = Context(
        root=options.root,
        recipe=recipe,
        recipe_file=recipes_index.file_of(request.recipe) if recipe is not None else None,
        options=options,
        arguments=_for_megatron(request, script, folder),
        environ=environment_of(recipe, environ),
        nodes=request.nodes,
        world=nproc * request.nodes,
        folder=folder,
        arguments_from=request.arguments_from,
        allows_unknown=request.allows_unknown,
    )
    calls.check_allowed(context.session.pages, context.fallbacks)  # the preflight takes a minute
    checks = _examined(context, request.recipe)
    argv, data = request.arguments, DataRecord()
    if recipe is not None:
        argv, data = _rendered(context, recipe)
    return ValidatedLaunch(
        request=request,
        recipe=recipe.plus(*request.arguments) if recipe is not None else None,
        name=named.name,
        source=script.file if script is not None else recipes_index.file_of(request.recipe),
        context=context,
        folder=folder,
        nproc=nproc,
        torchrun=(
            *_torchrun(request, folder, nproc),
            *(script.words(options) if script is not None else _trainer(options, folder, named)),
            *(("--",) if script is None and request.arguments else ()),
            *request.arguments,
        ),
        argv=argv,
        data=data,
        checks=checks,
    )


def _ranks(request: LaunchRequest, recipe: Recipe | None) -> int:
    """The number of ranks on each host."""
    if recipe is not None:
        return recipe.gpus // request.nodes or request.nproc or _LOOP_RANKS
    return request.nproc or len(gpus.reported()) or 1


def _for_megatron(request: LaunchRequest, script: Script | None, folder: Path) -> tuple[str, ...]:
    """The arguments that Megatron's parser will get: a script may parse its own."""
    if script is None:
        return request.arguments
    if not (script.calls_megatrons_parser or request.arguments_from):
        console.say(
            f"  {script.file.name} imports nothing of megatron.training: its arguments are its "
            "own, and are not checked (--arguments-from MODULE if it calls Megatron's parser "
            "elsewhere)"
        )
        return ()
    return placeholders.filled(request.arguments, folder, request.options.load)


def _check_session(name: str, recipe: str) -> None:
    tmux.check_name(name)
    tmux.require(f"cppmega launch {recipe} ... (leave --tmux out), with nohup or screen")
    tmux.refuse_existing(name)


def _folder(request: LaunchRequest, name: str, runs: Path) -> Path:
    """Where the run folder will be.

    Raises:
        RunExistsError: `run-exists`.
        CppmegaError: `bad-name`.
    """
    if request.name is None:
        return runs / run_folder.fresh_name(runs, name)
    run_folder.check_name(request.name)
    folder = runs / request.name
    if folder.exists() and request.nodes == 1:
        raise run_folder.already_exists(folder)
    return folder


def _options(options: RunOptions, recipe: Recipe | None, folder: Path) -> RunOptions:
    """The trainer's options with this run's own folders."""
    data = options.data
    if recipe is not None and recipe.kind == "loop" and not data:
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
    own_loop.recipe_of_rank(recipe, world)
    Start(recipe, options).check("loops")


def environment_of(recipe: Recipe | None, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of the ranks."""
    environment = dict(environ)
    environment.setdefault("OMP_NUM_THREADS", "1")  # torchrun's own default, which it warns of
    for name, value in recipe.environment if recipe is not None else ():
        environment.setdefault(name, value)
    if recipe is not None and recipe.gpus == 0:
        environment["CUDA_VISIBLE_DEVICES"] = ""  # a loop on CPU, also if there is a GPU
    else:
        allocator.set_in(environment)
    return environment


def _examined(context: Context, recipe: str) -> dict[str, str]:
    """Run the preflight. Returns the state of every check.

    Raises:
        CppmegaError: the first check that does not hold, or `preflight-incomplete`.
    """
    with console.Progress("preflight", len(ORDER)) as progress:
        examined = examine(context, progress)
    for finding in examined.findings:
        if finding.is_remark:
            console.say(f"  {finding.check}: {finding.what}")
    if not examined.ok:
        failures = merged(examined.failures)
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
        fingerprint = own_loop.fingerprint(own_loop.folder_of(options.data))
        return (), DataRecord(paths=options.data, fingerprint=fingerprint)
    version, data = context.session.read_tree().version, context.data
    rendered = render(recipe.plus(*context.arguments), version, options, data.eod)
    return rendered.argv, DataRecord(
        paths=options.data, fingerprint=data.fingerprint, mock=options.mock_data
    )


def _torchrun(request: LaunchRequest, folder: Path, nproc: int) -> tuple[str, ...]:
    """torchrun's command line up to `cppmega.run`, without the log folder of each host."""
    if request.nodes > 1:
        where = [
            *("--nnodes", str(request.nodes), "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", str(request.rdzv), "--rdzv-id", folder.name),
        ]
    else:
        # If the host's own name has no address, ranks would wait for each other forever.
        where = ["--standalone", "--local-addr", "127.0.0.1"]
    if request.restarts:
        where += ["--max-restarts", str(request.restarts)]
    # Every rank has log files; the first and the last, which print Megatron's lines, are also
    # shown.
    shown = ",".join(f"{rank}:3" for rank in sorted({0, nproc - 1}))
    return (
        *where,
        *("--nproc-per-node", str(nproc), "--redirects", "3", "--tee", shown),
        *("-m", "cppmega.run"),
    )


def _trainer(options: RunOptions, folder: Path, recipe: Recipe) -> tuple[str, ...]:
    """What `cppmega.run` is given for a recipe, before Megatron's own arguments."""
    chosen = ["--megatron", str(options.root)] if options.root is not None else []
    kept = folder / "recipe" / f"{recipe.name}.py"
    words = options.words(without=("root",))
    return (*chosen, "-m", "cppmega.trainer", str(kept), *words)
