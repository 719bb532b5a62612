"""The commands that convert checkpoints from and to Hugging Face."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

from cppmega.cli.group import cli, root_option


@cli.group()
def checkpoint() -> None:
    """Bring checkpoints of Hugging Face in, and take them out.

    Megatron-Bridge converts them, if it is installed, with the patched Megatron and under the
    guard. Nothing that exists is overwritten.
    """


@checkpoint.command(name="import")
@click.argument("model", metavar="MODEL")
@click.argument("to", metavar="FOLDER", type=click.Path(path_type=Path))
@root_option
def import_(model: str, to: Path, root: Path | None) -> None:
    """Convert MODEL of Hugging Face, a folder or a name on the hub, to Megatron's in FOLDER."""
    _convert(root, "import", model, str(to))


@checkpoint.command(name="export")
@click.argument("source", metavar="CHECKPOINT", type=click.Path(path_type=Path, exists=True))
@click.argument("to", metavar="FOLDER", type=click.Path(path_type=Path))
@click.option(
    "--like",
    "model",
    required=True,
    metavar="MODEL",
    help="The model of Hugging Face whose configuration and tokenizer the result gets.",
)
@root_option
def export(source: Path, to: Path, model: str, root: Path | None) -> None:
    """Convert Megatron's CHECKPOINT to one of Hugging Face in FOLDER."""
    _convert(root, "export", str(source), str(to), model)


def _convert(root: Path | None, *words: str) -> None:
    tree = ["--megatron", str(root)] if root is not None else []
    command = [sys.executable, "-m", "cppmega.run", "--no-steps", *tree, "-m", "cppmega.bridge"]
    sys.exit(subprocess.run([*command, *words], check=False).returncode)
