"""The names that a checkpoint's pickles may contain, and stand-ins for the objects they name.

Loading a pickle calls whatever its author chose to name. Every name on the list becomes a stand-in
that keeps its arguments and its state; nothing is imported. The list covers checkpoints of Megatron
0.16 to 0.19: their arguments, what torch needs for tensors and for the index of a distributed
checkpoint, and the state of Transformer Engine's FP8 recipes.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

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
LISTED: dict[str, tuple[str, ...]] = {
    "argparse": ("Namespace",),
    "types": ("SimpleNamespace",),
    "pathlib": ("Path", "PosixPath", "PurePosixPath"),
    "pathlib._local": ("Path", "PosixPath", "PurePosixPath"),
    "signal": ("Signals",),
    "builtins": ("int", "float", "bool", "str", "bytes", "list", "tuple", "dict", "complex"),
    "torch": (*_DTYPES, *(f"{name}Storage" for name in _STORAGES), "device", "Tensor"),
    "torch.storage": ("UntypedStorage", "TypedStorage", "_load_from_bytes"),
    "io": ("BytesIO",),
    "_io": ("BytesIO",),
    "megatron.core.safe_globals": ("safe_load_from_bytes",),
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
    """A pickle names something that no checkpoint of Megatron contains."""


class Damaged(Exception):  # noqa: N818  (turned into an error where the file is known)
    """The bytes differ from what was written; the message states where."""


class Inert:
    """A stand-in for an object of a pickle, with its arguments and its state."""

    name = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        """Accept any arguments, as the real class may."""
        made = object.__new__(cls)
        made.args, made.state = (*args, *kwargs.values()), None
        return made

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


def contents(value: object) -> Iterator[object]:
    """Every object inside the content of a pickle, once, however often it is shared."""
    seen, waiting = set(), [value]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, type | str | int | float | None):
            continue
        seen.add(id(one))
        yield one
        match one:
            case dict():
                waiting += [*one.keys(), *one.values()]
            case list() | tuple() | set() | frozenset():
                waiting += one
            case Inert():
                waiting += [one.args, one.state]
            case _:
                waiting += getattr(one, "__dict__", {}).values()


def plain(value: Any, depth: int = 2) -> Any:
    """Convert a value of the arguments to one that can be compared and printed."""
    match value:
        case Inert():
            return "/".join(str(one) for one in value.args if isinstance(one, str | int))
        case list() | tuple() if depth:
            return [plain(one, depth - 1) for one in value[:1000]]
        case int() if value.bit_length() > 64:
            return "a large number"
        case int() | float() | str() | None:
            return value
    # Printing an object prints all that it holds, which may hold itself many times over.
    known = isinstance(value, Enum) or not (
        isinstance(value, _CONTAINERS) or hasattr(value, "__dict__")
    )
    return (str(value) if known else type(value).__name__).removeprefix("torch.")


_CONTAINERS = (dict, list, tuple, set, frozenset, bytes, bytearray)


class Unpickler(pickle.Unpickler):
    """Reads the pickles that no `torch.load` opens: the index, and the state of FP8 recipes."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.names_something = False

    def find_class(self, module: str, name: str) -> Any:
        """Return a stand-in; nothing is imported.

        Raises:
            NotListed: the name is not on the list.
        """
        self.names_something = True
        try:
            return STAND_INS[f"{module}.{name}"]
        except KeyError:
            raise NotListed(f"{module}.{name}") from None

    def persistent_load(self, pid: Any) -> Any:
        """Report a storage, whose bytes are elsewhere in the archive."""
        return pid


def _latin1(text: str, encoding: str = "latin1") -> bytes:
    """Encode bytes the way protocol 2 does; looking up another codec could import a module."""
    if encoding not in ("latin1", "latin-1"):
        raise NotListed(f"_codecs.encode to {encoding}")
    return text.encode("latin-1")


_REAL: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": OrderedDict,
    "collections.Counter": Counter,
    # Not the real one: torch sets items of no other types than these two and dict.
    "collections.defaultdict": lambda *factory: {},
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "builtins.bytearray": bytearray,
    "_codecs.encode": _latin1,
    "torch.Size": tuple,
}
"""Names that are not replaced by stand-ins: containers."""

STAND_INS = _REAL | {
    f"{module}.{name}": type(name, (Inert,), {"name": f"{module}.{name}"})
    for module, names in LISTED.items()
    for name in names
}
"""Each name on the list, and what takes its place."""
