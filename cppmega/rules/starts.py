"""Rules of a start: what must hold before a run may touch a GPU, known without torch.

The launcher, the preflight and the trainer ask the same rules, each group as soon as it can. A
question is asked about a start (`cppmega.training.requirements.Start`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cppmega.host import env, packages
from cppmega.host.wording import counted
from cppmega.rules.rule import Table, stated

_OF_FIELDS = {
    env.DSA_INDEX_PATTERN.name: "dsa_index_pattern",
    env.NGRAM_HASH.name: "ngram_hash",
    env.STRUCTURE.name: "structure",
    env.MAMBA3.name: "mamba3",
    env.M2RNN.name: "m2rnn",
}
"""Variables that change a model, with the fields that set them."""
_NOT_IN_LOOPS = (
    *("held_out", "mock_data", "data_cache", "tensorboard", "wandb_project", "wandb_name"),
    *("tokenizer", "eod", "profile"),
)
MAMBA2_BY_TORCH = "--disable-mamba-mem-eff-path"
"""Megatron's argument with which torch convolves in Mamba-2."""

_OTHER_LAYOUT = "A different number of replicas means another batch and another layout."

Cases = Iterator[Mapping[str, object]]


def _gates_not_set(start: Any) -> Cases:
    for name, wanted in start.recipe.wanted_gates:
        if (value := start.environ.get(name, "")) != wanted:
            yield {"gate": name, "wanted": wanted, "value": repr(value)}


def _other_variables(start: Any) -> Cases:
    meant = dict(start.recipe.variables)
    for name, wanted in meant.items():
        if (value := start.environ.get(name, wanted)) != wanted:
            yield {"name": name, "value": repr(value), "means": f"means {wanted}"}
    for name, field in _OF_FIELDS.items():
        if (value := start.environ.get(name, "").strip()) and name not in meant:
            yield {"name": name, "value": value, "means": f"has no {field}"}


def _missing_packages(start: Any) -> Cases:
    recipe, options = start.recipe, start.options
    needed = {"transformer_engine": ("the layers of every recipe for GPUs", "")}
    if recipe.uses_tilelang:
        needed["tilelang"] = ("the recipe's DSA kernels", "--set dsa_kernel_backend=none")
    if recipe.uses_mamba_ssm:
        needed["mamba_ssm"] = ("the recipe's Mamba-3 layers", "")
    if recipe.uses_mimo:
        needed["tilelang"] = ("the recipe's Mamba-3 layers", "")
    if recipe.mamba2 is not None:
        needed["mamba_ssm"] = ("Megatron's Mamba-2 layers", "")
        if MAMBA2_BY_TORCH not in recipe.arguments:
            otherwise = f"add {MAMBA2_BY_TORCH} after --, which convolves without it, but slower"
            needed["causal_conv1d"] = ("Megatron's Mamba-2 layers", otherwise)
    if recipe.num_experts and recipe.moe_token_dispatcher_type == "flex":
        otherwise = "--set moe_token_dispatcher_type=alltoall"
        needed["deep_ep"] = ("the recipe's token dispatcher", otherwise)
        if recipe.moe_flex_dispatcher_backend == "hybridep":
            needed["hybrid_ep_cpp"] = needed.pop("deep_ep")  # a branch of DeepEP builds both
    if options.tensorboard is not None:
        needed["tensorboard"] = ("--tensorboard", "leave --tensorboard out")
    if options.wandb_project:
        needed["wandb"] = ("--wandb-project", "leave --wandb-project out")
    for package, (purpose, otherwise) in needed.items():
        if importlib.util.find_spec(package) is None:
            instead = f", or {otherwise}" * bool(otherwise)
            name = packages.to_install(package.replace("_", "-"))
            yield {"package": package, "purpose": purpose, "install": name, "instead": instead}


def _profile_beyond(start: Any) -> object:
    if start.options.profile is None:
        return False
    done, last = start.steps
    needed = start.options.profile_after + start.options.profile
    case = {"needed": needed, "first": done + 1, "last": last, "more": done + needed}
    return done + needed > last and {**case, "count": max(last - done, 0)}


def _other_world(start: Any) -> object:
    gpus, hosts = start.recipe.gpus, start.nodes or 1
    world = (start.nproc or 0) * hosts
    case = {"gpus": counted(gpus, "GPU"), "world": world}
    return gpus and world and world != gpus and case


def _undivided(start: Any) -> object:
    gpus, hosts = start.recipe.gpus, start.nodes
    uneven = hosts < 1 or gpus % hosts or gpus < hosts
    return gpus and uneven and {"gpus": counted(gpus, "GPU"), "hosts": counted(hosts, "host")}


def _other_ranks(start: Any) -> object:
    world, gpus = start.world, start.recipe.gpus
    case = {"gpus": counted(gpus, "GPU"), "ranks": counted(world, "process", "processes")}
    return world != gpus and case


def _not_in_loops(start: Any) -> object:
    names = [name for name in _NOT_IN_LOOPS if getattr(start.options, name)]
    words = [f"--{name.replace('_', '-')}" for name in names]
    words += [" ".join(start.recipe.arguments)] if start.recipe.arguments else []
    return words and {"words": ", ".join(words)}


def _incomplete(start: Any) -> object:
    gaps = "; ".join(f"{gap.part}: {gap.reason}" for gap in start.rendered.missing)
    return gaps and {"lacks": gaps}


_TABLE: Table = {
    "the tree": {
        "{tree.root} has megatron.core {tree.version} and no megatron.training.": (
            lambda start: not (start.tree.root / "megatron" / "training" / "__init__.py").is_file(),
            "Wheels up to 0.16 ship only the library; the training loop is in the repository.",
            "pip install megatron-core==0.19.2, or a checkout of the same version on PYTHONPATH",
            "training-not-in-wheel",
        ),
    },
    "completeness": {
        "Recipe {recipe.name} on megatron-core {rendered.version} lacks {lacks}.": (
            _incomplete,
            "Another, smaller model would train under this model's name.",
            "cppmega recipes shows what each one lacks; train one that lacks nothing, or your own",
            "recipe-not-complete",
        ),
    },
    "loops": {
        "The CPU loop of recipe {recipe.name} does not support {words}.": (
            _not_in_loops,
            "The option would be ignored silently.",
            "leave it out",
            "not-supported",
        ),
        "Recipe {recipe.name} takes one folder of data, not {count}.": (
            lambda start: (count := len(start.options.data)) > 1 and {"count": count},
            "It builds its own dataset there and cannot mix several.",
            "name one folder, or none",
            "not-supported",
        ),
        "{options.data[0]} is a dataset, and {recipe.name} trains on a corpus that it builds "
        "itself.": (
            lambda start: start.options.data and Path(f"{start.options.data[0]}.idx").is_file(),
            "It would silently build that in a folder of this name, and train on it.",
            "leave out --data, or name a folder",
            "not-supported",
        ),
    },
    "variables": {
        "Recipe {recipe.name} needs {gate}={wanted}; the environment has {value}.": (
            _gates_not_set,
            "The patch it switches is off, and the run is not the one the recipe describes.",
            "export {gate}={wanted}, then python -m cppmega.apply_patches",
            "gate-not-set",
        ),
        "{name} is {value} in the environment, and recipe {recipe.name} {means}.": (
            _other_variables,
            "The run would follow the environment, and be recorded with the recipe.",
            "unset {name}, or change the recipe's field with --set",
            "recipe-differs",
        ),
    },
    "packages": {
        "The package {package} is not installed; it is needed for {purpose}.": (
            _missing_packages,
            "Megatron would stop after the start, or print a warning and log nothing.",
            "pip install {install}{instead}",
            "package-missing",
        ),
    },
    "the profiler": {
        "--profile {options.profile} --profile-after {options.profile_after} takes {needed} steps; "
        "this run has {count}, from {first} to {last}.": (
            _profile_beyond,
            "It would end without a profile.",
            "--set train_iters={more}, another --exit-interval, or fewer steps",
            "profile-beyond-run",
        ),
        "--profile is among Megatron's own arguments, too.": (
            lambda start: start.options.profile and "--profile" in start.recipe.arguments,
            "Two profilers cannot record at the same time.",
            "leave one of the two out",
            "profiled-twice",
        ),
    },
    "steps": {
        "The checkpoint in {options.load} has {loaded} steps, and {recipe.train_iters} are "
        "requested.": (
            lambda start: (
                (step := start.loaded) is not None
                and step >= start.recipe.train_iters
                and {"more": step + start.recipe.train_iters}
            ),
            "The run would end immediately, with a folder and no step.",
            "--set train_iters={more} trains on",
            "already-trained",
        ),
    },
    "division into hosts": {
        "Recipe {recipe.name} takes {gpus}, not {world}.": (
            _other_world,
            _OTHER_LAYOUT,
            "leave --nproc out, or --set gpus={world} with a batch that fits",
            "wrong-world-size",
        ),
        "{gpus} of {recipe.name} cannot be divided among {hosts}.": (
            _undivided,
            "torchrun starts the same number of ranks on each.",
            "--set gpus=... with a batch that fits, or another --nnodes",
            "wrong-world-size",
        ),
    },
    "hosts": {
        "--rdzv {rdzv} is given without --nnodes.": (
            lambda start: start.nodes == 1 and start.rdzv is not None,
            "This host would train alone, and the others would wait for it.",
            "--nnodes with the number of hosts, or leave --rdzv out",
            "no-rendezvous",
        ),
        "--nnodes {nodes} needs --rdzv and --name.": (
            lambda start: start.nodes > 1 and None in (start.rdzv, start.name),
            "The hosts find each other at one address, and write to one run folder.",
            "on every host: cppmega launch RECIPE --nnodes N --rdzv FIRST_HOST:29500 --name NAME "
            "--runs A_SHARED_FOLDER",
            "no-rendezvous",
        ),
    },
    "ranks": {
        "Recipe {recipe.name} takes {gpus}; the launch has {ranks}.": (
            _other_ranks,
            _OTHER_LAYOUT,
            "torchrun --nproc_per_node {recipe.gpus} -m cppmega.run -m cppmega.trainer "
            "{recipe.name} ..., or --set gpus={world} with a batch that fits",
            "wrong-world-size",
        ),
    },
    "data": {
        "Recipe {recipe.name} is evaluated every {recipe.eval_interval} steps, and --held-out is "
        "not given.": (
            lambda start: (
                start.recipe.eval_interval
                and not (start.options.held_out or start.options.mock_data)
            ),
            "A loss on the training data does not show what the model has learnt.",
            "--held-out PREFIX, of data prepared from other sources, or --set eval_interval=0",
            "no-held-out-data",
        ),
        "--held-out is given, and recipe {recipe.name} has eval_interval=0.": (
            lambda start: start.options.held_out and not start.recipe.eval_interval,
            "Nothing would be evaluated.",
            "--set eval_interval=STEPS, or leave --held-out out",
            "argument-without-effect",
        ),
        "Both {given} and --mock-data are given.": (
            lambda start: (
                start.options.mock_data
                and (start.options.data or start.options.held_out)
                and {"given": "--data" if start.options.data else "--held-out"}
            ),
            "It would not be clear afterwards what the model was trained on.",
            "leave one of them out",
            "data-and-mock-data",
        ),
        "Neither --data nor --mock-data is given.": (
            lambda start: not start.options.mock_data and not start.options.data,
            "Mock data is never used silently: it trains faster and means nothing.",
            "python -m cppmega.data.command --out PREFIX TEXT..., then --data PREFIX",
            "no-data",
        ),
    },
}

ABOUT = {subject: stated({subject: rows}) for subject, rows in _TABLE.items()}
"""The rules by their subject, of which a start is asked as many as are known of it."""
RULES = tuple(rule for rules in ABOUT.values() for rule in rules)
