"""What mkdocs calls: the pages of scripts/docs_pages.py, and the navigation over them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).resolve().parent))

import docs_pages


def on_config(config: Any) -> Any:
    """Put every page into the navigation."""
    config.nav = docs_pages.navigation()
    return config


def on_files(files: Files, config: Any) -> Files:
    """Take the finished pages in place of their sources; what belongs to the theme stays."""
    finished = {
        *(File.generated(config, name, content=text) for name, text in docs_pages.pages().items()),
        *(
            File.generated(config, name, abs_src_path=str(path))
            for name, path in docs_pages.pictures().items()
        ),
    }
    docs = Path(config.docs_dir)
    theme = [file for file in files if docs not in Path(file.abs_src_path or "/").parents]
    return Files([*theme, *sorted(finished, key=lambda file: file.src_uri)])
