"""Read the pickles of a checkpoint without importing or calling anything that they name.

Loading a pickle calls whatever its author chose to name. Here every name on a list becomes a
stand-in that keeps its arguments and its state, and any other name stops the reading. The list
covers checkpoints of Megatron 0.16 to 0.19: their arguments, what torch needs for tensors and for
the index of a distributed checkpoint, and the state of Transformer Engine's FP8 recipes.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any, BinaryIO, cast

from cppmega.checkpoints import saved_archive

_DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool"),
    *("complex64", "complex128"),
)
_STORAGES = (
    *("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool"),
    *("Untyped", "Float8_e4m3fn", "Float8_e5m2"),
)
_BYTES = ("ByteStorage", "UntypedStorage")
_NUMPY = (
    *("Bool", "Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "UInt64"),
    *("Float16", "Float32", "Float64"),
)
_LISTED: dict[str, tuple[str, ...]] = {
    "argparse": ("Namespace",),
    "types": ("SimpleNamespace",),
    "pathlib": ("Path", "PosixPath", "PurePosixPath"),
    "pathlib._local": ("Path", "PosixPath", "PurePosixPath"),
    "signal": ("Signals",),
    "builtins": ("int", "float", "bool", "str", "bytes", "list", "tuple", "dict", "complex"),
    "torch": (*_DTYPES, *(f"{name}Storage" for name in _STORAGES), "device", "Tensor"),
    "torch.storage": ("UntypedStorage", "TypedStorage"),
    "torch.nn.parameter": ("Parameter", "Buffer"),
    "torch._C": ("Generator",),
    "torch._utils": (
        *("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter"),
        *("_rebuild_parameter_with_state", "_rebuild_meta_tensor_no_storage"),
    ),
    "torch._tensor": ("_rebuild_from_type_v2",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata"),
        *("ChunkStorageMetadata", "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "numpy": ("ndarray", "dtype"),
    "numpy.dtypes": tuple(f"{name}DType" for name in _NUMPY),
    "numpy.core.multiarray": ("_reconstruct", "scalar"),
    "numpy._core.multiarray": ("_reconstruct", "scalar"),
    "numpy.core.numeric": ("_frombuffer",),
    "numpy._core.numeric": ("_frombuffer",),
    "megatron.core.enums": ("ModelType", "Fp8Recipe", "Fp4Recipe"),
    "megatron.core.transformer.enums": (
        *("AttnBackend", "AttnMaskType", "AttnType", "LayerType", "ModelType"),
        *("CudaGraphModule", "CudaGraphScope", "InferenceCudaGraphScope"),
    ),
    "megatron.core.rerun_state_machine": (
        *("RerunDiagnostic", "RerunMode", "RerunState", "RerunValidationStatus"),
    ),
    "megatron.core.inference.config": (
        *("KVCacheManagementMode", "PrefixCachingEvictionPolicy"),
        *("PrefixCachingCoordinatorPolicy", "AsyncScheduleMode", "CudaGraphSizingDistribution"),
    ),
    "megatron.core.optimizer.optimizer_config": ("OptimizerConfig",),
    "megatron.core.extensions.transformer_engine": ("TEDelayedScaling",),
    "transformer_engine.common.recipe": (
        *("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling"),
        *("NVFP4BlockScaling", "Format", "_FormatHelper", "MMParams", "QParams"),
    ),
}


_DEEPEST = 8
"""The limit of nested pickles; Megatron and Transformer Engine nest two."""
_DEPTH = ContextVar("depth", default=0)


class NotListed(Exception):  # noqa: N818  (an answer, not an error)
    """A pickle names something that no checkpoint of Megatron contains."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(name)


class Inert:
    """A stand-in for an object of a pickle, with its arguments and its state."""

    name = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        """Accept any arguments, as the real class may."""
        found = object.__new__(cls)
        found.args, found.state = args, None
        return found

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args: tuple[Any, ...]
        self.state: Any

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def field(self, name: str) -> Any:
        """Return a field of an object whose state is its `__dict__`.

        Raises:
            KeyError: there is no such field.
        """
        if not isinstance(self.state, dict):
            raise KeyError(name)
        return self.state[name]


def loads(data: bytes, storage: Callable[[Any], object] = lambda pid: pid) -> Any:
    """Return the content of a pickle, with stand-ins for its objects.

    Args:
        data: the pickle.
        storage: called with the persistent id of each tensor's storage.

    Raises:
        NotListed: it names something that checkpoints do not contain.
        Exception: it is damaged; `pickle` has no specific error for that.
    """
    return _Unpickler(io.BytesIO(data), storage).load()


def load_archive(file: BinaryIO) -> Any:
    """Return the content of an archive of `torch.save`, and check the pickles inside its parts.

    Raises:
        saved_archive.Damaged: it is not an archive, or a checksum differs.
        NotListed: a pickle in it names something that checkpoints do not contain.
    """
    with saved_archive.opened(file) as archive:
        name = saved_archive.only_pickle(archive)
        storages: list[Any] = []
        found = _unpickled(saved_archive.read(archive, name), storages.append)
        for key in _of_bytes(storages):
            refuse_nested(saved_archive.read(archive, saved_archive.storage(name, key)))
        return found


def _unpickled(data: bytes, storage: Callable[[Any], object]) -> Any:
    try:
        return loads(data, storage)
    except (NotListed, saved_archive.Damaged):
        raise
    except Exception as error:  # a damaged pickle raises anything
        raise saved_archive.Damaged(f"its pickle: {type(error).__name__}: {error}") from error


def _of_bytes(storages: Iterable[Any]) -> set[str]:
    """Keys of byte tensors, in which Transformer Engine keeps the pickle of its state."""
    found = set()
    for pid in storages:
        match pid:
            case ("storage", kind, str(key), *_) if plain(kind) in _BYTES:
                found.add(key)
    return found


def plain(value: Any) -> Any:
    """Convert a stand-in to a value that can be compared and printed."""
    if isinstance(value, type) and issubclass(value, Inert):
        return value.name.rpartition(".")[2]  # torch.bfloat16
    if isinstance(value, Inert):
        return "/".join(map(str, value.args)) if value.args else value.name
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if isinstance(value, int | float | str | None) else str(value)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO, storage: Callable[[Any], object] = lambda pid: pid) -> None:
        super().__init__(file)
        self._storage = storage
        self.names_something = False

    def find_class(self, module: str, name: str) -> Any:
        """Return a stand-in; nothing is imported."""
        self.names_something = True
        real = _REAL.get((module, name))
        if real is not None:
            return real
        if name not in _LISTED.get(module, ()):
            raise NotListed(f"{module}.{name}")
        return type(name, (Inert,), {"name": f"{module}.{name}"})

    def persistent_load(self, pid: Any) -> Any:
        """Report a storage, whose bytes are elsewhere in the archive."""
        self._storage(pid)
        return pid


class _Bytes(Inert):
    """An object stored as bytes, usually a pickle itself, which the run would load as well."""

    name = "io.BytesIO"

    def __new__(cls, *args: Any, **kwargs: Any) -> _Bytes:
        for one in (*args, *kwargs.values()):
            refuse_nested(one)
        return cast("_Bytes", super().__new__(cls, *args))

    def __setstate__(self, state: Any) -> None:
        for one in state if isinstance(state, tuple) else ():
            refuse_nested(one)


def refuse_nested(data: object) -> None:
    """Check bytes that may be pickles or an archive of torch themselves.

    Bytes that become invalid before they name anything are not a pickle, and cannot call anything:
    loading them fails at the same place as here.

    Raises:
        NotListed: a pickle names something that checkpoints do not contain.
        saved_archive.Damaged: they are a pickle or an archive that cannot be read.
    """
    if not isinstance(data, bytes | bytearray):
        return
    if _DEPTH.get() == _DEEPEST:
        raise saved_archive.Damaged(f"more than {_DEEPEST} pickles inside each other")
    inside = _DEPTH.set(_DEPTH.get() + 1)
    try:
        _refuse_inside(data)
    finally:
        _DEPTH.reset(inside)


def _refuse_inside(data: bytes | bytearray) -> None:
    if data.startswith(b"PK\x03\x04"):
        load_archive(io.BytesIO(data))
        return
    stream = io.BytesIO(data)
    while stream.tell() < len(data):  # torch's old format has several in a row
        unpickler = _Unpickler(stream)
        try:
            unpickler.load()
        except (NotListed, saved_archive.Damaged):
            raise
        except Exception as error:
            if unpickler.names_something:
                raise saved_archive.Damaged(f"a pickle inside it: {error!r}") from error
            return


def _latin1(text: str, encoding: str = "latin1") -> bytes:
    """Encode bytes the way protocol 2 does; looking up another codec could import a module."""
    if encoding not in ("latin1", "latin-1"):
        raise NotListed(f"_codecs.encode to {encoding}")
    return text.encode("latin-1")


_REAL: dict[tuple[str, str], Callable[..., Any]] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "Counter"): Counter,
    ("collections", "defaultdict"): defaultdict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "bytearray"): bytearray,
    ("_codecs", "encode"): _latin1,
    ("torch", "Size"): tuple,
    ("io", "BytesIO"): _Bytes,
    ("_io", "BytesIO"): _Bytes,
    ("torch.storage", "_load_from_bytes"): _Bytes,
    ("megatron.core.safe_globals", "safe_load_from_bytes"): _Bytes,
}
"""Names that are not replaced by stand-ins: containers, and types that may hold another pickle."""
