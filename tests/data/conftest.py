"""For tests that prepare data with Megatron's builder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def no_collections() -> Iterator[None]:
    """Megatron's builder collects garbage for every shard: half a second with torch loaded.

    Once for a module, whose data may be made before its first test: a collection there also walks
    through what earlier files have left.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("gc.collect", lambda *generation: 0)
        yield
