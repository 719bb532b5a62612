"""Run many configurations on stock and on patched megatron-core, and compare the outcomes.

    python -m benchmarks.configurations --count 300

Small GPT and hybrid models train two steps on CPU ranks (gloo), save a checkpoint, take the next
step, load the checkpoint and take that step again; then each tree loads what the other has saved.
All must be equal to the bit, unless a page says under `Numerics:` that it changes it: then within
the bound in tests/configurations/law.py. Configurations that cover all pairs of settings come
first, then random ones. What is in --out of the same overlay is not computed again.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import click

from benchmarks.harness import results
from cppmega.host import console, durable
from cppmega.overlay import verbs as overlay
from cppmega.overlay.receipt import load
from tests.configurations import law, settings
from tests.configurations.settings import AXES, FOUND, Configuration, cover
from tests.configurations.trees import opened, records_of
from tests.support import VERSIONS, patched, pristine


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", default=VERSIONS[-1], show_default=True, help="Of megatron-core.")
@click.option("--count", default=300, show_default=True, help="Configurations, but all pairs.")
@click.option("--seed", default=0, show_default=True, help="Seed of the random draw.")
@results.out_option()
def main(version: str, count: int, seed: int, out: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        os.environ.setdefault("TESTS_SCRATCH", scratch)
        root = patched(version)
        digest = load(overlay.Session(root).read_tree()).receipt.digest
        chosen = drawn(count, seed)
        file = out / "configurations.json"
        result = _begun(file, version, digest)
        try:
            run(chosen, pristine(version), root, result, file)
        finally:
            (out / "configurations.md").write_text(table(result))
    bad = [row for row in result["rows"] if _kinds(row) & set(law.REGRESSIONS)]
    for row in bad:
        click.echo(f"{_named(row)}: {row['findings']}")
    click.echo(_summary(result))
    raise SystemExit(1 if bad else 0)


def drawn(count: int, seed: int) -> list[Configuration]:
    """The cover of all pairs, those in which pages were wrong, and then others at random."""
    chosen = dict.fromkeys([*cover(), *FOUND])
    others = settings.drawn(seed)
    while len(chosen) < count:
        chosen[next(others)] = None
    return list(chosen)


def _begun(file: Path, version: str, digest: str) -> dict[str, Any]:
    """The result so far, if it is of the same code; otherwise an empty one."""
    fresh = {"megatron-core": version, "overlay": digest, "axes": AXES, "legal": settings.count()}
    kept: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    same = all(kept.get(key) == fresh[key] for key in ("megatron-core", "overlay", "legal"))
    return kept if same else {**fresh, "rows": []}


def run(
    chosen: Iterable[Configuration], stock: Path, root: Path, result: dict[str, Any], file: Path
) -> None:
    """Run what is missing, and write the file after each configuration."""
    done = {tuple(row["configuration"].values()) for row in result["rows"]}
    missing = [c for c in chosen if tuple(asdict(c).values()) not in done]
    if not missing:
        return
    progress = console.Progress("configurations", len(missing))
    with opened(stock, root) as (one, other), progress:
        for setting in missing:
            progress(setting.name)
            records = records_of(setting, one, other)
            findings = law.judged(setting, records)
            result["rows"].append(row_of(setting, records, findings))
            result["date"] = date.today().isoformat()
            file.parent.mkdir(parents=True, exist_ok=True)
            durable.replace(file, _text(result).encode())
            for finding in findings:
                if finding.kind in law.REGRESSIONS:
                    console.say(f"{setting.name}: {finding}")


def row_of(
    setting: Configuration, records: dict[str, Any], findings: list[law.Finding]
) -> dict[str, Any]:
    """The recorded outcome of a configuration."""
    rows = {name: record["rows"] for name, record in records.items()}
    return {
        "configuration": asdict(setting),
        "completed": [name for name, stages in rows.items() if "resumed" in stages],
        "steps": {
            name: {stage: [sum(x["losses"]), x["gradient"]] for stage, x in stages.items()}
            for name, stages in rows.items()
        },
        "findings": [list(asdict(finding).values()) for finding in findings],
        "seconds": sum(record["seconds"] for record in records.values()),
    }


def _text(result: dict[str, Any]) -> str:
    head = {key: value for key, value in result.items() if key != "rows"}
    rows = ",\n".join(json.dumps(row) for row in result["rows"])
    return f'{json.dumps(head, indent=1)[:-2]},\n "rows": [\n{rows}\n]}}\n'


def _kinds(row: dict[str, Any]) -> set[str]:
    return {kind for kind, _, _ in row["findings"]}


def _named(row: dict[str, Any]) -> str:
    return Configuration(**row["configuration"]).name


def _summary(result: dict[str, Any]) -> str:
    rows = result["rows"]
    kinds = Counter(kind for row in rows for kind in _kinds(row))
    same = sum("stock" in row["completed"] and not _kinds(row) for row in rows)
    able = {name: sum(name in row["completed"] for row in rows) for name in ("stock", "patched")}
    return (
        f"{len(rows)} of {result['legal']} legal configurations on megatron-core "
        f"{result['megatron-core']}, overlay {result['overlay']}, {result['date']}. Completed: "
        f"{able['stock']} by stock, {able['patched']} by patched code. Equal to the bit: {same}; "
        f"different within the bound of a named page: {kinds['excused']}. Stock can and patched "
        f"cannot: {kinds['fails']}; different without an excuse: {kinds['differs']}; known and "
        f"not fixed: {kinds['known']}."
    )


def table(result: dict[str, Any]) -> str:
    groups: dict[str, list[tuple[str, str]]] = {}
    for row in result["rows"]:
        for kind, stage, detail in row["findings"]:
            text = detail.rpartition(": ")[2] if kind == "excused" else f"{stage}: {detail[:160]}"
            groups.setdefault(f"{kind}: {text}", []).append((_named(row), stage))
    names = {what: {name for name, _ in where} for what, where in sorted(groups.items())}
    axes = (f"{name} {'/'.join(map(str, of))}" for name, of in result["axes"].items())
    cell = lambda text: " ".join(text.split()).replace("|", "\\|")  # noqa: E731
    return results.page(
        _summary(result),
        f"Settings: {'; '.join(axes)}.",
        results.table(
            ["what", "configurations", "example"],
            ([cell(what), len(each), min(each, key=len)] for what, each in names.items()),
        ),
    )


if __name__ == "__main__":
    main()
