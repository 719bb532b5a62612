"""Whether pages ask runs with real arguments to reach them, as JSON.

Imported in the process that runs a tree, never by pytest itself.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from cppmega.catalogue import gates, loader
from tests.support import parsed_line

EXPERTS = (
    *("--num-experts", "4", "--moe-permute-fusion", "--moe-token-dispatcher-type"),
    *("--moe-router-dtype", "fp32", "--disable-bias-linear"),
)
FLEX = (*EXPERTS[:4], "flex", *EXPERTS[4:])
LINES = {
    "a GPT": ("te_plain_layers", ()),
    "alltoall": ("te_permutation_calls", (*EXPERTS[:4], "alltoall", *EXPERTS[4:])),
    "deepep": ("te_permutation_calls", FLEX),
    **{
        backend: ("te_permutation_calls", (*FLEX, "--moe-flex-dispatcher-backend", backend))
        for backend in ("hybridep", "ncclep")
    },
    "forked writer": ("async_save_host_copies", ("--async-save", "--async-strategy", "mcore")),
    "living writer": (
        "async_save_host_copies",
        ("--async-save", "--async-strategy", "mcore", "--use-persistent-ckpt-worker"),
    ),
}


def report() -> None:
    """Name of a line -> whether its page must be reached; None where Megatron refuses the line."""
    pages = loader.load()
    found: dict[str, Any] = {}
    for name, (page, line) in LINES.items():
        try:
            args = parsed_line.validated(*line)
        except parsed_line.RefusedError:
            found[name] = None
            continue
        when = pages[page].patch.when
        assert when is not None
        found[name] = gates.wanted(page, when, args)
        # A line of 0.15, whose wheel has no parser: the same names, without a later one.
        if name == "forked writer":
            vars(args).update(async_save=True)
            del args.async_strategy
            found["forked writer of 0.15"] = gates.wanted(page, when, args)
    when = pages["te_plain_layers"].patch.when
    assert when is not None

    class Linear(torch.nn.Linear):
        pass

    extension = sys.modules["megatron.core.extensions.transformer_engine"]
    extension.TELinear = Linear
    found["local layers"] = gates.wanted("te_plain_layers", when, args)
    built = torch.nn.Sequential(type("Row", (Linear,), {})(1, 1))
    found["its layers"] = gates.wanted("te_plain_layers", when, args) and len(built) == 1
    print(json.dumps(found))
