"""`--report`: SARIF, JUnit XML and annotations say what the answer says, whatever is in it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree as Xml

import msgspec
import pytest

from cppmega.cli.main import main
from cppmega.cli.reports import answers, github, junit, sarif
from cppmega.cli.reports.entries import Entry, Place, Report, Result
from cppmega.preflight.findings import Finding
from cppmega.proof.messages import ProofRun
from cppmega.proof.verify import Proved
from tests.cli import sarif_rules
from tests.support.lab import A, B, Lab

NASTY = "100%: a, b\r\nc\x1b[31m\x00 ]]> <&\"'> \ud800 \ufffe\N{SNOWMAN}"


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.chdir(tmp_path)
    return Lab(tmp_path, monkeypatch)


def command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as done:
        main(arguments)
    return done.value.code if isinstance(done.value.code, int) else 0


def annotations(text: str) -> Iterator[tuple[str, dict[str, str], str]]:
    """Read workflow commands as the runner of GitHub Actions does."""
    for line in text.splitlines():
        if found := re.fullmatch(r"::(\w+) ([^:]*)::(.*)", line):
            pairs = (word.partition("=") for word in found[2].split(",") if word)
            properties = {name: unescaped(value) for name, _, value in pairs}
            yield found[1], properties, unescaped(found[3])


def unescaped(text: str) -> str:
    for code, sign in (("%2C", ","), ("%3A", ":"), ("%0A", "\n"), ("%0D", "\r"), ("%25", "%")):
        text = text.replace(code, sign)
    return text


def report(result: Result = "failed", text: str = NASTY, **more: object) -> Report:
    entry = Entry(name="page", rule="drifted", result=result, message=text, **more)
    return Report("status", (entry,), {"drifted": "the text is not known"})


# -- the three formats --------------------------------------------------------------------------


def test_sarif_keeps_the_rules_for_every_text_and_path(tmp_path: Path) -> None:
    place = Place(tmp_path / "a b%", "megatron/ü#1.py", 7)
    elsewhere = Place(Path("/opt/site"), "megatron/core/a.py")
    entries = (
        *report(place=place, page=tmp_path / "pages" / "page.py").entries,
        *report("note", place=elsewhere).entries,
        *report("warning").entries,
        *report("passed").entries,
        *report("error").entries,
    )
    run = sarif_rules.checked(sarif.written(Report("status", entries), tmp_path))
    assert [result.level for result in run.results] == ["error", "note", "warning"]
    here, there, nowhere = run.results
    found = here.locations[0].physical_location
    assert unquote(found.artifact_location.uri) == "a b%/megatron/ü#1.py"
    assert found.region.start_line == 7 and found.artifact_location.uri_base_id == "%SRCROOT%"
    assert here.related_locations[0].physical_location.artifact_location.uri == "pages/page.py"
    assert there.locations[0].physical_location.artifact_location.uri_base_id == "MEGATRON"
    assert run.original_uri_base_ids["MEGATRON"].uri == "file:///opt/site/"
    assert nowhere.locations == []
    (invocation,) = run.invocations
    assert not invocation.execution_successful and invocation.tool_execution_notifications


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"ruleIndex": 0', '"ruleIndex": 1'),
        ('"startLine": 1', '"startLine": 0'),
        ('"level": "error"', '"level": "bad"'),
        ('"uri": "mega', '"uri": "mega tron'),
        ('"uriBaseId": "MEGATRON"', '"uriBaseId": "OTHER"'),
        ('"version": "2.1.0"', '"version": "2.0.0"'),
        ('"ruleId"', '"ruleName"'),
    ],
)
def test_the_check_of_the_rules_finds_what_breaks_them(tmp_path: Path, old: str, new: str) -> None:
    text = sarif.written(report(place=Place(Path("/opt"), "megatron/a.py")), tmp_path)
    sarif_rules.checked(text)
    assert old in text
    with pytest.raises((AssertionError, msgspec.ValidationError)):
        sarif_rules.checked(text.replace(old, new))


def test_junit_is_read_by_an_xml_parser_for_every_text() -> None:
    entries = [
        *(report(result).entries[0] for result in ("passed", "skipped", "failed", "error")),
        *report("failed").entries,
    ]
    root = Xml.fromstring(junit.written(Report("verify", tuple(entries))).encode())
    (suite,) = root
    assert {key: suite.get(key) for key in ("tests", "failures", "errors", "skipped")} == {
        **{"tests": "5", "failures": "2", "errors": "1", "skipped": "1"}
    }
    assert [case[0].tag for case in suite] == [
        *("system-out", "skipped", "failure", "error", "failure")
    ]
    text = suite[2][0].text or ""
    assert r"c\x1b[31m\x00 ]]> <&" in text and r"\ud800 \ufffe" in text and "\N{SNOWMAN}" in text
    assert suite[2][0].get("type") == "drifted"


def test_an_annotation_is_one_line_that_the_runner_reads_back(tmp_path: Path) -> None:
    place = Place(tmp_path / "a,b:c%", "megatron/a.py", 3)
    (line,) = github.written(report(place=place), tmp_path).splitlines()
    ((level, properties, message),) = annotations(line)
    assert level == "error"
    assert properties["file"] == "a,b:c%/megatron/a.py" and properties["line"] == "3"
    assert properties["title"] == "cppmega status: page (drifted)"
    assert "100%: a, b\r\nc" in message and "\x1b" not in message and "\x00" not in message


def test_a_place_outside_the_repository_is_named_in_the_text_alone(tmp_path: Path) -> None:
    place = Place(Path("/opt/site"), "megatron/a.py", 3)
    ((_, properties, message),) = annotations(github.written(report(place=place), tmp_path))
    assert "file" not in properties and "megatron/a.py:3" in message
    page = tmp_path / "patches" / "page.py"
    written = github.written(report(place=place, page=page), tmp_path)
    assert next(annotations(written))[1]["file"] == "patches/page.py"


def test_what_is_as_it_must_be_is_not_annotated(tmp_path: Path) -> None:
    assert github.written(report("passed"), tmp_path) == ""
    assert github.written(report("skipped"), tmp_path) == ""


# -- the four commands --------------------------------------------------------------------------


def test_status_reports_the_line_of_what_is_wrong(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    lab.wheel()
    lab.page("one")
    lab.page("two", f"{B}:other", 'replacing("os.sep", "\'/\'")')
    lab.change(B, b"return os.sep + x", b"return os.sep * x")
    words = ("--report", "sarif=out/s.sarif", "--report", "junit=s.xml", "--report", "github")
    assert command("status", "--megatron", str(lab.root), *words) == 1
    run = sarif_rules.checked(Path("out/s.sarif").read_text())
    (result,) = [one for one in run.results if one.properties["name"] == "two"]
    place = result.locations[0].physical_location
    assert (place.artifact_location.uri, place.region.start_line) == (f"site/{B}", 8)
    assert result.level == "error" and "reinstall" in result.properties["next"]
    suite = Xml.parse("s.xml").getroot()[0]
    assert {case.get("name"): [part.tag for part in case] for case in suite if len(case)}[
        "two"
    ] == ["failure"]
    found = list(annotations(capsys.readouterr().err))
    ((_, properties, _),) = found  # the other patch only waits for this one
    assert {"file": f"site/{B}", "line": "8"}.items() <= properties.items()


def test_a_patch_that_is_only_not_applied_is_reported_at_its_place(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    lab.wheel()
    lab.page("one")
    assert command("status", "--megatron", str(lab.root), "--report", "github") == 1
    ((level, properties, message),) = annotations(capsys.readouterr().err)
    assert level == "error" and "(pending)" in properties["title"]
    assert {"file": f"site/{A}", "line": "8"}.items() <= properties.items()
    assert "next: python -m cppmega.apply_patches" in message


def test_status_of_a_patched_tree_reports_nothing_wrong(lab: Lab) -> None:
    lab.wheel()
    lab.page("one")
    lab.apply()
    assert command("status", "--megatron", str(lab.root), "--report", "sarif=s.sarif") == 0
    assert sarif_rules.checked(Path("s.sarif").read_text()).results == []


def test_drift_reports_the_place_in_the_new_tree(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    lab.wheel()
    lab.page("one")
    lab.page("two", f"{B}:single", 'replacing("x", "x + 1", times=1)')
    new = lab.root.rename(lab.root.with_name("new"))
    lab.wheel()
    text = (new / A).read_text().replace("return x + x", "return sum((x, x))")
    (new / A).write_text(f"import sys\n{text}")
    words = ("--report", "sarif=d.sarif", "--report", "github=d.txt", "--json")
    assert command("drift", str(lab.root), str(new), *words) == 1
    run = sarif_rules.checked(Path("d.sarif").read_text())
    (result,) = run.results
    place = result.locations[0].physical_location
    assert (place.artifact_location.uri, place.region.start_line) == (f"new/{A}", 9)
    assert (result.rule_id, result.level) == ("changed", "error")
    assert "cppmega pin one" in result.message.text and "sum((x, x))" in result.message.text
    ((level, properties, _),) = annotations(Path("d.txt").read_text())
    assert (level, properties["line"]) == ("error", "9")
    assert msgspec.json.decode(capsys.readouterr().out)["ok"] is False


def test_verify_and_preflight_report_every_proof_and_check() -> None:
    runs = {"patched": ProofRun(result="passed", detail="", seconds=0.25)}
    proved = [
        Proved("a", "passed", "", runs),
        Proved("b", "unverified", "needs sm_90", {}),
        Proved("c", "stale", "of another text", {}),
    ]
    verified = answers.of_verify(proved, {})
    assert [entry.result for entry in verified.entries] == ["passed", "skipped", "failed"]
    assert verified.entries[0].seconds == 0.25
    findings = [
        Finding("one_root", "ok", what="fine"),
        Finding("data", "failed", "no-data", "it is missing", "nothing to read", "--data"),
        Finding("gpus", "not-run", what="one_root does not hold"),
    ]
    checked = answers.of_findings("preflight", findings)
    assert [entry.result for entry in checked.entries] == ["passed", "failed", "skipped"]
    assert checked.entries[1].rule == "no-data" and "nothing to read" in checked.entries[1].text


def test_a_proof_that_fails_is_shown_at_its_page(tmp_path: Path) -> None:
    entry = Entry(name="a", rule="failed", result="failed", page=tmp_path / "patches" / "a.py")
    run = sarif_rules.checked(sarif.written(Report("verify", (entry,)), tmp_path))
    (result,) = run.results
    assert result.locations[0].physical_location.artifact_location.uri == "patches/a.py"
    assert result.related_locations == []


def test_a_tree_that_is_not_as_apply_left_it_is_reported(lab: Lab) -> None:
    lab.wheel()
    lab.page("one")
    lab.apply()
    (lab.root / ".cppmega" / "receipt.json").write_text("{")
    assert command("status", "--megatron", str(lab.root), "--report", "sarif=s.sarif") == 1
    results = sarif_rules.checked(Path("s.sarif").read_text()).results
    assert "unsound" in {result.rule_id for result in results}


def test_an_error_of_the_command_is_reported_too(lab: Lab) -> None:
    words = ("--report", "junit=s.xml", "--report", "sarif=s.sarif")
    assert command("status", "--megatron", "nowhere", *words) == 1
    (case,) = Xml.parse("s.xml").getroot()[0]
    assert case[0].tag == "error" and case[0].get("type") == "no-megatron"
    (invocation,) = sarif_rules.checked(Path("s.sarif").read_text()).invocations
    assert "no-megatron" in invocation.tool_execution_notifications[0].message.text


@pytest.mark.parametrize("word", ["sarif", "junit=", "pdf=x", ""])
def test_a_report_that_cannot_be_meant_is_wrong_usage(word: str) -> None:
    assert command("status", "--report", word) == 2


def test_a_report_that_cannot_be_written_fails_the_command(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    lab.wheel()
    Path("file").write_text("")
    assert command("status", "--megatron", str(lab.root), "--report", "junit=file/s.xml") == 1
    assert "write-failed" in capsys.readouterr().err
