"""What the tests of `cppmega verify` share."""

from __future__ import annotations

import pytest

THING = "megatron/core/thing.py"

IN_NEW_INTERPRETERS = pytest.mark.parametrize("python", ["new"])
"""For what a fork does not show: a hash seed of its own, and the end of all that a worker began."""
