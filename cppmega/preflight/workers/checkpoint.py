"""Open the archives of a checkpoint as a rank would; started by `cppmega.preflight.checks`.

What torch would load is what is checked: each archive is opened by `torch.load(weights_only=True)`
with the names that checkpoints of Megatron contain, and so are the pickles in its bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import pickle
import re
from pathlib import Path
from typing import Any

from cppmega.checkpoints.allowed import (
    STAND_INS,
    Damaged,
    NotListed,
    Unpickler,
    contents,
    plain,
)
from cppmega.checkpoints.files import ARCHIVES, Archive, naming
from cppmega.errors import CppmegaError
from cppmega.preflight.ask import serve
from cppmega.preflight.messages import CheckpointAnswer, CheckpointOrder

_DEEPEST = 8
"""The limit of nested pickles; Megatron and Transformer Engine nest two."""
_NAMED = re.compile(r"GLOBAL (\S+)")


def open_all(order: CheckpointOrder) -> CheckpointAnswer:
    """Open every archive; the arguments are those of the first one that holds any."""
    os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)  # some releases let it win
    arguments: Any = None
    try:
        for archive in order.archives:
            with naming(Path(archive.path), archive.part):
                content = _content(archive)
            if isinstance(content, list) and content:
                content = content[0]
            if archive.holds_state and isinstance(content, dict) and arguments is None:
                arguments = getattr(content.get("args"), "state", None)
    except CppmegaError as error:
        return CheckpointAnswer(problem=error.as_json())
    return CheckpointAnswer(
        arguments=_plain(arguments) if isinstance(arguments, dict) else {},
    )


def loaded(source: str | io.BytesIO, depth: int = 0) -> Any:
    """Return the content of an archive of `torch.save`, and check the pickles in its bytes.

    Raises:
        NotListed: a pickle in it names something that checkpoints do not contain.
        Damaged: torch cannot load it.
    """
    import torch

    in_memory = isinstance(source, io.BytesIO)
    allowed: list[Any] = [(stand_in, name) for name, stand_in in STAND_INS.items()]
    already = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()  # Megatron allows more where it is imported
    try:
        with torch.serialization.safe_globals(allowed):
            content = torch.load(source, "cpu", weights_only=True, mmap=not in_memory)
    except pickle.UnpicklingError as error:
        if named := _NAMED.search(str(error)):
            raise NotListed(named[1]) from error
        reason = str(error).rpartition("WeightsUnpickler error:")[2].strip()
        raise Damaged(f"its pickle: {reason[:200]}") from error
    except (Damaged, NotListed):
        raise
    except Exception as error:  # a damaged archive raises anything
        raise Damaged(f"{type(error).__name__}: {error}") from error
    finally:
        torch.serialization.add_safe_globals(already)
    _check_bytes(content, depth)
    return content


def _check_bytes(content: object, depth: int) -> None:
    """Check all bytes, in which Transformer Engine keeps the pickle of its state."""
    import torch

    for one in contents(content):
        if isinstance(one, bytes | bytearray):
            refuse_nested(bytes(one), depth)
        elif isinstance(one, torch.Tensor) and one.dtype == torch.uint8:
            storage = one.untyped_storage()
            refuse_nested(ctypes.string_at(storage.data_ptr(), storage.nbytes()), depth)


def refuse_nested(data: bytes, depth: int = 0) -> None:
    """Check bytes that may be pickles or an archive of torch themselves.

    Bytes that become invalid before they name anything are not a pickle, and cannot call anything:
    loading them fails at the same place as here.

    Raises:
        NotListed: a pickle names something that checkpoints do not contain.
        Damaged: they are a pickle or an archive that cannot be read.
    """
    if depth == _DEEPEST:
        raise Damaged(f"more than {_DEEPEST} pickles inside each other")
    if data.startswith(b"PK\x03\x04"):
        loaded(io.BytesIO(data), depth + 1)
        return
    stream = io.BytesIO(data)
    while stream.tell() < len(data):  # torch's old format has several in a row
        unpickler = Unpickler(stream)
        try:
            content = unpickler.load()
        except NotListed:
            raise
        except Exception as error:  # a damaged pickle raises anything
            if unpickler.names_something:
                raise Damaged(f"a pickle inside it: {error!r}") from error
            return
        _check_bytes(content, depth + 1)


def _content(archive: Archive) -> Any:
    if archive.length is None and archive.path.endswith(ARCHIVES):
        with contextlib.suppress(UnicodeEncodeError):
            archive.path.encode()  # torch maps no file whose path is not UTF-8
            return loaded(archive.path)
    with Path(archive.path).open("rb") as file:
        file.seek(archive.offset)
        data = file.read(-1 if archive.length is None else archive.length)
    if archive.length is None and not archive.path.endswith(ARCHIVES):
        refuse_nested(data)
        return None
    return loaded(io.BytesIO(data))


def _plain(state: dict[Any, Any]) -> dict[str, Any]:
    return {name: plain(value) for name, value in state.items() if isinstance(name, str)}


if __name__ == "__main__":
    serve(CheckpointOrder, open_all)
