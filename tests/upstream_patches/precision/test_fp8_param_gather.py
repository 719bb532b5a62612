"""Rules refuse the runs in which the variable would have no effect."""

from __future__ import annotations

import pytest

from tests.support.rules import broken

PAGE = "fp8_param_gather"
GATE = "CPPMEGA_FP8_PARAM_GATHER"


@pytest.mark.parametrize(
    ("args", "option"),
    [
        ({}, "A run without FP8"),
        ({"fp8": "hybrid", "use_torch_fsdp2": True}, "--use-torch-fsdp2"),
        ({"fp8": "hybrid", "use_torch_fsdp2": False}, ""),
        ({"fp8": "hybrid"}, ""),
    ],
)
def test_what_gathers_nothing_is_refused(args: dict[str, object], option: str) -> None:
    found = broken(PAGE, bf16=True, **args)
    assert [error.what.partition(" cannot")[0] for error in found] == [option] * bool(option)
    assert all(GATE in error.what and GATE in error.next for error in found)
