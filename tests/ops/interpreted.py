"""Lets Triton 3.6 interpret loops under numpy 2.5, and faster; import it where it interprets.

The interpreter turns loop bounds into integers by `int(array)`, which numpy refuses since 2.5
unless the array has no dimension; the bounds are arrays of one element.

At every call of a function within a kernel it replaces all operations of the language again, which
are replaced until the kernel ends. That took half of the time of some kernels.
"""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter

_released = interpreter._patch_lang_tensor
_replace = interpreter._patch_lang
_restore = interpreter._LangPatchScope.restore
_replaced: set[int] = set()
"""The namespaces of functions whose operations are replaced, until the kernel ends."""


def _patched(tensor: Any, scope: Any) -> None:
    _released(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _replaced_once(function: Any) -> Any:
    namespace = id(function.__globals__)
    if namespace in _replaced:
        return interpreter._LangPatchScope()
    _replaced.add(namespace)
    return _replace(function)


def _restored(scope: Any) -> None:
    _replaced.clear()
    _restore(scope)


interpreter._patch_lang_tensor = _patched
interpreter._patch_lang = _replaced_once
interpreter._LangPatchScope.restore = _restored
