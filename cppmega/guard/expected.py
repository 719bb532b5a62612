"""The expected code of a source file: what its bytes on disk compile to.

Compiling all of Megatron takes a second. Bytecode that was once compared with its source is known
by its hash in the user's cache folder, and then holds the expected code, ready to be loaded.
"""

from __future__ import annotations

import collections
import dis
import importlib.util
import marshal
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cppmega.tree import pyc, wheels
from cppmega.tree.installed import sha256

_EXTENDED, _PLAIN = dis.opmap["EXTENDED_ARG"], dis.opmap["MAKE_FUNCTION"]
_ATTRIBUTE = dis.opmap.get("SET_FUNCTION_ATTRIBUTE", _PLAIN)  # after MAKE_FUNCTION, from 3.13 on
_STORES_NAME, _STORES_GLOBAL = dis.opmap["STORE_NAME"], dis.opmap["STORE_GLOBAL"]
_STORES_ATTRIBUTE = dis.opmap["STORE_ATTR"]
_NOTHING = bytes((dis.opmap["NOP"], 0))


@dataclass(slots=True)
class Expected:
    """The code of one file."""

    digest: str
    """SHA-256 of the source."""
    codes: dict[str, list[types.CodeType]] = field(default_factory=dict)
    """Qualified name -> code; branches of an `if` may define a name several times."""
    stale: str = ""
    """The bytecode that Python would run although the source compiles to other code."""

    def has(self, code: types.CodeType, name: str | None = None) -> bool:
        """Whether the file contains this code, as the definition of that name or of any."""
        known = self.codes.get(code.co_qualname if name is None else name, ())
        return any(code is one or same_code(code, one) for one in known)


def of_source(path: Path, data: bytes, *, loaded: bool = False) -> Expected:
    """Find the expected code of a file.

    Args:
        path: the file.
        data: its bytes.
        loaded: whether Python's own loader has just executed it. If there is no bytecode, or it is
            known to hold its code, that code has run, and is not loaded again: `codes` is empty.
    """
    cached, bytecode = _bytecode(path)
    digest = sha256(data)
    known = _LEDGER.knows(bytecode, data)
    if loaded and (known or not bytecode):
        return Expected(digest)
    if known:
        code, stale = marshal.loads(memoryview(bytecode)[pyc.HEADER :]), ""
    else:
        code, stale = _compiled(path, data, cached, bytecode)
    expected = Expected(digest, stale=stale)
    for each in nested(code):
        expected.codes.setdefault(each.co_qualname, []).append(each)
    return expected


def same_code(one: types.CodeType, other: types.CodeType) -> bool:
    """Whether two code objects run the same instructions.

    A line profiler appends instructions that do nothing, to tell two equal functions apart.
    """
    if one == other:
        return True
    return (
        one.co_code.rstrip(_NOTHING) == other.co_code.rstrip(_NOTHING)
        and one.co_consts == other.co_consts
        and (one.co_names, one.co_varnames) == (other.co_names, other.co_varnames)
        and (one.co_freevars, one.co_flags) == (other.co_freevars, other.co_flags)
        and one.co_firstlineno == other.co_firstlineno
    )


def nested(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code object and all code objects nested in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from nested(constant)


def plain(expected: Expected) -> set[str]:
    """Qualified names of functions and methods that have one definition, without a decorator."""
    names: set[str] = set()
    for name, codes in expected.codes.items():
        if name == "<module>" or "<" not in name:
            outer = "" if name == "<module>" else f"{name}."
            names.update(outer + each for code in codes for each in _plain_definitions(code))
    return {name for name in names if len(expected.codes.get(name, ())) == 1}


def state(expected: Expected) -> set[str]:
    """Names of variables and attributes that the file assigns while it runs: state, not code."""
    names: set[str] = set()
    for codes in expected.codes.values():
        for code in codes:
            for opcode in (_STORES_GLOBAL, _STORES_ATTRIBUTE):
                names.update(code.co_names[index] for _, index in _steps(code, opcode))
    return names


def _plain_definitions(code: types.CodeType) -> Iterator[str]:
    """Names that a body assigns once, directly to a function that it has just made."""
    made, stores = code.co_code[::2], [*_steps(code, _STORES_NAME)]
    counts = collections.Counter(index for _, index in stores)
    for at, index in stores:
        before = at - 1
        while before >= 0 and made[before] == _EXTENDED:
            before -= 1
        if before >= 0 and made[before] in (_PLAIN, _ATTRIBUTE) and counts[index] == 1:
            yield code.co_names[index]


def _steps(code: types.CodeType, opcode: int) -> Iterator[tuple[int, int]]:
    """Place and argument of each instruction of one kind; several times faster than `dis`."""
    opcodes, arguments = code.co_code[::2], code.co_code[1::2]
    at = opcodes.find(opcode)
    while at >= 0:
        argument = arguments[at]
        if at and opcodes[at - 1] == _EXTENDED:
            argument |= arguments[at - 1] << 8
        if argument < len(code.co_names):  # else a cache entry that looks like an instruction
            yield at, argument
        at = opcodes.find(opcode, at + 1)


_LEDGER = pyc.Ledger(wheels.cache())


def remember() -> None:
    """Save the comparisons for the next process."""
    _LEDGER.save()


def _bytecode(path: Path) -> tuple[Path, bytes]:
    cached = Path(importlib.util.cache_from_source(str(path)))
    try:
        return cached, cached.read_bytes()
    except OSError:
        return cached, b""


def _compiled(path: Path, data: bytes, cached: Path, bytecode: bytes) -> tuple[types.CodeType, str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # upstream's invalid escapes
        code = pyc.compiled(data, path)
    if pyc.same(bytecode, code):
        _LEDGER.add(bytecode, data)
    elif pyc.trusted(bytecode, path, data):
        return code, str(cached)
    return code, ""
