"""Preflight of environment and stack: each check broken, and each healthy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cppmega.host import packages as stack
from cppmega.host import process
from cppmega.host.packages import folder_of
from cppmega.recipe import Mamba2, Mamba3
from cppmega.recipe.run_options import RunOptions
from cppmega.rules.starts import MAMBA2_BY_TORCH
from tests.preflight.contexts import FUSED, SLICE, SMOKE, V32, holds, launch, refuses
from tests.support import REPOSITORY, patched

pytestmark = pytest.mark.slow


# -- the environment ---------------------------------------------------------------------------


def test_variables() -> None:
    root = patched("0.19.2")
    holds("variables", launch(root=root, environ={"CPPMEGA_LINEAR_CE_KERNEL": "triton"}))

    def said(**environ: str) -> str:
        name = "leftover-variable" if "CPPMEGA_OVERLAY" in environ else "unknown-variable"
        return refuses("variables", name, launch(root=root, environ=environ)).what

    assert "Did you mean CPPMEGA_LINEAR_CE_KERNEL" in said(CPPMEGA_LINEAR_CE_KERNAL="triton")
    warmup = {"CPPMEGA_LEMYX_DSA": "1", "CPPMEGA_DSA_DENSE_LOSS_STEPS": "2"}
    holds("variables", launch(root=root, environ=warmup))
    closed = launch(root=root, environ={**warmup, "CPPMEGA_LEMYX_DSA": "0"})
    found = refuses("variables", "variable-without-gate", closed)
    assert found.next.startswith("export CPPMEGA_LEMYX_DSA=1")
    assert "another run" in said(CPPMEGA_OVERLAY="0123")
    options = RunOptions(allow_fallback=("mla_rope_kernel",))
    allowed = {"CPPMEGA_ALLOW_FALLBACK": "mtp_linear_ce"}
    found = holds("variables", launch(root=root, options=options, environ=allowed))
    assert "declined calls are allowed: mla_rope_kernel, mtp_linear_ce" in found
    recipe = SLICE.with_(allow_fallback=("linear_ce_gpt_head",))
    found = holds("variables", launch(recipe, root=root, options=options))
    assert "declined calls are allowed: linear_ce_gpt_head, mla_rope_kernel" in found
    allowed = {"CPPMEGA_ALLOW_FALLBACK": "mtp_linear_cee"}
    refused = refuses("variables", "unknown-page", launch(root=root, environ=allowed))
    assert "Did you mean mtp_linear_ce?" in refused.what
    refuses(
        "variables",
        "bad-gate-value",
        launch(root=root, environ={"CPPMEGA_MAMBA_RECOMPUTE": "maybe"}),
    )


@pytest.mark.parametrize("name", ["RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "PET_NNODES"])
def test_the_environment_of_a_rank(name: str) -> None:
    root = patched("0.19.2")
    said = refuses("variables", "leftover-variable", launch(SMOKE, root=root, environ={name: "2"}))
    assert said.next == f"unset {name}"
    holds("variables", launch(SMOKE, root=root, environ={name: ""}))
    # A line of one's own is looked at in a scheduler's environment too, by processes that are none.
    holds("variables", launch(root=root, environ={name: "2"}))
    for value in ("2", ""):
        assert process.alone({name: value, "HOME": "/"}) == {"HOME": "/"}


def test_gates_that_gave_nan() -> None:
    gate = "CPPMEGA_MTP_NATIVE_HOPPER_CE"
    holds("gates", launch(environ={gate: "0"}))
    assert gate in refuses("gates", "gate-gives-nan", launch(environ={gate: "1"})).next


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("PYTHONOPTIMIZE", "1"), ("CUDA_LAUNCH_BLOCKING", "1"), ("NVIDIA_TF32_OVERRIDE", "0")),
        ("PYTHONINSPECT", "1"),
    ],
)
def test_debug_variables(name: str, value: str) -> None:
    holds("debug_variables", launch(SLICE, environ={name: ""}))
    refuses("debug_variables", "debug-variable", launch(SLICE, environ={name: value}))
    named = SLICE.with_(environment=((name, value),))
    holds("debug_variables", launch(named, environ={name: value}))


@pytest.mark.parametrize(
    ("name", "value", "harmless"),
    [
        ("PYTHONWARNINGS", "error", "ignore"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "info"),
        ("TORCH_DISTRIBUTED_DEBUG", "1", "OFF"),
    ],
)
def test_debug_variables_by_their_value(name: str, value: str, harmless: str) -> None:
    holds("debug_variables", launch(SMOKE, environ={name: harmless}))
    refuses("debug_variables", "debug-variable", launch(SMOKE, environ={name: value}))


def test_a_number_of_threads() -> None:
    holds("debug_variables", launch(SMOKE, environ={"OMP_NUM_THREADS": "4,2"}))
    for value in ("abc", "0", "-1", ""):
        wrong = launch(SMOKE, environ={"OMP_NUM_THREADS": value})
        refuses("debug_variables", "bad-variable", wrong)


def test_gates_of_the_recipe() -> None:
    needing = SLICE.with_(gates=(("CPPMEGA_MAMBA_RECOMPUTE", "1"),))
    holds("gates", launch(needing, environ={"CPPMEGA_MAMBA_RECOMPUTE": "1"}))
    refuses("gates", "gate-not-set", launch(needing))
    stating = FUSED.with_(dsa_dense_loss_steps=2)
    holds("gates", launch(stating))
    holds("gates", launch(stating, environ={"CPPMEGA_DSA_DENSE_LOSS_STEPS": "2"}))
    other = launch(stating, environ={"CPPMEGA_DSA_DENSE_LOSS_STEPS": "3"})
    assert "'3'" in refuses("gates", "recipe-differs", other).what
    assert holds("gates", launch(SLICE)) == holds("gates", launch())
    sharing, switch = SLICE.with_(dsa_index_pattern="FS"), {"CPPMEGA_INDEX_CACHE": "1"}
    holds("gates", launch(sharing, environ=switch))
    refuses("gates", "gate-not-set", launch(sharing))
    differing = {**switch, "CPPMEGA_DSA_INDEX_PATTERN": "FF"}
    for recipe in (sharing, SLICE):
        refuses("gates", "recipe-differs", launch(recipe, environ=differing))


def test_the_allocator_ends_up_with_expandable_segments() -> None:
    old, new = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
    merged = holds("debug_variables", launch(SLICE, environ={old: "max_split_size_mb:128"}))
    assert merged == f"none is set; {old}=max_split_size_mb:128,expandable_segments:True"
    assert holds("debug_variables", launch(SLICE, environ={new: "backend:native"})).count(new) == 1
    off = {old: "expandable_segments:False"}
    refuses("debug_variables", "allocator-differs", launch(SLICE, environ=off))
    assert holds("debug_variables", launch(SMOKE)) == "none is set"


def test_the_launcher_of_a_rank_sets_it_before_torch(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys\nassert 'torch' not in sys.modules\n"
        "print(os.environ['PYTORCH_CUDA_ALLOC_CONF'], os.environ['NCCL_GRAPH_REGISTER'])"
    )
    command = [sys.executable, "-m", "cppmega.run", "--no-steps"]
    done = subprocess.run(
        [*command, "--megatron", str(patched("0.19.2")), str(script)],
        env={**launch().environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    # The second is what Megatron's CUDA graphs then insist on.
    assert done.stdout == "expandable_segments:True 0\n", done.stderr


# -- the stack ---------------------------------------------------------------------------------


def dist(folder: Path, name: str, version: str, *requires: str) -> None:
    """The metadata of an installed distribution."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {r}" for r in requires)]
    (info / "METADATA").write_text("\n".join(lines) + "\n")


def test_versions_of_the_stack() -> None:
    assert "torch " in holds("stack", launch(SMOKE))
    newer = SMOKE.with_(stack=(("torch", ">=99"),))
    assert "torch>=99" in refuses("stack", "stack-differs", launch(newer)).next
    other = SMOKE.with_(stack=(("no-such-package", ">=1"),))
    refuses("stack", "stack-differs", launch(other))
    layers = SMOKE.with_(stack=(("transformer-engine", ">=99"),))
    command = refuses("stack", "stack-differs", launch(layers)).next
    assert command.startswith("pip install 'transformer-engine[pytorch]>=99'")
    cuda = SMOKE.with_(stack=(("cuda", ">=99"),))
    refuses("stack", "stack-differs", launch(cuda))
    text = (folder_of("torch") or Path()).joinpath("version.py").read_text()
    assert repr(stack.version("cuda")) in text
    holds("stack", launch(SMOKE.with_(stack=())))


def test_pairs_that_do_not_go_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    dist(tmp_path, "mamba-ssm", "2.3.2.post1", "tilelang==0.1.8", 'triton==0; extra == "dev"')
    dist(tmp_path, "tilelang", "0.1.8")
    assert "tilelang 0.1.8" in holds("stack", launch())
    (tmp_path / "tilelang-0.1.8.dist-info").rename(tmp_path / "gone")
    dist(tmp_path, "tilelang", "0.1.15")
    found = refuses("stack", "stack-pair-broken", launch())
    assert "mamba-ssm 2.3.2.post1 demands tilelang==0.1.8; installed is 0.1.15" in found.what


@pytest.mark.parametrize(
    ("tilelang", "ffi", "breaks"),
    [("0.1.8", "0.1.9", False), ("0.1.8", "0.1.12", True), ("0.1.15", "0.1.12", False)],
)
def test_a_pair_that_pip_allows_and_python_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tilelang: str, ffi: str, breaks: bool
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    dist(tmp_path, "tilelang", tilelang)
    dist(tmp_path, "apache-tvm-ffi", ffi)
    if breaks:
        found = refuses("stack", "stack-pair-broken", launch())
        assert found.next == "pip install 'apache-tvm-ffi<=0.1.9'"
    else:
        holds("stack", launch())


@pytest.mark.parametrize(
    ("torch", "triton", "said"),
    [
        ("2.11.0+cu130", "3.6.0", ""),
        ("2.15.0", "3.9.0", ""),
        ("2.6.0a0+nv25", "3.6.0", "torch 2.6.0a0+nv25"),
        ("2.16.0.dev1", "3.10.0", "torch 2.16.0.dev1 and triton 3.10.0"),
    ],
)
def test_an_untested_stack_is_a_remark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch: str, triton: str, said: str
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    dist(tmp_path, "torch", torch)
    dist(tmp_path, "triton", triton)
    found = holds("stack", launch())
    assert (f"never tested with {said}:" in found) if said else ("never tested" not in found)


def test_a_liger_of_wrong_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    asked = launch(environ={"CPPMEGA_LINEAR_CE_KERNEL": "liger"})
    dist(tmp_path, "liger_kernel", "0.8.4")
    assert "liger-kernel is 0.8.4" in refuses("stack", "stack-pair-broken", asked).what
    holds("stack", launch())  # nobody asked for it


def test_packages_and_compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    here: dict[str, Any] = {"root": patched("0.19.2"), "training_machine": True}
    refuses("packages", "package-missing", launch(SLICE, "--mock-data", **here))
    for name in ("transformer_engine", "tilelang", "wandb"):
        (tmp_path / f"{name}.py").write_text("")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "gcc").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "gcc").chmod(0o755)
    environ = {"PATH": str(tmp_path / "bin"), "CUDA_HOME": str(tmp_path), "HOME": str(tmp_path)}
    here["environ"] = environ
    holds("packages", launch(SLICE, **here))
    assert "nvcc" in refuses("packages", "compiler-missing", launch(V32, **here)).what
    scanned = SLICE.with_(pattern="D-EM", mamba3=Mamba3())
    holds("packages", launch(scanned, **here))
    mixers = scanned.with_(mamba3=Mamba3(out_norm=True))  # which only mamba-ssm's kernels support
    assert "mamba_ssm" in refuses("packages", "package-missing", launch(mixers, **here)).what
    (tmp_path / "mamba_ssm.py").write_text("")
    said = refuses("packages", "compiler-missing", launch(mixers, **here))
    assert "nvcc" in said.what and "The first Mamba-3 layer" in said.why
    holds("packages", launch(mixers.with_(mamba3=Mamba3(rank=1)), **here))
    second = SLICE.with_(pattern="D-EM", mamba2=Mamba2(heads=128))
    said = refuses("packages", "package-missing", launch(second, **here))
    assert "causal_conv1d" in said.what and MAMBA2_BY_TORCH in said.next
    holds("packages", launch(second.plus(MAMBA2_BY_TORCH), **here))
    deep = SLICE.with_(gpus=2, global_batch_size=2, expert_model_parallel_size=2)
    deep = deep.with_(moe_token_dispatcher_type="flex")
    assert "deep_ep" in refuses("packages", "package-missing", launch(deep, **here)).what
    (tmp_path / "deep_ep.py").write_text("")
    holds("packages", launch(deep, **here))
    hybrid = deep.with_(moe_flex_dispatcher_backend="hybridep")
    said = refuses("packages", "package-missing", launch(hybrid, **here))
    assert "hybrid_ep_cpp" in said.what and "DeepEP@hybrid-ep, or --set moe_token" in said.next
    (tmp_path / "hybrid_ep_cpp.py").write_text("")
    holds("packages", launch(hybrid, **here))
    logged = launch(SLICE, "--wandb-project", "x", **here)
    assert "WANDB_MODE" in refuses("packages", "wandb-not-logged-in", logged).next
    here["environ"] = {**environ, "WANDB_MODE": "offline"}
    holds("packages", launch(SLICE, "--wandb-project", "x", **here))
    here["environ"] = {**environ, "PATH": str(tmp_path)}
    assert "C compiler" in refuses("packages", "compiler-missing", launch(SLICE, **here)).what
