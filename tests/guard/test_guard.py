"""`cppmega.run` in every rank: what is imported is what was applied, and it was reached."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.guard.bench import Bench, finish
from tests.support import PATIENCE, free_port, made

pytestmark = pytest.mark.slow

TRAINING = """
from megatron.core.thing import double
def train_step():
    return double(2)
def training_log():
    return "logged"
def save_checkpoint():
    return "saved"
def train(steps):
    for _ in range(steps):
        train_step()
        training_log()
    save_checkpoint()
"""


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_a_whole_run_is_summed_up_once(bench: Bench) -> None:
    made.page(bench.pages)
    root = bench.tree()
    first, second = bench.run(root, root, script=bench.script())
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert "reached: double_doubles" in first[2] and "reached" not in second[2]
    assert "trained True" in first[1]


def test_the_log_counts_pages_and_names_them_only_where_asked(bench: Bench) -> None:
    made.page(bench.pages)
    root = bench.tree()
    ((_, _, err),) = bench.run(root, script=bench.script(), CPPMEGA_VERBOSE="")
    first, second = (line for line in err.splitlines() if line.startswith("cppmega: "))
    assert "1 patch reached, 0 idle (CPPMEGA_VERBOSE=1 names them)" in first
    assert second.startswith("cppmega: imported: ") and "double_doubles" not in err


def test_four_ranks_reach_a_page_together(bench: Bench) -> None:
    """A page is reached when one rank reaches it: pipeline stages run different code."""
    made.page(bench.pages)
    root = bench.tree()
    script = bench.script('double(step) if os.environ["RANK"] == "3" else None')
    answers = bench.run(root, root, root, root, script=script)
    assert [code for code, _, _ in answers] == [0] * 4, answers[0][2]
    assert "reached: double_doubles" in answers[0][2]


def test_a_page_that_no_rank_reaches_stops_the_run(bench: Bench) -> None:
    made.page(bench.pages)
    root = bench.tree()
    for code, out, err in bench.run(root, root, script=bench.script("half(step)")):
        assert code == 1 and "page-not-reached" in err and "trained" not in out
        assert "double_doubles" in err and "thing.py:double" in err and "rank" in err


def test_a_page_that_this_run_need_not_reach_is_idle(bench: Bench) -> None:
    made.page(bench.pages, patch='reached="forward", when=lambda args: args.mtp')
    root = bench.tree()
    ((code, _, err),) = bench.run(root, script=bench.script("half(step)", '{"mtp": False}'))
    assert code == 0 and "idle: double_doubles (this run's arguments do not use it)" in err
    ((code, _, err),) = bench.run(root, script=bench.script("half(step)", '{"mtp": True}'))
    assert code == 1 and "page-not-reached" in err


def test_a_rule_that_the_arguments_break_ends_the_run_before_its_first_step(bench: Bench) -> None:
    made.page(bench.pages)
    root = bench.tree()
    mixed = '{"enable_mhc_connections": True, "fp4": "e2m1"}'
    for code, out, err in bench.run(root, root, script=bench.script("print('a step')", mixed)):
        assert code == 1 and "unsupported" in err and "a step" not in out
        assert "rank 0" in err and "--fp4-format cannot be combined with hyper-connections" in err


def test_a_tampered_file_on_one_rank(bench: Bench) -> None:
    made.page(bench.pages)
    good, bad = bench.tree("good"), bench.tree("bad")
    file = bad / "megatron/core/thing.py"
    file.write_text(file.read_text().replace("2 * x", "3 * x"))
    answers = bench.run(good, bad, script=bench.script(), waiting=(0,))
    code, out, err = answers[1]
    assert code == 1 and "trained" not in out
    assert "rank 1" in err and "host" in err and "thing.py" in err and "double_doubles" in err
    assert answers[0][0] != 0


def test_a_file_changed_between_start_and_first_step(bench: Bench) -> None:
    made.page(bench.pages)
    good, bad = bench.tree("good"), bench.tree("bad")
    before = """
import megatron.core.thing as thing
if os.environ["RANK"] == "1":
    text = open(thing.__file__).read()
    os.unlink(thing.__file__)
    open(thing.__file__, "w").write(text + "# changed")
"""
    for code, _, err in bench.run(good, bad, script=bench.script(before=before)):
        assert code == 1 and "file-changed" in err
        assert "rank 1" in err and "thing.py" in err and "double_doubles" in err


def test_code_in_memory_that_is_not_the_code_of_the_file(bench: Bench) -> None:
    """Stale bytecode and a late setattr look right on disk."""
    made.page(bench.pages)
    before = """
import megatron.core.thing as thing
def double(x):
    return x
thing.double = double
"""
    ((code, _, err),) = bench.run(bench.tree(), script=bench.script(before=before))
    assert code == 1 and "stale-code" in err and "thing.py:double" in err


def test_a_shadow_on_the_path_of_one_rank(bench: Bench) -> None:
    made.page(bench.pages)
    root, shadow = bench.tree("root"), bench.tree("shadow", apply=False)
    path = f"{root}:{bench.environment['PYTHONPATH']}"
    done = subprocess.run(
        [sys.executable, "-m", "cppmega.run", str(bench.script())],
        env={**bench.environment, "PYTHONPATH": f"{shadow}:{path}", "RANK": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "several-megatrons" in done.stderr
    assert str(shadow) in done.stderr and str(root) in done.stderr and "rank 1" in done.stderr


def test_a_module_imported_from_elsewhere(bench: Bench) -> None:
    made.page(bench.pages)
    root, other = bench.tree("root"), bench.tree("other", files={"megatron/core/extra.py": ""})
    before = f"""
import megatron.core
megatron.core.__path__.append({str(other / "megatron/core")!r})
import megatron.core.extra
"""
    ((code, _, err),) = bench.run(root, script=bench.script(before=before))
    assert code == 1 and "shadowed" in err and "extra.py" in err


def test_a_missing_receipt_on_one_rank(bench: Bench) -> None:
    made.page(bench.pages)
    good, bad = bench.tree("good"), bench.tree("bad")
    shutil.rmtree(bad / ".cppmega")
    code, _, err = bench.run(good, bad, script=bench.script(), waiting=(0,))[1]
    assert code == 1 and "no-receipt" in err and "rank 1" in err
    assert f"python -m cppmega.apply_patches --megatron {bad}" in err


def test_ranks_with_different_overlays(bench: Bench) -> None:
    """Each rank is whole by itself; only the comparison shows it."""
    made.page(bench.pages, patch='reached="never", gate="CPPMEGA_MADE"')
    on, off = bench.tree("on", apply=False), bench.tree("off")
    bench.apply(on, CPPMEGA_MADE="1")
    before = 'os.environ.pop("CPPMEGA_MADE", None)'
    script = bench.script(before=before)
    # each rank's environment agrees with its own receipt
    path = bench.folder / "start.py"
    path.write_text(
        "import os, sys, runpy\n"
        'if os.environ["RANK"] == "0": os.environ["CPPMEGA_MADE"] = "1"\n'
        'sys.argv = ["run", *sys.argv[1:]]\n'
        'runpy.run_module("cppmega.run", run_name="__main__")\n'
    )
    together = bench.together(2)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(path), "--megatron", str(root), str(script)],
            env={**together, "RANK": str(i)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i, root in enumerate((on, off))
    ]
    for code, _, err in finish(ranks):
        assert code == 1 and "overlay-differs" in err, err
        assert "rank 0" in err and "rank 1" in err


def test_a_gate_that_differs_from_the_receipt(bench: Bench) -> None:
    made.page(bench.pages, patch='reached="never", gate="CPPMEGA_MADE"')
    root = bench.tree()
    ((code, _, err),) = bench.run(root, script=bench.script(), CPPMEGA_MADE="1")
    assert code == 1 and "gate-differs" in err and "CPPMEGA_MADE" in err


def test_a_module_instead_of_a_script(bench: Bench) -> None:
    """What an installed wheel is launched with: there is no script without a checkout."""
    made.page(bench.pages)
    root = bench.tree()
    text = bench.script().read_text() + "print(sys.argv[1:])\n"
    (bench.folder / "site" / "training_of_mine.py").write_text(text)
    # Options behind the module are the module's, also those that cppmega.run has too.
    words = ["-m", "training_of_mine", "--no-steps", "--megatron", "x", "-m"]
    for chosen, status in (([*words], 0), (["-m", "no_such_thing"], 1), ([], 1)):
        done = subprocess.run(
            [sys.executable, "-m", "cppmega.run", "--megatron", str(root), *chosen],
            env=bench.environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == status, done.stderr
        if status:
            assert "no-script" in done.stderr
        else:
            assert "reached: double_doubles" in done.stderr
            assert "['--no-steps', '--megatron', 'x', '-m']" in done.stdout


def test_the_reason_of_an_end_is_left_for_torchrun(bench: Bench) -> None:
    """An error of ours and any other, each with the exact time."""
    made.page(bench.pages)
    root = bench.tree()
    for body, said in (("half(step)", "error: page-not-reached"), ("1 / 0", "ZeroDivisionError")):
        file = bench.folder / f"{said.split()[-1]}.json"
        ((code, _, _),) = bench.run(
            root, script=bench.script(body), TORCHELASTIC_ERROR_FILE=str(file)
        )
        message = json.loads(file.read_text())["message"]
        assert code == 1 and said in message["extraInfo"]["py_callstack"]
        assert int(message["extraInfo"]["timestamp"]) == int(message["extraInfo"]["time"])


def test_a_misspelt_variable(bench: Bench) -> None:
    made.page(bench.pages, patch='reached="never", gate="CPPMEGA_MADE"')
    root = bench.tree()
    ((code, _, err),) = bench.run(root, script=bench.script(), CPPMEGA_MADEE="1")
    assert code == 1 and "unknown-variable" in err and "Did you mean CPPMEGA_MADE?" in err


def test_a_script_whose_steps_nobody_saw(bench: Bench) -> None:
    made.page(bench.pages)
    script = bench.folder / "train.py"
    script.write_text("import megatron.core.thing\n")
    ((code, _, err),) = bench.run(bench.tree(), script=script)
    assert code == 1 and "no-step-seen" in err


def test_megatrons_own_train_step_is_found(bench: Bench) -> None:
    files = {
        "megatron/training/__init__.py": "",
        "megatron/training/training.py": TRAINING,
        "megatron/training/global_vars.py": "def get_args():\n    return None\n",
    }
    made.page(bench.pages)
    root = bench.tree(files=files)
    script = bench.folder / "pretrain.py"
    script.write_text("from megatron.training import training\ntraining.train(2)\n")
    ((code, _, err),) = bench.run(root, script=script)
    assert code == 0 and "reached: double_doubles" in err, err


@pytest.mark.parametrize(("phase", "said"), [("log", "first log"), ("save", "first checkpoint")])
def test_a_page_of_a_later_phase_is_checked_when_that_phase_ends(
    bench: Bench, phase: str, said: str
) -> None:
    files = {
        "megatron/training/__init__.py": "",
        "megatron/training/training.py": TRAINING,
        "megatron/training/global_vars.py": "def get_args():\n    return None\n",
    }
    made.page(bench.pages)
    made.second_page(bench.pages, phase)
    root = bench.tree(files=files)
    script = bench.folder / "pretrain.py"
    script.write_text("from megatron.training import training\ntraining.train(2)\n")
    ((code, _, err),) = bench.run(root, script=script)
    assert code == 1 and "page-not-reached" in err and "half_halves" in err
    assert said in err


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_worker_processes_hold_the_same_overlay(bench: Bench, method: str) -> None:
    """A data loader's spawned workers import megatron anew, runtime patches included."""
    made.page(bench.pages)
    path = bench.pages / "half_at_run_time.py"
    source = "def half(x):\n    return x / 2\n"
    made.page(bench.pages, path.stem, target="megatron/core/thing.py:half", source=source)
    text = path.read_text()
    text = text.replace('replacing("return x", "return 2 * x")', 'tenth, kind="function-swap"')
    text = text.replace("PATCH =", "def tenth(original):\n    return lambda x: x / 10\n\nPATCH =")
    path.write_text(text)
    script = bench.folder / "train.py"
    script.write_text(
        textwrap.dedent(f"""
        import multiprocessing
        from cppmega import guard
        from megatron.core import thing

        def work(queue):
            queue.put((thing.double(2), thing.half(20)))

        if __name__ == "__main__":
            context = multiprocessing.get_context({method!r})
            for step in guard.steps(range(1)):
                assert (thing.double(2), thing.half(20)) == (4, 2)
                queue = context.Queue()
                worker = context.Process(target=work, args=(queue,))
                worker.start()
                print("worker", queue.get(timeout={PATIENCE}))
                worker.join()
        """)
    )
    ((code, out, err),) = bench.run(bench.tree(), script=script)
    assert code == 0 and "worker (4, 2.0)" in out, err


def test_under_torchrun(bench: Bench) -> None:
    made.page(bench.pages)
    root = bench.tree()
    command = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port"]
    command += [str(free_port()), "-m", "cppmega.run", "--megatron", str(root)]
    done = subprocess.run(
        [sys.executable, *command, str(bench.script())],
        env=bench.environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained True") == 2
    assert done.stderr.count("reached: double_doubles") == 1


# -- files that no page touches ----------------------------------------------------------------


DECLINES = """
    from cppmega import calls
    try:
        calls.served("double_doubles", "the first is zero" if double(step) == 0 else None)
    except calls.CallDeclinedError:
        pass  # a script that catches it fails all the same
"""


def test_a_declined_call_that_the_arguments_promised_ends_the_run(bench: Bench) -> None:
    made.page(bench.pages, patch='reached="forward", when=lambda args: args.mtp')
    root = bench.tree()

    def ended(mtp: bool, *words: str) -> tuple[int, str]:
        script = bench.script(DECLINES.strip(), repr({"mtp": mtp}))
        ((code, _, err),) = bench.run(root, script=script, words=words)
        return code, err

    code, err = ended(True)
    assert code == 1 and "call-declined" in err and "the first is zero" in err
    summary = "kernel calls: double_doubles 0 (1 declined: the first is zero)"
    code, err = ended(True, "--allow-fallback", "double_doubles")
    assert code == 0 and summary in err and "+fallback:double_doubles;" in err
    code, err = ended(False)  # nothing was promised
    assert code == 0 and summary in err and "+fallback" not in err
    code, err = ended(False, "--allow-fallback", "double_double")
    assert code == 1 and "unknown-page" in err and "Did you mean double_doubles?" in err


def _extra(bench: Bench, text: str) -> tuple[Path, Path]:
    """A tree with a file that is imported and not patched, and a script that imports it."""
    made.page(bench.pages)
    root = bench.tree(files={"megatron/core/extra.py": "VALUE = 1\n"})
    (root / "megatron/core/extra.py").write_text(text)
    return root, bench.script(before="import megatron.core.extra")


def test_an_edit_of_an_unpatched_file_stops_the_run_unless_it_is_accepted(bench: Bench) -> None:
    root, script = _extra(bench, "VALUE = 2\n")
    for code, out, err in bench.run(root, root, script=script):
        assert code == 1 and "foreign-edit" in err and "trained" not in out
        assert "megatron/core/extra.py" in err and "--accept" in err
    digest = hashlib.sha256(b"VALUE = 2\n").hexdigest()
    words = ("--accept", f"megatron/core/extra.py={digest}")
    first, second = bench.run(root, root, script=script, words=words)
    assert (first[0], second[0]) == (0, 0), first[2]
    assert "+edits:" in first[2] and "accepted edits: megatron/core/extra.py" in first[2]


def test_a_tree_without_origin_trains_and_says_so(bench: Bench) -> None:
    root, script = _extra(bench, "VALUE = 1\n")
    for file in root.glob("*.dist-info/*"):
        file.unlink()
    bench.apply(root)
    ((code, _, err),) = bench.run(root, script=script)
    assert code == 0 and "2 unverified, of no RECORD and no commit" in err, err


def test_ranks_with_different_files_that_nobody_vouches_for(bench: Bench) -> None:
    """The overlay is the same, and so is every hash that a RECORD could have had."""
    made.page(bench.pages)
    roots = []
    for name in ("one", "other"):
        root = bench.tree(name, apply=False, files={"megatron/core/extra.py": f"V = '{name}'\n"})
        for file in root.glob("*.dist-info/*"):
            file.unlink()
        bench.apply(root)
        roots.append(root)
    script = bench.script(before="import megatron.core.extra")
    for code, out, err in bench.run(*roots, script=script):
        assert code == 1 and "imported-differs" in err and "trained" not in out, err
        assert "megatron/core/extra.py" in err and "rank 1" in err
