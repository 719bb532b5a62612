"""The comparison of all ranks: each is whole by itself, and all of them run the same code."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from cppmega.calls import Count
from cppmega.errors import CppmegaError
from cppmega.guard import children, files, interpreter, modules, ranks, swaps
from cppmega.guard.held import Guard
from cppmega.guard.reached import NOTHING, Seen

_STACK = ("torch", "triton", "transformer_engine", "tilelang", "mamba_ssm", "liger_kernel")


@dataclass(frozen=True, slots=True)
class Answer:
    """What one process has found about itself."""

    where: str
    overlay: str
    """The digest of its overlay."""
    stack: dict[str, str]
    """The versions of what it has imported."""
    files: str
    """One hash over the files that it has imported."""
    problem: CppmegaError | None
    """Why this process would train, or has trained, other code."""
    replaced: CppmegaError | None
    """Which file was replaced on disk after this process had imported it."""
    seen: Seen
    calls: dict[str, Count]


def problem_of_this_process() -> CppmegaError | None:
    """What is wrong with the interpreter, the processes below it, or the code in memory."""
    try:
        interpreter.check()
        children.check(ranks.where())
        swaps.check()
        modules.check()
    except CppmegaError as error:
        return error
    return None


def answer(
    guard: Guard,
    seen: Seen = NOTHING,
    calls: Mapping[str, Count] = MappingProxyType({}),
) -> Answer:
    """Look at this process."""
    problem = problem_of_this_process()
    judged = files.look(guard.session.read_tree().root, guard.receipt)
    late = [one for one in judged.problems if one in judged.replaced]
    now = [one for one in judged.problems if one not in judged.replaced]
    return Answer(
        ranks.where(),
        guard.receipt.digest,
        stack(),
        judged.digest,
        problem or modules.counted(now),
        modules.counted(late),
        seen,
        dict(calls),
    )


def refuse(answers: Sequence[Answer], when: str, *, keep_replaced: bool = False) -> None:
    """Raise, on every rank, the first thing that is wrong on one of them.

    Args:
        answers: those of all ranks, or of this process alone.
        when: for messages, as in "before a checkpoint".
        keep_replaced: let files pass that were replaced on disk after their import.

    Raises:
        CppmegaError: the problem of a rank, `overlay-differs`, `stack-differs`,
            `imported-differs`.
    """
    problems = [(one.where, one.problem) for one in answers]
    if not keep_replaced:
        problems += [(one.where, one.replaced) for one in answers]
    refuse_first(problems, when)
    _refuse_differing("overlay", {one.where: one.overlay for one in answers})
    for name in dict.fromkeys(name for one in answers for name in one.stack):
        _refuse_differing(name, {a.where: a.stack[name] for a in answers if name in a.stack})
    if len({one.files for one in answers}) > 1:  # pipeline stages import different files
        _refuse_files(ranks.gather((ranks.where(), files.last().files)))


def refuse_first(problems: Iterable[tuple[str, CppmegaError | None]], when: str = "") -> None:
    """Raise the first error of some rank, with the places of all ranks that have one.

    Raises:
        CppmegaError: under the name of that error.
    """
    broken = [(where, error) for where, error in problems if error is not None]
    if broken:
        first, at = broken[0][1], f", {when}" if when else ""
        texts = dict.fromkeys(f"{where}{at}: {error.what}" for where, error in broken[:8])
        raise CppmegaError(first.name, " ".join(texts), first.why, first.next)


def stack() -> dict[str, str]:
    """The versions of Python and of the packages that this process has imported."""
    versions = {"Python": sys.version.partition(" ")[0]}
    for name in _STACK:
        version = getattr(sys.modules.get(name), "__version__", None)
        if isinstance(version, str):
            versions[name] = version
    torch = sys.modules.get("torch")
    if torch is not None and torch.version.cuda:
        versions["CUDA"] = torch.version.cuda
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return versions


def _refuse_differing(name: str, held: dict[str, str]) -> None:
    if len(set(held.values())) < 2:
        return
    text = ", ".join(f"{place} has {value}" for place, value in held.items())
    if name == "overlay":
        raise CppmegaError(
            "overlay-differs",
            f"The ranks hold {len(set(held.values()))} overlays: {text}.",
            "They would train different code.",
            "run `python -m cppmega.apply_patches` with one version of cppmega on every host",
        )
    raise CppmegaError(
        "stack-differs",
        f"The ranks run different versions of {name}: {text}.",
        "Their kernels and collectives may compute different things, or wait for each other.",
        f"install one version of {name} on every host",
    )


def _refuse_files(everyone: Iterable[tuple[str, dict[str, str]]]) -> None:
    """Compare the files that more than one rank has imported."""
    first: dict[str, tuple[str, str]] = {}
    for where, held in everyone:
        for path, digest in held.items():
            place, known = first.setdefault(path, (where, digest))
            if known != digest:
                raise CppmegaError(
                    "imported-differs",
                    f"{path} is {known[:12]} on {place} and {digest[:12]} on {where}.",
                    "The ranks would train different code.",
                    "install the same files on every host; copy an extension built on one, "
                    "or build it on each with the same compiler",
                )
