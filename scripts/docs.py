"""Build the documentation as a site, or record the transcripts that need torch.

usage: python scripts/docs.py build [--site DIR]   where `pip install -e '.[docs]'` was run
       python scripts/docs.py record [NAME]...     where torch is: writes docs/transcripts/

The texts of `docs/` are pages; a line `<!-- include KIND ARGUMENT -->` takes its text from where it
is kept: the README, the contributor's guide, the catalogue, the commands, the errors. Nothing that
is generated is committed, except transcripts of commands that need torch.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import docs_transcripts


def build(site: str) -> None:
    """Run mkdocs, which stops at a broken link."""
    from mkdocs.__main__ import cli

    config = str(docs_transcripts.REPOSITORY / "mkdocs.yml")
    cli(["build", "--strict", "--config-file", config, "--site-dir", str(Path(site).resolve())])


def main(words: list[str]) -> None:
    """Do what the command line says."""
    match words:
        case ["build"]:
            build("build/site")
        case ["build", "--site", site]:
            build(site)
        case ["record", *names]:
            docs_transcripts.record(names)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
