"""What runs capture in CUDA graphs, compared with the code of each release that captures it."""

from __future__ import annotations

import json

import pytest

from tests.support import pristine, python


@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.17.1", "0.18.2", "0.19.2"])
def test_mamba_layers_are_captured_where_megatron_captures_them(version: str) -> None:
    done = python(pristine(version), "from tests.sizes import graph_lines; graph_lines.report()")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert {row[0] for row in found.values()} == {True, False}
    wrong = {line: row for line, row in found.items() if len(set(row)) > 1}
    assert not wrong
