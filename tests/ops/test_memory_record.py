"""The record of kernels' shared memory: what it answers, and what has no answer there."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tests.ops import kernel_memory, memory_record  # noqa: E402
from tests.ops.kernel_memory import LIMITS  # noqa: E402
from tests.ops.memory_record import known  # noqa: E402

TEXT = """
import triton
import triton.language as tl

SCALE = tl.constexpr(2)


@triton.jit
def _scaled(x):
    return x * SCALE


@triton.jit
def _twice(x):
    return _scaled(x) + x


@triton.jit
def _rows_kernel(out, count, ROWS: tl.constexpr):
    at = tl.arange(0, ROWS)
    tl.store(out + at, _twice(tl.load(out + at)), mask=at < count)
"""


def key_of(kernel: Any, arch: int = 90, **changes: Any) -> str:
    """The key of a launch of a made kernel, which is not compiled."""
    keys: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_record, "known", lambda key, *others: keys.append(key))
        given = {"out": torch.zeros(64), "count": 48, "ROWS": 64, **changes}
        kernel_memory.shared_memory(kernel, given, arch)
    return keys[0]


def kernel_of(file: Path, text: str = TEXT) -> Any:
    """A made kernel, in a module of its own."""
    file.write_text(text)
    spec = importlib.util.spec_from_file_location("made", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module._rows_kernel


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("constexpr(2)", "constexpr(3)"),  # a constant of what is called by what is called
        ("return x * SCALE", "return x + SCALE"),
        ("+ x", "- x"),
        ("at < count", "at <= count"),
    ],
)
def test_a_changed_kernel_has_another_key(tmp_path: Path, old: str, new: str) -> None:
    assert TEXT.count(old) == 1
    changed = kernel_of(tmp_path / "changed.py", TEXT.replace(old, new))
    assert key_of(changed) != key_of(kernel_of(tmp_path / "made.py"))


def test_another_launch_has_another_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernel_of(tmp_path / "made.py")
    changes: list[dict[str, Any]] = [
        {},
        {"ROWS": 128},
        {"count": 47},  # not divisible by 16
        {"count": 1},  # which is compiled in
        {"out": torch.zeros(64, dtype=torch.bfloat16)},
        {"num_warps": 8},
        {"num_stages": 1},
        {"maxnreg": 64},
        {"arch": 100},
    ]
    keys = {key_of(kernel, **change) for change in changes}
    assert len(keys) == len(changes)
    monkeypatch.setattr(kernel_memory, "getsource", lambda function: "other passes")
    assert key_of(kernel) not in keys
    monkeypatch.undo()
    monkeypatch.setattr("triton.__version__", "another")
    assert key_of(kernel) not in keys


def test_a_kernel_elsewhere_and_other_values_have_the_same_key(tmp_path: Path) -> None:
    kernel, below = kernel_of(tmp_path / "a.py"), kernel_of(tmp_path / "b.py", f"#\n\n{TEXT}")
    assert key_of(kernel) == key_of(below) == key_of(kernel, count=32, out=torch.ones(128))


def test_a_constant_that_a_test_replaces_changes_the_key(tmp_path: Path) -> None:
    from triton.language import constexpr

    kernel = kernel_of(tmp_path / "made.py")
    before = key_of(kernel)
    kernel.__globals__["SCALE"] = constexpr(3)
    assert key_of(kernel) != before


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A record of four kernels and a scratch folder, both made; and what is compiled."""
    file = tmp_path / "record.json"
    file.write_text(json.dumps({"90": {"d": 4, "a": 1, "b": 2, "c": 3}, "80": {"e": 5}}))
    monkeypatch.setattr(memory_record, "FILE", file)
    monkeypatch.setenv("TESTS_SCRATCH", str(tmp_path))
    monkeypatch.delenv(memory_record.RECOMPILE, raising=False)
    return []


def test_what_is_compiled(compiled: list[str]) -> None:
    """What is missing, and those with the least keys."""
    sizes = {"a": 1, "b": 2, "c": 3, "d": 4, "e": 6}

    def size_of(key: str) -> int:
        def compiles() -> int:
            compiled.append(key)
            return sizes[key]

        return known(key, 90, compiles, "family.kernel")

    assert [size_of(key) for key in "dcbae"] == [4, 3, 2, 1, 6]
    assert compiled == ["b", "a", "e"]  # e is recorded of another architecture
    assert memory_record.asked() == {"90": sizes}
    assert memory_record.largest() == {"90": {"family.kernel": 6}}
    assert memory_record.unrecorded() == 1


def test_a_wrong_answer_is_noticed(compiled: list[str]) -> None:
    with pytest.raises(AssertionError, match="1 is recorded, run: python scripts/record_golden"):
        known("a", 90, lambda: 9)


def test_nothing_is_recorded_of_a_kernel_that_does_not_compile(compiled: list[str]) -> None:
    def fails() -> int:
        raise AssertionError("multiplies fp32 in tf32")

    with pytest.raises(AssertionError, match="tf32"):
        known("new", 90, fails)
    assert memory_record.asked() == {} and memory_record.unrecorded() == 0


def test_the_record_can_be_ignored(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(memory_record.RECOMPILE, "1")
    assert [known(key, 90, lambda: 9) for key in "ad"] == [9, 9]


ASSEMBLED = """
ptxas info    : 0 bytes gmem
ptxas info    : Function properties for _rows_kernel
    16 bytes stack frame, {0} bytes spill stores, 4 bytes spill loads
ptxas info    : Used {1} registers, used 1 barriers
"""


def test_the_largest_spill_of_a_kernel_is_kept(compiled: list[str]) -> None:
    for arch, name, *said in (
        (90, "family.kernel", 8, 255),
        (90, "family.kernel", 24, 168),
        (90, "family.other", 0, 40),
        (80, "kernel_of_a_test", 8, 255),
    ):
        memory_record.note(int(arch), str(name), ASSEMBLED.format(*said))
    largest = {"family.kernel": [24, 168], "family.other": [0, 40]}
    assert memory_record.spills() == {"90": largest}


def test_some_of_every_architecture_are_compiled_in_every_run() -> None:
    recorded = json.loads(memory_record.FILE.read_text())
    assert recorded.keys() == {str(arch) for arch in LIMITS}
    assert all(len(found) > memory_record.SAMPLED for found in recorded.values())


def test_a_kernel_of_two_families_keeps_its_maximum() -> None:
    recorded = {"shared": {"90": {"common.bits": 8, "mhc.own": 4}}, "spills": {}}
    asked = {
        "shared": {"90": {"common.bits": 2, "dsa.own": 1}},
        "spills": {"90": {"dsa.own": [0, 9]}},
    }
    found = memory_record.beside(recorded, asked, "dsa")
    assert found["shared"] == {"90": {"common.bits": 8, "mhc.own": 4, "dsa.own": 1}}
    assert found["spills"] == asked["spills"]


def test_its_own_kernels_are_recorded_anew() -> None:
    recorded = {"spills": {"90": {"dsa.own": [64, 255]}}}
    asked = {"spills": {"90": {"dsa.own": [0, 128]}}}
    assert memory_record.beside(recorded, asked, "dsa") == asked
    assert memory_record.beside(recorded, asked, "") == asked
