"""Pickles of a checkpoint, read without importing or calling anything that they name.

Loading a pickle calls what its author chose. Here every name on a list becomes a stand-in that
keeps its arguments and its state, and a name that is not on the list ends the reading. The list is
what checkpoints of Megatron 0.16 to 0.19 hold: their arguments, what torch needs for tensors and
for the index of a distributed checkpoint, and the state of Transformer Engine's FP8 recipes.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, BinaryIO, cast

_DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool"),
    *("complex64", "complex128"),
)
_STORAGES = (
    *("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool"),
    *("Untyped", "Float8_e4m3fn", "Float8_e5m2"),
)
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


class NotListed(Exception):  # noqa: N818  (an answer, not an error)
    """A pickle names something that no checkpoint of Megatron holds."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(name)


class Inert:
    """Stands for an object of a pickle: what it was called with, and the state it was given."""

    name = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        """Whatever the real class would take."""
        found = object.__new__(cls)
        found.args, found.state = args, None
        return found

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args: tuple[Any, ...]
        self.state: Any

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __call__(self, *args: Any, **kwargs: Any) -> Inert:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        """A dictionary's, and `append` and the like those of lists and sets: nothing is kept."""

    def append(self, value: Any) -> None:
        """See `__setitem__`."""

    def extend(self, values: Any) -> None:
        """See `__setitem__`."""

    def add(self, value: Any) -> None:
        """See `__setitem__`."""

    def field(self, name: str) -> Any:
        """A field of an object whose state is its `__dict__`.

        Raises:
            KeyError: there is no such field.
        """
        if not isinstance(self.state, dict):
            raise KeyError(name)
        return self.state[name]


def loads(data: bytes, storage: Callable[[Any], object] = lambda pid: pid) -> Any:
    """The content of a pickle, with stand-ins for its objects.

    Args:
        data: the pickle.
        storage: told what names each storage of a tensor.

    Raises:
        NotListed: it names something else than what checkpoints hold.
        Exception: it is damaged; `pickle` has no error of its own for that.
    """
    return _Unpickler(io.BytesIO(data), storage).load()


def plain(value: Any) -> Any:
    """A stand-in as a value that can be compared and printed."""
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

    def find_class(self, module: str, name: str) -> Any:
        """Never imports."""
        real = _REAL.get((module, name))
        if real is not None:
            return real
        if name not in _LISTED.get(module, ()):
            raise NotListed(f"{module}.{name}")
        return type(name, (Inert,), {"name": f"{module}.{name}"})

    def persistent_load(self, pid: Any) -> Any:
        """A storage, whose bytes are elsewhere in the archive."""
        self._storage(pid)
        return pid


class _Bytes(Inert):
    """An object kept as bytes, most often a pickle itself, which the run will load as well."""

    name = "io.BytesIO"

    def __new__(cls, *args: Any, **kwargs: Any) -> _Bytes:
        for one in (*args, *kwargs.values()):
            refuse_nested(one)
        return cast("_Bytes", super().__new__(cls, *args))

    def __setstate__(self, state: Any) -> None:
        for one in state if isinstance(state, tuple) else ():
            refuse_nested(one)


def refuse_nested(data: object) -> None:
    """Go through bytes that may be pickles or an archive of torch themselves.

    Bytes that are neither end where they stop making sense, for us as for whoever loads them: a
    stand-in takes everything that the object it stands for would take.

    Raises:
        NotListed: what `loads` raises.
        saved_archive.Damaged: it is an archive, and not one that can be gone through.
    """
    from cppmega import saved_archive

    if not isinstance(data, bytes | bytearray):
        return
    if data.startswith(b"PK\x03\x04"):
        saved_archive.load(io.BytesIO(data))
        return
    stream = io.BytesIO(data)
    while stream.tell() < len(data):  # torch once wrote several in a row
        try:
            _Unpickler(stream).load()
        except (NotListed, saved_archive.Damaged, RecursionError):
            raise
        except Exception:
            return


def _latin1(text: str, encoding: str = "latin1") -> bytes:
    """How protocol 2 writes bytes. Any other codec would be looked for among modules."""
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
"""What a reader needs as it is: containers, and whatever may hold another pickle."""
