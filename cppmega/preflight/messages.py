"""Orders to the preflight's child processes and their answers, exchanged as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from cppmega.checkpoints.files import Archive


class Order(Struct, frozen=True, kw_only=True):
    """An order to a child process."""

    parent: int | None = None
    """Process that waits for the answer; set by `ask`."""


class RankOrder(Order, frozen=True, kw_only=True):
    """Import what a rank imports, and parse a launch line."""

    root: str | None
    """Folder that holds megatron/; None: the one that Python would import."""
    expected: str
    """The folder that the other checks inspected."""
    accepted: Mapping[str, str] = {}
    """Edited files of Megatron that may be trained: path -> SHA-256."""
    argv: tuple[str, ...] | None = None
    """Arguments for Megatron's parser; None: nothing is parsed."""
    world: int | None = None
    """Number of ranks; None: the fewest that the line's parallel sizes allow."""
    only_parses: bool = False
    """Whether nothing is compared with what was applied."""
    arguments_from: tuple[str, ...] = ()
    """Modules that are imported before Megatron's parser is built: `MODULE`, `MODULE:FUNCTION`."""
    respells: bool = False
    """Whether a script's own parser may spell Megatron's arguments as fields: see `respelled`."""


class ParsedLine(Struct, frozen=True, kw_only=True):
    """A launch line after the installed version's own parser and validation."""

    refused: str = ""
    """Why the parser refuses it."""
    unknown: Mapping[str, str] = {}
    """Words that the parser does not know -> the nearest argument that it has, or an empty word."""
    args: Mapping[str, Any] = {}
    """Name -> value, before validation; empty where the parser refuses the line."""
    respelled: tuple[str, ...] = ()
    """Options that were read as the arguments of Megatron that they name as fields."""
    added: tuple[str, ...] = ()
    """Names in args that are not Megatron's own."""
    invalid: str = ""
    """Why Megatron's validation refuses it."""
    unset: tuple[str, ...] = ()
    """Arguments whose absence is the reason: neither the line nor a default gives them a value."""


class RankAnswer(Struct, frozen=True, kw_only=True):
    """The findings of a process that imports what a rank imports."""

    problems: list[dict[str, str]]
    """The parts of each error."""
    imported: str = ""
    """Summary of what was imported."""
    line: ParsedLine | None = None
    """None where no line was to be parsed, or a problem came first."""


class DevicesOrder(Order, frozen=True, kw_only=True):
    """List the GPUs, and try to import modules on them."""

    root: str
    modules: list[str]


class Device(Struct, frozen=True):
    """One GPU that torch can use."""

    name: str
    capability: tuple[int, int]
    total: int
    """Bytes."""
    free: int
    uuid: str = ""

    @property
    def architecture(self) -> str:
        """The name of its CUDA architecture, such as sm_90."""
        return f"sm_{self.capability[0]}{self.capability[1]}"


class DevicesAnswer(Struct, frozen=True, kw_only=True):
    """The GPUs as torch sees them."""

    devices: tuple[Device, ...] = ()
    compiled_for: tuple[str, ...] = ()
    """Architectures in the installed torch, such as sm_90 and compute_90."""
    imports: Mapping[str, str] = {}
    """Module -> why it cannot be imported; empty where it can."""
    why: str = ""
    """Why torch can use no GPU."""


class SparseAttention(Struct, frozen=True):
    """The sizes of DSA's attention on a rank."""

    heads: int
    width: int
    """Width of queries and keys."""
    value_width: int
    """The first columns of the keys, where one latent key serves all heads."""
    key_per_head: bool


class ParityOrder(Order, frozen=True, kw_only=True):
    """Compare the fused kernels with their references."""

    device: str
    attentions: tuple[SparseAttention, ...] = ()
    """The sizes at which our kernels of the sparse attention are compared."""
    first_kernel: bool = False
    """Whether Mamba-3's TileLang kernel is run before all others."""


class KernelParity(Struct, frozen=True):
    """One fused kernel next to its reference."""

    kernel: str
    error: float | None
    """Relative L2 distance; None where there is no finite one."""
    ok: bool
    why: str = ""
    """The exception that the kernel raised."""


class SharedMemory(Struct, frozen=True):
    """Dynamic shared memory of one compiled kernel."""

    kernel: str
    bytes: int
    ok: bool
    """It fits into a block of sm_120 and sm_121."""


class ParityAnswer(Struct, frozen=True):
    """The results of the kernels, and the code they were compiled to."""

    kernels: list[KernelParity]
    shared: list[SharedMemory]
    first: str = ""
    """What the TileLang kernel that was compiled first returns; empty if it is right."""


class CheckpointOrder(Order, frozen=True, kw_only=True):
    """Open the archives of a checkpoint, without running what they name."""

    archives: list[Archive]


class CheckpointAnswer(Struct, frozen=True, kw_only=True):
    """The arguments in the archives."""

    problem: dict[str, str] | None = None
    """The parts of the error that opening them raised."""
    arguments: Mapping[str, Any] = {}
    """Megatron's arguments of the run that saved it; empty if it has none."""
