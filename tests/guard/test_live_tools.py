"""Tools that trace, measure and log a run replace no code of it, and the guard knows that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.guard.bench import Bench
from tests.support import PATIENCE, free_port, made

LOOP = """
from cppmega import guard
from megatron.core.thing import double
{before}
for step in guard.steps(range(2)):
    double(step)
    {body}
guard.after_first_save()
print("trained")
"""
WANDB = """
import wandb
run = wandb.init(mode="offline", project="p", settings=wandb.Settings(console="wrap"))
"""
COVERAGE_CORES = ["ctrace", "sysmon"]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    bench = Bench(tmp_path_factory.mktemp("tools"))
    made.page(bench.pages)
    bench.tree()
    return bench


def trained(bench: Bench, *tool: str, before: str = "", body: str = "pass", **env: str) -> str:
    """Run a loop below a tool; what it printed."""
    script = bench.folder / "train.py"
    script.write_text(LOOP.format(before=before, body=body))
    words = ["--megatron", str(bench.folder / "root"), str(script)]
    done = subprocess.run(
        [sys.executable, *tool, "-m", "cppmega.run", *words],
        env={**bench.environment, **env},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        cwd=bench.folder,
    )
    assert done.returncode == 0 and "trained" in done.stdout, done.stdout + done.stderr
    assert "reached: double_doubles" in done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("core", COVERAGE_CORES)
def test_coverage(bench: Bench, core: str) -> None:
    pytest.importorskip("coverage")
    data = bench.folder / core
    trained(bench, "-m", "coverage", "run", "--branch", f"--data-file={data}", COVERAGE_CORE=core)
    assert data.stat().st_size


def test_debugpy(bench: Bench) -> None:
    pytest.importorskip("debugpy")
    trained(bench, "-m", "debugpy", "--listen", f"127.0.0.1:{free_port()}")


def test_python_profilers(bench: Bench) -> None:
    trained(bench, "-m", "cProfile", "-o", str(bench.folder / "profile"))


def test_wandb(bench: Bench) -> None:
    pytest.importorskip("wandb")
    home = {"WANDB_DIR": str(bench.folder), "HOME": str(bench.folder), "WANDB_SILENT": "true"}
    trained(bench, before=WANDB, body='run.log({"loss": step})', **home)


@pytest.mark.megatron
def test_modelopt_on_a_real_tree(tmp_path: Path) -> None:
    """It subclasses Megatron's modules; the classes of patched files stay what they were."""
    pytest.importorskip("modelopt")
    from tests.support import VERSIONS, patched

    bench = Bench(tmp_path)
    script = tmp_path / "quantize.py"
    script.write_text(
        "import modelopt.torch.quantization as mtq\n"
        "from megatron.core.models.gpt import gpt_model\n"
        "import megatron.training.training\n"
        "import modelopt.torch.opt.plugins.megatron\n"
        "import modelopt.torch.quantization.plugins.megatron\n"
        "from cppmega import guard\n"
        "guard.recheck('with ModelOpt')\n"
        "print('compared')\n"
    )
    environment = {k: v for k, v in bench.environment.items() if k != "PYTHONPATH"}
    environment["PYTHONPATH"] = os.fspath(Path(__file__).parents[2])
    words = ["--no-steps", "--megatron", str(patched(VERSIONS[-1])), str(script)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "cppmega.run", *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0 and "compared" in done.stdout, done.stderr
