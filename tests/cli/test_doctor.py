"""`cppmega doctor`: the facts of the machine, and the checks that need no recipe."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from cppmega.cli.main import main
from cppmega.preflight import examine, machine
from cppmega.preflight.checks import ORDER
from tests.support.lab import Lab

QUICK = ORDER[: ORDER.index("imported_process")]
"""The checks that start no process that imports torch."""


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(examine, "ORDER", QUICK)
    monkeypatch.setattr(machine, "gpu_here", lambda: False)
    monkeypatch.setattr("cppmega.preflight.context.gpu_here", lambda: False)
    monkeypatch.setattr("cppmega.host.gpus.reported", lambda *environ: [])
    made = Lab(tmp_path, monkeypatch)
    made.wheel()
    made.page()
    return made


def doctor(lab: Lab, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as done:
        main(("doctor", "--megatron", str(lab.root), *words))
    assert isinstance(done.value.code, int)
    return done.value.code, capsys.readouterr().out


def test_a_healthy_machine_without_a_gpu_is_fine(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    lab.apply()
    code, out = doctor(lab, capsys)
    assert code == 0, out
    rows = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert rows["gpu"].startswith("none: this machine has no NVIDIA device")
    assert f"megatron-core 1.0 in {lab.root}" in rows["packages"]
    assert sys.executable in rows["python"] and "free" in rows["disk"]
    assert "need a recipe or a GPU" in rows["not-applicable"] and "folders" in out


def test_what_is_wrong_fails_it_as_it_fails_the_preflight(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = doctor(lab, capsys, "--json", "--report", "junit=d.xml")
    answer = json.loads(out)
    assert code == 1 and answer["ok"] is False
    assert answer["machine"]["gpus"] == [] and answer["machine"]["no_gpu"]
    (failed,) = [one for one in answer["checks"] if one["state"] == "failed"]
    assert failed["name"] == "no-receipt" and str(lab.root) in failed["next"]
    assert 'failures="1"' in Path("d.xml").read_text()


def test_a_machine_without_megatron_still_has_facts(
    lab: Lab, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lab.root = tmp_path / "empty"
    lab.root.mkdir()
    code, out = doctor(lab, capsys)
    assert code == 1 and out.startswith("machine") and "no-megatron" in out


def test_no_run_folder_is_created(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    lab.apply()
    doctor(lab, capsys)
    assert not Path("runs").exists()
