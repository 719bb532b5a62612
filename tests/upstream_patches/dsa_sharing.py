"""What models whose DSA layers share keys do, in a process that runs one tree."""

from __future__ import annotations

import json
import os
import queue
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from cppmega.errors import CppmegaError
from tests.upstream_patches import dsa_sharing_models as models
from tests.upstream_patches.dsa_sharing_models import dsa

SHARE = {"dsa_indexer_topk_freq": 2, "dsa_indexer_skip_topk_offset": 1}


def said(pattern: str, switch: str = "1") -> Any:
    variables = {"CPPMEGA_INDEX_CACHE": switch, "CPPMEGA_DSA_INDEX_PATTERN": pattern}
    return mock.patch.dict(os.environ, variables)


def trained(model: Any) -> dict[str, Any]:
    """One training step's loss and gradients, and the keys that each call of attention used."""
    used = []
    name = "_run_sparse_attention" if models.NEW else "unfused_dsa_fn"
    attention = getattr(dsa, name)

    def seen(*inputs: Any, **named: Any) -> Any:
        used.append((named["topk_indices"] if models.NEW else inputs[3]).tolist())
        return attention(*inputs, **named)

    with mock.patch.object(dsa, name, seen):
        loss = models.loss(model.train())
        loss.backward()
    grads = {n: p.grad.tolist() for n, p in model.named_parameters() if p.grad is not None}
    with mock.patch.object(dsa, name, seen), torch.no_grad():
        models.loss(model.eval())
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
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    # It would start a process for the results of writers that are other processes.
    filesystem_async._results_queue = queue.Queue()
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


def main(what: str) -> None:
    models.start()
    hybrid = "D-DD-D" + ("/D-" if models.NEW else "")
    if what == "stock":
        answer: Any = {
            "gpt": trained(models.gpt(4, **SHARE)),
            "hybrid": trained(models.hybrid(hybrid, **{**SHARE, "dsa_indexer_topk_freq": 3})),
        }
    elif what == "kinds":
        answer = {
            "gpt": trained(build("FSFS", "gpt")),
            "hybrid": trained(build("FSFS", hybrid)),
            "options": trained(build("", "gpt", **SHARE)),
        }
    elif what == "refused":
        answer = {
            "unset": build("", "gpt"),
            "length": build("FSS", "D-DD-D"),
            "first": build("SFFF", "D-DD-D"),
            "both": build("FSSS", "gpt", **SHARE),
            "gpt": second_stage("FSSF", "gpt"),
            "gpt fits": second_stage("FSFS", "gpt"),
            "hybrid": second_stage("FSSF", "D-D|D-D"),
            "hybrid fits": second_stage("FSFS", "D-D|D-D"),
            "options": second_stage("", "D-D|D-D", **{**SHARE, "dsa_indexer_topk_freq": 6}),
        }
    else:
        answer = {"gpt": round_trips("gpt"), "hybrid": round_trips("D-DD-D")}
    print(json.dumps(answer))
    sys.stdout.flush()
