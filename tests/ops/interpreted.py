"""Lets Triton interpret loops under numpy 2.5, and faster; import it where it interprets.

The interpreter turns loop bounds into integers by `int(array)`, which numpy refuses since 2.5
unless the array has no dimension; the bounds are arrays of one element.

At every call of a function within a kernel it replaces all operations of the language again, which
are replaced until the kernel ends. That took half of the time of some kernels. And for every value
it makes a type with a name, a shape and a size of its own, which are those of many before it. Of
the two values of an operation it finds a common type and shape, though most have these already.
"""

from __future__ import annotations

from typing import Any

import triton
from triton import language as tl
from triton.runtime import interpreter

_released = interpreter._patch_lang_tensor
_replace = interpreter._patch_lang
_replaced: set[int] = set()
"""The namespaces of functions whose operations are replaced, until the kernel ends."""


def _patched(tensor: Any, *scope: Any) -> None:
    _released(tensor, *scope)
    if scope:
        scope[0].set_attr(tensor, "__index__", _index)
    else:
        tensor.__index__ = _index


def _index(tensor: Any) -> int:
    return int(tensor.handle.data.item())


def _replaced_once(function: Any) -> Any:
    namespace = id(function.__globals__)
    if namespace in _replaced:
        return interpreter._LangPatchScope()
    _replaced.add(namespace)
    return _replace(function)


_type_in_numpy = interpreter._get_np_dtype
_in_numpy: dict[tuple[type, str], Any] = {}
_new_block_type = tl.block_type.__init__
_block_types: dict[tuple[Any, ...], dict[str, Any]] = {}
_new_tensor = tl.tensor.__init__
_alike: dict[tuple[type, str], dict[str, Any]] = {}
"""Type of a tensor -> its attributes without the handle."""


def _known_in_numpy(of: Any) -> Any:
    key = type(of), of.name
    if key not in _in_numpy:
        _in_numpy[key] = _type_in_numpy(of)
    return _in_numpy[key]


def _known_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    key = (type(element_ty), element_ty.name, *[getattr(size, "value", size) for size in shape])
    if key not in _block_types:
        _new_block_type(self, element_ty, shape)
        _block_types[key] = vars(self).copy()
    vars(self).update(_block_types[key])


def _known_tensor(self: Any, handle: Any, type: Any) -> None:  # noqa: A002
    key = type.__class__, type.name
    if key not in _alike:
        _new_tensor(self, handle, type)
        _alike[key] = {name: value for name, value in vars(self).items() if name != "handle"}
    vars(self).update(_alike[key])
    self.handle = handle


_shapes: dict[str, tuple[Any, ...]] = {}
"""Name of a type -> the sizes of its dimensions."""
_NUMBERS = {"fp32", "fp16", "bf16", "int64", "int32", "int1"}


def _shape(of: Any) -> tuple[Any, ...]:
    name: str = of.name
    if name not in _shapes:
        _shapes[name] = tuple(of.shape) if of.is_block() else ()
    return _shapes[name]


def _quick_semantic(kind: Any) -> None:
    """Return two values as they are if they have a type or a shape in common."""
    checked, broadcast = kind.binary_op_type_checking_impl, kind.broadcast_impl_value

    def quick_check(self: Any, lhs: Any, rhs: Any, *allowed: bool, **named: bool) -> Any:
        if (
            isinstance(lhs, tl.tensor)
            and isinstance(rhs, tl.tensor)
            and lhs.type.name == rhs.type.name
            and lhs.type.scalar.name in _NUMBERS
            and len(allowed) < 4  # no division, of which the type may be another
            and not named
        ):
            return lhs, rhs
        return checked(self, lhs, rhs, *allowed, **named)

    def quick_broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        if _shape(lhs.type) == _shape(rhs.type):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    kind.binary_op_type_checking_impl = quick_check
    kind.broadcast_impl_value = quick_broadcast


if hasattr(tl.semantic, "TritonSemantic"):  # from 3.4 on
    _quick_semantic(tl.semantic.TritonSemantic)
interpreter._get_np_dtype = _known_in_numpy
tl.block_type.__init__ = _known_block_type
tl.tensor.__init__ = _known_tensor
interpreter._patch_lang_tensor = _patched
if hasattr(interpreter, "_LangPatchScope"):  # from 3.5 on; before, nothing is restored
    _restore = interpreter._LangPatchScope.restore

    def _restored(scope: Any) -> None:
        _replaced.clear()
        _restore(scope)

    interpreter._patch_lang = _replaced_once
    interpreter._LangPatchScope.restore = _restored


def _with_bits(access: Any, place: int) -> Any:
    """An access whose mask, the argument in this place, is of booleans.

    Triton 3.9 computes `block & (scalar < scalar)` in integers, and then refuses it as a mask.
    """

    def checked(builder: Any, *given: Any, **named: Any) -> Any:
        mask = named["mask"] if "mask" in named else given[place]
        mask.data = mask.data.astype(bool, copy=False)
        return access(builder, *given, **named)

    return checked


VERSION = tuple(map(int, triton.__version__.split(".")[:2]))


def _validated(self: Any) -> None:
    """The checks of a descriptor from Triton 3.6 on; 3.4 takes strides in elements for bytes."""
    size = self.base.dtype.element_ty.primitive_bitwidth // 8
    assert self.base.data.item() % 16 == 0 and self.strides[-1].data.item() == 1
    assert all(stride.data.item() * size % 16 == 0 for stride in self.strides[:-1])


if (3, 4) <= VERSION < (3, 6):
    interpreter.TensorDescHandle.validate = _validated
if VERSION >= (3, 9):
    _masked = {"create_masked_load": 1, "create_masked_store": 2, "create_atomic_rmw": 3}
    for _name, _place in _masked.items():
        _access = getattr(interpreter.InterpreterBuilder, _name)
        setattr(interpreter.InterpreterBuilder, _name, _with_bits(_access, _place))
