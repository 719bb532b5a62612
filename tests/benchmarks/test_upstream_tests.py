"""The command that runs Megatron's unit tests on two trees: what it sees, and what it survives."""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cppmega.errors import CppmegaError
from tests.support import PATIENCE, REPOSITORY, made

pytestmark = pytest.mark.slow

command = importlib.import_module("benchmarks.upstream_tests.run")
report = importlib.import_module("benchmarks.upstream_tests.report")

TESTS = {
    "test_values.py": """
        import pytest
        from megatron.core.thing import double, half
        def test_half(): assert half(4) == 2
        def test_double(): assert double(2) == 2
        def test_skipped(): pytest.skip("not here")
        @pytest.mark.xfail
        def test_known(): assert double(half(2)) == 3
    """,
    "test_crash.py": """
        import os
        def test_before(): pass
        def test_ends_the_process(): os.kill(os.getpid(), 11)
        def test_after(): pass
    """,
    "test_hang.py": """
        import os
        import time
        from pathlib import Path
        def test_hangs():
            report = Path(os.environ["TMPDIR"]).with_name("report.jsonl")
            long_ago = time.time() - 590  # so that nobody waits for the limit
            os.utime(report, (long_ago, long_ago))
            time.sleep(600)
        def test_next(): pass
    """,
    "test_broken.py": "import what_is_not_there",
    "test_left.py": """
        import pytest
        DONE = []
        class Owner:
            def __init__(self): self.me = self
            def __del__(self): DONE.append("gone")
        @pytest.mark.xfail
        def test_leaves():
            owner = Owner()
            assert False
        def test_finds_it_gone(): assert DONE == ["gone"]
        def test_leaves_another(): Owner()
        def test_nothing_goes_by_itself():
            things = [[] for _ in range(100_000)]
            assert DONE == ["gone", "gone"]
    """,
    "sub/test_flaky.py": """
        from pathlib import Path
        def test_in_turns():
            runs = Path(__file__).parents[4] / "runs"
            count = len(runs.read_text()) if runs.exists() else 0
            runs.write_text("x" * (count + 1))
            assert count % 4 in (0, 3), f"this time {__file__}"
    """,
}
GIVEN: dict[str, Any] = {
    "pages": ["double_doubles"],
    "gated": False,
    "wanted": (),
    "expression": None,
    "jobs": 2,
    "limit": 0,
    "file_seconds": 600,
    "test_seconds": 500,  # which one test runs into on each side, and no other on a slow machine
    "reruns": 1,
    "fresh": False,
    "only": None,
}


def write(folder: Path) -> Path:
    """A made folder of tests."""
    for name, text in TESTS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        lines = text.strip("\n").splitlines()
        (folder / name).write_text("\n".join(line.removeprefix(" " * 8) for line in lines) + "\n")
    return folder


def compared(folder: Path, **changes: Any) -> dict[str, Any]:
    """The result of a made tree, a page that makes `double` right, and made tests."""
    site = made.tree(folder / "site")
    made.page(folder / "pages")
    given = {**GIVEN, "patches": [folder / "pages"], **changes}
    scratch = folder / "scratch"
    scratch.mkdir()
    tests = write(folder / "made_tests")
    found: dict[str, Any] = command.compare(tests, site, "none", scratch, given, time.monotonic())
    return found


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return compared(tmp_path_factory.mktemp("compared"))


def named(entries: list[dict[str, Any]]) -> list[str]:
    return [entry["test"].removeprefix("tests/unit_tests/") for entry in entries]


def test_a_difference_is_reported_with_both_outcomes(result: dict[str, Any]) -> None:
    (entry,) = result["differences"]
    assert named([entry]) == ["test_values.py::test_double"]
    assert (entry["stock"], entry["patched"]) == (("passed", "passed"), ("failed", "failed"))
    assert entry["patched_reason"] == "assert 4 == 2"
    assert not report.fine(result)


def test_what_overlaps_when_run_again_is_flaky(result: dict[str, Any]) -> None:
    (entry,) = result["flaky"]
    assert named([entry]) == ["sub/test_flaky.py::test_in_turns"]
    assert (entry["stock"], entry["patched"]) == (("passed", "failed"), ("failed", "passed"))


def test_a_crash_a_hang_and_a_broken_file_cost_nothing_but_themselves(
    result: dict[str, Any],
) -> None:
    files = {name.removeprefix("tests/unit_tests/"): f for name, f in result["files"].items()}
    for side in ("stock", "patched"):
        assert files["test_crash.py"][side] == {"crashed": 1, "passed": 2}
        assert files["test_hang.py"][side] == {"passed": 1, "timed out": 1}
        assert files["test_broken.py"][side] == {"error": 1}
    assert files["test_left.py"]["stock"] == {"passed": 3, "xfailed": 1}
    assert files["test_values.py"]["stock"] == {"passed": 2, "skipped": 1, "xfailed": 1}


def test_the_result_names_the_overlay_and_no_path(
    result: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = report.table({**result, "minutes": 1})
    assert "- pages: double_doubles" in text and "- tests: 6 files" in text
    assert "1 differ" in text and "assert 4 == 2" in text
    (flaky,) = result["flaky"]
    assert flaky["patched_reason"] == "AssertionError: this time .../test_flaky.py"
    assert str(tmp_path_factory.getbasetemp()) not in repr(result)


def test_a_fresh_interpreter_sees_what_a_fork_sees(tmp_path: Path, result: dict[str, Any]) -> None:
    values = "tests/unit_tests/test_values.py"
    found = compared(tmp_path, fresh=True, only=[values, "gone"], test_seconds=60, file_seconds=99)
    assert (found["processes"], result["processes"]) == ("a fresh interpreter", "a fork")
    (file,) = found["files"]
    assert found["files"][file] == result["files"][file]


def test_no_file_is_begun_late_and_the_rest_is_named(tmp_path: Path) -> None:
    found = compared(tmp_path, limit=1e-9)
    assert len(found["files_without_time"]) == len(TESTS)
    assert not report.fine(found), "nothing was compared"


def test_a_tree_that_is_patched_already_is_no_stock(tmp_path: Path) -> None:
    site = made.tree(tmp_path / "site")
    pages = made.page(tmp_path / "pages").parent
    once, twice = tmp_path / "once", tmp_path / "twice"
    command.patched(site, once, ["double_doubles"], False, [pages])
    with pytest.raises(CppmegaError, match="not-applied") as raised:
        command.patched(once, twice, ["double_doubles"], False, [pages])
    assert "thing.py" in raised.value.what


class Cut:
    """A server whose every process runs into the limit before it has said anything."""

    def run(self, job: dict[str, Any]) -> str:
        assert job["file_seconds"] <= 7
        return "file limit"


def test_a_file_without_time_on_one_side_is_not_compared(tmp_path: Path) -> None:
    limits = command.Limits(test=1, file=7)
    assert command.run_file(Cut(), "test_x.py", limits, tmp_path, ()) is None
    assert list(tmp_path.iterdir()) == []


def test_tests_of_patched_modules_come_first(tmp_path: Path) -> None:
    write(tmp_path / "tests" / "unit_tests")
    imported = tmp_path / "tests" / "unit_tests" / "test_zzz.py"
    imported.write_text("from megatron.core import (\n    other,\n    thing,\n)\n")
    first = command.ordered(tmp_path, ["megatron/core/thing.py"], ())[:2]
    assert [Path(name).name for name in first] == ["test_values.py", "test_zzz.py"]
    chosen = command.ordered(tmp_path, [], ["sub/", "crash"])
    assert [Path(name).name for name in chosen] == ["test_flaky.py", "test_crash.py"]


STOCK = {"a": ("passed", ""), "b": ("failed", "at 0x12"), "c": ("passed", "")}
PATCHED = {"a": ("failed", "why"), "b": ("failed", "at 0x34"), "c": ("passed", "")}


def summary(stock: dict[str, Any], patched: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = report.summary({}, {"file": [(stock, patched)]}, [])
    return found


def test_a_difference_on_purpose_is_named_and_must_stay_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = report.Meant("a", "passed", "failed", "page", "it asserts the bug")
    monkeypatch.setattr(report, "MEANT", (entry,))
    found = summary(STOCK, PATCHED)
    assert report.fine(found) and named(found["meant"]) == ["a"]
    assert "it asserts the bug" in report.table(found)
    same = summary(STOCK, STOCK)
    assert not report.fine(same) and named(same["no_longer_seen"]) == ["a"]
    earlier = {**summary(STOCK, STOCK), "files_without_time": [], "files": {}}
    assert named(report.merged(found, {**earlier, "no_longer_seen": []})["meant"]) == ["a"]
    otherwise = summary(STOCK, {**PATCHED, "a": ("crashed", "")})
    assert not report.fine(otherwise) and named(otherwise["differences"]) == ["a"]


def test_a_test_that_is_gone_or_passes_only_now_differs() -> None:
    assert named(summary(STOCK, {"a": STOCK["a"], "b": STOCK["b"]})["differences"]) == ["c"]
    assert named(summary(STOCK, {**STOCK, "b": ("passed", "")})["differences"]) == ["b"]
    assert not summary(STOCK, {**STOCK, "c": ("not run", "")})["differences"]


def test_a_later_result_is_put_onto_an_earlier_one() -> None:
    told = {"device": "one", "tests": "these", "minutes": 2.0}
    old = report.summary(told, {"first": [(STOCK, PATCHED)]}, ["second"])
    late = {"d": ("passed", "")}
    new = report.summary(told, {"second": [(late, late)]}, [])
    both = report.merged(old, new)
    assert both["counts"]["stock"] == {"failed": 1, "passed": 3}
    assert (both["passed_on_both"], both["minutes"]) == (2, 4.0)
    assert named(both["differences"]) == ["a"] and not report.fine(both)
    assert list(both["files"]) == ["first", "second"] and not both["files_without_time"]
    with pytest.raises(CppmegaError, match="another device"):
        report.merged({**old, "device": "two"}, new)


def test_a_second_round_without_time_makes_nothing_flaky() -> None:
    late = dict.fromkeys(STOCK, ("not run", ""))
    for second in ((late, late), ({}, {}), (late, PATCHED)):
        (found,) = report.differences([(STOCK, PATCHED), second])
        assert not found.flaky and (found.stock, found.patched) == (("passed",), ("failed",))


def test_the_limit_of_a_file_is_no_outcome_of_the_test_that_met_it() -> None:
    cut = {**PATCHED, "a": ("timed out", "file limit")}
    assert report.differences([(STOCK, cut)]) == []
    (found,) = report.differences([(STOCK, PATCHED), (STOCK, cut)])
    assert not found.flaky and found.patched == ("failed",)
    hangs = {**PATCHED, "a": ("timed out", "test limit")}
    assert [found.test for found in report.differences([(STOCK, hangs)])] == ["a"]


def test_failing_otherwise_is_told() -> None:
    assert summary(STOCK, PATCHED)["other_reasons"] == []
    other = {**STOCK, "b": ("failed", "NameError: d_v")}
    assert summary(STOCK, other)["other_reasons"] == [("b", "at 0x12", "NameError: d_v")]


def test_a_folder_without_tests_is_wrong_usage(tmp_path: Path) -> None:
    done = CliRunner().invoke(command.main, ["--tests", str(tmp_path / "none")])
    assert done.exit_code == 2 and "does not exist" in done.output
    done = CliRunner().invoke(command.main, ["--help"])
    assert done.exit_code == 0 and "tests/unit_tests" in done.output


STAND_INS = """
from benchmarks.upstream_tests import on_cpu as stand_ins
stand_ins.install()
import torch
a = torch.ones(2, device="cuda")
assert a.device.type == "cpu" and a.cuda() is a
assert torch.arange(3, device=torch.cuda.current_device()).device.type == "cpu"
assert a.to("cuda", torch.float64).dtype == torch.float64 and a.to(torch.device("cuda:0")) is a
assert torch.nn.Linear(2, 2).cuda()(a).sum().backward() is None
torch.cuda.manual_seed(3)
state = torch.cuda.get_rng_state()
first = torch.rand(2, device="cuda")
torch.cuda.set_rng_state(state)
assert torch.equal(first, torch.rand(2))
with torch.cuda.stream(torch.cuda.Stream()):
    torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
torch.distributed.init_process_group(
    backend="nccl", world_size=1, rank=0, store=torch.distributed.HashStore()
)
group = torch.distributed.new_group([0], backend="nccl")
torch.distributed.all_reduce(a.cuda(), group=group)
assert torch.distributed.get_backend(group) == "gloo"
print("works")
"""


def test_the_cpu_stands_in_for_the_gpu() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STAND_INS],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.stdout.endswith("works\n"), done.stderr
