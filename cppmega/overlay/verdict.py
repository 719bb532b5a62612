"""The states of a patch on a tree, one word each, and which of them are failures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

PatchState = Literal[
    "applied",
    "armed",
    "pending",
    "upstreamed",
    "not-applicable",
    "off",
    "drifted",
    "moved",
    "absent",
    "ambiguous",
    "foreign",
    "conflict",
    "too-late",
    "stale-reference",
    "unported",
]
Proof = Literal["passed", "failed", "unverified", "stale"]

MEANING: dict[PatchState, str] = {
    "applied": "its text is in the tree",
    "armed": "a runtime patch; it is installed when its module is imported",
    "pending": "known text; `python -m cppmega.apply_patches` applies it",
    "upstreamed": "upstream has the fix",
    "not-applicable": "there is nothing to fix: the feature does not exist in this tree",
    "off": "its gate is not set, or it was left out or removed by name",
    "drifted": "the text of the target is not known",
    "moved": "the target is in another file",
    "absent": "the target does not exist",
    "ambiguous": "the target is defined more than once",
    "foreign": "a file of the patch was edited outside cppmega",
    "conflict": "two pages edit one symbol without a declared order",
    "too-late": "its module was imported before the patch was armed",
    "stale-reference": "something still holds the original object",
    "unported": "it has not been ported to this tree; a failure if it applied before, or a recipe "
    "needs it",
}
PROOFS: dict[Proof, str] = {
    "passed": "the proof holds: on this machine, or as it was recorded on a GPU",
    "unverified": "the proof has not run on this text; `cppmega verify` runs it",
    "failed": "the proof does not hold",
    "stale": "the recorded proof is for a different text; `cppmega verify` creates a new one",
}
FAILURES: frozenset[PatchState] = frozenset(
    {
        "drifted",
        "moved",
        "absent",
        "ambiguous",
        "foreign",
        "conflict",
        "too-late",
        "stale-reference",
    }
)
"""`unported` is one only for a patch that applied before, or that a recipe needs."""
DONE: frozenset[PatchState] = frozenset({"applied", "armed"})
NEEDED: frozenset[PatchState] = DONE | {"pending"}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on one patch for one tree."""

    name: str
    kind: str
    state: PatchState
    target: str
    detail: str = ""
    proof: Proof = "unverified"
    targets: tuple[str, ...] = field(default=())
    next: str = ""
    """The command that resolves a failure; empty otherwise."""
    served: str = ""
    """The version of megatron-core to which a patch that is now unported applied before."""

    @property
    def failed(self) -> bool:
        """Whether it stops an apply."""
        return self.state in FAILURES or bool(self.served)

    @property
    def blocks(self) -> bool:
        """Whether a run must not start with it."""
        return self.failed or self.state == "pending"

    def as_json(self) -> dict[str, Any]:
        """One entry of `patches` in the JSON answer."""
        return {
            "name": self.name,
            "kind": self.kind,
            "state": self.state,
            "proof": self.proof,
            "target": self.target,
            "targets": list(self.targets),
            "detail": self.detail,
            "next": self.next,
        }


def summary(verdicts: Iterable[Verdict]) -> str:
    """Count the verdicts by state: `12 applied, 1 armed, 2 upstreamed`."""
    counts: dict[str, int] = {}
    for verdict in verdicts:
        counts[verdict.state] = counts.get(verdict.state, 0) + 1
    return ", ".join(f"{count} {state}" for state, count in counts.items()) or "no patches"
