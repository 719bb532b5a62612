"""Give a version to what CHANGELOG.md has under [Unreleased], and to the package.

usage: python scripts/cut_release.py VERSION      `scripts/release.sh prepare VERSION` runs it

Entries go under their headings (Added, Changed, ...) of that version, which may be there already as
long as no tag has it: what was never published needs no history of its own.
"""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
UNRELEASED = "Unreleased"
_VERSION = re.compile(r"\d+\.\d+\.\d+((a|b|rc)\d+)?")
_PLACES = {"cppmega/__init__.py": "__version__ = ", "pyproject.toml": "version = "}

Releases = dict[str, dict[str, str]]
"""Title of a release -> heading -> its text."""


def read(text: str) -> tuple[str, Releases]:
    """What comes before the releases, and the releases in their order."""
    before, *parts = re.split(r"^## ", text, flags=re.MULTILINE)
    found: Releases = {}
    for part in parts:
        title, _, rest = part.partition("\n")
        first, *sections = re.split(r"^### ", rest, flags=re.MULTILINE)
        headed = (section.partition("\n") for section in sections)
        found[title] = {"": first.strip()} | {head: body.strip() for head, _, body in headed}
    return before, found


def written(before: str, releases: Releases) -> str:
    """The text of releases."""
    parts = [before.strip()]
    for title, sections in releases.items():
        parts.append(f"## {title}")
        for heading, body in sections.items():
            parts += filter(None, [f"### {heading}" * bool(heading and body), body])
    return "\n\n".join(parts) + "\n"


def cut(text: str, version: str, day: str) -> str:
    """Move the entries of [Unreleased] to a version."""
    before, releases = read(text)
    new = releases.get(f"[{UNRELEASED}]", {})
    known = next((title for title in releases if title.startswith(f"[{version}]")), None)
    old = releases.pop(known) if known is not None else {}
    headings = {name: _joined(new.get(name, ""), old.get(name, "")) for name in {**new, **old}}
    others = {t: one for t, one in releases.items() if t != f"[{UNRELEASED}]"}
    return written(before, {f"[{UNRELEASED}]": {}, f"[{version}] - {day}": headings, **others})


def _joined(new: str, old: str) -> str:
    """One list of two, unless the second begins with a heading."""
    return f"\n{'' if old.startswith('- ') else chr(10)}".join(filter(None, [new, old]))


def main(version: str) -> None:
    """Cut a release; nothing is committed."""
    if not _VERSION.fullmatch(version):
        sys.exit(f"release: {version} is not a version such as 0.2.0")
    tags = subprocess.run(
        ["git", "tag", "--list", f"v{version}"], cwd=REPOSITORY, capture_output=True, check=True
    )
    if tags.stdout:
        sys.exit(f"release: v{version} is tagged already; what is published does not change")
    changelog = REPOSITORY / "CHANGELOG.md"
    changelog.write_text(cut(changelog.read_text(), version, str(datetime.date.today())))
    for name, beginning in _PLACES.items():
        file = REPOSITORY / name
        line = re.compile(rf'^{beginning}".*"$', re.MULTILINE)
        file.write_text(line.sub(f'{beginning}"{version}"', file.read_text(), count=1))
    print(f"next: git diff, then git commit -am 'Release {version}' and scripts/release.sh")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
