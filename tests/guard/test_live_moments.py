"""When the guard looks at what runs: at steps, checkpoints, imports, and the end of the run."""

from __future__ import annotations

import importlib.util
import os
import py_compile
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.guard.bench import Bench
from tests.guard.made_files import FILES
from tests.support import made

pytestmark = pytest.mark.slow

TRAINING = """
from megatron.core.thing import double
def train_step(step):
    return double(2)
def training_log():
    return "logged"
def save_checkpoint(step):
    print("saved", step)
def maybe_finalize_async_save(blocking=False):
    print("written" if blocking else "not yet")
def train(steps, after=lambda step: None):
    for step in range(1, steps + 1):
        train_step(step)
        after(step)
        save_checkpoint(step)
"""
TRAINS = {
    "megatron/training/__init__.py": "",
    "megatron/training/training.py": TRAINING,
    "megatron/training/global_vars.py": "def get_args():\n    return None\n",
}
STEP = """
from megatron.core import thing
from megatron.training import training
def other(x):
    return x
def after(step):
    if step == {step}:
        thing.double = other
training.train(3, after)
print("trained")
"""
OWN_LOOP = """
from cppmega import guard
from megatron.core import thing
def other(x):
    return x
for step in guard.steps(range(3)):
    thing.double(step)
    if step == {step}:
        thing.double = other
print("trained")
"""


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A tree with a training module, as Megatron's own is."""
    bench = Bench(tmp_path_factory.mktemp("trainer"))
    made.page(bench.pages)
    bench.tree(files=FILES | TRAINS)
    return bench


@contextmanager
def header(bench: Bench, patch: str) -> Iterator[None]:
    """The page with another header."""
    made.page(bench.pages, patch=patch)
    bench.apply(bench.folder / "root")
    yield
    made.page(bench.pages)
    bench.apply(bench.folder / "root")


def answer(bench: Bench, text: str, **environment: str) -> tuple[int, str, str]:
    script = bench.folder / "script.py"
    script.write_text(text)
    ((code, out, err),) = bench.run(bench.folder / "root", script=script, **environment)
    return code, out, err


def test_replaced_in_step_two_is_found_before_its_checkpoint(trainer: Bench) -> None:
    """At every checkpoint and not only at the first: a good one is not replaced by a wrong one."""
    code, out, err = answer(trainer, STEP.format(step=2))
    assert code == 1 and "stale-code" in err and "before a checkpoint" in err
    assert "thing.py:double is __main__:other" in err
    assert "saved 1" in out and "saved 2" not in out


UPGRADE = """
import os, sys
if int(os.environ["WORLD_SIZE"]) > 1:
    import torch
    torch.distributed.init_process_group("gloo")
from megatron.core import thing
from megatron.training import training
def upgrade(step):
    if step == 2 and os.environ["RANK"] == "0":
        path = thing.__file__.replace("thing.py", {file!r})
        text = open(path).read()
        os.unlink(path)  # as package managers do
        if {text!r}:
            open(path, "w").write({text!r} + text)
        {more}
training.train(3, upgrade)
"""
REPLACED = {
    "a patched file": ("thing.py", "# new", "", "file-changed"),
    "another file": ("decorators.py", "# new", "", "file-changed"),
    "a file that is gone": ("decorators.py", "", "", "file-changed"),
    "the file of a module that is imported again": (
        *("decorators.py", "NEW = 1\n"),
        "import importlib; importlib.reload(sys.modules['megatron.core.decorators'])",
        "foreign-edit",
    ),
    "a file, and code in memory": ("decorators.py", "# new", "thing.double = len", "stale-code"),
}
"""File, what is written before its text, what else happens, and the error."""


@pytest.mark.parametrize("case", REPLACED)
def test_files_replaced_during_a_run_end_it_after_a_checkpoint(trainer: Bench, case: str) -> None:
    file, text, more, error = REPLACED[case]
    path = trainer.folder / "root" / "megatron" / "core" / file
    before = path.read_bytes()
    try:
        code, out, err = answer(trainer, UPGRADE.format(file=file, text=text, more=more))
    finally:
        path.unlink(missing_ok=True)
        path.write_bytes(before)
    assert code == 1 and error in err and "saved 1" in out and "saved 3" not in out, err
    assert ("saved 2\nwritten" in out) == (not more), "different code replaces no good checkpoint"


def test_files_replaced_on_one_host_end_every_rank_after_a_checkpoint(trainer: Bench) -> None:
    roots = [trainer.folder / "root", trainer.tree("second", files=FILES | TRAINS)]
    script = trainer.folder / "script.py"
    script.write_text(UPGRADE.format(file="decorators.py", text="# new\n", more=""))
    path = roots[0] / "megatron" / "core" / "decorators.py"
    before = path.read_bytes()
    try:
        answers = trainer.run(*roots, script=script)
    finally:
        path.unlink()
        path.write_bytes(before)
    for code, out, err in answers:
        assert code == 1 and "rank 0, before a checkpoint" in err and "file-changed" in err, err
        assert "saved 2\nwritten" in out and "saved 3" not in out


@pytest.mark.parametrize(("step", "when"), [(0, "after the first step"), (2, "at the end of the")])
def test_replaced_during_a_loop_of_ones_own(trainer: Bench, step: int, when: str) -> None:
    code, out, err = answer(trainer, OWN_LOOP.format(step=step))
    assert code == 1 and "stale-code" in err and when in err, err
    assert ("trained" in out) == (step == 2)


def test_first_imported_when_the_tree_was_reverted_meanwhile(trainer: Bench) -> None:
    text = """
    import os
    from cppmega import guard
    import megatron.core
    path = megatron.core.__path__[0] + "/thing.py"
    text = open(path).read()
    def write(text):
        os.unlink(path)
        open(path, "w").write(text)
    for step in guard.steps(range(2)):
        if step == 1:
            write(text.replace("return 2 * x", "return x"))
            from megatron.core import thing
            write(text)
            continue
        import megatron.core.decorators
    """
    with header(trainer, 'reached="never"'):
        code, out, err = answer(trainer, textwrap.dedent(text))
    assert code == 1 and "file-changed" in err and "thing.py" in err and not out


def test_a_decorator_that_was_replaced_before_the_import(trainer: Bench) -> None:
    text = """
    import functools
    from cppmega import guard
    from megatron.core import decorators
    def faster(function):
        return functools.wraps(function)(lambda x, by=1: x)
    decorators.announced = faster
    from megatron.core import thing
    for step in guard.steps(range(1)):
        thing.double(step)
    """
    code, _, err = answer(trainer, textwrap.dedent(text))
    assert code == 1 and "thing.py:decorated is __main__:faster.<locals>.<lambda>" in err, err


def test_bytecode_of_another_text_ends_the_run_before_its_first_step(trainer: Bench) -> None:
    """With the second and the size of the file that was checked."""
    root = trainer.folder / "root"
    file = root / "megatron/core/thing.py"
    text, there = file.read_text(), file.stat()
    other = trainer.folder / "other.py"
    other.write_text(text.replace("2 * x", "3 * x"))
    os.utime(other, ns=(there.st_atime_ns, there.st_mtime_ns))
    cached = Path(importlib.util.cache_from_source(str(file)))
    cached.parent.mkdir(exist_ok=True)
    py_compile.compile(str(other), cfile=str(cached), dfile=str(file), doraise=True)
    code, out, err = answer(trainer, OWN_LOOP.format(step=9))
    assert code == 1 and "stale-bytecode" in err and f"rm {cached}" in err and not out, err
    cached.unlink()


LOADED = """
import importlib.abc, importlib.machinery, sys
from cppmega import guard
class Loader(importlib.machinery.SourceFileLoader):
    def source_to_code(self, data, path, *, _optimize=-1):
        return super().source_to_code(data{change}, path, _optimize=_optimize)
    def get_code(self, fullname):
        return self.source_to_code(self.get_data(self.path), self.path)
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "megatron.core.thing":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec
sys.meta_path.insert(0, Finder())
from megatron.core import thing
for step in guard.steps(range(1)):
    thing.double(step)
"""


def test_code_counts_whoever_loaded_it(trainer: Bench) -> None:
    """typeguard compiles other code of a file; most import hooks do not."""
    assert answer(trainer, LOADED.format(change=""))[0] == 0
    change = ".replace(b'return 2 * x', b'assert x is not None; return 2 * x')"
    code, _, err = answer(trainer, LOADED.format(change=change))
    assert code == 1 and "stale-code" in err and "loaded by __main__.Loader" in err, err


def test_a_loop_without_arguments_cannot_be_decided(trainer: Bench) -> None:
    loop = OWN_LOOP.format(step=9)
    with header(trainer, 'reached="forward", when=lambda args: args.mtp'):
        code, _, err = answer(trainer, loop)
        assert code == 0 and "reached: double_doubles" in err, "reached is reached"
        code, out, err = answer(trainer, loop.replace("thing.double(step)", "pass"))
    assert code == 1 and "arguments-not-given" in err and "trained" not in out
    assert 'give it {"mtp": ...}' in err and "double_doubles" in err


def test_a_vouched_wrapper_is_named_in_the_log(trainer: Bench) -> None:
    text = """
    import functools
    from cppmega import guard
    from megatron.core import thing
    def timed(function):
        return functools.wraps(function)(lambda x: function(x))
    thing.double = timed(thing.double)
    for step in guard.steps(range(1)):
        thing.double(step)
    """
    key = "__main__:timed.<locals>.<lambda>"
    code, _, err = answer(trainer, textwrap.dedent(text))
    assert code == 1 and f"--allow-wrapper {key}" in err
    code, _, err = answer(trainer, textwrap.dedent(text), CPPMEGA_ALLOW_WRAPPER="__main__:timed*")
    assert code == 0 and f"vouched wrappers: double by {key}" in err
    words = ["--megatron", str(trainer.folder / "root"), str(trainer.folder / "script.py")]
    done = subprocess.run(
        [sys.executable, "-m", "cppmega.run", "--allow-wrapper", key, *words],
        env=trainer.environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and f"vouched wrappers: double by {key}" in done.stderr


def test_one_rank_with_other_code_stops_all_at_a_checkpoint(trainer: Bench) -> None:
    text = """
    import os
    import torch
    from cppmega import guard
    from megatron.core import thing
    torch.distributed.init_process_group("gloo")
    for step in guard.steps(range(3)):
        thing.double(step)
        if step == 1 and os.environ["RANK"] == "1":
            thing.double = lambda x: x
        guard.after_first_save()
        print("saved", step, flush=True)
    """
    script = trainer.folder / "script.py"
    script.write_text(textwrap.dedent(text))
    root = trainer.folder / "root"
    for code, out, err in trainer.run(root, root, script=script):
        assert code == 1 and "rank 1, after a checkpoint: " in err and "stale-code" in err, err
        assert "saved 0" in out and "saved 1" not in out
