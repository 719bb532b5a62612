"""What models whose DSA layers share keys do, in a process that runs one tree."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from cppmega.errors import CppmegaError
from cppmega.proof.cpu_shims import keep_saves_here
from tests.upstream_patches.dsa import dsa_models as models

SHARE = {"dsa_indexer_topk_freq": 2, "dsa_indexer_skip_topk_offset": 1}


def said(pattern: str, switch: str = "1") -> Any:
    variables = {"CPPMEGA_INDEX_CACHE": switch, "CPPMEGA_DSA_INDEX_PATTERN": pattern}
    return mock.patch.dict(os.environ, variables)


def trained(model: Any) -> dict[str, Any]:
    """One training step's loss and gradients, and the keys that each call of attention used."""
    used = []
    with models.noting_keys(lambda keys: used.append(keys.tolist())):
        loss = models.loss(model.train())
        loss.backward()
        with torch.no_grad():
            models.loss(model.eval())
    grads = {n: p.grad.tolist() for n, p in model.named_parameters() if p.grad is not None}
    return {
        "loss": float(loss),
        "grads": grads,
        "names": list(model.state_dict()),
        "kinds": [layer.indexer is None for layer in models.attentions(model).values()],
        "used": used,
    }


def build(pattern: str, how: str, **options: Any) -> Any:
    """A model of 4 DSA layers, GPT or hybrid, or the name and text of the error instead."""
    try:
        with said(pattern):
            return models.gpt(4, **options) if how == "gpt" else models.hybrid(how, **options)
    except CppmegaError as error:
        return f"{error.name}: {error.what}"


def second_stage(pattern: str, how: str, **options: Any) -> Any:
    """What becomes of a model's second (virtual) stage: the error, or the kinds of its layers."""
    last = {"pre_process": False, "vp_stage": 1}
    from megatron.core.transformer import transformer_block

    offset = mock.patch.object(
        transformer_block, "get_transformer_layer_offset", lambda *ignored: 2
    )
    if how == "gpt":
        with offset:
            model = build(pattern, how, here=2, stages={"pre_process": False}, **options)
    else:
        model = build(pattern, how, stages=last, **options)
    if isinstance(model, str):
        return model
    return [layer.indexer is None for layer in models.attentions(model).values()]


def saved(model: Any, folder: str) -> None:
    from megatron.core import dist_checkpointing

    keep_saves_here()
    Path(folder).mkdir()
    dist_checkpointing.save(model.sharded_state_dict(), folder)


def loaded(model: Any, folder: str, **how: Any) -> Any:
    """The differences that loading says, and whether a parameter kept its old value."""
    from megatron.core import dist_checkpointing

    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 7.0)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            state = dist_checkpointing.load(model.sharded_state_dict(), folder, **how)
            model.load_state_dict(state)
        except CppmegaError as error:
            return f"{error.name}: {error.what}"
    untouched = [name for name, p in model.named_parameters() if bool((p == 7.0).all())]
    return [[str(w.message) for w in heard if "left out" in str(w.message)], untouched]


def plainly(model: Any, state: dict[str, Any], strict: bool = True) -> Any:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            model.load_state_dict(state, strict=strict)
        except CppmegaError as error:
            return f"{error.name}: {error.what}"
    return [str(w.message) for w in heard if "left out" in str(w.message)]


def _without_indexers(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if ".indexer." not in name}


def round_trips(how: str) -> dict[str, Any]:
    """Every way between a model of FSFS and one of FFFF."""
    found: dict[str, Any] = {}
    different = {"hetereogenous_dist_checkpoint": True}
    with tempfile.TemporaryDirectory() as folder:
        own, shared = build("FFFF", how, **different), build("FSFS", how)
        saved(own, f"{folder}/own")
        saved(shared, f"{folder}/shared")
        found["own to shared"] = loaded(build("FSFS", how), f"{folder}/own")
        found["shared to shared"] = loaded(build("FSFS", how), f"{folder}/shared")
        found["own to own"] = loaded(build("FFFF", how, **different), f"{folder}/own")
        found["shared to own"] = loaded(build("FFFF", how, **different), f"{folder}/shared")
        if how == "gpt":
            saved(build("FFFF", how), f"{folder}/stacked")
            found["stacked to shared"] = loaded(build("FSFS", how), f"{folder}/stacked")
        state, less = own.state_dict(), shared.state_dict()
        found["plain"] = [
            plainly(build("FSFS", how), state),
            plainly(build("FFFF", how), less),
            plainly(build("FFFF", how), less, strict=False),  # as Megatron repeats a failed load
            plainly(build("FFFF", how), _without_indexers(state), strict=False),
        ]
    return found


HYBRID = "D-DD-D/D-"
"""Four DSA layers, and one of an MTP depth."""


def stock() -> dict[str, Any]:
    """Keys shared by Megatron's options, since 0.19."""
    return {
        "gpt": trained(models.gpt(4, **SHARE)),
        "hybrid": trained(models.hybrid(HYBRID, **{**SHARE, "dsa_indexer_topk_freq": 3})),
    }


def kinds() -> dict[str, Any]:
    """Keys shared by a pattern."""
    found = {"gpt": trained(build("FSFS", "gpt"))}
    if models.HAS_HYBRID:
        found["hybrid"] = trained(build("FSFS", HYBRID))
    if models.NEW:
        found["options"] = trained(build("", "gpt", **SHARE))
    return found


def full() -> dict[str, Any]:
    """A model whose DSA layers are all Full."""
    return {"gpt": trained(build("FFFF", "gpt"))}


def refused() -> dict[str, Any]:
    """Models that cannot share keys, and stages that can."""
    either = "D-DD-D" if models.HAS_HYBRID else "gpt"
    found = {
        "unset": build("", "gpt"),
        "length": build("FSS", either),
        "first": build("SFFF", either),
        "gpt": second_stage("FSSF", "gpt"),
        "gpt fits": second_stage("FSFS", "gpt"),
    }
    if models.HAS_HYBRID:
        found["hybrid"] = second_stage("FSSF", "D-D|D-D")
        found["hybrid fits"] = second_stage("FSFS", "D-D|D-D")
    if models.NEW:
        found["both"] = build("FSSS", "gpt", **SHARE)
        found["options"] = second_stage("", "D-D|D-D", **{**SHARE, "dsa_indexer_topk_freq": 6})
    return found


def checkpoints() -> dict[str, Any]:
    """Round trips of models of both kinds."""
    kinds_of_models = ("gpt", "D-DD-D") if models.HAS_HYBRID else ("gpt",)
    return {how: round_trips(how) for how in kinds_of_models}


def main(*parts: Callable[[], dict[str, Any]]) -> None:
    models.start()
    print(json.dumps({part.__name__: part() for part in parts}))
    sys.stdout.flush()
