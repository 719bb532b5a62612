"""The laws, once for every page and every version: what a patch may and may not do.

The law that a patch is needed, that its proof fails without it, is `cppmega verify`.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from cppmega.catalogue import loader as catalogue
from cppmega.overlay import verbs as overlay
from cppmega.overlay.verdict import FAILURES
from cppmega.page import PURPOSES, Page, left_alone
from cppmega.proof import hash_seeds, proof_process
from cppmega.rewriting import marks
from cppmega.rewriting import source as sources
from cppmega.tree.installed import Tree, sha256
from cppmega.tree.resolve import is_version, requirement
from tests.support import BRANCHES, NEWEST, NOT_NEEDED, OTHERS, VERSIONS, copy, laws, pristine
from tests.support.made import leftovers
from tests.support.weekly import MAIN, mostly_weekly, of_this_run

pytestmark = pytest.mark.slow

every_page = pytest.mark.parametrize("name", laws.names())
ALONE = of_this_run(laws.RECORDED)
"""Releases on which each page is applied alone. All pages together are compared on every release,
and the text of each page is in theirs."""
every_version = pytest.mark.parametrize("version", laws.EVERY)
every_other = pytest.mark.parametrize("release", OTHERS)


def _page(name: str) -> Page:
    return laws.pages()[name]


# -- the page ---------------------------------------------------------------------------------


@every_page
def test_header_is_complete(name: str) -> None:
    """What, Why, Upstream, Remove, Numerics; a page that says less is not loaded at all."""
    page = _page(name)
    assert list(page.labels) == list(catalogue.LABELS)
    assert page.fixed_upstream is not None and page.verify is not None
    assert page.patch.feature or any(page.patch.edits)


@every_page
def test_pins_are_the_texts_of_their_versions(name: str) -> None:
    """A pin that belongs to no text, or to another version's, would patch what nobody looked at."""
    wrong = []
    for edit in _page(name).patch.edits:
        for number, pin in edit.pins.items():
            version = requirement(number, edit.distribution)
            if version in (*laws.EVERY, *OTHERS):
                tree = laws.planned(version).tree
                survey = laws.planned(version).survey
                found = survey.fingerprint(tree.read(edit.path), edit)
                if found != pin:
                    wrong.append(f"{edit.target} {version}: {found or 'missing'}, not {pin}")
    assert not wrong


@every_page
def test_nothing_is_no_fix(name: str) -> None:
    """`fixed_upstream` must see a fix: the absence of the bug's text is not one."""
    page = _page(name)
    assert page.fixed_upstream is not None
    assert not page.fixed_upstream(laws.Nothing())


# -- the page on a version ----------------------------------------------------------------------


@every_page
def test_known_text(name: str) -> None:
    """On every version a page is needed and known, or not needed and says why."""
    for version in laws.there(*laws.EVERY):
        _assert_known(name, version)


def _assert_known(name: str, version: str) -> None:
    verdict = laws.planned(version).verdicts[name]
    assert verdict.state not in FAILURES, (version, verdict)
    assert verdict.state == "pending" or (verdict.state in NOT_NEEDED and verdict.detail)


@every_page
def test_state_is_honest(name: str) -> None:
    """What needs the page has the bug; what does not has the fix, or nothing to fix."""
    for version in laws.there(*laws.EVERY):
        _assert_honest(name, version)


def _assert_honest(name: str, version: str) -> None:
    made = laws.planned(version)
    verdict = made.verdicts[name]
    page = _page(name)
    assert page.fixed_upstream is not None
    if verdict.state == "pending":
        fixed = page.fixed_upstream(made.survey)
        assert not fixed, f"it is pinned, and {version} has the fix"
    elif verdict.state == "upstreamed":
        assert page.fixed_upstream(made.survey) or _all_left_alone(page, version), version
    else:
        assert verdict.state in ("not-applicable", "unported"), version
        _assert_missing(made.tree, verdict.detail)


def _all_left_alone(page: Page, version: str) -> bool:
    edits = [edit for edit in page.patch.edits if version in edit.pins]
    return bool(edits) and all(edit.edit is left_alone for edit in edits)


def _assert_missing(tree: Tree, detail: str) -> None:
    """The symbol that the verdict names is defined nowhere; found without the engine."""
    missing = r"(?:nobody has ported it: )?(\S+\.py):(\S+) does not exist in this tree"
    absent = r"(\S+) is not installed here(?:; Python imports it from .+)?"
    said = re.fullmatch(f"{missing}|{absent}", detail)
    assert said, detail
    path, symbol, distribution = said.groups()
    if distribution:
        folder = distribution.replace("-", "_")
        assert not (tree.root / folder).exists()
        return
    names = symbol.split(".")
    for file, data in laws.texts(tree.root, path.partition("/")[0]).items():
        if all(name.encode() in data for name in names):
            assert not sources.find(ast.parse(data), symbol), f"{file} defines {symbol}"


@every_page
def test_one_small_target(name: str) -> None:
    """The page alone: nothing outside of its targets and what it declares differs."""
    for version in laws.there(*of_this_run(laws.SUPPORTED)):
        _assert_small(name, version)


def _assert_small(name: str, version: str) -> None:
    if name not in laws.needed(version):
        return
    files = laws.result(version, name)
    edited = laws.targets(name, version)
    assert set(files) == {
        edit.path for edit in laws.planned(version, name).edits[name] if edit.kind == "source"
    }
    for path, data in files.items():
        edits = [e for e in _page(name).patch.edits if e.path == path]
        helpers = {helper.__name__ for edit in edits for helper in edit.helpers}
        imported = {line for edit in edits for line in edit.imports}
        before = (pristine(version) / path).read_bytes()
        after = _without(data, imported, before)
        assert laws.foreign_code(before, after, edited[path], helpers) == "", version


def _without(data: bytes, lines: set[str], before: bytes) -> bytes:
    """The text without the imports that the page declares and upstream does not have."""
    kept = before.splitlines()
    for line in lines:
        if line.encode() not in kept:
            data = data.replace(line.encode() + b"\n", b"", 1)
    return data


@every_page
def test_stable(name: str) -> None:
    """What comes out is no text that the page would edit again."""
    for version in laws.there(*of_this_run(laws.SUPPORTED)):
        _assert_stable(name, version)


def _assert_stable(name: str, version: str) -> None:
    survey = laws.planned(version).survey
    for edit in laws.planned(version, name).edits.get(name, ()):
        if edit.kind == "source":
            data = laws.result(version, name)[edit.path]
            pins = {
                pin
                for e in _page(name).patch.edits
                if e.target == edit.target and e.edit is not left_alone
                for pin in e.pins.values()
            }
            again = survey.fingerprint(data, edit) in pins
            # What is added next to a statement leaves that statement as it was.
            (node,) = sources.find(survey.parse(data, edit.path)[1], edit.symbol)
            is_statement = not isinstance(node, sources.Definition)
            added = is_statement and f"{marks.COMMENT}{name}".encode() in data
            assert added or not again, version


@every_page
def test_result_is_the_recorded_one(name: str) -> None:
    """Deterministic: the same bytes on every machine, every Python and every day."""
    assert (laws.GOLDEN / f"{name}.json").exists()
    recorded = laws.recorded(name)
    assert recorded == laws.golden(name, ALONE), f"run: python scripts/record_golden.py {name}"


@every_page
def test_changed_target_is_drifted(name: str) -> None:
    """More in any target: the page is neither applied nor taken for retired."""
    for version in reversed((*OTHERS, *VERSIONS)):
        if name not in laws.needed(version):
            continue
        for edit in laws.planned(version, name).edits[name]:
            data = (pristine(version) / edit.path).read_bytes()
            inner = f"{edit.symbol}.__init__" if edit.kind == "class-swap" else edit.symbol
            (node,) = sources.find(laws.planned(version).survey.parse(data, edit.path)[1], inner)
            lines = data.splitlines(keepends=True)
            body = getattr(node, "body", None)
            if body:
                indent = b" " * body[0].col_offset
                lines.insert(body[0].lineno - 1, indent + b"_mutated_ = 1\n")
            else:  # a statement that assigns
                last = lines[node.end_lineno - 1]
                lines[node.end_lineno - 1] = b" or 0".join(
                    (last[: node.end_col_offset], last[node.end_col_offset :])
                )
            mutant = laws.exported(version, edit.path, b"".join(lines))
            assert laws.verdict_on(mutant, name, version) == "drifted", edit.target
        return


# -- pages of other packages ----------------------------------------------------------------------


@every_other
def test_another_package_is_patched_like_megatron(release: str) -> None:
    """Known, small and stable: the same laws on the texts of that package."""
    names = laws.pages_of(release)
    assert names
    for name in names:
        for law in (_assert_known, _assert_honest, _assert_small, _assert_stable):
            law(name, release)


@pytest.mark.parametrize("release", NEWEST)
def test_another_package_on_disk(release: str, tmp_path: Path) -> None:
    """Apply, apply again, revert; each file is restored, and Megatron's are never written."""
    root = copy(release, tmp_path / "site")
    before = {path: path.read_bytes() for path in root.rglob("*.py")}
    session = overlay.Session(root, ())
    session.pages = {name: _page(name) for name in laws.pages_of(release)}
    outcome = overlay.apply(session, kinds=PURPOSES, environment=laws.gates(release))
    assert outcome.ok, outcome.plan.failures
    now = {path.relative_to(root).as_posix(): path.read_bytes() for path in before}
    changed = {path for path, data in now.items() if data != before[root / path]}
    assert not any(path.startswith("megatron/") for path in changed)
    assert {path: now[path] for path in changed} == laws.result(release)
    again = overlay.apply(session, kinds=PURPOSES, environment=laws.gates(release))
    assert again.ok and not again.changed and not again.receipt_changed
    overlay.revert(session)
    assert {path: path.read_bytes() for path in root.rglob("*.py")} == before
    assert not (root / ".cppmega").exists() and not leftovers(root)


def test_every_pinned_release_of_another_package_is_checked() -> None:
    """A pin of a release whose text no law reads would be a promise without a proof."""
    pinned = {
        requirement(number, edit.distribution)
        for page in laws.pages().values()
        for edit in page.patch.edits
        for number in edit.pins
        if edit.distribution != "megatron-core" and is_version(number)
    }
    assert pinned == set(OTHERS)


# -- pages together -------------------------------------------------------------------------------


@pytest.mark.parametrize("version", of_this_run(laws.SUPPORTED))
@pytest.mark.parametrize("pair", laws.pairs(), ids=" then ".join)
def test_declared_pairs_compose(version: str, pair: tuple[str, str]) -> None:
    wanted = [name for name in pair if name in laws.needed(version)]
    if len(wanted) == 2:
        files = laws.result(version, *pair)
        assert set(files) == {path for name in pair for path in laws.result(version, name)}


def test_all_together_is_the_recorded_one() -> None:
    recorded = laws.recorded(laws.TOGETHER)
    assert recorded == laws.golden(laws.TOGETHER), "run: python scripts/record_golden.py"


@pytest.mark.parametrize(
    "version", mostly_weekly((*laws.SUPPORTED, "0.15.3", "0.19.0"), VERSIONS[-1], MAIN, "0.15.3")
)
def test_apply_and_revert_on_disk(version: str, tmp_path: Path) -> None:
    """Apply, apply again, revert: exit 0 each time, and the original hashes at the end."""
    root = copy(version, tmp_path / "site")
    before = _hashes(root)
    if version not in BRANCHES:  # the hashes that the wheel was published with
        record = next(iter(Tree(root).distributions.values())).record
        assert len(record) > 100 and record.items() <= before.items()
    for environment in ({}, laws.gates()) if version in laws.SUPPORTED else ({},):
        outcome = _apply(root, version, environment)
        assert outcome.ok, outcome.plan.failures
        states = {verdict.state for verdict in outcome.verdicts}
        assert states <= {"applied", "armed", *NOT_NEEDED}
        if environment:
            _assert_patched(root, version)
        again = _apply(root, version, environment)
        assert again.ok and not again.changed and not again.receipt_changed
    overlay.revert(_session(root, version))
    assert not (root / ".cppmega").exists() and not leftovers(root)
    assert _hashes(root) == before


def _hashes(root: Path) -> dict[str, str]:
    files = (path for path in root.rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix(): sha256(path.read_bytes()) for path in files}


def _session(root: Path, version: str) -> overlay.Session:
    session = overlay.Session(root, ())
    session.pages, session._survey = laws.pages(), laws.planned(version).survey
    return session


def _apply(root: Path, version: str, environment: dict[str, str]) -> overlay.Outcome:
    session = _session(root, version)
    return overlay.apply(session, kinds=PURPOSES, environment=environment)


def _assert_patched(root: Path, version: str) -> None:
    """On disk stands what was computed in memory."""
    wanted = laws.result(version)
    assert {path: (root / path).read_bytes() for path in wanted} == wanted


@pytest.mark.parametrize("version", mostly_weekly(laws.SUPPORTED, VERSIONS[-1]))
def test_text_is_the_same_under_another_hash_seed(version: str) -> None:
    """An edit that walks through a set writes another overlay on the next machine."""
    made = laws.planned(version)
    environment = {"PYTHONHASHSEED": str(laws.SUPPORTED.index(version))}
    order = hash_seeds.order(made)
    worker = proof_process.Worker(str(made.tree.root), "stock", [], environment, ordered=order)
    assert not list(worker.answers())
    assert worker.texts == laws.hashes(laws.result(version))


@every_version
def test_every_release_is_patched(version: str) -> None:
    """In memory: on every release all files come out complete."""
    assert set(laws.result(version)) == set(laws.planned(version).work)


def test_export_is_patched_like_the_wheel(tmp_path: Path) -> None:
    """The same files without a RECORD: known text counts as pristine, and the receipt says so."""
    version = VERSIONS[-1]
    root = copy(version, tmp_path / "site")
    for file in root.glob("*.dist-info/*"):
        if file.is_file():
            file.unlink()
    for folder in root.glob("*.dist-info"):
        folder.rename(tmp_path / folder.name)
    assert _apply(root, version, laws.gates()).ok
    _assert_patched(root, version)
    receipt = json.loads((root / ".cppmega" / "receipt.json").read_bytes())
    assert {entry["origin"] for entry in receipt["files"].values()} == {"unverified"}
