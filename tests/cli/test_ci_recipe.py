"""The workflow that teams copy: its commands fail, with reports, where a patch does not apply."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as Xml

import pytest
import yaml

from tests.cli import sarif_rules
from tests.support import REPOSITORY
from tests.support.lab import A, B, Lab

WORKFLOW = yaml.safe_load((REPOSITORY / "scripts" / "ci" / "megatron.yml").read_text())
BRANCH = "dev"
PROOF = """
def verify():
    from megatron.core.a import double

    assert double(1) == 3
"""


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """The trained tree, and the same one as upstream's branch has it."""
    made = Lab(tmp_path, monkeypatch)
    made.wheel().rename(tmp_path / f"megatron-{BRANCH}")
    made.wheel()
    page = made.page(edit='replacing("x + x", "3 * x")')
    page.write_text(page.read_text().partition("def verify()")[0] + PROOF)
    return made


def change(tree: Path) -> None:
    """Have upstream rewrite what the patch edits."""
    file = tree / A
    file.write_text(file.read_text().replace("return x + x", "return sum((x, x))"))


def in_job(words: str) -> str:
    return words.replace("${{ matrix.branch }}", BRANCH)


def run(lab: Lab, job: str) -> dict[str, int]:
    """Run the commands of a job as the runner does; exit status by the step's name.

    Those that install are left out: this checkout is what would be installed.
    """
    folder = lab.root.parent
    statuses: dict[str, int] = {}
    for step in WORKFLOW["jobs"][job]["steps"]:
        failed = any(statuses.values())
        if "run" not in step or step["run"].startswith("pip ") or (failed and "if" not in step):
            continue
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", in_job(step["run"])],
            cwd=folder,
            env=environment(lab, step.get("env", {})),
            capture_output=True,
            text=True,
            check=False,
        )
        print(done.stdout, done.stderr)
        statuses[step["name"]] = done.returncode
    return statuses


def environment(lab: Lab, of_step: Mapping[str, str]) -> dict[str, str]:
    """That of a step, with a `cppmega` for the made tree and catalogue on the path."""
    program = lab.root.parent / "bin" / "cppmega"
    program.parent.mkdir(exist_ok=True)
    command = shlex.join(lab.command())
    here = f"--megatron {shlex.quote(str(lab.root))}"
    program.write_text(f'#!/bin/sh\n[ "$1" = drift ] || set -- "$@" {here}\nexec {command} "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    given = {name: in_job(value) for name, value in {**WORKFLOW["env"], **of_step}.items()}
    return {**lab.environment(), **given, "PATH": path, "MEGATRON": str(lab.root)}


def uploaded(job: str) -> list[str]:
    """The files that the job hands on after its commands."""
    steps: list[dict[str, Any]] = WORKFLOW["jobs"][job]["steps"]
    assert all(step["if"] == "always()" for step in steps if "upload" in step.get("uses", ""))
    return [step["with"]["sarif_file"] for step in steps if "sarif_file" in step.get("with", {})]


def test_the_nightly_job_passes_and_fails_with_what_upstream_did(lab: Lab) -> None:
    assert run(lab, "drift") == {"Compare": 0}
    change(lab.root.parent / f"megatron-{BRANCH}")
    assert run(lab, "drift") == {"Compare": 1}
    (file,) = uploaded("drift")
    (result,) = sarif_rules.checked((lab.root.parent / file).read_text()).results
    place = result.locations[0].physical_location.artifact_location
    assert place.uri == f"megatron-{BRANCH}/{A}" and result.properties["name"] == "page"
    suite = Xml.parse(lab.root.parent / "reports" / "drift.xml").getroot()[0]
    assert suite.get("failures") == "1"


def test_the_nightly_job_names_a_recipe_that_upstream_takes_away(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has ported the patch; that is a finding only for whoever trains a recipe with it."""
    unported = {"pins": {"0.9": "0" * 16}, "builds_on": (f"{A}:later",)}
    lab.page("mtp_roll_packed_sequences", f"{B}:other", "str", **unported)
    assert run(lab, "drift") == {"Compare": 0}
    monkeypatch.setitem(WORKFLOW["env"], "RECIPES", "--recipe smoke_cpu")
    assert run(lab, "drift") == {"Compare": 1}
    (result,) = sarif_rules.checked((lab.root.parent / "reports/drift.sarif").read_text()).results
    assert "smoke_cpu cannot be built" in result.message.text


def test_the_job_of_a_pull_request_proves_every_patch(lab: Lab) -> None:
    assert run(lab, "patches") == {"Apply": 0, "Show the state of each patch": 0, "Prove": 0}
    (case,) = Xml.parse(lab.root.parent / "reports" / "verify.xml").getroot()[0]
    assert case.get("name") == "page" and case[0].tag == "system-out"


def test_the_job_of_a_pull_request_names_the_patch_that_a_bump_breaks(lab: Lab) -> None:
    """And that one alone: apply leaves the others pending, and GitHub shows ten annotations."""
    change(lab.root)
    lab.page("another", f"{B}:other", 'replacing("os.sep", "\'/\'")')
    assert run(lab, "patches") == {"Apply": 1, "Show the state of each patch": 1}
    (file,) = uploaded("patches")
    (result,) = sarif_rules.checked((lab.root.parent / file).read_text()).results
    assert result.rule_id == "drifted" and result.level == "error"
    assert result.properties["name"] == "page"
