"""The pass configs of Megatron's and mamba_ssm's TileLang kernels, and what the check lists."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from functools import cache
from pathlib import Path

import pytest

from cppmega.overlay import verbs as overlay
from cppmega.preflight.ask import ask
from cppmega.preflight.messages import TilelangAnswer, TilelangKernel, TilelangOrder
from cppmega.proof import verify
from cppmega.tree import wheels
from tests.support import patched, pristine, python

VERSION = "0.19.2"
OPS = "megatron/core/transformer/experimental_attention_variant/ops"
KEY = "TL_ENABLE_AGGRESSIVE_SHARED_MEMORY_MERGE"
MAMBA = "2.3.2.post1"

ASK = """
import importlib, json

from cppmega.proof import stand_ins

tilelang = stand_ins.tilelang()
# Stock's kernels get a package of their own next to the patched ones: their imports are relative.
stand_ins.package("stock", STOCK)
answers = []
for folder in ("stock", "megatron.core.transformer.experimental_attention_variant.ops"):
    tilelang.kernels.clear()
    for name in ("indexer_fwd", "indexer_bwd", "indexer_loss", "sparse_mla_fwd", "sparse_mla_bwd"):
        importlib.import_module(f"{folder}.tilelang_{name}")
    utils = importlib.import_module(f"{folder}.tilelang_utils")
    utils.tilelang_jit(out_idx=[0], pass_configs={KEY: False})(lambda: 0)
    utils.HAVE_TILELANG = False
    assert utils.tilelang_jit(print) is print and utils.tilelang_jit(out_idx=[0])(print) is print
    answers.append({kernel.name: kernel.options for kernel in tilelang.kernels})
print(json.dumps(answers))
"""


def test_every_kernel_of_megatron_is_built_with_it() -> None:
    code = f"STOCK, KEY = {str(pristine(VERSION) / OPS)!r}, {KEY!r}\n{ASK}"
    done = python(patched(VERSION, "smem_merge"), code)
    assert done.returncode == 0, done.stderr
    stock, ours = json.loads(done.stdout.splitlines()[-1])
    assert len(stock) == 10 and sum(_merges(given) for given in stock.values()) == 1
    for name, given in stock.items():
        configs = {**(given.get("pass_configs") or {}), KEY: True}
        assert ours[name] == {**given, "pass_configs": configs}, name


def _merges(given: dict[str, dict[str, bool]]) -> bool:
    return (given.get("pass_configs") or {}).get(KEY) is True


def listed(package: Path) -> list[TilelangKernel]:
    """The TileLang kernels of a package, as the check `shared_memory_flag` lists them."""
    order = TilelangOrder(root=str(package.parent), packages=[str(package)])
    worker = "cppmega.preflight.workers.tilelang_kernels"
    return ask(worker, order, TilelangAnswer, dict(os.environ)).kernels


def test_the_check_lists_stock_kernels() -> None:
    stock = listed(pristine(VERSION) / "megatron")
    assert [kernel.name for kernel in stock if not kernel.reason] == ["bwd"] and len(stock) == 9
    assert listed(pristine("0.18.2") / "megatron") == []


def test_the_check_accepts_patched_kernels() -> None:
    ours = listed(patched(VERSION, "smem_merge") / "megatron")
    assert len(ours) == 9 and not any(kernel.reason for kernel in ours)


def test_mamba_ssm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mamba_ssm next to Megatron is patched, listed, proved and reverted."""
    monkeypatch.setenv("CPPMEGA_SMEM_MERGE", "1")
    root = tmp_path / "site"
    (root / "megatron" / "core").mkdir(parents=True)
    info = "megatron/core/package_info.py"
    shutil.copy(pristine(VERSION) / info, root / info)
    shutil.copytree(_mamba_ssm(), root / "mamba_ssm")
    before = listed(root / "mamba_ssm")
    assert len(before) == 6 and all(kernel.reason for kernel in before)
    name = "smem_merge_mamba"
    environment = {"CPPMEGA_SMEM_MERGE": "1"}
    assert overlay.apply(overlay.Session(root), only=[name], environment=environment).ok
    assert [kernel.reason for kernel in listed(root / "mamba_ssm")] == [""] * 6
    proved = verify.verify(overlay.Session(root), [name])
    assert [(one.name, one.proof) for one in proved] == [(name, "passed")]
    assert overlay.revert(overlay.Session(root)).ok
    files = {file.relative_to(_mamba_ssm()): file for file in _mamba_ssm().rglob("*.py")}
    assert all((root / "mamba_ssm" / f).read_bytes() == at.read_bytes() for f, at in files.items())


@cache
def _mamba_ssm() -> Path:
    """Return the package from mamba-ssm's source distribution; there is no wheel on the index."""
    place = wheels.cache() / "trees" / f"mamba_ssm-{MAMBA}"
    if not place.is_dir():
        place.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--no-binary=:all:", "--no-build-isolation", f"mamba-ssm=={MAMBA}"]
        command += ["--dest", str(wheels.cache() / "wheels")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        (archive,) = (wheels.cache() / "wheels").glob(f"mamba_ssm-{MAMBA}.tar.gz")
        assert archive.is_file(), done.stderr
        with tarfile.open(archive) as packed:
            packed.extractall(place.parent, filter="data")
    return place / "mamba_ssm"
