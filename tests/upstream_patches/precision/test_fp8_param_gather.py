"""The preflight refuses the runs in which the variable would have no effect."""

from __future__ import annotations

from argparse import Namespace

import pytest

from cppmega.catalogue import loader
from cppmega.errors import CppmegaError

PAGE = "fp8_param_gather"
GATE = "CPPMEGA_FP8_PARAM_GATHER"


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (Namespace(fp8=None), "nothing is FP8"),
        (Namespace(fp8="hybrid", use_torch_fsdp2=True), "--use-torch-fsdp2"),
        (Namespace(fp8="hybrid", use_torch_fsdp2=False), None),
        (Namespace(fp8="hybrid"), None),
    ],
)
def test_refuses(args: Namespace, reason: str | None) -> None:
    page = loader.load_page(
        PAGE, loader.builtin_folder() / "precision" / f"{PAGE}.py", loader.BUILTIN
    )
    assert page.patch.refuses is not None and page.patch.when is not None
    refused: list[CppmegaError] = list(page.patch.refuses(args, {}))
    assert page.patch.when(args) is (args.fp8 is not None)
    assert [error.name for error in refused] == ["fp8-param-gather-ignored"] * (reason is not None)
    if reason is not None:
        assert reason in refused[0].what and f"{GATE}=0" in refused[0].next
