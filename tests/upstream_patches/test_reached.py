"""Healthy runs are not asked to reach pages that they do not use."""

from __future__ import annotations

import json

import pytest

from cppmega.catalogue import loader
from tests.support import pristine, python

ANSWERS = {
    "a GPT": False,  # the parser's default, and nothing of Transformer Engine is built
    "alltoall": True,
    "deepep": True,
    "hybridep": False,
    "ncclep": False,
    "forked writer": False,
    "forked writer of 0.15": False,
    "living writer": True,
    "local layers": False,
    "its layers": True,
}


@pytest.mark.parametrize("version", ["0.17.1", "0.18.2", "0.19.2"])
def test_pages_are_asked_of_the_runs_that_use_them(version: str) -> None:
    code = "from tests.upstream_patches import reached_lines; reached_lines.report()"
    done = python(pristine(version), code)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    refused = {name for name, answer in found.items() if answer is None}
    assert refused == ({"ncclep"} if version < "0.19" else set())
    assert found == {name: None if name in refused else ANSWERS[name] for name in found}
    assert set(found) == set(ANSWERS)


@pytest.mark.parametrize("name", ["dataset_helpers_prebuilt", "modelopt_without_post_training"])
def test_loops_of_their_own_need_not_reach_what_they_do_not_call(name: str) -> None:
    assert loader.load()[name].patch.reached == "never"
