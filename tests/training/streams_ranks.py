"""Several residual streams together with packed documents and with heads that hold no logits.

Imported in the process that runs a tree, never by pytest itself.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipe.test_arithmetic import BASE, STREAMS
from tests.training.evaluation_ranks import ONE, trained

PACKED = BASE.with_(
    pattern="*-*-/*-/*-", packed_documents=True, train_iters=3, global_batch_size=2, **STREAMS
)
LINEAR = PACKED.with_(cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="linear")


def check_streams_packs_and_linear_heads_go_together(folder: Path) -> None:
    """The losses of trunk and depths are those of heads with logits; packs and streams matter."""
    rows = {
        name: trained(folder, name, recipe, ONE)[1]
        for name, recipe in (
            ("logits", PACKED),
            ("linear", LINEAR),
            ("unpacked", LINEAR.with_(packed_documents=False)),
            ("one stream", LINEAR.with_(mhc_num_residual_streams=1)),
        )
    }
    linear = rows.pop("linear")
    for step, (_, norm, losses) in rows.pop("logits").items():
        assert losses == pytest.approx(linear[step][2], rel=1e-5) and len(losses) == 3, step
        assert norm == pytest.approx(linear[step][1], abs=2e-3), step
    for name, other in rows.items():
        assert other[1][2] != pytest.approx(linear[1][2], rel=1e-4), name
