"""Preflight of environment, stack and hardware: each check broken, and each healthy."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec import structs

from cppmega.checkpoints.tracker import TRACKER
from cppmega.errors import CppmegaError
from cppmega.host import gpus, process
from cppmega.host import packages as stack
from cppmega.host.gpus import Gpu
from cppmega.host.importable import folder_of
from cppmega.preflight import examine as preflight
from cppmega.preflight.ask import ask
from cppmega.preflight.checks import kernel_parity, limits, mhc_kernels, tilelang_first_kernel
from cppmega.preflight.checks.limits import Host
from cppmega.preflight.context import Context, gpu_here
from cppmega.preflight.devices import Devices
from cppmega.preflight.findings import Remark
from cppmega.preflight.messages import (
    ConnectionsAnswer,
    ConnectionsOrder,
    Device,
    DevicesAnswer,
    DevicesOrder,
    FirstKernelAnswer,
    FirstKernelOrder,
    ParityAnswer,
    ParityOrder,
    SharedMemory,
    SparseAttention,
)
from cppmega.preflight.workers import devices as devices_worker
from cppmega.preflight.workers import mhc_kernels as mhc_worker
from cppmega.preflight.workers import parity
from cppmega.recipe import Mamba3
from cppmega.recipe import index as recipes_index
from tests.preflight.contexts import (
    FUSED,
    SLICE,
    SMOKE,
    V32,
    holds,
    launch,
    parsed,
    refuses,
    says_nothing,
)
from tests.support import REPOSITORY, patched, pristine
from tests.support.lab import Lab

pytestmark = pytest.mark.slow

GIB = 2**30
H200 = Device("NVIDIA H200", (9, 0), 140 * GIB, 139 * GIB, "GPU-1")
GB10 = Device("NVIDIA GB10", (12, 1), 120 * GIB, 119 * GIB)
TORCH = ("sm_80", "sm_90", "sm_100", "compute_120")


def on(*found: Device, recipe: Any = SLICE, words: tuple[str, ...] = (), **more: Any) -> Context:
    """A launch on a machine with these GPUs."""
    fields = {name: more.pop(name) for name in ("imports", "reported") if name in more}
    context = launch(recipe, *words, training_machine=True, **more)
    context.__dict__["devices"] = Devices(found, TORCH, **fields)
    return context


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
    holds("nan_gates", launch(environ={gate: "0"}))
    assert gate in refuses("nan_gates", "gate-gives-nan", launch(environ={gate: "1"})).next


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
    holds("recipe_gates", launch(needing, environ={"CPPMEGA_MAMBA_RECOMPUTE": "1"}))
    refuses("recipe_gates", "gate-not-set", launch(needing))
    stating = FUSED.with_(dsa_dense_loss_steps=2)
    holds("recipe_gates", launch(stating))
    holds("recipe_gates", launch(stating, environ={"CPPMEGA_DSA_DENSE_LOSS_STEPS": "2"}))
    other = launch(stating, environ={"CPPMEGA_DSA_DENSE_LOSS_STEPS": "3"})
    assert "'3'" in refuses("recipe_gates", "variable-differs", other).what
    says_nothing("recipe_gates", launch(SLICE))
    sharing, switch = SLICE.with_(dsa_index_pattern="FS"), {"CPPMEGA_INDEX_CACHE": "1"}
    holds("recipe_gates", launch(sharing, environ=switch))
    refuses("recipe_gates", "gate-not-set", launch(sharing))
    differing = {**switch, "CPPMEGA_DSA_INDEX_PATTERN": "FF"}
    for recipe in (sharing, SLICE):
        refuses("recipe_gates", "variable-differs", launch(recipe, environ=differing))


def test_the_allocator_ends_up_with_expandable_segments() -> None:
    old, new = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
    merged = holds("allocator", launch(SLICE, environ={old: "max_split_size_mb:128"}))
    assert merged == f"{old}=max_split_size_mb:128,expandable_segments:True"
    assert holds("allocator", launch(SLICE, environ={new: "backend:native"})).startswith(new)
    off = {old: "expandable_segments:False"}
    refuses("allocator", "allocator-differs", launch(SLICE, environ=off))
    says_nothing("allocator", launch(SMOKE))


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
    assert holds("stack_versions", launch(SMOKE)).startswith("torch ")
    newer = SMOKE.with_(stack=(("torch", ">=99"),))
    assert "torch>=99" in refuses("stack_versions", "stack-differs", launch(newer)).next
    other = SMOKE.with_(stack=(("no-such-package", ">=1"),))
    refuses("stack_versions", "stack-missing", launch(other))
    cuda = SMOKE.with_(stack=(("cuda", ">=99"),))
    error = "stack-differs" if stack.version("cuda") else "stack-missing"
    refuses("stack_versions", error, launch(cuda))
    text = (folder_of("torch") or Path()).joinpath("version.py").read_text()
    assert repr(stack.version("cuda")) in text
    says_nothing("stack_versions", launch(SMOKE.with_(stack=())))


def test_pairs_that_do_not_go_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    dist(tmp_path, "mamba-ssm", "2.3.2.post1", "tilelang==0.1.8", 'triton==0; extra == "dev"')
    dist(tmp_path, "tilelang", "0.1.8")
    assert "tilelang 0.1.8" in holds("stack_pairs", launch())
    (tmp_path / "tilelang-0.1.8.dist-info").rename(tmp_path / "gone")
    dist(tmp_path, "tilelang", "0.1.15")
    found = refuses("stack_pairs", "stack-conflict", launch())
    assert "mamba-ssm 2.3.2.post1 demands tilelang==0.1.8; installed is 0.1.15" in found.what


LIGER = """
class LigerFusedLinearCrossEntropyFunction:
    @staticmethod
    def forward(ctx, _input):
        return {}
"""


def test_a_liger_that_returns_another_number_of_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "liger_kernel" / "ops" / "fused_linear_cross_entropy.py"
    file.parent.mkdir(parents=True)
    (tmp_path / "liger_kernel" / "__init__.py").write_text("raise ImportError('never imported')")
    asked = launch(environ={"CPPMEGA_LINEAR_CE_KERNEL": "liger"})
    file.write_text(LIGER.format("loss, z_loss, accuracy, predicted"))
    holds("stack_pairs", asked)
    file.write_text(LIGER.format("loss, z_loss"))
    assert "returns 2 values" in refuses("stack_pairs", "liger-returns-other", asked).what
    holds("stack_pairs", launch())  # nobody asked for it


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
    logged = launch(SLICE, "--wandb-project", "x", **here)
    assert "WANDB_MODE" in refuses("packages", "wandb-not-logged-in", logged).next
    here["environ"] = {**environ, "WANDB_MODE": "offline"}
    holds("packages", launch(SLICE, "--wandb-project", "x", **here))
    here["environ"] = {**environ, "PATH": str(tmp_path)}
    assert "C compiler" in refuses("packages", "compiler-missing", launch(SLICE, **here)).what


# -- the host ----------------------------------------------------------------------------------


def test_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    eight = SLICE.with_(gpus=8, global_batch_size=8)
    says_nothing("hosts", launch(eight))
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.0.0.7")
    assert "4 GPUs on each of 2 hosts" in holds("hosts", launch(eight, nodes=2))
    refuses("hosts", "gpus-do-not-divide", launch(eight, nodes=3))
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    refuses("hosts", "host-name-unknown", launch(eight, nodes=2))

    def unknown(name: str) -> str:
        raise socket.gaierror("unknown")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    refuses("hosts", "host-name-unknown", launch(eight, nodes=2))
    # One host: cppmega launch does not use the name, torchrun does.
    (alone,) = preflight.answers("hosts", launch(eight))
    assert alone.is_remark and "--local-addr 127.0.0.1" in alone.what
    launched = holds("hosts", launch(eight, folder=Path("runs/one")))
    assert launched.endswith("the ranks meet at 127.0.0.1")


def test_interfaces() -> None:
    names = [name for _, name in socket.if_nameindex()]
    says_nothing("network", launch(SLICE, environ={"NCCL_SOCKET_IFNAME": "^docker"}))
    holds("network", launch(SLICE, environ={"NCCL_SOCKET_IFNAME": names[0][:2]}))
    holds("network", launch(SLICE, environ={"NCCL_SOCKET_IFNAME": f"={names[0]}"}))
    for variable, value in (("NCCL_SOCKET_IFNAME", "ib9"), ("GLOO_SOCKET_IFNAME", names[0][:1])):
        found = refuses("network", "no-such-interface", launch(SLICE, environ={variable: value}))
        assert names[0] in found.what


def test_limits_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    good = Host(files=65536, shared=16 * GIB, memory=100 * GIB)
    poor = Host(files=1024, shared=64 * 2**20, memory=10 * GIB)
    monkeypatch.setattr(limits, "measure", lambda: good)
    holds("limits", launch(SLICE, training_machine=True))
    monkeypatch.setattr(limits, "measure", lambda: poor)
    assert (
        "ulimit -n" in refuses("limits", "too-few-files", launch(SLICE, training_machine=True)).next
    )
    names = {error.name for error in limits.shortages(poor, ranks=2)}
    assert names == {"too-few-files", "shared-memory-too-small", "host-memory-too-small"}
    says_nothing("limits", launch(SMOKE, training_machine=True))
    monkeypatch.setattr(limits, "measure", lambda: replace(poor, files=20))
    refuses("limits", "too-few-files", launch(SMOKE))


@pytest.mark.parametrize(
    ("most", "command"), [(8192, "ulimit -n 8192"), (2**31, "ulimit -n 65536"), (1024, "--ulimit")]
)
def test_the_soft_limit_counts_and_the_hard_one_says_what_helps(most: int, command: str) -> None:
    host = Host(files=1024, shared=16 * GIB, memory=100 * GIB, most_files=most)
    (error,) = limits.shortages(host, ranks=1)
    assert command in error.next and str(most) in error.what


def test_what_the_kernel_says_of_this_host() -> None:
    """A rank has the soft limit: nothing raises it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        host = limits.measure()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert host.files == min(soft, 512) and host.most_files in (hard, 2**31)
    assert 0 < host.memory <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# -- the GPUs ----------------------------------------------------------------------------------


def test_a_machine_without_a_gpu() -> None:
    found = refuses("gpus", "no-gpu", launch(SLICE))
    assert "cppmega recipes" in found.next and "takes 1 GPU, and" in found.what
    for name in ("gpus", "gpus_free", "kernels", "shared_memory_flag"):
        assert "CPU" in says_nothing(name, launch(SMOKE))
    says_nothing("gpus", launch())
    says_nothing("gpu_memory", launch(SMOKE))


def test_gpus() -> None:
    assert holds("gpus", on(H200)) == "1 x NVIDIA H200 (sm_90, 140.0 GiB)"
    two = SLICE.with_(gpus=2, global_batch_size=2)
    hidden = on(H200, recipe=two, environ={"CUDA_VISIBLE_DEVICES": "0"})
    said = refuses("gpus", "too-few-gpus", hidden).what
    assert "takes 2 GPUs on this host, which has 1 usable one (CUDA_VISIBLE_DEVICES=0)." in said
    holds("gpus", on(H200, recipe=two, nodes=2))
    refuses("gpus", "architecture-differs", on(GB10))
    any_gpu = SLICE.with_(architectures=())
    holds("gpus", on(GB10, recipe=any_gpu))  # from the PTX of compute_120
    old = Device("Tesla V100", (7, 0), 32 * GIB, 32 * GIB)
    refuses("gpus", "architecture-not-built", on(old, recipe=any_gpu))
    refuses("gpus", "unlike-gpus", on(H200, GB10, recipe=any_gpu))


def test_gpus_that_the_driver_warns_of() -> None:
    fine = Gpu("0", "GPU-1", "NVIDIA H200", "143771 MiB")
    holds("gpus", on(H200, reported={"GPU-1": fine}))
    lost = replace(fine, uncorrected_errors=2)
    refuses("gpus", "gpu-damaged", on(H200, reported={"GPU-1": lost}))
    closed = replace(fine, compute_mode="Prohibited")
    refuses("gpus", "gpu-closed", on(H200, reported={"GPU-1": closed}))


def test_what_nvidia_smi_says(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    rows = ["0, GPU-1, NVIDIA H200, 143771 MiB, Default, 2", "1, GPU-2, X, 1 MiB, Default, [N/A]"]
    lines = "".join(f"echo '{row}'\n" for row in (*rows, "No devices were found"))
    program.write_text(f"#!/bin/sh\n{lines}")
    program.chmod(0o755)
    first, second = gpus.reported({"PATH": f"{tmp_path}:/bin:/usr/bin"})
    assert (first.uncorrected_errors, second.uncorrected_errors) == (2, 0)
    assert f"{first.name}, {first.memory}" == "NVIDIA H200, 143771 MiB"  # as run.json has it
    refuses("gpus", "gpu-damaged", on(H200, reported={"GPU-1": first}))
    program.write_text("not a program")
    assert gpus.reported({"PATH": str(tmp_path)}) == []
    assert gpus.reported({"PATH": ""}) == []


@pytest.mark.skipif(gpu_here(), reason="needs a machine without a GPU")
def test_a_driver_that_torch_cannot_use() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": ""}
    asked = launch(SLICE, root=patched("0.19.2"), training_machine=True, environ=environ)
    found = refuses("gpus", "no-gpu", asked)
    assert "torch" in found.what and "CUDA_VISIBLE_DEVICES=''" in found.what


def test_what_torch_says_of_its_gpus_crosses_the_border(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(
        device_count=lambda: 1,
        get_device_properties=lambda index: SimpleNamespace(name="H", major=9, minor=0, uuid="1"),
        mem_get_info=lambda index: (139 * GIB, 140 * GIB),
        get_arch_list=lambda: ["sm_90"],
    )
    version = SimpleNamespace(cuda="13.0")
    torch = SimpleNamespace(version=version, cuda=cuda, zeros=lambda *_, **__: None)
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]
    monkeypatch.setattr(devices_worker, "only_from", lambda root: None)
    found = devices_worker.inspect(DevicesOrder(root="/", modules=["json", "no_such_kernel"]))
    assert (
        msgspec.convert(json.loads(json.dumps(msgspec.to_builtins(found))), DevicesAnswer) == found
    )
    (device,) = found.devices
    assert (device.architecture, device.total, device.uuid) == ("sm_90", 140 * GIB, "GPU-1")
    assert found.imports["json"] == "" and "no_such_kernel" in found.imports["no_such_kernel"]


def test_gpus_that_somebody_else_uses() -> None:
    holds("gpus_free", on(H200))
    taken = Device("NVIDIA H200", (9, 0), 140 * GIB, 60 * GIB)
    assert "80.0 GiB" in refuses("gpus_free", "gpu-occupied", on(taken)).what


def test_kernels_that_can_be_imported() -> None:
    holds("kernels", on(H200, imports={"triton": ""}))
    broken = on(H200, imports={"triton": "", "tilelang": "ImportError: libcuda.so.1"})
    assert "libcuda" in refuses("kernels", "kernel-not-importable", broken).what


def test_the_model_fits() -> None:
    assert "of 140.0 GiB" in holds("gpu_memory", on(H200))
    small = Device("NVIDIA RTX", (9, 0), 24 * GIB, 24 * GIB)
    assert "activations" in refuses("gpu_memory", "does-not-fit", on(small)).what


KERNEL = """
import tilelang

@tilelang.jit(pass_configs={"tl.enable_aggressive_shared_memory_merge": %s})
def kernel():
    pass
"""


def test_the_shared_memory_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = SLICE.with_(architectures=())
    says_nothing("shared_memory_flag", on(H200, root=patched("0.19.2")))
    lab = Lab(tmp_path, monkeypatch)
    lab.files["megatron/core/kernels.py"] = (KERNEL % True).encode()
    made = on(GB10, recipe=recipe, root=lab.wheel())
    assert holds("shared_memory_flag", made) == "1 TileLang kernels carry the flag"
    lab.change("megatron/core/kernels.py", b"True", b"False")
    found = refuses("shared_memory_flag", "shared-memory-flag", made)
    assert "kernels.py:4: kernel is not built with" in found.what
    assert "pass_configs" in found.next  # no page of this catalogue adds it
    shipped = on(GB10, recipe=recipe, root=made.root, catalogues=[REPOSITORY / "upstream_patches"])
    found = refuses("shared_memory_flag", "shared-memory-flag", shipped)
    assert found.next.startswith("CPPMEGA_SMEM_MERGE=1 python -m cppmega.apply_patches")


def test_parity_of_the_indexer(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPU both sides are the reference; one that drops the head weights is found."""
    from cppmega.ops import dsa_indexer

    reference, calls = dsa_indexer.indexer_loss, count()

    def every_other(q: Any, k: Any, weights: Any, *terms: Any) -> Any:
        kept = weights if next(calls) % 2 else weights * 0 + 1
        return reference(q, k, kept, *terms)

    fine = {one.kernel: one.error for one in parity.compare("cpu") if one.ok}
    names = {name for name in fine if name.startswith("DSA indexer")}
    assert len(names) == 4 and {fine[name] for name in names} == {0.0}
    monkeypatch.setattr(dsa_indexer, "indexer_loss", every_other)
    found = {one.kernel for one in parity.compare("cpu") if one.kernel in names and not one.ok}
    assert found == names - {"DSA indexer, prologue"}
    monkeypatch.setattr(dsa_indexer, "obstacle", lambda *call: "there is no room")
    with pytest.raises(ValueError, match="declined: there is no room"):
        parity._refuse_declined("cuda", dsa_indexer.obstacle())


ATTENTION = SparseAttention(heads=3, width=24, value_width=16, key_per_head=False)


@pytest.mark.parametrize("sizes", [ATTENTION, structs.replace(ATTENTION, key_per_head=True)])
def test_parity_of_the_sparse_attention(
    sizes: SparseAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CPU the reference of all heads in bf16 next to that of each; wrong scores are found."""
    from cppmega.ops import dsa_attention

    for other in ("_cross_entropy", "_hadamard", "_indexer_prologue", "_indexer_loss"):
        monkeypatch.setattr(parity, other, lambda *given, **named: 0.0)
    attend = dsa_attention.sparse_attention

    def compared() -> dict[str, float | None]:
        found = parity.inspect(ParityOrder(device="cpu", attention=sizes)).kernels
        return {one.kernel: one.error for one in found if one.kernel.startswith("DSA attention")}

    def wrong_beyond_one_head(query: Any, *given: Any, **named: Any) -> Any:
        return attend(query * (1.1 if query.size(2) > 1 else 1.0), *given, **named)

    fine = compared()
    assert len(fine) == (1 if sizes.key_per_head else 2)
    assert all(error is not None and 0 < error < 5e-3 for error in fine.values()), fine
    monkeypatch.setattr(dsa_attention, "sparse_attention", wrong_beyond_one_head)
    wrong = compared()
    assert wrong.keys() == fine.keys()
    assert all(error is not None and error > parity.TOLERANCE for error in wrong.values()), wrong


def test_the_sparse_attention_is_compared_at_the_recipe_s_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the recipe wants a page with kernels for it, on the releases of one key and of many."""
    sizes = SparseAttention(heads=32, width=128, value_width=64, key_per_head=False)
    tensor = FUSED.with_(tensor_model_parallel_size=2, gpus=2)
    newer, older = pristine("0.19.2"), pristine("0.18.2")
    assert kernel_parity.attention(launch(FUSED, root=newer)) == sizes
    halved = structs.replace(sizes, heads=16)
    assert kernel_parity.attention(launch(tensor, root=newer)) == halved
    of_heads = kernel_parity.attention(launch(FUSED, root=older))
    assert of_heads == structs.replace(sizes, key_per_head=True)
    wide = kernel_parity.attention(launch(V32, root=newer))
    assert wide is not None and (wide.width, wide.value_width) == (576, 512)
    for recipe in (SLICE, SMOKE, None):
        assert kernel_parity.attention(launch(recipe, root=newer)) is None
    asked: list[Any] = []

    def answer(worker: str, order: Any, *given: Any) -> ParityAnswer:
        asked.append(msgspec.json.decode(msgspec.json.encode(order), type=ParityOrder))
        return ParityAnswer([], [])

    monkeypatch.setattr(kernel_parity, "ask", answer)
    for recipe in (FUSED, SLICE):
        holds("kernel_parity", on(H200, recipe=recipe, root=newer, deep=True))
    assert [order.attention for order in asked] == [sizes, None]


def test_parity_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    says_nothing("kernel_parity", on(H200))
    answers = {one.kernel: one.ok for one in parity.compare("cpu")}
    assert answers["walsh-hadamard transform"]
    from cppmega.ops import hadamard

    transform = hadamard.walsh_hadamard
    monkeypatch.setattr(hadamard, "walsh_hadamard", lambda x, scale: transform(x, scale) * 1.1)
    (broken,) = [one for one in parity.compare("cpu") if one.kernel == "walsh-hadamard transform"]
    assert not broken.ok and broken.error == pytest.approx(0.1, abs=0.01)
    answer = ParityAnswer([broken], [SharedMemory("_row_kernel", 120000, False)])
    assert [e.name for e in kernel_parity.wrong_kernels(answer, {"sm_90"})] == ["kernel-differs"]
    small = [e.name for e in kernel_parity.wrong_kernels(answer, {"sm_121"})]
    assert small == ["kernel-differs", "shared-memory-too-large"]


MAMBA3 = """
import torch

class Mamba3(torch.nn.Module):
    def __init__(self, d_model, is_mimo, mimo_rank, chunk_size, device, dtype):
        super().__init__()
        self.factor = {factor}

    def forward(self, tokens):
        return tokens * self.factor
"""


@pytest.mark.parametrize(
    ("factor", "says"), [("2.0", "the largest output"), ("0.0", "zeros"), ("1e40", "not finite")]
)
def test_the_first_kernel_of_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: str, says: str
) -> None:
    """The worker in a process of its own, with a stand-in for Mamba-3 on CPU."""
    modules = tmp_path / "mamba_ssm" / "modules"
    modules.mkdir(parents=True)
    (modules / "mamba3.py").write_text(MAMBA3.format(factor=factor))
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    worker = "cppmega.preflight.workers.first_kernel"
    answer = ask(worker, FirstKernelOrder(device="cpu"), FirstKernelAnswer, environ)
    if factor == "2.0":
        assert says in tilelang_first_kernel.judge(answer)
        return
    with pytest.raises(CppmegaError) as refused:
        tilelang_first_kernel.judge(answer)
    assert refused.value.name == "tilelang-first-kernel" and says in refused.value.what
    assert "cppmega explain tilelang_3071" in refused.value.next


def test_where_the_first_kernel_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    any_gpu = SLICE.with_(architectures=())
    says_nothing("tilelang_first_kernel", on(H200))
    monkeypatch.setattr(tilelang_first_kernel, "folder_of", lambda name: None)
    says_nothing("tilelang_first_kernel", on(GB10, recipe=any_gpu))
    (tmp_path / "ops" / "tilelang" / "mamba3").mkdir(parents=True)
    monkeypatch.setattr(tilelang_first_kernel, "folder_of", lambda name: tmp_path)
    asked: list[str] = []

    def answer(worker: str, order: Any, kind: Any, environ: Any) -> FirstKernelAnswer:
        asked.append(environ["TILELANG_CACHE_DIR"])
        assert order.device == "cuda" and not list(Path(asked[-1]).iterdir())
        return FirstKernelAnswer(missing="" if len(asked) == 1 else "no scan", largest=0.0)

    monkeypatch.setattr(tilelang_first_kernel, "ask", answer)
    refuses("tilelang_first_kernel", "tilelang-first-kernel", on(GB10, recipe=any_gpu))
    assert "no scan" in says_nothing("tilelang_first_kernel", on(GB10, recipe=any_gpu))
    assert len(set(asked)) == 2, "each time without a cache"


CONNECTED = {
    **{"bf16": True, "fp16": False, "hidden_size": 64, "enable_mhc_connections": True},
    **{"use_fused_mhc": True, "mhc_num_residual_streams": 4},
}
ON_DEV = {"enable_mhc_connections": False, "enable_hyper_connections": True}


@pytest.mark.parametrize(
    ("changes", "shared", "why"),
    [
        ({}, 99, ""),
        ({"hidden_size": 60}, 99, "width of 60"),
        ({"mhc_num_residual_streams": 3}, 99, "3 streams"),
        ({"mhc_num_residual_streams": None, "num_residual_streams": 3} | ON_DEV, 99, "3 streams"),
        ({}, 64, "sm_75 gives a block 64 KiB"),
    ],
)
def test_connections_that_their_kernels_decline(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], shared: int, why: str
) -> None:
    pytest.importorskip("triton")
    from cppmega.ops import dsa_indexer_device

    asked: list[ConnectionsOrder] = []

    def answer(worker: str, order: Any, kind: Any, environ: Any) -> Any:
        asked.append(order)
        return mhc_worker.inspect(order)

    kind = dsa_indexer_device.Gpu((9, 0) if shared == 99 else (7, 5), shared << 10)
    monkeypatch.setattr(dsa_indexer_device, "gpu_of", lambda device: kind)
    monkeypatch.setattr(mhc_kernels, "ask", answer)
    context = on(H200)
    context.__dict__["process"] = parsed({**CONNECTED, **changes})
    if not why:
        assert holds("mhc_kernels", context) == "4 streams of 64"
        assert (asked[0].device, asked[0].dtype) == ("cuda", "bfloat16")
    else:
        assert why in refuses("mhc_kernels", "mhc-kernels-decline", context).what


@pytest.mark.parametrize(
    ("changes", "found"),
    [({"enable_mhc_connections": False}, H200), ({"use_fused_mhc": False}, H200), ({}, None)],
)
def test_connections_that_are_not_fused(changes: dict[str, Any], found: Device | None) -> None:
    context = on(*([found] if found else []))
    context.__dict__["process"] = parsed({**CONNECTED, **changes})
    says_nothing("mhc_kernels", context)


def test_the_kernels_are_asked_in_a_process() -> None:
    pytest.importorskip("triton")
    order = ConnectionsOrder(device="cpu", dtype="bfloat16", streams=4, width=64)
    worker = "cppmega.preflight.workers.mhc_kernels"
    answer = ask(worker, order, ConnectionsAnswer, dict(os.environ))
    assert answer.obstacle == "the streams are on cpu"


@pytest.mark.gpu
def test_this_gpu(tmp_path: Path) -> None:
    context = launch(SLICE.with_(architectures=()), root=patched("0.19.2"), deep=True)
    context.training_machine = True
    found = context.devices
    assert found.found and found.compiled_for and found.imports["triton"] == ""
    assert holds("gpus", context) and holds("gpus_free", context)
    assert "linear cross-entropy" in holds("kernel_parity", context)


# -- folders -----------------------------------------------------------------------------------


def saving(folder: Path, **more: Any) -> Context:
    return launch(SLICE, "--mock-data", "--save", str(folder), root=patched("0.19.2"), **more)


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--save" in holds("folders", saving(tmp_path / "new" / "folder"))
    (tmp_path / "file").write_text("")
    refuses("folders", "folder-not-writable", saving(tmp_path / "file" / "below"))
    refuses("folders", "folder-not-writable", launch(SMOKE, folder=Path("/proc/run")))
    usage = type("Usage", (), {"free": 10 * GIB})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    found = refuses("folders", "disk-full", saving(tmp_path))
    assert "10.0 GiB free" in found.what
    assert "nowhere" in holds("folders", launch())
    whole_line = launch(None, "--bf16", "--save", str(tmp_path / "file" / "below"))
    refuses("folders", "folder-not-writable", whole_line)


def test_the_host_has_memory_for_the_copies_of_an_asynchronous_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 75.9 GiB, by the ranks of this host."""
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 999 * GIB}))
    recipe = recipes_index.load("nam56r_h200_2gpu_ep2").with_(async_save=True)
    words = ("--mock-data", "--save", str(tmp_path))
    for hosts, too_little, enough in ((1, 75, 77), (2, 37, 38)):
        context = launch(recipe, *words, root=patched("0.19.2"))
        context.training_machine, context.nodes = True, hosts
        monkeypatch.setattr("cppmega.host.memory.available", partial(int, enough * GIB))
        holds("folders", context)
        monkeypatch.setattr("cppmega.host.memory.available", partial(int, too_little * GIB))
        refuses("folders", "host-memory-too-small", context)
        context.training_machine = False  # another host will train
        holds("folders", context)


@pytest.mark.parametrize(
    ("changes", "free", "said"),
    [
        ({}, 75, None),
        ({}, 77, "room for 1 of the 2 checkpoints that will exist at once (--set keep_check"),
        ({}, 153, ""),
        ({"keep_checkpoints": 1}, 77, "room for 1 of the 2 checkpoints that will exist at once"),
        ({"keep_checkpoints": 1, "train_iters": 500}, 77, ""),
        ({"train_iters": 2000}, 153, "room for 2 of the 4 checkpoints"),
        ({"train_iters": 2000, "keep_checkpoints": 1}, 153, ""),
        ({"train_iters": 2000, "keep_checkpoints": 2}, 153, "room for 2 of the 3 checkpoints"),
    ],
)
def test_the_disk_has_room_for_checkpoints_of_the_whole_model(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, int],
    free: int,
    said: str | None,
) -> None:
    """Of 75.9 GiB each; one is needed, and what more there is no room for is said."""
    recipe = recipes_index.load("nam56r_h200_2gpu_ep2").with_(
        **{"train_iters": 1000, "keep_checkpoints": 0, **changes}
    )
    usage = type("Usage", (), {"free": free * GIB})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    words = ("--mock-data", "--save", str(tmp_path))
    context = launch(recipe, *words, root=patched("0.19.2"))
    if said is None:
        found = refuses("folders", "disk-full", context)
        assert "it needs 75.9 GiB" in found.what
        weights = launch(recipe, *words, "--no-save-optim", root=patched("0.19.2"))
        assert holds("folders", weights)
        return
    text = holds("folders", context)
    assert isinstance(text, Remark) == bool(said) and said in text
    assert not said or "each of 75.9 GiB, of which 10.8 GiB are weights" in text


def test_a_checkpoint_that_is_there_is_replaced_by_one_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipes_index.load("nam56r_h200_2gpu_ep2").with_(keep_checkpoints=1, train_iters=1000)
    usage = type("Usage", (), {"free": 77 * GIB})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    (tmp_path / TRACKER).write_text("500")
    context = launch(recipe, "--mock-data", "--save", str(tmp_path), root=patched("0.19.2"))
    assert not isinstance(holds("folders", context), Remark)


@pytest.mark.parametrize("flag", ["--save", "--metrics"])
def test_folders_of_a_loop(tmp_path: Path, flag: str) -> None:
    (tmp_path / "file").write_text("")
    holds("folders", launch(SMOKE, flag, str(tmp_path / "new" / "file")))
    for words in ([flag, str(tmp_path / "file" / "x")], [f"{flag}={tmp_path / 'file' / 'x'}"]):
        refuses("folders", "folder-not-writable", launch(SMOKE, *words))
    metrics = launch(SMOKE, "--metrics", str(tmp_path))
    assert "must be a file" in refuses("folders", "folder-not-writable", metrics).what


def test_a_save_folder_of_two_runs(tmp_path: Path) -> None:
    save = tmp_path / "checkpoints"
    assert "no other run" in holds("save_folder", saving(save))
    words = ["cppmega.run", "--save", str(save)]
    other = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()", *words], stdin=subprocess.PIPE
    )
    try:
        assert str(other.pid) in refuses("save_folder", "save-folder-in-use", saving(save)).what
    finally:
        other.communicate()
    says_nothing("save_folder", launch(SLICE, "--mock-data", root=patched("0.19.2")))


def test_a_save_folder_of_two_loops(tmp_path: Path) -> None:
    says_nothing("save_folder", launch(SMOKE))
    words = ["cppmega.run", "--save", str(tmp_path)]
    other = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()", *words], stdin=subprocess.PIPE
    )
    try:
        refuses("save_folder", "save-folder-in-use", launch(SMOKE, "--save", str(tmp_path)))
    finally:
        other.communicate()
    holds("save_folder", launch(SMOKE, "--save", str(tmp_path)))


def test_a_save_folder_with_the_checkpoints_of_another_run(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / TRACKER).write_text("7")
    words = ("--mock-data", "--save", str(tmp_path / "second"))
    root = patched("0.19.2")
    holds("save_folder", launch(SLICE, *words, root=root))
    holds("save_folder", launch(SLICE, *words, "--load", str(tmp_path / "second"), root=root))
    mixed = launch(SLICE, *words, "--load", str(tmp_path / "first"), root=root)
    refuses("save_folder", "save-folder-of-another-run", mixed)
