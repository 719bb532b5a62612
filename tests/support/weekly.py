"""The mark of tests that are too long for every run."""

from __future__ import annotations

import os

import pytest

weekly = pytest.mark.skipif(
    os.environ.get("TESTS_WEEKLY") != "1",
    reason="it takes a minute or more, and runs with TESTS_WEEKLY=1, as once a week",
)
