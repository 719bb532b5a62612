"""The pages of the site: those of docs/ with their parts put in, and those that are generated."""

from __future__ import annotations

import importlib
import inspect
import json
import posixpath
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parent))

import architecture
import architecture_svg
import catalogue_readme
import decisions_page
import docs_transcripts
import readme_figures

from cppmega.catalogue import loader as catalogue
from cppmega.cli import error_index
from cppmega.cli.main import cli
from cppmega.overlay.verdict import FAILURES, MEANING
from cppmega.page import Page
from cppmega.rules import RULES
from cppmega.rules.rule import Rule
from tools.markdown import table

REPOSITORY = architecture.REPOSITORY
DOCS = REPOSITORY / "docs"
RESULTS = REPOSITORY / "benchmarks" / "results"
_INCLUDE = re.compile(r"^<!-- include (\w+)(?: (.+?))? -->$", re.MULTILINE)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://)([^)\s]+)\)")
_NUMBERED = re.compile(r"^\d+\. .*\n(?:(?: {3}.*)?\n)+", re.MULTILINE)
_MERMAID = re.compile(r"^```mermaid\n.*?^```$", re.MULTILINE | re.DOTALL)
_CONSOLE = re.compile(r"^( *)```console\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"^<!-- /?\w+(?:: written by [^>]*)? -->\n", re.MULTILINE)

ORDER = (
    ("Start in five minutes", "index.md"),
    ("In your environment", "environment.md"),
    ("Tested stacks", "stacks.md"),
    ("My run was refused", "refused.md"),
    ("What goes with what", "combinations.md"),
    ("Kernels without a patch", "kernels.md"),
    ("Python API", "api.md"),
    ("I upgrade Megatron", "upgrade-megatron.md"),
    ("I upgrade cppmega", "upgrades.md"),
    ("I write a patch", "write-a-patch.md"),
    ("Fixes for upstream", "upstream.md"),
    ("Training", "training.md"),
    ("Data", "data.md"),
    ("Production status", "production.md"),
    ("Threat model", "threat-model.md"),
    ("Architecture", "architecture.md"),
    ("What is not here", "decisions.md"),
    ("Changelog", "changelog.md"),
)
OTHER_COMMANDS = {
    "run": ("cppmega.run", "run"),
    "data.command": ("cppmega.data.command", "main"),
    "check_data": ("cppmega.check_data", "main"),
}
"""Commands that are modules, started with `python -m`."""
_MOVED = {
    "CONTRIBUTING.md": "write-a-patch.md",
    "README.md": "index.md",
    "upstream_patches/README.md": "patches/index.md",
    "upstream_patches/NOT.md": "decisions.md",
    "scripts/ci/megatron.yml": "upgrade-megatron.md#in-continuous-integration",
}


@cache
def pages() -> dict[str, str]:
    """Every page of the site: its path -> its text."""
    return {name: _copyable(_to_errors(text, name)) for name, text in _pages()}


def _copyable(text: str) -> str:
    """Show commands and what they print in blocks of their own, so that no prompt is copied."""

    def parted(block: re.Match[str]) -> str:
        indent, parts = block[1], list[str]()
        lines = block[2].removesuffix(indent).splitlines()
        for typed, group in groupby(lines, lambda line: line.strip().startswith("$ ")):
            shown = [line.replace("$ ", "", 1) if typed else line for line in group]
            if any(map(str.strip, shown)):
                parts.append(f"{indent}```{'bash' if typed else 'text'}\n" + "\n".join(shown))
        return f"\n{indent}```\n\n".join(parts) + f"\n{indent}```"

    return _CONSOLE.sub(parted, text)


def _to_errors(text: str, page: str) -> str:
    """Let links to an error lead to the page of its subject."""
    up = "../" * page.count("/")
    return re.sub(
        r"\]\((?:\.\./)*errors\.md#([\w-]+)\)",
        lambda link: f"]({up}errors/{_subjects()[link[1]]}.md#{link[1]})",
        text,
    )


def _pages() -> Iterator[tuple[str, str]]:
    for path in sorted(DOCS.glob("*.md")):
        yield path.name, _indented(_INCLUDE.sub(_included, path.read_text()))
    yield "decisions.md", _moved(_titled(decisions_page.page(tables=False)), "upstream_patches")
    yield from _error_pages()
    yield "changelog.md", _moved((REPOSITORY / "CHANGELOG.md").read_text())
    yield from _patch_pages()
    yield from _command_pages()
    for path in sorted(RESULTS.glob("*.md")):
        text = _moved(path.read_text(), "benchmarks/results", "results")
        yield f"results/{path.name}", text if text.startswith("# ") else f"# {path.stem}\n\n{text}"


def pictures() -> dict[str, Path]:
    """Every picture of the site: its path -> the file."""
    found = (path for path in sorted(RESULTS.iterdir()) if path.suffix in (".png", ".svg"))
    return {f"results/{path.name}": path for path in found}


def navigation() -> list[Any]:
    """The navigation: the pages in their order, the catalogue, the commands, and the results."""
    listed = {"errors.md", *(name for _, name in ORDER)}
    rest = sorted(pages().keys() - listed)

    def below(folder: str) -> list[str]:
        return [name for name in rest if name.startswith(f"{folder}/")]

    start: list[Any] = [{title: name} for title, name in ORDER]
    subjects = catalogue.by_subject(catalogue.load())
    patches: list[Any] = ["patches/index.md"]
    patches += [{title: [f"patches/{page.name}.md" for page in of]} for title, of in subjects]
    sections = {
        "Commands": below("commands"),
        "Patches": patches,
        "Results": below("results"),
        "Errors": ["errors.md", *below("errors")],
    }
    return start[:-2] + [{title: inside} for title, inside in sections.items()] + start[-2:]


def _included(match: re.Match[str]) -> str:
    kind, argument = match[1], match[2] or ""
    return _KINDS[kind](argument).strip()


def _titled(text: str) -> str:
    """A generated file from its title on, which the navigation shows."""
    return text[text.index("# ") :]


def _indented(text: str) -> str:
    """Indent what follows in a numbered item by four columns, and end it with an empty line.

    Three are enough on GitHub; for mkdocs they end the list, and the next item begins another one.
    """

    def deeper(item: re.Match[str]) -> str:
        text = item[0].replace("\n   ", "\n    ")
        return f"{text.rstrip()}\n\n" if "\n\n" in text else text

    return _NUMBERED.sub(deeper, text)


def section(document: str, title: str) -> str:
    """What a document of the repository says under a heading, with links that fit the site."""
    text = (REPOSITORY / document).read_text()
    found = re.search(
        rf"^(#+) {re.escape(title)}\n(.*?)(?=^#{{1,2}} |\Z)", text, re.MULTILINE | re.DOTALL
    )
    if found is None:
        raise ValueError(f"{document} has no section {title!r}")
    return _moved(_COMMENT.sub("", _MERMAID.sub(_drawn, found[2])))


def _drawn(_: re.Match[str]) -> str:
    """The picture itself: mkdocs would load the program that draws it from another site."""
    return architecture_svg.svg()


def _moved(text: str, home: str = ".", page: str = ".") -> str:
    """A text with its links changed from files of the repository to pages of the site.

    A link to a file that is not on the site keeps its text alone.

    Args:
        home: the folder of the text in the repository.
        page: the folder of the page on the site.
    """

    def change(match: re.Match[str]) -> str:
        target = _MOVED.get(match[3]) or _on_the_site(match[3], home)
        if not target:
            return "" if match[1] else match[2]
        up = "../" if page != "." and not target.startswith("#") else ""
        return f"{match[1]}[{match[2]}]({up}{target})"

    return _LINK.sub(change, text)


def _on_the_site(link: str, home: str) -> str:
    target, _, anchor = link.partition("#")
    if not target:
        return link
    full = PurePosixPath(posixpath.normpath(f"{home}/{target}"))
    if (name := str(full)) in _MOVED:
        return _MOVED[name]
    if full.parts[:1] == ("docs",):
        return full.name + (f"#{anchor}" if anchor else "")
    if full.parts[:2] == ("benchmarks", "results") and full.suffix in (".md", ".png", ".svg"):
        return f"results/{full.name}" + (f"#{anchor}" if anchor else "")
    if full.parts[:1] == ("upstream_patches",) and full.suffix == ".py":
        return f"patches/{full.stem}.md"
    return ""


def _patch_pages() -> Iterator[tuple[str, str]]:
    table_of_all = _titled(catalogue_readme.readme())
    yield "patches/index.md", _moved(table_of_all, "upstream_patches", "patches")
    for name, page in catalogue.load().items():
        yield f"patches/{name}.md", _patch_page(page)


def _patch_page(page: Page) -> str:
    title = page.title.rstrip(".")
    head = [f"# {page.name}", "", f"{title}.", ""]
    body = [f"**{label}.** {_one_line(text)}\n" for label, text in page.labels.items()]
    gate = f"`{page.patch.gate}=1`" if page.patch.gate else "always on"
    rows = [
        ("kind", page.patch.purpose),
        ("edits", page.patch.kind),
        ("switch", gate),
        ("a run must reach it", page.patch.reached),
        ("its proof needs", ", ".join(page.patch.needs)),
        ("versions", catalogue_readme.releases(page)),
    ]
    targets = [
        (f"`{edit.target}`", "<br>".join(f"{v}: `{pin}`" for v, pin in edit.pins.items()))
        for edit in page.patch.edits
    ]
    show = f"```console\n$ cppmega diff {page.name}\n$ cppmega verify {page.name}\n```"
    pins = ["", "## Targets and pins", "", table(("target", "texts"), targets), ""]
    return "\n".join([*head, *body, table(("property", "value"), rows), *pins, show, ""])


def _one_line(text: str) -> str:
    """A label's text as one paragraph, with links."""
    joined = " ".join(text.split())
    joined = re.sub(r"benchmarks/results/([\w.]+?\.md)", r"[\1](../results/\1)", joined)
    return re.sub(r"(?<![(<\"`])(https?://[^\s)]+[\w/])", r"<\1>", joined)


def _command_pages() -> Iterator[tuple[str, str]]:
    transcripts = {**docs_transcripts.live(), **docs_transcripts.recorded()}
    called = {name: (f"cppmega {name}", command) for name, command in cli.commands.items()}
    for name, (module, attribute) in OTHER_COMMANDS.items():
        called[name] = f"python -m {module}", getattr(importlib.import_module(module), attribute)
    for name, (title, command) in called.items():
        yield f"commands/{name}.md", _command_page(title, command, transcripts.get(name))


def _command_page(name: str, command: click.Command, transcript: str | None) -> str:
    """What mkdocs-click renders of a command, and a transcript of it."""
    module = sys.modules[inspect.unwrap(command.callback or cli).__module__]
    attribute = next(key for key, value in vars(module).items() if value is command)
    shown = {"module": module.__name__, "command": attribute, "prog_name": name, "depth": 1}
    parts = [f"# {name.removeprefix('cppmega ')}", "", "::: mkdocs-click"]
    parts += [f"    :{key}: {value}" for key, value in shown.items()]
    if transcript is not None:
        parts += ["", "## Transcript", "", _fenced(transcript, "console")]
    return "\n".join([*parts, ""])


_SUBJECTS = {
    "patching": "cli overlay rewriting tree catalogue page edits authoring rules",
    "proving": "proof",
    "launching": "preflight launch recipe runs checkpoints sizes host",
    "running": "guard run calls",
    "training": "training trainer features ops runtime patches",
    "data": "data check_data",
}
"""The pages of errors -> the parts of the package that raise them; the first is of all others."""


@cache
def _subjects() -> dict[str, str]:
    """The anchor of each error -> the page that has it: that of the part that raises it first."""
    of = {part: subject for subject, parts in _SUBJECTS.items() for part in parts.split()}
    return {
        _anchor(name): of.get([*causes[0].module.split("."), ""][1], "patching")
        for name, causes in error_index.index().items()
    }


def _error_pages() -> Iterator[tuple[str, str]]:
    """The errors by subject, and an index of their names."""
    rows, texts = [], {subject: list[str]() for subject in _SUBJECTS}
    for name, causes in error_index.index().items():
        subject = _subjects()[_anchor(name)]
        texts[subject] += _error(name, causes)
        rows.append((f"[{_escaped(name)}](errors/{subject}.md#{_anchor(name)})", subject))
    yield "errors.md", "\n".join(["# Errors", "", table(("error", "subject"), rows), ""])
    note = "What only a run knows is in &lt;angle brackets&gt;."
    for subject, text in texts.items():
        yield f"errors/{subject}.md", "\n".join([f"# Errors of {subject}", "", note, "", *text])


def _error(name: str, causes: list[error_index.Cause]) -> Iterator[str]:
    yield from (f"## {_escaped(name)} {{: #{_anchor(name)} }}", "")
    for (why, cures), whats in _alike(causes).items():
        lines = [f"what: {what}" for what in whats]
        lines += [f"why:  {why}", f"next: {cures[0]}", *(f"  or: {cure}" for cure in cures[1:])]
        yield from (f"*{_escaped(causes_title(causes, why))}*", "", _fenced("\n".join(lines)), "")


def causes_title(causes: Iterable[error_index.Cause], why: str) -> str:
    """What the module is for that raises an error with this reason."""
    return next(cause.title for cause in causes if cause.why == why)


def _alike(
    causes: Iterable[error_index.Cause],
) -> dict[tuple[str, tuple[str, ...]], list[str]]:
    found: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for cause in causes:
        found.setdefault((cause.why, cause.next), []).append(cause.what)
    return found


def _anchor(name: str) -> str:
    return re.sub(r"[<>]", "", name)


def _escaped(text: str) -> str:
    return text.replace("<", "&lt;").replace(">", "&gt;")


def _states(_: str) -> str:
    rows = [
        (f"`{state}`", "**failure**" if state in FAILURES else "", meaning)
        for state, meaning in MEANING.items()
    ]
    return table(("state", "", "meaning"), rows)


def _combinations(_: str) -> str:
    """Every part of a run, with the options that it does not support."""
    pages = catalogue.load().values()
    rules = (*RULES, *(rule for page in pages for rule in page.patch.rules))
    by_part: dict[str, dict[str, Rule]] = {}
    for rule in rules:
        if rule.option:
            by_part.setdefault(rule.concerns, {}).setdefault(rule.option, rule)
    text = []
    for part, options in by_part.items():
        rows = [
            (_sentence(name), _sentence(rule.why), _sentence(rule.cure))
            for name, rule in options.items()
        ]
        heading = part[:1].upper() + part[1:]
        text += [f"## {heading}", "", table(("not with", "why", "instead"), rows), ""]
    return "\n".join(text)


def _sentence(text: str) -> str:
    """A sentence of a rule, without what only a run can put in."""
    return _escaped(re.sub(r"\{[^}]*\}", "…", text)).replace("|", "\\|")


def _words(command: str) -> str:
    """The list of words in a command's help."""
    text = inspect.cleandoc(cli.commands[command].help or "")
    block = text.partition("\b\n")[2].partition("\n\n")[0]
    rows: list[list[str]] = []
    for line in block.splitlines():
        word, _, meaning = line.partition("  ")
        if word.strip():
            rows.append([f"`{word.strip()}`", meaning.strip()])
        else:
            rows[-1][1] += f" {meaning.strip()}"
    return table(("word", "meaning"), rows)


def _kernels(_: str) -> str:
    """Forward and backward of each kernel beside others, from the result files."""

    def result(name: str) -> Any:
        return json.loads((RESULTS / f"{name}_h200.json").read_text())

    losses = {
        row["name"].partition(" (")[0]: row["milliseconds"]
        for row in result("linear_cross_entropy")["rows"]
        if (row["tokens"], row["vocabulary"]) == (32768, 131072)
    }
    attention = result("dsa_attention")["cases"]["NAM56R, b 8"]
    attention = {way: measured["both"]["milliseconds"] for way, measured in attention.items()}
    recurrence = {way: result("m2rnn")[way]["both, ms"] for way in ("ours", "authors")}
    scans, shape = result("mamba3")["rows"], "8 x 4096 tokens"
    measured = (
        ("linear_cross_entropy", "32768 tokens, V 131072", losses, "linear_cross_entropy_h200"),
        ("sparse_attention", "NAM56R, b 8", attention, "dsa_attention_h200"),
        ("hyper_connection", *next(iter(result("mhc_cutile")["sites"].items())), "mhc_cutile_h200"),
        ("mamba3", f"MIMO of rank 4, {shape}", scans["MIMO, 8 x 4096"], "mamba3_h200"),
        ("mamba3", f"SISO, {shape}", scans["SISO, 8 x 4096"], "mamba3_h200"),
        ("m2rnn", shape, recurrence, "m2rnn_designs"),
    )
    return table(
        ("function", "shape", "beside", "ours, ms", "the other, ms", "ratio"),
        [
            (
                f"`{function}`",
                f"[{at}](results/{page}.md)",
                name,
                f"{ways['ours']:.1f}",
                f"{ways[way]:.1f}",
                f"{ways[way] / ways['ours']:.2f}",
            )
            for function, at, ways, page in measured
            for way, name in _OTHERS.items()
            if way in ways
        ],
    )


_OTHERS = {
    "te": "Transformer Engine",
    "torch.compile of stock": "Megatron's, by torch.compile",
    "Liger none": "Liger, a loss per token",
    "Liger mean": "Liger, their mean",
    "CCE": "CCE",
    "tilelang": "TileLang",
    "dev, cuTile beside Triton": "Megatron's branch dev, with cuTile",
    "dev": "Megatron's branch dev, without cuTile",
    "Transformer Engine": "Transformer Engine",
    "mamba-ssm": "mamba-ssm 2.3.2.post1",
    "main": "mamba-ssm's main",
    "authors": "the authors' kernels",
}
"""Other implementations in the result files -> how the table names them."""


def _results(_: str) -> str:
    rows = []
    for path in sorted(RESULTS.glob("*.md")):
        title = _LINK.sub(r"\2", path.read_text().lstrip().partition("\n")[0].lstrip("# "))
        rows.append((f"[{path.stem}](results/{path.name})", title))
    return table(("result", "what"), rows)


def _proofs(_: str) -> str:
    """Where the proofs of the patches run."""
    pages = sorted(catalogue.load().values(), key=lambda page: page.name)
    beyond = [page for page in pages if set(page.patch.needs) != {"cpu"}]
    on_cpu = f"{len(pages) - len(beyond)} of {len(pages)} proofs run on any CPU, in every test run."
    rows = (
        f"- [`{page.name}`](patches/{page.name}.md) needs {', '.join(page.patch.needs)}"
        for page in beyond
    )
    return "\n".join([on_cpu, "", *rows])


def _counts(_: str) -> str:
    """The counts of Megatron's unit tests."""
    return _moved(readme_figures.upstream())


def _corpus(_: str) -> str:
    """What the shipped list of projects gives, as it was measured."""
    text = (RESULTS / "code_corpus.md").read_text()
    return text[text.index("\n") : text.index("Made with")].strip()


def _deprecated(_: str) -> str:
    """The modules whose docstring says until when they stay."""
    rows = []
    for path in sorted((REPOSITORY / "cppmega").glob("*.py")):
        text = path.read_text()
        if (until := re.search(r"Deprecated: removed in (\d+\.\d+)", text)) is not None:
            use = re.search(r"former name of `([\w.]+)`", text)
            rows.append((f"`cppmega.{path.stem}`", f"`{use[1]}`" if use else "", until[1]))
    return table(("name", "use instead", "removed in"), rows)


def _file(argument: str) -> str:
    name, _, language = argument.partition(" ")
    return _fenced((REPOSITORY / name).read_text(), language)


def _transcript(name: str) -> str:
    known = {**docs_transcripts.live(), **docs_transcripts.recorded()}
    return _fenced(known[name], "console")


def _fenced(text: str, language: str = "text") -> str:
    return f"```{language}\n{text.rstrip()}\n```"


_FIGURES: dict[str, Callable[[], str]] = {
    "kernels": readme_figures.kernels,
    "linear": readme_figures.linear,
    "cli": readme_figures.cli,
    "production": lambda: readme_figures.production.measured("benchmarks/results"),
}
_KINDS: dict[str, Callable[[str], str]] = {
    "readme": lambda title: section("README.md", title),
    "contributing": lambda title: section("CONTRIBUTING.md", title),
    "transcript": _transcript,
    "combinations": _combinations,
    "states": _states,
    "words": _words,
    "kernels": _kernels,
    "figure": lambda name: _moved(_FIGURES[name]()),
    "results": _results,
    "proofs": _proofs,
    "counts": _counts,
    "corpus": _corpus,
    "deprecated": _deprecated,
    "file": _file,
}
