"""The DSA indexer on one GPU: our kernels against Megatron's reference path and its TileLang path.

usage: python -m benchmarks.dsa_indexer --megatron ROOT [--patched ROOT] [--out benchmarks/results]
           [--only NAME]

ROOT holds a pristine megatron/ (an unpacked wheel), that of --patched one to which
`tilelang_indexer_parallel_store` is applied; TileLang must be installed. All sides run in
this process on the same inputs, with the functions that Megatron's DSA layer calls. Medians of 10
(of 3 where one takes a second) with CUDA events, host time included; the peak is above the inputs;
launches are what the profiler saw. How far our losses and gradients are from Megatron's is in the
result. Writes dsa_indexer_h200.json and .md; with --only, the cases whose name begins so are
measured and the others kept.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import click
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness import results
from benchmarks.harness.gpu import both_ways, distances, timed
from cppmega.ops.dsa_indexer import Loss, choose_keys, indexer_loss
from cppmega.ops.pointwise.dsa_indexer_prologue import Rotary, prepare_index_inputs
from cppmega.ops.pointwise.hadamard import walsh_hadamard

NAM56R = {"sequence": 4096, "heads": 32, "width": 64, "topk": 256, "attention": (32, 128)}
PER_HEAD = {**NAM56R, "attention": (32, 192), "key_heads": 32}  # MLA up to 0.18
DEEPSEEK = {"heads": 64, "width": 128, "topk": 2048, "attention": (128, 576)}
DEEPSEEK_4K = {"sequence": 4096, **DEEPSEEK}
PRODUCTS = 790e12
"""Rate of bf16 products that floors assume, and bytes a second below."""
COPY = 4.26e12
PACKAGE = "megatron.core.transformer.experimental_attention_variant"

Tensors = Sequence[Tensor]
Call = Callable[[], Any]

_ALONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
"""A process group of one."""
_GROUPS = SimpleNamespace(**dict.fromkeys(("tp", "cp"), _ALONE))


class Megatron:
    def __init__(self, patched: Path | None) -> None:
        self.dsa = importlib.import_module(f"{PACKAGE}.dsa")
        self.tilelang = importlib.import_module(f"{PACKAGE}.ops.tilelang_dsa")
        self.forward = importlib.import_module(f"{PACKAGE}.ops.tilelang_indexer_fwd")
        self.patched_forward = patched and _loaded_beside(self.forward, patched)

    @staticmethod
    def bounds(sequence: int) -> tuple[Tensor, Tensor]:
        """Causal, row by row: starts and ends."""
        rows = torch.arange(sequence, device="cuda", dtype=torch.int32)
        return torch.zeros_like(rows), rows + 1

    def loss(self, sparse: bool, topk: int, scale: float) -> Callable[..., Tensor]:
        """The path that DSA takes without kernels."""

        def call(*tensors: Tensor) -> Tensor:
            q, k, w, query, key = tensors
            size = q.size(0)
            mask = torch.full((size, size), -torch.inf, device="cuda").triu_(1)
            key = key.expand(-1, -1, query.size(2), -1)
            found: Tensor = self.dsa.FusedDSAIndexerLoss.apply(
                q, w, k, query, key, scale, topk, 1.0, mask, sparse, _GROUPS, None, None, None,
                None, False, True,
            )[1]  # fmt: skip
            return found

        return call

    def streamed(self, topk: int, scale: float) -> Callable[..., Tensor]:
        """TileLang's path with the sparse loss."""

        def call(*tensors: Tensor) -> Tensor:
            q, k, w, query, key = tensors
            found = self.tilelang.fused_qk_topk_lighting_with_streaming_sparse_kl(
                q, k, w, topk, *self.bounds(q.size(0)), 8192, query, key, scale, 1.0,
                _GROUPS,
            )  # fmt: skip
            assert found is not None, "declined"
            loss: Tensor = found[1]
            return loss

        return call

    def prologue(self, rotary: Rotary) -> Callable[..., Tensors]:
        """Unfused rotary embedding, and the Hadamard transform that our page puts in."""
        self.dsa.hadamard_transform = walsh_hadamard
        layer = SimpleNamespace(qk_pos_emb_head_dim=rotary.angles.size(-1), pg_collection=_GROUPS)
        layer.config = SimpleNamespace(apply_rope_fusion=False, rotary_interleaved=False)
        layer.config.dsa_indexer_rope_interleaved = rotary.gathered
        documents = None if rotary.documents is None else rotary.documents[0]

        def call(q: Tensor, k: Tensor, w: Tensor) -> Tensors:
            layer.index_head_dim = q.size(-1)
            turn = lambda x: self.dsa.rotate_activation(  # noqa: E731
                self.dsa.DSAIndexer._apply_rope(layer, x, rotary.angles, 1.0, documents)
            )
            scaled = w * q.size(2) ** -0.5 * q.size(3) ** -0.5
            return turn(q), turn(k.unsqueeze(2)).squeeze(2), scaled

        return call

    def choice(self, tensors: Tensors, topk: int) -> Call:
        """TileLang's scores and torch's top-k, in Megatron's loop."""
        bounds = self.bounds(tensors[0].size(0))
        return partial(self.tilelang.fused_qk_topk_lighting, *tensors[:3], topk, *bounds, 8192)

    def scores(self, forward: ModuleType, tensors: Tensors) -> Call:
        q, k, w = tensors[:3]
        bounds = self.bounds(q.size(0))

        def each() -> None:
            for b in range(q.size(1)):
                parts = (x[:, b].contiguous() for x in (q, k, w))
                forward.indexer_fwd_interface(*parts, *bounds)

        return each


def _loaded_beside(module: ModuleType, root: Path) -> ModuleType:
    """The same module from another tree, which takes its neighbors from this one."""
    name = f"{module.__name__}_patched"
    file = root.joinpath(*module.__name__.split(".")).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made


def inputs(batch: int, shape: dict[str, Any]) -> Tensors:
    """q, k, weights, query, key in bf16; head weights as the layer scales them."""
    sequence, heads, width = (shape[name] for name in ("sequence", "heads", "width"))
    (many, wide), key_heads = shape["attention"], shape.get("key_heads", 1)
    made = torch.Generator("cuda").manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=made, device="cuda")

    rows = (heads, width), (width,), (heads,), (many, wide), (key_heads, wide)
    q, k, weights, query, key = (normal(sequence, batch, *row) for row in rows)
    weights *= (heads * width) ** -0.5
    return tuple(x.bfloat16() for x in (q, k, weights, query, key))


def measured(call: Call, times: int = 10) -> dict[str, Any]:
    """Median milliseconds, peak GiB and kernels launched; or why it did not run."""
    try:
        found = timed(call, times, warm_up=2)
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            call()
            torch.cuda.synchronize()
    except (torch.OutOfMemoryError, AssertionError) as error:
        torch.cuda.empty_cache()
        return {"failed": str(error).split(".")[0]}
    on_device = torch.autograd.DeviceType.CUDA
    found["launches"] = sum(event.device_type == on_device for event in seen.events())
    return found


LOSS = ("loss", "dq", "dk", "dweights")
PREPARED = ("q", "k", "weights", "dq", "dk", "dweights")


def agreement(found: Tensors, want: Tensors, names: tuple[str, ...] = LOSS) -> dict[str, float]:
    return {n: float(f"{x:.2e}") for n, x in distances(names, found, want).items()}


def choices(theirs: Megatron, batch: int, shape: dict[str, Any]) -> dict[str, Any]:
    tensors = inputs(batch, shape)
    sq, topk = shape["sequence"], shape["topk"]
    products = batch * sq * (sq + 1) * shape["heads"] * shape["width"]
    full = batch * sq * sq * 4
    row: dict[str, Any] = {
        "floor": round(1e3 * (products / PRODUCTS + full / COPY), 3),
        "ours": measured(lambda: choose_keys(*tensors[:3], topk)),
        "TileLang, scores alone": measured(theirs.scores(theirs.forward, tensors), 3),
        "TileLang, scores and top-k": measured(theirs.choice(tensors, topk), 3),
    }
    if theirs.patched_forward:
        call = theirs.scores(theirs.patched_forward, tensors)
        row["TileLang with its parallel store, scores alone"] = measured(call, 3)
    if sq == 4096:
        q, k, w = tensors[:3]
        stock = partial(theirs.dsa._compute_index_scores, q, w, k)
        row["reference path, scores alone"] = measured(stock, 3)
    return row


def losses(theirs: Megatron, sparse: bool, batch: int, shape: dict[str, Any]) -> dict[str, Any]:
    tensors = inputs(batch, shape)
    topk, scale = shape["topk"], shape["attention"][1] ** -0.5

    def ours(repeatable: bool) -> Callable[..., Tensor]:
        loss = Loss(softmax_scale=scale, coefficient=1.0, sparse=sparse, repeatable=repeatable)
        return lambda *tensors: indexer_loss(*tensors, topk, loss).loss

    sides = {"ours": ours(False)} | ({"ours, repeatable": ours(True)} if sparse else {})
    if batch == 1 and shape is not DEEPSEEK_4K:  # 32 GiB for each of its tensors at a batch of 8
        sides["reference path"] = theirs.loss(sparse, topk, scale)
    if sparse and shape is not PER_HEAD:  # TileLang's kernels share one key
        sides["TileLang"] = theirs.streamed(topk, scale)

    def trained(side: str) -> Tensors:
        """A loss and its gradients of q, k and weights."""
        return both_ways(lambda *leaves: sides[side](*leaves, *tensors[3:]), tensors[:3])

    row: dict[str, Any] = {
        name: measured(partial(trained, name), 3 if "path" in name else 10) for name in sides
    }
    rival = "TileLang" if "TileLang" in sides else "reference path"
    if "milliseconds" in row.get(rival, {}):
        row["difference from " + rival] = agreement(trained("ours"), trained(rival))
    if not sparse or shape is PER_HEAD:
        pairs = batch * shape["sequence"] * (shape["sequence"] + 1) / 2
        # Attention scores twice; index scores for the choice, and if dense for loss, dq and dk.
        of_index = (1 if sparse else 4) * shape["heads"] * shape["width"]
        products = 2 * pairs * (2 * math.prod(shape["attention"]) + of_index)
        row["floor"] = round(1e3 * products / PRODUCTS, 3)
    return row


def prologues(
    theirs: Megatron, batch: int, shape: dict[str, Any], documents: int = 0
) -> dict[str, Any]:
    """Rotary embedding, Hadamard transform and head weights, forward and backward."""
    tensors = inputs(batch, shape)[:3]
    upstream = tuple(torch.randn_like(x) for x in tensors)
    length = 4096 // max(documents, 1)
    angles = torch.outer(torch.arange(length).float(), 1e4 ** -torch.linspace(0, 1, 32)).cuda()
    angles = torch.cat((angles, angles), -1)[:, None, None]
    ends = torch.arange(documents + 1, device="cuda", dtype=torch.int32) * length
    rotary = Rotary(angles=angles, documents=(ends, ends) if documents else None)
    calls = {
        "ours": lambda *x: prepare_index_inputs(*x, rotary),
        "reference path": theirs.prologue(rotary),
    }
    sides = {name: partial(both_ways, call, tensors, upstream) for name, call in calls.items()}
    differences = agreement(*(side() for side in sides.values()), names=PREPARED)
    traffic = 4 * sum(x.numel() * x.element_size() for x in tensors)
    return {
        "floor": round(1e3 * traffic / COPY, 3),
        **{name: measured(side) for name, side in sides.items()},
        "difference from reference path": differences,
    }


def clocks() -> str:
    fields = "clocks.sm,clocks.max.sm,temperature.gpu,power.draw"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def table(result: dict[str, Any]) -> str:
    columns = ["case", "side", "ms", "of ours", "peak GiB", "launches"]
    stack = results.versions(result, "torch", "triton", "tilelang", "megatron-core")
    return results.page(
        "# The DSA indexer, bf16, milliseconds",
        f"Written by `benchmarks/dsa_indexer.py`. {result['gpu']}, {stack}, {result['date']}. SM "
        f"clock, its maximum, temperature and power before and after each run: "
        f"{'; '.join(result['clocks'])}.",
        "Losses are from q, k and the head weights to their gradients, the choice included; a "
        "prologue is rotary embedding, Hadamard transform and head weights, both ways. The floor "
        "is the products at 790 TFLOP/s, a write of the scores, or a prologue's reads and writes.",
        results.table(columns, _cells(result)),
    )


def _cells(result: dict[str, Any]) -> Iterator[list[Any]]:
    for case, row in result["cases"].items():
        own = row["ours"]["milliseconds"]
        for side, found in row.items():
            if side.startswith("difference"):
                yield [case, side, json.dumps(found), None, None, None]
            elif side == "floor":
                yield [case, "floor", found, f"{found / own:.2f}", None, None]
            elif "failed" in found:
                yield [case, side, found["failed"], None, None, None]
            else:
                ms = found["milliseconds"]
                yield [case, side, ms, f"{ms / own:.1f}", found["peak_gib"], found["launches"]]


def cases(theirs: Megatron) -> dict[str, Call]:
    found: dict[str, Call] = {}
    for batch in (1, 8):
        found[f"prologue, 4096 x {batch}, 32 x 64"] = partial(prologues, theirs, batch, NAM56R)
    found["prologue, 4096 x 1, 32 x 64, 16 documents"] = partial(prologues, theirs, 1, NAM56R, 16)
    found["prologue, 4096 x 1, 64 x 128"] = partial(prologues, theirs, 1, DEEPSEEK_4K)
    for batch in (1, 8):
        name = f"choice, 4096 x {batch}, 32 x 64, top-k 256"
        found[name] = partial(choices, theirs, batch, NAM56R)
    per_head = "sparse loss, a key per head"
    for name, shape in (("sparse loss", NAM56R), ("dense loss", NAM56R), (per_head, PER_HEAD)):
        for batch in (1, 8):
            of_loss = partial(losses, theirs, name != "dense loss", batch, shape)
            found[f"{name}, 4096 x {batch}"] = of_loss
    for sequence in (4096, 16384, 32768):
        name = f"choice, {sequence} x 1, 64 x 128, top-k 2048"
        found[name] = partial(choices, theirs, 1, {"sequence": sequence, **DEEPSEEK})
    found["sparse loss, 4096 x 1, DeepSeek-V3.2"] = partial(losses, theirs, True, 1, DEEPSEEK_4K)
    return found


@click.command(help=__doc__)
@results.folder_option("--megatron", "a pristine megatron/", required=True)
@results.folder_option("--patched", "one to which `tilelang_indexer_parallel_store` is applied")
@results.out_option()
@click.option("--only", default="", help="begin of the names of cases to measure")
def main(megatron: Path, patched: Path | None, out: Path, only: str) -> None:
    sys.path.insert(0, str(megatron))
    theirs = Megatron(patched)
    before, name = clocks(), "dsa_indexer_h200"
    every = cases(theirs)
    earlier = results.read(out, name) if only else {}
    found = earlier.get("cases", {})
    found |= {each: case() for each, case in every.items() if each.startswith(only)}
    result: dict[str, Any] = {
        **results.facts("torch", "triton", "tilelang", "megatron-core"),
        "clocks": [*earlier.get("clocks", ()), before, clocks()],
        "cases": {each: found[each] for each in every if each in found},
    }
    results.write(out, name, result, table(result))


if __name__ == "__main__":
    main()
