"""For tests that prepare data with Megatron's builder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def no_collections() -> Iterator[None]:
    """Disable the garbage collection of Megatron's builder: half a second per shard with torch.

    The fixture is module-scoped because a module's data may be built before its first test, where a
    collection would also traverse the objects that earlier files have left.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("gc.collect", lambda *generation: 0)
        yield
