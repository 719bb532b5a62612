"""The profile of some steps of a run, as stored in `summary.json`: where their time went."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from cppmega.errors import CppmegaError
from cppmega.host import table as host_table
from cppmega.runs import json_file
from cppmega.runs.folder import Run

SCHEMA = 1
TRACE, SUMMARY = "trace.json.gz", "summary.json"
OTHER = "other"
"""The kind of kernels whose names match no rule; they are listed by name."""

_SHOWN_KERNELS = 10
_SHOWN_WAITS = 8
_SHOWN_NAME = 60
"""Characters of a kernel's name in a table."""
_SHOWN_OTHER = 100
"""The same for a kernel of no known kind, whose template may show what it is."""
_SHOWN_HOST = 3
"""Number of the host's longest activities listed for a wait."""


class _Part(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a profile. Milliseconds and counts are means per step unless stated otherwise."""


class KernelTotal(_Part, frozen=True, kw_only=True):
    """All launches of one kernel."""

    name: str
    ms: float
    launches: float


class KindTotal(_Part, frozen=True, kw_only=True):
    """All kernels of one kind."""

    kind: str
    ms: float
    """The kinds add up to the busy time: each instant counts once, for communication and copies
    only if nothing else runs."""
    share: float
    """Share of the step's time."""
    summed_ms: float
    """The sum of the durations, whatever ran at the same time."""
    launches: float
    kernels: tuple[KernelTotal, ...]
    """The longest ones; for the kind `other`, all."""


class StepTime(_Part, frozen=True, kw_only=True):
    """One step."""

    step: int
    ms: float
    busy_ms: float
    launches: int


class Wait(_Part, frozen=True, kw_only=True):
    """What the host did while the device waited."""

    host: str
    ms: float
    gaps: float
    """How many gaps between kernels it is in."""


class Gap(_Part, frozen=True, kw_only=True):
    """One gap between kernels; not a mean."""

    step: int
    at_ms: float
    """Milliseconds since the beginning of the step."""
    ms: float
    before: str
    """The kernel that ended; empty at the beginning of the profile."""
    after: str
    """The kernel that began; empty at its end."""
    host: dict[str, float]
    """What the host did meanwhile -> milliseconds."""


class Profile(_Part, frozen=True, kw_only=True):
    """The profile of some steps on one rank."""

    schema: int = SCHEMA
    recipe: str
    changes: tuple[str, ...] = ()
    overlay: str = ""
    megatron: str = ""
    versions: dict[str, str] = {}
    device: str
    """The name of the GPU."""
    rank: int = 0
    world_size: int = 1
    trace: str = TRACE
    steps: tuple[StepTime, ...]
    step_ms: float
    unprofiled_step_ms: float | None = None
    """Median of the steps before, since the profiler slows the host down; None: too few steps."""
    busy_ms: float
    waiting_ms: float
    waiting_share: float
    launches: float
    """Kernels, copies and fills that the device ran."""
    synchronizations: float
    """Calls in which the host waited for the device."""
    synchronizing_ms: float
    kinds: tuple[KindTotal, ...]
    waits: tuple[Wait, ...]
    gaps: tuple[Gap, ...]
    """The longest ones."""


def read(run: Run) -> Profile:
    """Read the profile of a run.

    Raises:
        CppmegaError: `no-profile`.
    """
    file = run.profile / SUMMARY
    profile = json_file.read(file, Profile)
    if profile is None or profile.schema != SCHEMA:
        raise CppmegaError(
            "no-profile",
            f"{run.name} has no readable profile in {file.parent}.",
            "It was not profiled, has not reached the profiled steps yet, or ended before them.",
            "cppmega launch RECIPE --profile 2; cppmega runs shows how it ended",
        )
    return profile


def short(name: str) -> str:
    """A kernel's name without return type, namespaces, template and parameters."""
    copied = re.search(r"(\w+_kernel_cuda|\w+Functor\w*)", name)
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    head = re.split(r"[<(]", plain, maxsplit=1)[0].rpartition("::")[2] or plain
    inner = f"<{copied[1]}>" if copied and copied[1] not in head and "<" in plain else ""
    text = head + inner if "::" in plain or "<" in plain else plain
    return clipped(text, _SHOWN_NAME)


def clipped(text: str, width: int) -> str:
    """A text, or as much of its beginning as fits."""
    return text if len(text) <= width else text[: width - 3] + "..."


def lines(profile: Profile) -> Iterator[str]:
    """The profile as text."""
    yield from _head(profile)
    yield ""
    yield from _kinds(profile)
    yield ""
    yield "longest kernels"
    yield from _kernels(profile)
    yield from _others(profile)
    yield ""
    yield "while the device waited, the host was in"
    rows = [
        host_table.Row((f"{wait.ms:.1f}", f"{wait.gaps:.0f} gaps", wait.host))
        for wait in profile.waits[:_SHOWN_WAITS]
    ]
    yield from host_table.table(rows, right=(0, 1), indent=2)
    yield ""
    yield "longest waits"
    yield from (f"  {_gap(gap)}" for gap in profile.gaps)


def _head(profile: Profile) -> Iterator[str]:
    first, last = profile.steps[0].step, profile.steps[-1].step
    changes = f" ({', '.join(profile.changes)})" if profile.changes else ""
    versions = dict(profile.versions)
    if profile.megatron:  # the one that was imported
        versions["megatron-core"] = profile.megatron
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    yield (
        f"profile of {profile.recipe}{changes}, steps {first} to {last}, rank {profile.rank} of "
        f"{profile.world_size}, {profile.device}"
    )
    yield f"overlay {profile.overlay or '-'}, {packages}"
    before = profile.unprofiled_step_ms
    without = "" if before is None else f" ({before:.1f} without the profiler)"
    yield (
        f"step {profile.step_ms:.1f} ms{without}: busy {profile.busy_ms:.1f}, waiting "
        f"{profile.waiting_ms:.1f} ({_percent(profile.waiting_share)}); "
        f"{profile.launches:.0f} launches, the host waited {profile.synchronizations:.0f} times, "
        f"{profile.synchronizing_ms:.1f} ms"
    )


def _kinds(profile: Profile) -> Iterator[str]:
    rows = [("kind", "ms", "share", "launches", "longest")]
    for kind in profile.kinds:
        longest = f"{short(kind.kernels[0].name)} {kind.kernels[0].ms:.1f}"
        rows.append(
            (kind.kind, f"{kind.ms:.1f}", _percent(kind.share), f"{kind.launches:.0f}", longest)
        )
    rows.append(("waiting", f"{profile.waiting_ms:.1f}", _percent(profile.waiting_share), "", ""))
    return host_table.table([host_table.Row(cells) for cells in rows], right=(1, 2, 3))


def _kernels(profile: Profile) -> Iterator[str]:
    named = [(one.ms, one, kind.kind) for kind in profile.kinds for one in kind.kernels]
    longest = sorted(named, key=lambda row: -row[0])[:_SHOWN_KERNELS]
    rows = [
        host_table.Row((f"{ms:.1f}", f"{one.launches:.0f} x", short(one.name), kind))
        for ms, one, kind in longest
    ]
    return host_table.table(rows, right=(0, 1), indent=2)


def _others(profile: Profile) -> Iterator[str]:
    kernels = [one for kind in profile.kinds if kind.kind == OTHER for one in kind.kernels]
    if kernels:
        yield ""
        yield "other kernels"
        for one in kernels:
            yield f"  {one.ms:.2f} ms, {one.launches:.0f} x {clipped(one.name, _SHOWN_OTHER)}"


def _gap(gap: Gap) -> str:
    longest = sorted(gap.host.items(), key=lambda item: -item[1])[:_SHOWN_HOST]
    host = ", ".join(f"{name} {ms:.2f}" for name, ms in longest)
    place = f"after {short(gap.before)}" if gap.before else "before the first kernel"
    return f"step {gap.step}, {gap.at_ms:.1f} ms: {gap.ms:.2f} ms {place}: {host}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def of_both(one: Run, other: Run) -> Iterator[str]:
    """The profiles of two runs side by side; nothing unless both have one."""
    try:
        profiles = read(one), read(other)
    except CppmegaError:
        return
    yield ""
    yield "profiles, per step"
    yield from side_by_side(*profiles)


def side_by_side(one: Profile, other: Profile) -> Iterator[str]:
    """Two profiles, kind by kind."""
    rows: list[tuple[str, ...]] = [("", "ms A", "ms B", "B - A", "launches A", "launches B")]
    a = {kind.kind: (kind.ms, kind.launches) for kind in one.kinds}
    b = {kind.kind: (kind.ms, kind.launches) for kind in other.kinds}
    for kind in sorted(a.keys() | b.keys(), key=lambda kind: -max(_ms(a, kind), _ms(b, kind))):
        rows.append(_pair(kind, a.get(kind, (0.0, 0.0)), b.get(kind, (0.0, 0.0))))
    waiting = ((one.waiting_ms, 0.0), (other.waiting_ms, 0.0))
    steps = ((one.step_ms, one.launches), (other.step_ms, other.launches))
    rows += [_pair("waiting", *waiting), _pair("step", *steps)]
    return host_table.table([host_table.Row(cells) for cells in rows], right=range(1, 5))


def _ms(kinds: dict[str, tuple[float, float]], kind: str) -> float:
    return kinds.get(kind, (0.0, 0.0))[0]


def _pair(name: str, a: tuple[float, float], b: tuple[float, float]) -> tuple[str, ...]:
    times = (f"{a[0]:.1f}", f"{b[0]:.1f}", f"{b[0] - a[0]:+.1f}")
    return (name, *times, *(f"{count:.0f}" if count else "" for count in (a[1], b[1])))
