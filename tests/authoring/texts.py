"""The target of a made page, and its text that the page pins."""

from __future__ import annotations

TARGET = "megatron/core/thing.py:double"
STOCK = "def double(x):\n    return x\n"
