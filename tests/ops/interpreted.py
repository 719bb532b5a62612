"""Lets Triton 3.6 interpret loops under numpy 2.5; import it where TRITON_INTERPRET is 1.

The interpreter turns loop bounds into integers by `int(array)`, which numpy refuses since 2.5
unless the array has no dimension; the bounds are arrays of one element.
"""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter

_released = interpreter._patch_lang_tensor


def _patched(tensor: Any, scope: Any) -> None:
    _released(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patched
