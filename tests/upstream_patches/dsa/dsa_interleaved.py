"""Two microbatches forward and then backward through models whose DSA layers share keys.

Imported in the process that runs a tree, never by pytest itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import torch

from tests.upstream_patches.dsa import dsa_models as models
from tests.upstream_patches.dsa.dsa_models import (
    ATTENTION,
    FULL,
    PROJECTIONS,
    Sets,
    gradients,
    loss,
    same,
)

Make = Callable[..., Any]
BLOCK = {**FULL, "recompute_method": "block", "recompute_num_layers": 2}


@cache
def one_at_a_time(make: Make, **given: Any) -> tuple[dict[str, Any], list[list[torch.Tensor]]]:
    """The weights of a model, and the gradients of two microbatches; nothing is recomputed."""
    model, found = make(), []
    for number in (1, 2):
        loss(model, number, **given).backward()
        found.append(gradients(model))
    return model.state_dict(), found


def interleaved(
    make: Make, evaluate: bool = False, options: dict[str, Any] = FULL, **given: Any
) -> dict[str, Any]:
    """Forward 1, forward 2, backward 1, backward 2; against one microbatch at a time."""
    weights, wanted = one_at_a_time(make, **given)
    model, sets = make(**options), Sets()
    model.load_state_dict(weights)
    try:
        with sets.of(model):
            sets.doing = "forward 1"
            first = loss(model, 1, **given)
            sets.doing = "forward 2"
            second = loss(model, 2, **given)
            if evaluate:
                sets.doing = "evaluation"
                with torch.no_grad():
                    loss(model.eval(), 3, **given)
                model.train()
            sets.doing = "backward 1"
            with ThreadPoolExecutor() as another_thread:  # as that of autograd on a GPU
                another_thread.submit(first.backward).result()
            found = [gradients(model)]
            sets.doing = "backward 2"
            second.backward()
            found.append(gradients(model))
    except RuntimeError as error:
        return {"error": str(error)}
    del first, second
    return {
        "kept": sets.kept(),
        "same": [same(a, b) for a, b in zip(found, wanted, strict=True)],
        "left": models.left_over(model),
    }


def of_options() -> dict[str, Any]:
    """Megatron's own option makes the layers 1 and 3 Full; since 0.19."""
    gpt = partial(models.gpt, dsa_indexer_topk_freq=2)
    hybrid = partial(models.hybrid, "DDDD/DD/DD", dsa_indexer_topk_freq=2)
    models_of = {
        "gpt": gpt,
        "gpt, MTP": partial(gpt, depths=2),
        "hybrid": partial(models.hybrid, "D-DD-D", dsa_indexer_topk_freq=3),
        "hybrid, MTP": hybrid,
    }
    mask = torch.ones(models.LENGTH, models.LENGTH, dtype=torch.bool).triu(1)[None, None]
    return {
        **{
            f"{name}: {how}": interleaved(make, options=options)
            for name, make in models_of.items()
            for how, options in (("full", FULL), ("selective", ATTENTION))
        },
        "mask": interleaved(gpt, mask=mask),
        "packed, MTP": interleaved(hybrid, packed=True),
        "repeated depth": interleaved(partial(gpt, depths=2, mtp_use_repeated_layer=True)),
        **_further(gpt, chunk=3),
    }


def of_pattern() -> dict[str, Any]:
    """A pattern makes every second DSA layer of a decoder Full; on any release."""
    os.environ |= {"CPPMEGA_INDEX_CACHE": "1", "CPPMEGA_DSA_INDEX_PATTERN": "FSFS"}
    models_of = {"gpt": models.gpt, "gpt, MTP": partial(models.gpt, depths=2)}
    if models.HAS_HYBRID:
        models_of["hybrid"] = partial(models.hybrid, "D-DD-D")
        models_of["hybrid, MTP"] = partial(models.hybrid, "DDDD/DD/DD")
    return {
        **{f"{name}: full": interleaved(make) for name, make in models_of.items()},
        "projections": interleaved(models.gpt, options=PROJECTIONS),
        **_further(models.gpt, chunk=2),  # up to 0.17, chunks must divide the layers
    }


def _further(gpt: Make, chunk: int) -> dict[str, Any]:
    return {
        "block": interleaved(gpt, options=BLOCK),
        "chunks of layers": interleaved(gpt, options={**FULL, "recompute_num_layers": chunk}),
        "evaluation": interleaved(gpt, evaluate=True),
        "sparse loss": interleaved(partial(gpt, dsa_indexer_use_sparse_loss=True)),
    }


def main(what: Callable[[], dict[str, Any]]) -> None:
    models.start()
    print(json.dumps(what()))
