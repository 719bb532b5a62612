"""The order of the rows of DSA indexers in checkpoints, for the page dsa_indexer_rope.

Releases 0.16 to 0.18 rotate the last channels of a head, in interleaved pairs; the page rotates the
first ones, in halves. No name or shape of a weight shows which of them it was trained for, so every
checkpoint that the patched code writes records it, and one without the record is refused unless the
user states its order.
"""

from __future__ import annotations

import json
import re
from collections.abc import MutableMapping
from typing import Any

from packaging.version import Version
from torch import Tensor

from cppmega.errors import CppmegaError
from cppmega.host import env

PAGE, RECORD = "dsa_indexer_rope", "cppmega_dsa_indexer_rope"
_ROWS = re.compile(
    r"\.indexer\.(linear_wq_b\.weight|linear_wk\.weight|k_norm\.weight|k_norm\.bias)$"
)
_VARIABLE = env.DSA_INDEXER_ROWS.name


def permuted(tensor: Tensor, width: int, rotated: int) -> Tensor:
    """Rows as the page reads them, from rows as releases 0.16 to 0.18 do.

    The scores are the same up to rounding. Of every head, the last `rotated` rows come first, the
    even ones before the odd ones, and the others follow.

    Args:
        tensor: `[heads * width, ...]`: a weight or bias whose name `load` permutes.
        width: channels of a head (`dsa_indexer_head_dim`).
        rotated: those that are rotated (`qk_pos_emb_head_dim`).
    """
    first = width - rotated
    order = [*range(first, width, 2), *range(first + 1, width, 2), *range(first)]
    return tensor.reshape(-1, width, *tensor.shape[1:])[:, order].flatten(0, 1)


def record(args: Any) -> None:
    """Record in the arguments, which a checkpoint keeps, that its rows are the page's."""
    setattr(args, RECORD, True)


def load(args: Any, state: MutableMapping[str, Any]) -> None:
    """Check the rows of a checkpoint before its weights enter the model, or permute them.

    Args:
        args: the run's arguments.
        state: the checkpoint, as Megatron has read it.

    Raises:
        CppmegaError: `dsa-indexer-rows`.
    """
    models = [each for key, each in state.items() if re.fullmatch(r"model\d*", key)]
    rows = [(model, name) for model in models for name in model if _ROWS.search(name)]
    if not rows or _is_recorded(state.get("args")):
        return
    stated = env.DSA_INDEXER_ROWS.read()
    if stated == "page":
        return
    rotated, width = args.qk_pos_emb_head_dim, args.dsa_indexer_head_dim
    if stated != "stock":
        raise CppmegaError(
            "dsa-indexer-rows",
            "The checkpoint has weights of DSA indexers, and does not record that they were "
            f"trained with {PAGE}.",
            "Indexers that were trained without it would select other keys: their rows have to be "
            f"permuted. Of each head of {width} rows of linear_wq_b, linear_wk and k_norm, the "
            f"last {rotated} come first, the even ones before the odd ones.",
            f"export {_VARIABLE}=stock, and add --no-load-optim or --finetune, to permute them as "
            f"they are loaded; or {_VARIABLE}=page if they were trained with the page, or by 0.19",
        )
    if not (args.no_load_optim or args.finetune):
        raise CppmegaError(
            "dsa-indexer-rows",
            f"{_VARIABLE}=stock permutes weights, and the run loads their optimizer, too.",
            "The moments of the optimizer would be those of other rows.",
            "add --no-load-optim, or --finetune",
        )
    for model, name in rows:
        model[name] = permuted(model[name], width, rotated)


def _is_recorded(saved: Any) -> bool:
    """Whether the run that saved these arguments had the page, or a Megatron that needs no page."""
    if getattr(saved, RECORD, False):
        return True
    try:  # the trainer records all pages
        overlay = json.loads(getattr(saved, "cppmega_patches", None) or "{}")
        had = PAGE in (overlay.get("pages") or {})
        return had or Version(overlay.get("megatron") or "0") >= Version("0.19")
    except ValueError:
        return False
