"""Linear cross-entropy in real models of every version matches stock, without logits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import patched, pristine, python

PAGES = ("cross_entropy_fusion_linear", "linear_ce_gpt_head", "linear_ce_hybrid_head")
MTP = ("mtp_linear_ce",)
RUNS = (
    ("0.19.2", 1, PAGES + MTP),
    ("0.19.2", 2, PAGES + MTP),
    ("0.18.2", 1, PAGES + MTP),
    ("0.17.1", 1, (*PAGES, *MTP, "mtp_loss_no_host_sync")),
    ("0.16.1", 1, PAGES + MTP),
)


@pytest.mark.megatron
@pytest.mark.parametrize(("version", "ranks", "pages"), RUNS)
def test_like_stock_without_logits(
    version: str, ranks: int, pages: tuple[str, ...], tmp_path: Path
) -> None:
    for side, root in (("stock", pristine(version)), ("patched", patched(version, *pages))):
        code = f"""
        from pathlib import Path
        from tests.upstream_patches.losses import linear_ce
        linear_ce.main({side!r}, {version!r}, {ranks}, Path({str(tmp_path)!r}))
        """
        done = python(root, code, nproc=ranks)
        assert done.returncode == 0, f"{side}: {done.stderr[-4000:]}"
