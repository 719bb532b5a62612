"""Generated documents are what the code and the result files say; every command has help."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import click
import msgspec
import pytest
from click.testing import CliRunner

from cppmega.catalogue import loader as catalogue
from cppmega.cli.main import cli
from cppmega.run import run
from examples.smoke import corpus
from examples.smoke.records import Summary

REPOSITORY = Path(__file__).resolve().parent.parent

sys.path.insert(0, str(REPOSITORY / "scripts"))
readme = importlib.import_module("readme_figures")
catalogue_readme = importlib.import_module("catalogue_readme")
exports_page = importlib.import_module("exports_page")


def test_the_catalogue_table_is_the_catalogue() -> None:
    written = (REPOSITORY / "upstream_patches" / "README.md").read_text()
    assert written == catalogue_readme.readme(), "run python scripts/catalogue_readme.py"


def test_the_page_about_upstream_shows_what_was_exported() -> None:
    written = (REPOSITORY / "docs" / "upstream.md").read_text()
    assert written == exports_page.page(), "run python scripts/catalogue_readme.py"
    record = json.loads(exports_page.record_file().read_text())["pages"]
    fixes = [name for name, page in catalogue.load().items() if page.patch.purpose == "fix"]
    assert sum(row["state"] == "exported" for row in record.values()) >= 10
    assert set(record) <= set(fixes)


def test_the_readme_shows_what_the_result_files_say() -> None:
    text = (REPOSITORY / "README.md").read_text()
    assert text == readme.rewritten(text), "run python scripts/readme_figures.py"


def test_the_production_status_is_what_recipes_and_results_say() -> None:
    text = (REPOSITORY / "docs" / "production.md").read_text()
    wanted = readme.filled(text, {"production": readme.production.page()})
    assert text == wanted, "run python scripts/readme_figures.py"


def test_the_tested_stacks_are_what_the_results_say() -> None:
    text = (REPOSITORY / "docs" / "stacks.md").read_text()
    wanted = readme.filled(text, readme.tables())
    assert text == wanted, "run python scripts/readme_figures.py"


def test_the_picture_of_the_kernels_shows_what_was_measured() -> None:
    shown = readme.kernel_plot.drawn()
    assert shown == readme.kernel_plot.numbers(), "run python scripts/readme_figures.py"
    assert all(value > 0 for panel in shown.values() for value in flat(panel)) and len(shown) == 3


def test_the_designs_of_the_attention_repeat_the_results() -> None:
    results = REPOSITORY / "benchmarks" / "results"
    cases = json.loads((results / "dsa_attention_h200.json").read_text())["cases"]
    text = (results / "dsa_attention_designs.md").read_text()
    for batch in (1, 4, 8):
        case = cases[f"NAM56R, b {batch}"]
        ways = [case[way]["backward"]["milliseconds"] for way in ("ours", "ours, deterministic")]
        assert f"| {batch} | {ways[0]} | {ways[1]} | {ways[1] / ways[0]:.2f} |" in text
    ways = [cases["DeepSeek-V3.2, 32k"][way] for way in ("tilelang", "ours")]
    for part in ("forward", "backward"):
        tilelang, ours = (way[part]["milliseconds"] for way in ways)
        assert f"{tilelang / ours:.2f} times" in " ".join(text.split()), part


def flat(value: object) -> list[float]:
    """The numbers of nested dicts and lists."""
    if isinstance(value, dict):
        return [number for part in value.values() for number in flat(part)]
    return (
        [number for part in value for number in flat(part)] if isinstance(value, list) else [value]
    )


def test_every_seed_of_the_smoke_run_shows_what_the_readme_claims() -> None:
    path = REPOSITORY / "benchmarks" / "results" / "smoke_cpu.json"
    runs = msgspec.json.decode(path.read_bytes(), type=dict[str, Summary]).values()
    stock = [run for run in runs if run.is_stock]
    patched = [run for run in runs if not run.is_stock]
    assert {run.seed for run in stock} == {run.seed for run in patched} and len(stock) >= 3
    assert {run.corpus for run in runs} == {corpus.digest(corpus.documents())}
    assert all(0.35 < run.wrong_mtp_labels / run.mtp_labels < 0.45 for run in stock)
    assert not any(run.wrong_mtp_labels for run in patched)
    for depth in (0, 1):
        best = min(run.true_mtp_loss[depth] for run in stock)
        assert all(run.true_mtp_loss[depth] < best for run in patched), "beyond the spread"


def test_every_page_is_in_the_changelog() -> None:
    changelog = (REPOSITORY / "CHANGELOG.md").read_text()
    missing = [name for name in catalogue.load() if f"`{name}`" not in changelog]
    assert not missing


def commands() -> list[click.Command]:
    return [cli, run, *cli.commands.values()]


@pytest.mark.parametrize("command", commands(), ids=lambda command: command.name)
def test_every_command_explains_itself(command: click.Command) -> None:
    done = CliRunner().invoke(command, ["--help"])
    assert done.exit_code == 0
    assert command.help and len(command.help) > 20
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{command.name} {parameter.opts[0]} has no help"


def test_every_command_is_in_the_readme() -> None:
    text = (REPOSITORY / "README.md").read_text()
    assert [name for name in cli.commands if f"cppmega {name}" not in text] == []
