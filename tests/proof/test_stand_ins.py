"""What a page may expect of the stand-ins for its proof."""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from cppmega.proof import stand_ins

KERNELS = """
import tilelang
from tilelang import language as T
from tilelang.autotuner import autotune

@autotune(configs=[])
@tilelang.jit(pass_configs={tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True})
def tuned(n):
    @T.prim_func
    def kernel():
        return n
    return kernel

@tilelang.jit
def plain(n):
    return n
"""


@pytest.fixture(autouse=True)
def _modules() -> Iterator[None]:
    """Take back what is put into `sys.modules`, which proofs leave to their process."""
    before = dict(sys.modules)
    yield
    sys.modules.clear()
    sys.modules.update(before)


def test_arguments_that_are_not_given_are_unset() -> None:
    args = stand_ins.Arguments(num_layers=2)
    assert (args.num_layers, args.fp8) == (2, None)
    args.fp8 = "hybrid"
    assert args.fp8 == "hybrid"
    assert stand_ins.Arguments(0).log_interval == 0


@pytest.mark.parametrize("unset", [None, 0])
def test_arguments_are_copied_like_a_namespace(unset: object) -> None:
    args = stand_ins.Arguments(unset, num_layers=2)
    for other in (copy.copy(args), copy.deepcopy(args), pickle.loads(pickle.dumps(args))):
        assert other == args and other.fp8 == unset


def test_training_runs_without_its_loggers() -> None:
    training = ModuleType("training")
    names = ("args", "num_microbatches", "timers", "tensorboard_writer", "wandb_writer")
    for name in (*names, "one_logger", "energy_monitor"):
        setattr(training, f"get_{name}", lambda: pytest.fail("a real one is asked for"))
    before = dict(vars(training))
    args = stand_ins.Arguments()
    with stand_ins.quiet_training(training, args, get_timers=lambda: "a clock"):
        assert training.get_args() is args and training.get_one_logger() is None
        assert training.get_timers() == "a clock" and training.get_num_microbatches() == 1
    assert vars(training) == before


def test_tilelang_records_the_kernels_and_leaves_their_functions(tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text(KERNELS)
    stand_ins.package("made_kernels", str(tmp_path))
    tilelang = stand_ins.tilelang()
    module = importlib.import_module("made_kernels.kernels")
    tuned, plain = tilelang.kernels
    assert (tuned.name, tuned.module) == ("tuned", "made_kernels.kernels")
    assert tuned.options == {"pass_configs": {"TL_ENABLE_FAST_MATH": True}}
    assert (plain.name, plain.options) == ("plain", {})
    assert module.plain(3) == 3 and module.tuned(4)() == 4


def test_what_is_forgotten_is_imported_again(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("from nowhere_at_all import thing\n")
    stand_ins.package("made_package", str(tmp_path))
    with pytest.raises(ImportError):
        importlib.import_module("made_package.one")
    stand_ins.module("nowhere_at_all", thing=1)
    assert importlib.import_module("made_package.one").thing == 1
    stand_ins.module("nowhere_at_all", thing=2)
    stand_ins.forget("made_package")
    assert not [name for name in sys.modules if name.startswith("made_package")]
    stand_ins.package("made_package", str(tmp_path))
    assert importlib.import_module("made_package.one").thing == 2
