"""Measure forward and backward of every linear cross-entropy on one GPU, in one process.

    python -m benchmarks.linear_cross_entropy compare --out DIR
    python -m benchmarks.linear_cross_entropy stages --out DIR
    torchrun --nproc-per-node 2 -m benchmarks.linear_cross_entropy tp --out DIR

`compare` begins with correctness, at a shape with ragged sizes: relative error of loss, dX and dW
in the 2-norm against fp64, next to that of the unfused path, and a profile of the kernels that ran:
an implementation whose own kernel is not among them, or whose errors are not near the unfused
path's, ends the run. Confident tokens, whose target has a probability of 1 - 1e-2 to 1 - 1e-7, have
a separate table of errors. Then, per shape, the median time of forward and backward, TFLOP/s
counted as 6*N*H*V (three GEMMs over all tokens, regardless of what is computed), and peak memory
twice: above the inputs, and above inputs plus the gradients dX and dW in the type of the inputs,
which every implementation must return. Writes `linear_cross_entropy_h200.json` and `.md` (or
`--name`) to DIR.

The implementations take turns, one step each in a shuffled order, because matrix work of more than
about 50 ms runs into the card's power limit: all of them are timed at the same clocks. The header
reports what a plain cuBLAS matrix product reaches in a short burst and after 2 s.

Data is random: logits of standard deviation 2, a tenth of the tokens masked.

Alternatives, if installed: Megatron's three losses on materialized logits, unfused ("stock", the
same arithmetic in torch if megatron-core is missing, and the table says so),
`--cross-entropy-fusion-impl native` and `te`; torch.compile of unfused torch, Liger mean and none,
cut-cross-entropy with its filter off. With --pull-3345, also the Hopper kernels of that pull
request of Megatron, from a checkout of it; they need nvidia-cutlass-dsl.

`stages` measures the stages of ours and the designs that it was chosen from. By chunk size: the
three GEMMs and the row kernel of one chunk, times the number of chunks of 32768 tokens, next to two
other ways to compute dW (rounded to bf16 per chunk, which is not precise enough; an fp32 product
and a separate addition). By launch parameters: the row kernel, with and without the arg-max. Then
complete steps by chunk size. Writes `linear_cross_entropy_stages.json`.

`tp` splits the vocabulary over the GPUs of one host. First every rank compares loss, its dX (summed
over the ranks) and its part of dW with fp64 at a small shape. Then the median time of forward and
backward at N=32768, H=4096, V=131072 for the unfused path (Megatron's loss on the logits of the
rank) and ours, TFLOP/s per GPU counted as 6*N*H*V/tp, and peak memory above inputs, dX and dW. Rank
0 writes `linear_cross_entropy_tp<ranks>.json`.
"""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.harness import results
from benchmarks.harness.gpu import GIB, distances, elapsed, median, rounds
from cppmega.ops.linear_cross_entropy import kernels_triton as kernels
from cppmega.ops.linear_cross_entropy import linear_cross_entropy
from cppmega.ops.linear_cross_entropy.chunks import LOGITS_BYTES

PROOFS = ("_row_kernel", "liger_cross", "cce_backward", "kernel_cutlass")
"""Parts of kernel names that occur only in fused implementations."""
TOKENS = (8192, 32768, 49152)
VOCABULARIES = (65536, 131072)


LARGE = 32768, 4096, 131072
"""Tokens, hidden size and vocabulary of the stages and of the split vocabulary."""
RESULTS = ("loss", "dX", "dW")


@dataclass
class Case:
    """Inputs of one measurement; `mask` is 0/1, and the loss is sum(mask * loss) / sum(mask)."""

    x: Tensor
    w: Tensor
    targets: Tensor
    mask: Tensor
    counted: int
    """The number of tokens that the mask keeps, as a loader knows it on the host."""

    @staticmethod
    def random(tokens: int, hidden: int, vocabulary: int) -> Case:
        """bf16 inputs with logits of standard deviation 2."""
        generator = torch.Generator("cuda").manual_seed(tokens + vocabulary)
        options: dict[str, Any] = {"device": "cuda", "generator": generator}
        x = torch.randn(tokens, hidden, dtype=torch.bfloat16, **options)
        w = torch.randn(vocabulary, hidden, dtype=torch.bfloat16, **options) * (2 / hidden**0.5)
        targets = torch.randint(vocabulary, (tokens,), **options)
        mask = (torch.rand(tokens, **options) > 0.1).float()
        return Case(x.requires_grad_(), w.requires_grad_(), targets, mask, int(mask.sum()))

    @staticmethod
    def confident(doubt: float, tokens: int = 512, vocabulary: int = 1024) -> Case:
        """Every target has the probability `1 - doubt`, at logits around 20, exact in bf16."""
        generator = torch.Generator("cuda").manual_seed(1)
        options: dict[str, Any] = {"device": "cuda", "generator": generator}
        x = torch.randn(tokens, vocabulary, dtype=torch.float64, **options)
        targets = torch.randint(vocabulary, (tokens,), **options)
        column = targets.unsqueeze(1)
        rest = x.scatter(1, column, -torch.inf).logsumexp(1, keepdim=True)
        x.scatter_(1, column, rest + math.log((1 - doubt) / doubt))
        x += 20 - x.amax(1, keepdim=True)
        w = torch.eye(vocabulary, device="cuda", dtype=torch.bfloat16)
        mask = torch.ones(tokens, device="cuda")
        return Case(x.bfloat16().requires_grad_(), w.requires_grad_(), targets, mask, tokens)

    def of_one(self) -> Case:
        """The same numbers as new parameters, without gradients."""
        x, w = (t.detach().requires_grad_() for t in (self.x, self.w))
        return Case(x, w, self.targets, self.mask, self.counted)

    def reduce(self, per_token: Tensor) -> Tensor:
        """Reduce the loss per token as a training step does."""
        return (per_token * self.mask).sum() / self.mask.sum()


@dataclass(frozen=True)
class Rival:
    """One implementation.

    Attributes:
        name: in the table.
        loss: the scalar loss of a case.
        kernel: part of the name of a kernel that proves that it ran; None for unfused torch, whose
            proof is that none of the others' kernels ran.
        repeats: timed runs.
    """

    name: str
    loss: Callable[[Case], Tensor]
    kernel: str | None
    repeats: int = 20


def ours(leave_out: bool = False, **options: Any) -> Callable[[Case], Tensor]:
    """The scalar loss by `linear_cross_entropy` with these options.

    Args:
        leave_out: tell it how many tokens count.
        options: of `linear_cross_entropy`; the backend is one of them, and must run.
    """

    def loss(case: Case) -> Tensor:
        given = dict(options)
        if options.get("upstream") == "weighted-scalar":
            given["loss_weights"] = case.mask
        if leave_out:
            given["counted_tokens"] = case.counted
        out = linear_cross_entropy(case.x, case.w, case.targets, **given)
        named = options["backend"]
        if out.backend != named:
            raise SystemExit(f"{named} was named, but {out.backend} ran")
        return case.reduce(out.loss)

    return loss


OURS_IN_FP32 = Rival(
    "bf16 inputs, fp32 arithmetic", ours(backend="reference", upstream="weighted-scalar"), None
)


def _into_main_grad(case: Case) -> Tensor:
    weight: Any = case.w
    if not hasattr(weight, "main_grad"):
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        weight.grad_added_to_main_grad = False
    return ours(backend="triton", upstream="weighted-scalar", gradient_accumulation_fusion=True)(
        case
    )


def _torch_unfused(case: Case) -> Tensor:
    logits = torch.matmul(case.x, case.w.t())
    return case.reduce(cross_entropy(logits.float(), case.targets, reduction="none"))


def _compiled() -> Callable[[Case], Tensor]:
    @torch.compile(dynamic=False)
    def per_token(x: Tensor, w: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(torch.matmul(x, w.t()).float(), targets, reduction="none")

    return lambda case: case.reduce(per_token(case.x, case.w, case.targets))


def _liger_mean(case: Case) -> Tensor:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    targets = case.targets.masked_fill(case.mask == 0, -100)
    returned: tuple[Tensor, ...] = LigerFusedLinearCrossEntropyFunction.apply(
        case.x, case.w, targets, None, None, -100, 0.0, 0.0, "mean", None, False, torch.float32
    )
    return returned[0]


def _megatron() -> list[Rival]:
    """Megatron's own losses on materialized logits."""
    try:
        from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
        from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
    except ImportError:
        return [Rival("stock (its arithmetic in torch)", _torch_unfused, None)]
    store = tempfile.mkdtemp()
    torch.distributed.init_process_group(
        "nccl", init_method=f"file://{store}/store", rank=0, world_size=1
    )
    group = torch.distributed.group.WORLD

    def unfused(case: Case) -> Tensor:
        logits = torch.matmul(case.x, case.w.t())
        return case.reduce(vocab_parallel_cross_entropy(logits, case.targets, tp_group=group))

    def native(case: Case) -> Tensor:
        logits = torch.matmul(case.x, case.w.t()).unsqueeze(1)
        loss = fused_vocab_parallel_cross_entropy(logits, case.targets.unsqueeze(1), group)
        return case.reduce(loss.squeeze(1))

    version = importlib.metadata.version("megatron-core")
    found = [
        Rival(f"stock (megatron-core {version})", unfused, None),
        Rival(f"native (megatron-core {version})", native, None),
    ]
    try:
        from megatron.core.extensions.transformer_engine import te_parallel_cross_entropy

        version = importlib.metadata.version("transformer-engine")
    except ImportError:
        print("transformer-engine is not installed: its row is missing", file=sys.stderr)
        return found

    def fused_by_te(case: Case) -> Tensor:
        logits = torch.matmul(case.x, case.w.t()).unsqueeze(1)
        loss = te_parallel_cross_entropy(logits, case.targets.unsqueeze(1), group)
        return case.reduce(loss.squeeze(1))

    return [*found, Rival(f"te (Transformer Engine {version})", fused_by_te, None)]


def _of_pull_3345(root: Path) -> list[Rival]:
    """The pull request's kernels; its checkout takes precedence over the release's fusions."""
    fusions = importlib.import_module("megatron.core.fusions")
    fusions.__path__.insert(0, str(root / "megatron" / "core" / "fusions"))
    call = importlib.import_module(
        "megatron.core.fusions.fused_linear_cross_entropy"
    ).linear_cross_entropy

    def mean(case: Case) -> Tensor:
        targets = case.targets.masked_fill(case.mask == 0, -100)
        found: Tensor = call(case.x, case.w, targets, reduction="mean")
        return found.squeeze()

    def none(case: Case) -> Tensor:
        return case.reduce(call(case.x, case.w, case.targets, reduction="none"))

    return [
        Rival("#3345 mean", mean, "kernel_cutlass"),
        Rival("#3345 none", none, "kernel_cutlass"),
    ]


def rivals(pull_3345: Path | None) -> list[Rival]:
    """All implementations that are installed; missing ones are reported on stderr."""
    found = [*_megatron(), Rival("torch.compile of stock", _compiled(), None)]
    if pull_3345 is not None:
        found += _of_pull_3345(pull_3345)
    for package, entries in {
        "liger-kernel": [
            Rival("Liger mean", _liger_mean, "liger_cross_entropy_kernel"),
            Rival("Liger none", ours(backend="liger"), "liger_cross_entropy_kernel"),
        ],
        "cut-cross-entropy": [Rival("CCE", ours(backend="cce"), "cce_backward_kernel", 5)],
    }.items():
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            print(f"{package} is not installed: its rows are missing", file=sys.stderr)
            continue
        found += [
            Rival(f"{rival.name} ({version})", rival.loss, rival.kernel, rival.repeats)
            for rival in entries
        ]
    promised = ours(backend="triton", upstream="weighted-scalar")
    return [
        *found,
        Rival("ours", promised, "_row_kernel"),
        Rival(
            "ours, masked tokens left out",
            ours(leave_out=True, backend="triton", upstream="weighted-scalar"),
            "_row_kernel",
        ),
        Rival("ours, into main_grad", _into_main_grad, "_row_kernel"),
        Rival("ours, any upstream gradient", ours(backend="triton"), "_row_kernel"),
    ]


@dataclass
class Row:
    """One line of the result."""

    name: str
    tokens: int
    vocabulary: int
    hidden: int
    milliseconds: float | None = None
    tflops: float | None = None
    above_inputs_gib: float | None = None
    above_gradients_gib: float | None = None
    note: str = ""
    spread: list[float] = field(default_factory=list)


def step(rival: Rival, case: Case) -> Tensor:
    """Run forward and backward without accumulated gradients."""
    case.x.grad = case.w.grad = None
    loss = rival.loss(case)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def exact(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, dX, dW in fp64."""
    x, w = (t.detach().double() for t in (case.x, case.w))
    logits, column = x @ w.t(), case.targets.unsqueeze(1)
    # By the target's lead over the others, so that no 1 is subtracted from a probability.
    others = logits.scatter(1, column, -torch.inf)
    lag = others.logsumexp(1, keepdim=True) - logits.gather(1, column)
    weights = (case.mask.double() / case.mask.double().sum()).unsqueeze(1)
    d_logits = others.softmax(1).scatter(1, column, -1.0) * lag.sigmoid() * weights
    loss = (torch.nn.functional.softplus(lag, threshold=100) * weights).sum()
    return loss, d_logits @ w, d_logits.t() @ x


def check(everyone: list[Rival], hidden: int) -> list[dict[str, Any]]:
    """Errors against fp64, and the kernels that ran; raises SystemExit on a wrong one."""
    case = Case.random(2085, hidden, 32003)
    truth = exact(case)
    found: list[dict[str, Any]] = []
    for rival in [*everyone, OURS_IN_FP32]:
        case = Case.random(2085, hidden, 32003)
        step(rival, case)
        weight: Any = case.w
        fused = hasattr(weight, "main_grad")
        if fused:
            weight.main_grad.zero_()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            loss = step(rival, case)
            torch.cuda.synchronize()
        launched = {event.key for event in profile.key_averages()}
        got = (loss, case.x.grad, weight.main_grad if fused else case.w.grad)
        errors = distances(RESULTS, got, truth)
        proven = [k for k in PROOFS if _ran(k, launched)]
        found.append({"name": rival.name, **errors, "fused kernels": proven})
        print(found[-1], flush=True)
        ran = _ran(rival.kernel, launched) if rival.kernel else not proven
        if not ran:
            raise SystemExit(f"{rival.name} did not run; kernels: {sorted(launched)}")
        allowed = {"loss": 1e-4, "dX": 2e-2, "dW": 2e-2}
        if not all(errors[name] <= limit for name, limit in allowed.items()):
            raise SystemExit(f"{rival.name} is wrong: {errors}")
    return found


def _ran(part: str, kernels: set[str]) -> bool:
    return any(part in kernel for kernel in kernels)


def confident(everyone: list[Rival]) -> list[dict[str, Any]]:
    """Errors of loss, dX and dW against fp64 where the model is sure of its target."""
    found: list[dict[str, Any]] = []
    for doubt in (1e-2, 1e-4, 1e-6, 1e-7):
        case = Case.confident(doubt)
        truth = exact(case)
        for rival in everyone:
            own = case.of_one()
            loss = step(rival, own)
            weight: Any = own.w
            d_weight = getattr(weight, "main_grad", own.w.grad)
            errors = distances(RESULTS, (loss, own.x.grad, d_weight), truth)
            found.append({"1 - p": doubt, "name": rival.name, **errors})
            print(found[-1], flush=True)
            if rival.name.startswith("ours") and not all(e < 1e-2 for e in errors.values()):
                raise SystemExit(f"{rival.name} is wrong at 1-p = {doubt}: {errors}")
    return found


def peak(rival: Rival, case: Case) -> float | None:
    """Bytes above the inputs that one step allocates at its peak; None: out of memory."""
    try:
        for _ in range(2):
            step(rival, case)
        case.x.grad = case.w.grad = None
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(rival, case)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    except torch.OutOfMemoryError:
        return None
    finally:
        case.x.grad = case.w.grad = None


def in_turns(everyone: list[Rival], case: Case, count: int) -> list[Row]:
    """Peak memory of each, one after the other; then their times, taking turns."""
    tokens, hidden = case.x.shape
    rows, times = {}, {}
    gradients = (case.x.numel() + case.w.numel()) * case.x.element_size()
    for rival in everyone:
        row = rows[rival.name] = Row(rival.name, tokens, case.w.shape[0], hidden)
        above = peak(rival, case.of_one())
        if above is None:
            row.note = "out of memory"
            continue
        row.above_inputs_gib = above / GIB
        row.above_gradients_gib = (above - gradients) / GIB
        times[rival.name] = list[float]()
        torch.cuda.empty_cache()
    parts = {rival.name: case.of_one() for rival in everyone}
    by_name = {rival.name: rival for rival in everyone}
    for turn, name in rounds(by_name, count + 1):
        if name in times and turn <= by_name[name].repeats:
            part = parts[name]
            times[name] += elapsed(step, by_name[name], part, repeats=1)
            part.x.grad = part.w.grad = None
    for name, found in times.items():
        row, counted = rows[name], found[1:]  # the first turn warms up
        row.milliseconds = statistics.median(counted)
        row.spread = [min(counted), max(counted)]
        row.tflops = 6 * case.x.numel() * case.w.shape[0] / 1e9 / row.milliseconds
    return list(rows.values())


def measure(rival: Rival, case: Case) -> Row:
    """Measure one implementation by itself."""
    return in_turns([rival], case, rival.repeats)[0]


def ceilings() -> dict[str, float]:
    """The card's own speed: a bf16 matrix product and a device-to-device copy."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    source = torch.randn(1 << 30, device="cuda")
    work = 2 * 8192**3 / 1e9
    burst = median(torch.mm, a, b)
    sustained = statistics.median(elapsed(torch.mm, a, b, repeats=1500)[-200:])
    return {
        "bf16 matrix product 8192^3, TFLOP/s, in a burst": work / burst,
        "bf16 matrix product 8192^3, TFLOP/s, after 2 s": work / sustained,
        "copy, TB/s read and written": 2 * source.nbytes / median(torch.clone, source) / 1e9,
    }


COLUMNS: list[str | tuple[str, str]] = [
    *("N", "V", "implementation", ("ms", ".2f"), "min..max", ("TFLOP/s", ".0f")),
    *(("GiB above inputs", ".2f"), ("GiB above inputs, dX, dW", ".2f")),
]


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Markdown lines."""

    def cells(row: dict[str, Any]) -> list[Any]:
        case = [row["tokens"], row["vocabulary"], row["name"]]
        if row["milliseconds"] is None:
            return [*case, row["note"], None, None, None, None]
        spread = "{:.2f}..{:.2f}".format(*row["spread"])
        peaks = row["above_inputs_gib"], row["above_gradients_gib"]
        return [*case, row["milliseconds"], spread, row["tflops"], *peaks]

    return results.table(COLUMNS, map(cells, rows))


def page(report: dict[str, Any]) -> Iterator[str]:
    """The report for people."""
    yield f"# Linear cross-entropy, forward and backward, bf16, H={report['hidden']}"
    yield ""
    yield "Written by `benchmarks/linear_cross_entropy.py`; its docstring says what is counted."
    yield ""
    yield from (f"- {name}: {value}" for name, value in report["environment"].items())
    yield ""
    yield from table(report["rows"])
    yield ""
    yield "Relative errors against fp64 at N=2085, V=32003, and the fused kernels that ran:"
    yield ""
    names = list(report["correctness"][0])
    yield from results.table(
        [(name, ".2e") if name in RESULTS else name for name in names],
        (
            [row[name] if name in RESULTS else str(row.get(name)) for name in names]
            for row in report["correctness"]
        ),
    )
    yield ""
    yield "Relative errors of confident tokens against fp64 (bf16 logits around 20, exact):"
    yield ""
    yield from results.table(
        [("1 - p", ".0e"), "implementation", *((name, ".1e") for name in RESULTS)],
        ([row[name] for name in ("1 - p", "name", *RESULTS)] for row in report["confident"]),
    )
    yield ""


def add_fp32_product(into: Tensor, logits: Tensor, x: Tensor) -> None:
    """dW by a separate product and a pass over dW."""
    into.add_(torch.mm(logits.t(), x, out_dtype=torch.float32))


def stage_times(rows: int) -> dict[str, float]:
    """Milliseconds of each stage for all tokens in chunks of `rows`."""
    tokens, hidden, vocabulary = LARGE
    case = Case.random(rows, hidden, vocabulary)
    x, w = case.x.detach(), case.w.detach()
    d_weight, d_hidden = torch.zeros_like(w, dtype=torch.float32), torch.empty_like(x)
    logits = kernels.logits_buffer(rows, vocabulary, x)
    kernels.logits(x, w, 1.0, logits)
    row_kernel = (logits, case.targets, vocabulary, case.mask, False)
    of_one = {"rows": median(kernels.statistics_and_gradient_, *row_kernel)}
    of_one["logits"] = median(kernels.logits, x, w, 1.0, logits)
    # The clock depends on the data: what the GEMMs below read must be a real gradient.
    kernels.statistics_and_gradient_(*row_kernel)
    of_one |= {
        "dX": median(kernels.hidden_gradient, logits, w, 1.0, d_hidden),
        "dW": median(kernels.weight_gradient, logits, x, 1.0, True, d_weight),
        "dW in bf16": median(torch.mm, logits.t(), x),
        "dW, product and addition": median(add_fp32_product, d_weight, logits, x),
    }
    return {"chunk": rows} | {name: tokens / rows * each for name, each in of_one.items()}


def row_kernel_sweep() -> list[dict[str, float]]:
    """The row kernel over its launch parameters, 4096 rows."""
    vocabulary = LARGE[2]
    shipped = kernels.ROW_GROUPS, kernels.ROW_WARPS
    logits = torch.randn(4096, vocabulary, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(vocabulary, (4096,), device="cuda")
    weights = torch.ones(4096, device="cuda")
    found = []
    for groups, warps in ((512, 8), (1024, 8), (1024, 16), (2048, 16), (2048, 32), (4096, 32)):
        kernels.ROW_GROUPS, kernels.ROW_WARPS = groups, warps
        of = (logits, targets, vocabulary)
        both = median(kernels.statistics_and_gradient_, *of, weights, False)
        found.append(
            {
                "groups": groups,
                "warps": warps,
                "both": both,
                "both, argmax": median(kernels.statistics_and_gradient_, *of, weights, True),
                "both, TB/s of one read and one write": 2 * logits.nbytes / both / 1e9,
            }
        )
        print(found[-1], flush=True)
    kernels.ROW_GROUPS, kernels.ROW_WARPS = shipped
    return found


def whole_step(chunk: int) -> dict[str, float]:
    """Forward and backward by chunk size."""

    loss = ours(backend="triton", upstream="weighted-scalar", chunk_tokens=chunk)
    row = measure(Rival("ours", loss, "_row_kernel"), Case.random(*LARGE))
    return {
        "chunk": chunk,
        "logits GiB": 2 * chunk * LARGE[2] / GIB,
        "ms": row.milliseconds or float("nan"),
        "TFLOP/s": row.tflops or float("nan"),
        "GiB above inputs, dX, dW": row.above_gradients_gib or float("nan"),
    }


def part(case: Case) -> Case:
    """The case with this rank's rows of the weight."""
    mine = case.w.detach().chunk(dist.get_world_size())[dist.get_rank()].clone()
    return replace(case, w=mine.requires_grad_())


class _Copied(torch.autograd.Function):
    """Identity whose backward sums over the ranks, as before a column-parallel layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        dist.all_reduce(gradient)
        return gradient


def unfused(case: Case) -> Tensor:
    """Megatron's loss over materialized logits."""
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    copied = _Copied.apply(case.x)  # type: ignore[no-untyped-call]
    logits = torch.matmul(copied, case.w.t())
    return case.reduce(
        vocab_parallel_cross_entropy(logits, case.targets, tp_group=dist.group.WORLD)
    )


def check_part(rival: Rival) -> dict[str, float]:
    """Errors against fp64; raises SystemExit if they exceed those of bf16."""
    whole = Case.random(2085, 1024, 4096 * 8)
    loss, d_x, d_w = exact(whole)
    case = part(whole)
    got = step(rival, case)
    mine = d_w.chunk(dist.get_world_size())[dist.get_rank()]
    errors = distances(RESULTS, (got, case.x.grad, case.w.grad), (loss, d_x, mine))
    if errors["loss"] > 1e-4 or max(errors.values()) > 2e-2:
        raise SystemExit(f"{rival.name} is wrong on rank {dist.get_rank()}: {errors}")
    return errors


@click.group(help=__doc__)
def main() -> None:
    """Measure linear cross-entropy."""


@main.command()
@results.out_option(None)
@click.option("--name", default="linear_cross_entropy_h200", help="stem of the files")
@click.option("--tokens", type=int, multiple=True, default=TOKENS)
@click.option("--vocabularies", type=int, multiple=True, default=VOCABULARIES)
@click.option("--hidden", default=4096)
@click.option("--rounds", "count", default=20, help="timed steps of each")
@click.option("--only", multiple=True, help="measure only names that contain one of these")
@results.folder_option("--pull-3345", "checkout of Megatron's pull request 3345")
def compare(
    out: Path,
    name: str,
    tokens: tuple[int, ...],
    vocabularies: tuple[int, ...],
    hidden: int,
    count: int,
    only: tuple[str, ...],
    pull_3345: Path | None,
) -> None:
    """Check and measure all implementations."""
    began = time.monotonic()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    everyone = rivals(pull_3345)
    if only:
        everyone = [r for r in everyone if any(part in r.name for part in only)]
    facts = {**results.stack("triton"), "python": platform.python_version()}
    facts |= {what: f"{value:.2f}" for what, value in ceilings().items()}
    report: dict[str, Any] = {
        "hidden": hidden,
        "logits_budget_bytes": LOGITS_BYTES,
        "environment": facts,
        "correctness": check(everyone, hidden=1024),
        "confident": confident(everyone),
        "rows": [],
    }
    for vocabulary in vocabularies:
        for many in tokens:
            case = Case.random(many, hidden, vocabulary)
            rows = [asdict(row) for row in in_turns(everyone, case, count)]
            print("\n".join(table(rows)), flush=True)
            report["rows"] += rows
            del case
            gc.collect()
            torch.cuda.empty_cache()
    facts["seconds for everything"] = f"{time.monotonic() - began:.0f}"
    results.write(out, name, report, page(report))


@main.command()
@results.out_option(None)
def stages(out: Path) -> None:
    """Measure the stages of ours, and its steps by chunk size."""
    report: dict[str, Any] = {"GPU": torch.cuda.get_device_name(), "tokens": LARGE[0]}
    report["row_kernel"] = row_kernel_sweep()
    for name, work, sizes in (
        ("stages", stage_times, (1024, 2048, 4096, 8192)),
        ("whole_step", whole_step, (2048, 4096, 5504, 8192)),
    ):
        report[name] = []
        for size in sizes:
            report[name].append(work(size))
            torch.cuda.empty_cache()
            print({key: round(value, 2) for key, value in report[name][-1].items()}, flush=True)
    results.write(out, "linear_cross_entropy_stages", report)


@main.command()
@results.out_option(None)
def tp(out: Path) -> None:
    """Measure on this rank, under torchrun; rank 0 writes the result."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    report = []
    split = ours(backend="triton", upstream="weighted-scalar", tp_group=dist.group.WORLD)
    for rival in (Rival("stock", unfused, None), Rival("ours", split, "_row_kernel")):
        errors = check_part(rival)
        row = measure(rival, part(Case.random(*LARGE)))
        torch.cuda.empty_cache()
        report.append(
            {
                "name": rival.name,
                "tp": ranks,
                "tokens": LARGE[0],
                "vocabulary": LARGE[2],
                "GPU": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "ms": row.milliseconds,
                "TFLOP/s per GPU": row.tflops,
                "GiB above inputs, dX, dW": row.above_gradients_gib,
                "errors": errors,
            }
        )
    if rank == 0:
        results.write(out, f"linear_cross_entropy_tp{ranks}", report)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
