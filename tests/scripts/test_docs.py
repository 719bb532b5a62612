"""The pages of the site, without mkdocs: complete, their links resolved, their transcripts true."""

from __future__ import annotations

import importlib
import itertools
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

import pytest
from packaging.version import Version

from cppmega import __version__
from cppmega.catalogue import decisions
from cppmega.catalogue import loader as catalogue
from cppmega.cli import error_index
from cppmega.cli.main import cli
from cppmega.preflight.checks import ORDER
from tests.support import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))
docs = importlib.import_module("docs_pages")
transcripts = importlib.import_module("docs_transcripts")

HELP_ALONE = {
    "checkpoint",
    "advise",
    "attach",
    "run",
    "profile",
    "doctor",
    "completion",
    "port",
    "export",
}
"""Commands without a transcript: they need a terminal, a GPU's run or a shell, show a machine,
take minutes, or are a process of torchrun."""
SHOWN = {**transcripts.LIVE, **transcripts.WITH_TORCH}
CHEAP = ("list", "runs", "logs")


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    """Every page; what commands print is left to the build."""
    patch = pytest.MonkeyPatch()
    patch.setattr(transcripts, "live", lambda: dict.fromkeys(transcripts.LIVE, "$ command\n"))
    docs.pages.cache_clear()
    yield docs.pages()
    patch.undo()
    docs.pages.cache_clear()


def test_every_part_of_a_page_is_put_in(pages: dict[str, str]) -> None:
    for name, text in pages.items():
        assert "<!-- include" not in text, name
        assert re.match(r"# \w", text), name


def test_pages_need_neither_torch_nor_pytest() -> None:
    """The extra `docs` has neither."""
    lines = [
        "import sys",
        "sys.modules.update(dict.fromkeys(['torch', 'megatron', 'pytest', 'hypothesis']))",
        f"sys.path[:0] = [{str(REPOSITORY / 'scripts')!r}, {str(REPOSITORY)!r}]",
        "import docs_pages",
    ]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)


def test_every_command_patch_and_error_has_its_place(pages: dict[str, str]) -> None:
    commands = {*cli.commands, *docs.OTHER_COMMANDS}
    assert {f"commands/{name}.md" for name in commands} <= pages.keys()
    assert {f"patches/{name}.md" for name in catalogue.load()} <= pages.keys()
    errors = "".join(text for name, text in pages.items() if name.startswith("errors/"))
    for name in error_index.index():
        assert errors.count(f"{{: #{re.sub('[<>]', '', name)} }}") == 1
    for name, page in catalogue.load().items():
        for label in page.labels:
            assert f"**{label}.** " in pages[f"patches/{name}.md"]
    assert commands - SHOWN.keys() == HELP_ALONE


def test_no_prompt_is_copied_with_a_command(pages: dict[str, str]) -> None:
    assert [name for name, text in pages.items() if re.search(r"^ *\$ ", text, re.M)] == []


def test_every_decision_has_its_section(pages: dict[str, str]) -> None:
    for name, row in decisions.load().items():
        assert f"### `{name}`\n\n**What.** {row.title}" in pages["decisions.md"]


@pytest.mark.parametrize("name", ["write-a-patch.md", "upgrade-megatron.md"])
def test_what_belongs_to_a_numbered_item_is_inside_it(pages: dict[str, str], name: str) -> None:
    """Python-Markdown wants four columns and an empty line; else the next item is number 1."""
    fences = re.findall(r"^( +)```\w", pages[name], re.MULTILINE)
    assert fences and set(fences) == {"    "}
    *items, _ = re.split(r"^(?=\d+\. )", pages[name], flags=re.MULTILINE)[1:]
    with_blocks = [item for item in items if "\n\n" in item.rstrip()]
    assert with_blocks and all(item.endswith("\n\n") for item in with_blocks)


def test_the_picture_of_the_packages_is_whole_and_points_down(pages: dict[str, str]) -> None:
    picture = pages["architecture.md"].partition("<svg")[2].partition("</svg>")[0]
    graph = docs.architecture.arrows()
    assert set(re.findall(r">(\w+)</text>", picture)) == graph.keys()
    lines = re.findall(r'd="M\S+ (\S+) C.* (\S+)"', picture)
    assert len(lines) == sum(map(len, graph.values()))
    assert all(float(start) < float(end) for start, end in lines)
    assert "\n\n" not in picture  # an empty line would end the HTML
    boxes = re.findall(r'<rect x="(\S+)" y="(\S+)" width="(\S+)"', picture)
    edges = sorted((int(y), int(x), int(x) + int(width)) for x, y, width in boxes)
    for (row, _, right), (below, left, _) in itertools.pairwise(edges):
        assert row != below or right < left, "two boxes overlap"


def test_the_navigation_has_every_page_once(pages: dict[str, str]) -> None:
    def listed(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        for inside in entry.values() if isinstance(entry, dict) else ():
            for each in inside if isinstance(inside, list) else [inside]:
                yield from listed(each)

    found = [name for entry in docs.navigation() for name in listed(entry)]
    assert sorted(found) == sorted(pages)


def test_every_link_leads_to_a_page_and_a_heading(pages: dict[str, str]) -> None:
    wrong = []
    for name, text in pages.items():
        for link in re.findall(r"\]\((?!https?://)([^)\s]+)\)", without_code(text)):
            target, _, anchor = link.partition("#")
            place = resolved(name, target) if target else name
            if place in docs.pictures():
                continue
            if place not in pages or (anchor and anchor not in anchors(pages[place])):
                wrong.append(f"{name}: {link}")
    assert wrong == []


def without_code(text: str) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def resolved(page: str, link: str) -> str:
    parts: list[str] = []
    for part in (PurePosixPath(page).parent / link).parts:
        parts = parts[:-1] if part == ".." else [*parts, part]
    return "/".join(parts)


def anchors(text: str) -> set[str]:
    found = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        title, _, explicit = heading.partition("{: #")
        plain = re.sub(r"[^\w\s-]", "", title).strip().lower()
        found.add(explicit.removesuffix(" }") or re.sub(r"[-\s]+", "-", plain))
    return found


def test_no_page_names_this_machine(pages: dict[str, str]) -> None:
    texts = {**pages, **transcripts.recorded()}
    assert [name for name, text in texts.items() if str(REPOSITORY) in text] == []
    assert [name for name, text in texts.items() if re.search(r"/tmp/|/root/|/home/\w", text)] == []


@pytest.mark.parametrize(
    "words",
    [one.words for commands in SHOWN.values() for one in commands if one.words.startswith("cppm")],
)
def test_every_command_of_a_transcript_is_one_that_exists(words: str) -> None:
    _, name, *rest = shlex.split(words)
    cli.commands[name].make_context(name, rest)  # raises what the console would print


def test_every_command_that_a_page_tells_the_reader_to_type_exists() -> None:
    typed = {
        word: path.name
        for path in (REPOSITORY / "docs").glob("*.md")
        for word in re.findall(r"(?:\$ |`)cppmega ([a-z]+)", path.read_text())
    }
    assert len(typed) > 10
    assert {word: page for word, page in typed.items() if word not in cli.commands} == {}


def test_recorded_transcripts_name_what_exists() -> None:
    """They need torch, and are recorded anew when what they show is renamed."""
    recorded = transcripts.recorded()
    for name, commands in transcripts.WITH_TORCH.items():
        shown = [line[2:] for line in recorded[name].splitlines() if line.startswith("$ ")]
        assert shown == [one.words for one in commands], "run python scripts/docs.py record"
    named = re.findall(r"checks (?:hold|wait[\w ]+): (.*)", recorded["preflight"])
    assert len(named) >= 3
    assert {check for line in named for check in line.split(", ")} <= set(ORDER)
    refusals = re.findall(r"^failed +(\w+) +([\w-]+)$", recorded["preflight"], re.MULTILINE)
    assert refusals and {check for check, _ in refusals} <= set(ORDER)
    assert all(error_index.look_up(error, error_index.index()) for _, error in refusals)
    assert re.findall(r"^passed +(\w+)", recorded["verify"], re.MULTILINE)[0] in catalogue.load()


@pytest.mark.slow
def test_transcripts_are_what_the_commands_print(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Those that take a moment; the build runs them all, and fails if one ends otherwise."""
    with transcripts.workplace(stock=False) as place:
        shown = {name: transcripts.transcript(transcripts.LIVE[name], place) for name in CHEAP}
    for name, text in shown.items():
        assert text.startswith("$ ") and str(REPOSITORY) not in text, name
    listed = [page.name for _, of in catalogue.by_subject(catalogue.load()) for page in of]
    assert all(page in shown["list"] for page in listed[:10])
    assert "SIGKILL" in shown["runs"] and "error: no-logs" in shown["logs"]


def test_a_deprecated_name_stays_until_the_release_that_is_promised(pages: dict[str, str]) -> None:
    rows = re.findall(
        r"^\| `([\w.]+)` \| `([\w.]+)` \| (\S+) \|$", pages["upgrades.md"], re.MULTILINE
    )
    promised = [
        path.stem
        for path in (REPOSITORY / "cppmega").rglob("*.py")
        if "eprecated" in path.read_text().partition('"""')[2].partition('"""')[0]
    ]
    assert rows and len(rows) == len(promised)
    for old, new, until in rows:
        assert Version(__version__) < Version(until), f"{old} was to be removed in {until}"
        assert importlib.import_module(old).__doc__ and importlib.import_module(new)
