"""What the tests of `cppmega verify` share."""

from __future__ import annotations

import pytest

THING = "megatron/core/thing.py"

WITH_ITS_OWN_SERVER = pytest.mark.parametrize("server", ["its own"], indirect=True)
"""For what the session's server does not show: a hash seed, and the end of all that was begun."""
