"""Run every check on a launch, before anything is started.

Checks run in order, and each reports its name before it starts. A check whose prerequisite failed
is `not-run`, which is not a pass. A prerequisite with no errors but those in its `APART` holds for
the checks after it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cppmega.errors import CppmegaError, did_you_mean
from cppmega.host import next_command
from cppmega.overlay import receipt
from cppmega.preflight.checks import ORDER
from cppmega.preflight.context import Context
from cppmega.preflight.findings import Finding, NotApplicable, Problems, Remark

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Preflight:
    """The result of all checks."""

    findings: tuple[Finding, ...]
    megatron: dict[str, str] | None
    """Version and root; None where no tree was found."""
    digest: str
    """Digest of the overlay that the receipt names; empty if there is none."""

    @property
    def ok(self) -> bool:
        """Whether every check holds or does not apply to this launch."""
        return all(finding.state in ("ok", "not-applicable") for finding in self.findings)

    @property
    def failures(self) -> list[Finding]:
        """The failures, root causes first."""
        return [finding for finding in self.findings if finding.state == "failed"]

    def as_json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        return {
            "schema": 1,
            "megatron": self.megatron,
            "digest": self.digest,
            "ok": self.ok,
            "checks": [finding.as_json() for finding in self.findings],
        }


def examine(context: Context, progress: Progress | None = None) -> Preflight:
    """Run every check on a launch; nothing is written, nothing is started.

    Args:
        progress: called with a check's name before it starts.
    """
    findings: list[Finding] = []
    unsound = context.unsound
    skipped = context.configuration.skip_checks
    for name in skipped:
        if name not in ORDER:
            raise CppmegaError(
                "unknown-check",
                f"{context.configuration.file} skips {name}, which is no check of the preflight."
                + did_you_mean(name, ORDER),
                "A check that was meant to be skipped would still refuse the launch.",
                "cppmega preflight -v lists the checks",
            )
    for name in ORDER:
        if name in skipped:
            why = f"skipped by {context.configuration.file}: {skipped[name]}"
            findings.append(Finding(name, "not-applicable", what=Remark(why)))
            continue
        module = importlib.import_module(f"cppmega.preflight.checks.{name}")
        broken = [earlier for earlier in getattr(module, "AFTER", ()) if earlier in unsound]
        if broken:
            findings.append(Finding(name, "not-run", what=f"{broken[0]} does not hold"))
            unsound.add(name)
            continue
        if progress is not None:
            progress(name)
        answered = answers(name, context)
        findings += answered
        apart = getattr(module, "APART", ())
        if any(one.state == "not-run" or one.name not in ("", *apart) for one in answered):
            unsound.add(name)
    if "one_root" in unsound:
        return Preflight(tuple(findings), None, "")
    session = context.session
    megatron = {"version": session.read_tree().version, "root": str(session.root)}
    return Preflight(tuple(findings), megatron, receipt.load(session.read_tree()).receipt.digest)


def answers(name: str, context: Context) -> list[Finding]:
    """The findings of one check, independent of the others."""
    module = importlib.import_module(f"cppmega.preflight.checks.{name}")
    problems: list[CppmegaError] = []
    detail = ""
    try:
        for part in _parts(module.check(context)):
            if isinstance(part, CppmegaError):
                problems.append(part)
            else:
                detail = part
    except NotApplicable as reason:
        if not problems:
            return [Finding(name, reason.state, what=str(reason))]
    except CppmegaError as error:
        problems.append(error)
    if problems:
        return [_failed(name, error, context.root) for error in problems]
    return [Finding(name, "ok", what=detail)]


def _parts(answer: str | Problems) -> Iterator[CppmegaError | str]:
    """The problems of a check, and its line of detail last."""
    yield answer if isinstance(answer, str) else (yield from answer)


def _failed(check: str, error: CppmegaError, root: Path | None) -> Finding:
    """A failure, whose next command names the tree that was checked."""
    command = next_command.carrying(error.next, root)
    return Finding(check, "failed", error.name, error.what, error.why, command)
