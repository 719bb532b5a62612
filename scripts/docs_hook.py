"""What mkdocs calls: the pages of scripts/docs_pages.py, and the navigation over them."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).resolve().parent))

import docs_pages


def on_config(config: Any) -> Any:
    """Put every page into the navigation, and take the addresses from pyproject.toml."""
    config.nav = docs_pages.navigation()
    pyproject = tomllib.loads((docs_pages.REPOSITORY / "pyproject.toml").read_text())
    stated = pyproject["tool"]["hatch"]["metadata"]["hooks"]["custom"]
    config.site_url = stated["documentation"]
    if stated["repository"]:
        config.repo_url, config.repo_name = stated["repository"], "cppmega"
    return config


def on_files(files: Files, config: Any) -> Files:
    """Take the finished pages in place of their sources; what is not a page stays."""
    finished = {
        *(File.generated(config, name, content=text) for name, text in docs_pages.pages().items()),
        *(
            File.generated(config, name, abs_src_path=str(path))
            for name, path in docs_pages.pictures().items()
        ),
    }
    docs = Path(config.docs_dir)
    sources = {file for file in files if docs in Path(file.abs_src_path or "/").parents}
    kept = [file for file in files if file not in sources or file.src_uri.endswith(".css")]
    return Files([*kept, *sorted(finished, key=lambda file: file.src_uri)])
