"""Small published projects: archives of sources, as an index has them."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

from tools.code_corpus.listing import Part, Source

NAMES = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "theta", "kappa")


def python(name: str) -> str:
    """A program whose lines are those of no other name."""
    lines = [f"def {name}_{other}({name}, {other}=1):" for other in NAMES]
    return "\n".join(f"{line}\n    return {name}_call({i} + {i})\n" for i, line in enumerate(lines))


def c(name: str) -> str:
    """The same in C, with characters of two, three and four bytes."""
    lines = [f"static int {name}_{other}(int {name}) {{" for other in NAMES]
    end = f'  puts("{name}: größer → 😀");\n}}\n'
    return "#include <stdio.h>\n" + "".join(f"{line}\n{end}" for line in lines)


FILES: dict[str, dict[str, str]] = {
    "one-lib": {
        "LICENSE": "Do as you like.\n",
        "src/a.py": python("first"),
        "src/b.c": c("second"),
        "src/copy.c": "/* another head */\n" + c("second"),
        "src/gpl.py": "# GNU General Public License\n" + python("gpl"),
        "src/.hidden/x.py": python("hidden"),
        "bundled/z.py": python("bundled"),
        "README.md": "Words.\n",
    },
    "two": {"COPYING.txt": "Do as you like.\n", "two.hpp": c("third"), "b.py": python("fourth")},
    "far": {"LICENSE": "As you like.\n", "far.py": python("fifth"), "two.hpp": c("third") + "\n"},
}


def packed(folder: Path, name: str, files: Mapping[str, str], *, again: str = "") -> Path:
    """Write a reproducible `NAME-1.0.tar.gz`; its setup.py, which must never run, fails."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{name.replace('-', '_')}-1.0"
    every = {
        **files,
        "PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{again}",
        "setup.py": "raise SystemExit('it was run')\n",
    }
    path = folder / f"{stem}.tar.gz"
    # With mode "w:gz", tarfile writes the current time into the header.
    with gzip.GzipFile(path, "wb", mtime=0) as zipped, tarfile.open(None, "w", zipped) as archive:
        for file, text in every.items():
            entry = tarfile.TarInfo(f"{stem}/{file}")
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    return path


def source(path: Path, name: str, part: Part) -> Source:
    """The entry of a list for it."""
    return Source(
        name=name,
        version="1.0",
        license="MIT",
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        part=part,
        leave_out=("bundled/*",),
    )


def all_of_them(folder: Path) -> dict[Source, Path]:
    """The archives of all projects: `far` is held out."""
    paths = {name: packed(folder, name, files) for name, files in FILES.items()}
    return {
        source(path, name, "heldout" if name == "far" else "train"): path
        for name, path in paths.items()
    }
