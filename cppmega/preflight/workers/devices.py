"""The process that looks at the GPUs for the preflight; started by `cppmega.preflight.devices`."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from cppmega.preflight.ask import given_order
from cppmega.rank.imported import only_from


def main() -> None:
    """Answer one order."""
    order = given_order()
    warnings.simplefilter("ignore")
    answer: dict[str, Any] = {"devices": [], "compiled_for": [], "imports": {}, "why": ""}
    with contextlib.redirect_stdout(sys.stderr):
        _look(order, answer)
    print("\n" + json.dumps(answer), flush=True)
    os._exit(0)


def _look(order: dict[str, Any], answer: dict[str, Any]) -> None:
    import torch

    if torch.version.cuda is None:
        answer["why"] = f"the installed torch {torch.__version__} is built without CUDA"
        return
    try:
        torch.zeros(1, device="cuda")
    except (RuntimeError, AssertionError) as error:
        answer["why"] = f"torch cannot use one: {error}".strip().rstrip(".")
        return
    answer["compiled_for"] = torch.cuda.get_arch_list()
    for index in range(torch.cuda.device_count()):
        one = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        answer["devices"].append(
            {
                "name": one.name,
                "capability": [one.major, one.minor],
                "total": total,
                "free": free,
                "uuid": f"GPU-{getattr(one, 'uuid', '')}",
            }
        )
    only_from(Path(order["root"]))
    for module in order["modules"]:
        try:
            importlib.import_module(module)
            answer["imports"][module] = ""
        except BaseException as error:
            answer["imports"][module] = f"{type(error).__name__}: {error}"[:500]


if __name__ == "__main__":
    main()
