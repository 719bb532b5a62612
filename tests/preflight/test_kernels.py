"""Preflight of the kernels on the GPUs: each check broken, and each healthy."""

from __future__ import annotations

import os
import subprocess
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec import structs

from cppmega.cli import prove
from cppmega.errors import CppmegaError
from cppmega.preflight.checks import kernel_parity
from cppmega.preflight.devices import Devices
from cppmega.preflight.messages import (
    KernelParity,
    ParityAnswer,
    ParityOrder,
    SharedMemory,
    SparseAttention,
)
from cppmega.preflight.workers import kernel_cases, parity
from tests import forkserver
from tests.preflight.contexts import (
    FUSED,
    GB10,
    H200,
    SLICE,
    SMOKE,
    V32,
    holds,
    launch,
    on,
    refuses,
    says_nothing,
)
from tests.support import REPOSITORY, patched, pristine

pytestmark = pytest.mark.slow


def test_kernels_that_can_be_imported() -> None:
    holds("kernels", on(H200, imports={"triton": ""}))
    broken = on(H200, imports={"triton": "", "tilelang": "ImportError: libcuda.so.1"})
    assert "libcuda" in refuses("kernels", "kernel-not-importable", broken).what


def test_the_shared_memory_flag() -> None:
    recipe = SLICE.with_(architectures=())
    says_nothing("shared_memory_flag", on(H200, root=patched("0.19.2")))
    merging = on(GB10, recipe=recipe, root=patched("0.19.2", "smem_merge"))
    assert holds("shared_memory_flag", merging) == "the kernels carry the flag by smem_merge"
    stock = on(GB10, recipe=recipe, root=patched("0.19.2"))
    found = refuses("shared_memory_flag", "shared-memory-flag", stock)
    assert found.what.startswith("smem_merge is off")
    assert found.next.startswith("CPPMEGA_SMEM_MERGE=1 python -m cppmega.apply_patches")
    older = on(GB10, recipe=recipe, root=patched("0.18.2"))
    assert holds("shared_memory_flag", older) == "there are no TileLang kernels"


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
        kernel_cases._refuse_declined(SimpleNamespace(is_cuda=True), dsa_indexer.obstacle())


ATTENTION = SparseAttention(heads=3, width=24, value_width=16, key_per_head=False)


@pytest.mark.parametrize("sizes", [ATTENTION, structs.replace(ATTENTION, key_per_head=True)])
def test_parity_of_the_sparse_attention(
    sizes: SparseAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CPU the reference of all heads in bf16 next to that of each; wrong scores are found."""
    from cppmega.ops import dsa_attention

    for other in ("_cross_entropy", "_hadamard", "_indexer_prologue", "_indexer_loss"):
        monkeypatch.setattr(kernel_cases, other, lambda *given, **named: 0.0)
    attend = dsa_attention.sparse_attention

    def compared() -> dict[str, float | None]:
        found = parity.inspect(ParityOrder(device="cpu", attentions=(sizes,))).kernels
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
    assert [order.attentions for order in asked] == [(sizes,), ()]


def test_parity_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    says_nothing("kernel_parity", on(H200))
    answers = {one.kernel: one.ok for one in parity.compare("cpu")}
    assert answers["walsh-hadamard transform"]
    from cppmega.ops.pointwise import hadamard

    transform = hadamard.walsh_hadamard
    monkeypatch.setattr(hadamard, "walsh_hadamard", lambda x, scale: transform(x, scale) * 1.1)
    (broken,) = [one for one in parity.compare("cpu") if one.kernel == "walsh-hadamard transform"]
    assert not broken.ok and broken.error == pytest.approx(0.1, abs=0.01)
    answer = ParityAnswer([broken], [SharedMemory("_row_kernel", 120000, False)])
    assert [e.name for e in kernel_parity.wrong_kernels(answer, {"sm_90"})] == ["kernel-differs"]
    small = [e.name for e in kernel_parity.wrong_kernels(answer, {"sm_121"})]
    assert small == ["kernel-differs", "shared-memory-too-large"]


def test_verify_compares_the_kernels_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    found = KernelParity("Mamba-3", 1e-3, True), KernelParity("M2RNN", None, False, "it crashed")
    monkeypatch.setattr(kernel_parity, "look", lambda *given, **named: Devices((H200,)))
    monkeypatch.setattr(kernel_parity, "ask", lambda *given: ParityAnswer([*found], []))
    fine, wrong = prove._compared(Path())
    assert (fine.name, fine.proof) == ("kernel: Mamba-3", "passed") and "0.001" in fine.detail
    assert (wrong.proof, wrong.detail) == ("failed", "it crashed")
    monkeypatch.setattr(kernel_parity, "look", lambda *given, **named: Devices(()))
    with pytest.raises(CppmegaError) as refused:
        prove._compared(Path())
    assert refused.value.name == "no-gpu"


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
    ("factor", "wrong"), [("2.0", ""), ("0.0", "zeros"), ("1e40", "values that are not finite")]
)
def test_the_first_kernel_of_a_process(tmp_path: Path, factor: str, wrong: str) -> None:
    """The worker's function in a process of its own, with a stand-in for Mamba-3 on CPU."""
    modules = tmp_path / "mamba_ssm" / "modules"
    modules.mkdir(parents=True)
    (modules / "mamba3.py").write_text(MAMBA3.format(factor=factor))
    code = "from cppmega.preflight.workers import parity; print(parity.first_kernel('cpu'))"
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}"}
    said = subprocess.run(
        [forkserver.executable(), "-c", code],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.strip() == wrong


def test_where_the_first_kernel_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(worker: str, order: Any, kind: Any, environ: Any) -> ParityAnswer:
        asked.append(environ["TILELANG_CACHE_DIR"])
        assert not list(Path(asked[-1]).iterdir())
        return ParityAnswer([], [], "zeros" if order.first_kernel else "")

    monkeypatch.setattr(kernel_parity, "ask", answer)
    holds("kernel_parity", on(H200, deep=True))
    small = on(GB10, recipe=SLICE.with_(architectures=()))
    found = refuses("kernel_parity", "tilelang-first-kernel", small)
    assert "zeros" in found.what and "cppmega explain tilelang_3071" in found.next
    assert len(set(asked)) == 2, "each time without a cache"
