"""What the tests of trees share: a lab that is a clone of upstream, and one that refuses."""

from __future__ import annotations

import pytest

from cppmega.errors import CppmegaError
from tests.support.git import commit_all
from tests.support.lab import Lab
from tests.support.made import snapshot


def checkout(lab: Lab) -> None:
    """A clone of upstream: git vouches for every file."""
    lab.export()
    commit_all(lab.root)


def fails(lab: Lab, name: str) -> CppmegaError:
    before = snapshot(lab.root)
    with pytest.raises(CppmegaError) as caught:
        lab.apply()
    assert caught.value.name == name
    assert snapshot(lab.root) == before
    return caught.value
