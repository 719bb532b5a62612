"""Measure forward and backward of every linear cross-entropy on one GPU, in one process.

\b
    python -m benchmarks.linear_cross_entropy compare --out DIR
    torchrun --nproc-per-node 2 -m benchmarks.linear_cross_entropy tp --out DIR

`compare` begins with correctness, at a shape with ragged sizes: relative errors of loss, dX and dW
against fp64, and a profile of the kernels that ran. An implementation whose own kernel is not among
them, or whose errors are not near the unfused path's, ends the run. Tokens whose target has a
probability of 1 - 1e-2 to 1 - 1e-7 have a separate table of errors. Then, per shape, the median
time of forward and backward, TFLOP/s counted as 6*N*H*V (three GEMMs over all tokens, regardless of
what is computed), and peak memory twice: above the inputs, and above inputs plus the gradients dX
and dW in the type of the inputs, which every implementation must return. Data is random: logits of
standard deviation 2, a tenth of the tokens masked. Writes `NAME.json` and `.md` to DIR.

The implementations take turns, one step each in a shuffled order, because matrix work of more than
about 50 ms runs into the card's power limit: all of them are timed at the same clocks. The header
reports what a plain cuBLAS matrix product reaches in a short burst and after 2 s.

Rivals, if installed: Megatron's three losses on materialized logits ("stock" is unfused, and the
same arithmetic in torch if megatron-core is missing); torch.compile of unfused torch, Liger mean
and none, and cut-cross-entropy with its filter off. With --pull-3345, also the Hopper kernels of
that pull request of Megatron, from a checkout of it; they need nvidia-cutlass-dsl.

`tp` splits the vocabulary over the GPUs of one host, and compares the unfused path (Megatron's loss
on the logits of the rank) with ours: every rank against fp64 at a small shape, then in time,
TFLOP/s per GPU counted as 6*N*H*V/tp, and peak memory above inputs, dX and dW. Rank 0 writes
`linear_cross_entropy_tp<ranks>.json`.
"""

from __future__ import annotations

import gc
import importlib
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy, softplus

from benchmarks.harness import results
from benchmarks.harness.gpu import GIB, distances, elapsed, median, refuse, rounds
from cppmega.host.packages import version
from cppmega.ops.linear_cross_entropy import linear_cross_entropy
from cppmega.ops.linear_cross_entropy.chunks import LOGITS_BYTES

PROOFS = ("_row_kernel", "liger_cross", "cce_backward", "kernel_cutlass")
"""Parts of kernel names that occur only in fused implementations."""
TOKENS = (8192, 32768, 49152)
VOCABULARIES = (65536, 131072)
HIDDEN = 4096
LARGE = 32768, HIDDEN, 131072
"""Tokens, hidden size and vocabulary of the split vocabulary."""
ALLOWED = {"loss": 1e-4, "dX": 2e-2, "dW": 2e-2}
"""Relative errors of results in bf16."""


@dataclass
class Case:
    """Inputs of one measurement; `mask` is 0/1, and the loss is sum(mask * loss) / sum(mask)."""

    x: Tensor
    w: Any
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
        return replace(self, x=x, w=w)

    def logits(self) -> Tensor:
        return torch.matmul(self.x, self.w.t())

    def ignored(self) -> Tensor:
        return self.targets.masked_fill(self.mask == 0, -100)

    def reduce(self, per_token: Tensor) -> Tensor:
        """Reduce the loss per token as a training step does."""
        return (per_token * self.mask).sum() / self.mask.sum()

    def forget(self) -> None:
        self.x.grad = self.w.grad = None


class Rival(NamedTuple):
    name: str
    loss: Callable[[Case], Tensor]
    """The scalar loss of a case."""
    kernel: str | None = None
    """Part of the name of a kernel that proves that it ran; None: none of PROOFS may run."""
    repeats: int = 20
    """Timed runs."""


def ours(leave_out: bool = False, **options: Any) -> Callable[[Case], Tensor]:
    """The scalar loss by `linear_cross_entropy`; `leave_out`: told how many tokens count."""

    def loss(case: Case) -> Tensor:
        weighted = options.get("upstream") == "weighted-scalar"
        given: dict[str, Any] = {"loss_weights": case.mask} if weighted else {}
        given |= {"counted_tokens": case.counted} if leave_out else {}
        out = linear_cross_entropy(case.x, case.w, case.targets, **given, **options)
        if out.backend != options["backend"]:
            raise SystemExit(f"{options['backend']} was named, but {out.backend} ran")
        return case.reduce(out.loss)

    return loss


PROMISED = {"backend": "triton", "upstream": "weighted-scalar"}
IN_FP32 = ours(backend="reference", upstream="weighted-scalar")


def _into_main_grad(case: Case) -> Tensor:
    if not hasattr(case.w, "main_grad"):
        case.w.main_grad = torch.zeros_like(case.w, dtype=torch.float32)
        case.w.grad_added_to_main_grad = False
    return ours(**PROMISED, gradient_accumulation_fusion=True)(case)


def _unfused(x: Tensor, w: Tensor, targets: Tensor) -> Tensor:
    """The loss of each token, in torch."""
    return cross_entropy(torch.matmul(x, w.t()).float(), targets, reduction="none")


def _by_torch(per_token: Callable[..., Tensor]) -> Callable[[Case], Tensor]:
    return lambda case: case.reduce(per_token(case.x, case.w, case.targets))


def _liger_mean(case: Case) -> Tensor:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    returned: tuple[Tensor, ...] = LigerFusedLinearCrossEntropyFunction.apply(
        *(case.x, case.w, case.ignored(), None, None, -100, 0.0, 0.0),
        *("mean", None, False, torch.float32),
    )
    return returned[0]


def _cce(case: Case) -> Tensor:
    """Apple's cut-cross-entropy without its filter, which drops small gradients."""
    from cut_cross_entropy import linear_cross_entropy as cut

    options = {"reduction": "none", "filter_eps": None, "impl": "cce"}
    return case.reduce(cut(case.x, case.w, case.targets, **options).float())


def _megatron() -> Iterator[Rival]:
    """Megatron's own losses on materialized logits."""
    try:
        from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
        from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
    except ImportError:
        yield Rival("stock (its arithmetic in torch)", _by_torch(_unfused))
        return
    store = tempfile.mkdtemp()
    dist.init_process_group("nccl", init_method=f"file://{store}/store", rank=0, world_size=1)
    group = dist.group.WORLD

    def sequence_first(call: Callable[..., Tensor]) -> Callable[[Case], Tensor]:
        def loss(case: Case) -> Tensor:
            found = call(case.logits().unsqueeze(1), case.targets.unsqueeze(1), group)
            return case.reduce(found.squeeze(1))

        return loss

    def unfused(case: Case) -> Tensor:
        found = vocab_parallel_cross_entropy(case.logits(), case.targets, tp_group=group)
        return case.reduce(found)

    core, native = version("megatron-core"), sequence_first(fused_vocab_parallel_cross_entropy)
    yield Rival(f"stock (megatron-core {core})", unfused)
    yield Rival(f"native (megatron-core {core})", native)
    engine = version("transformer-engine")
    if engine is None:
        print("transformer-engine is not installed: its row is missing", file=sys.stderr)
        return
    from megatron.core.extensions.transformer_engine import te_parallel_cross_entropy

    yield Rival(f"te (Transformer Engine {engine})", sequence_first(te_parallel_cross_entropy))


def _of_pull_3345(root: Path) -> Iterator[Rival]:
    """The pull request's kernels; its checkout takes precedence over the release's fusions."""
    fusions = importlib.import_module("megatron.core.fusions")
    fusions.__path__.insert(0, str(root / "megatron" / "core" / "fusions"))
    module = importlib.import_module("megatron.core.fusions.fused_linear_cross_entropy")
    call = module.linear_cross_entropy
    mean = lambda case: call(case.x, case.w, case.ignored(), reduction="mean").squeeze()  # noqa: E731
    none = lambda case: case.reduce(call(case.x, case.w, case.targets, reduction="none"))  # noqa: E731
    yield Rival("#3345 mean", mean, "kernel_cutlass")
    yield Rival("#3345 none", none, "kernel_cutlass")


def rivals(pull_3345: Path | None) -> Iterator[Rival]:
    """All implementations that are installed; missing ones are reported on stderr."""
    yield from _megatron()
    yield Rival("torch.compile of stock", _by_torch(torch.compile(_unfused, dynamic=False)))
    if pull_3345 is not None:
        yield from _of_pull_3345(pull_3345)
    for package, rival in (
        ("liger-kernel", Rival("Liger mean", _liger_mean, "liger_cross_entropy_kernel")),
        ("liger-kernel", Rival("Liger none", ours(backend="liger"), "liger_cross_entropy_kernel")),
        ("cut-cross-entropy", Rival("CCE", _cce, "cce_backward_kernel", 5)),
    ):
        if installed := version(package):
            yield rival._replace(name=f"{rival.name} ({installed})")
        else:
            print(f"{package} is not installed: {rival.name} is missing", file=sys.stderr)
    yield Rival("ours", ours(**PROMISED), "_row_kernel")
    left_out = ours(leave_out=True, **PROMISED)
    yield Rival("ours, masked tokens left out", left_out, "_row_kernel")
    yield Rival("ours, into main_grad", _into_main_grad, "_row_kernel")
    yield Rival("ours, any upstream gradient", ours(backend="triton"), "_row_kernel")


def step(rival: Rival, case: Case) -> Tensor:
    """Run forward and backward without accumulated gradients."""
    case.forget()
    loss = rival.loss(case)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def exact(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    x, w = (t.detach().double() for t in (case.x, case.w))
    logits, column = x @ w.t(), case.targets.unsqueeze(1)
    # By the target's lead over the others, so that no 1 is subtracted from a probability.
    others = logits.scatter(1, column, -torch.inf)
    lag = others.logsumexp(1, keepdim=True) - logits.gather(1, column)
    weights = (case.mask.double() / case.mask.double().sum()).unsqueeze(1)
    d_logits = others.softmax(1).scatter(1, column, -1.0) * lag.sigmoid() * weights
    loss = (softplus(lag, threshold=100) * weights).sum()
    return loss, d_logits @ w, d_logits.t() @ x


def errors_of(case: Case, loss: Tensor, truth: Iterable[Tensor]) -> dict[str, float]:
    """Errors of the loss and of the gradients that a step has left."""
    got = (loss, case.x.grad, getattr(case.w, "main_grad", case.w.grad))
    return distances(ALLOWED, got, truth)


def check(everyone: list[Rival], hidden: int) -> list[dict[str, Any]]:
    """Errors against fp64, and the kernels that ran; raises SystemExit on a wrong one."""
    truth = exact(Case.random(2085, hidden, 32003))
    found: list[dict[str, Any]] = []
    for rival in [*everyone, Rival("bf16 inputs, fp32 arithmetic", IN_FP32)]:
        case = Case.random(2085, hidden, 32003)
        step(rival, case)
        if hasattr(case.w, "main_grad"):
            case.w.main_grad.zero_()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            loss = step(rival, case)
            torch.cuda.synchronize()
        launched = " ".join(sorted({event.key for event in profile.key_averages()}))
        errors = errors_of(case, loss, truth)
        proven = [part for part in PROOFS if part in launched]
        found.append({"name": rival.name, **errors, "fused kernels": proven})
        print(found[-1], flush=True)
        if not (rival.kernel in launched if rival.kernel else not proven):
            raise SystemExit(f"{rival.name} did not run; kernels: {launched}")
        refuse(rival.name, errors, ALLOWED)
    return found


def confident(everyone: list[Rival]) -> list[dict[str, Any]]:
    """Errors of loss, dX and dW against fp64 where the model is sure of its target."""
    found: list[dict[str, Any]] = []
    for doubt in (1e-2, 1e-4, 1e-6, 1e-7):
        case = Case.confident(doubt)
        truth = exact(case)
        for rival in everyone:
            own = case.of_one()
            errors = errors_of(own, step(rival, own), truth)
            found.append({"1 - p": doubt, "name": rival.name, **errors})
            print(found[-1], flush=True)
            if rival.name.startswith("ours"):
                refuse(f"{rival.name} at 1-p = {doubt}", errors, 1e-2)
    return found


def peak(rival: Rival, case: Case) -> float | None:
    """Bytes above the inputs that one step allocates at its peak; None: out of memory."""
    try:
        for _ in range(2):
            step(rival, case)
        case.forget()
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(rival, case)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    except torch.OutOfMemoryError:
        return None
    finally:
        case.forget()


def in_turns(everyone: list[Rival], case: Case, count: int) -> list[dict[str, Any]]:
    """Peak memory of each, one after the other; then their times, taking turns."""
    tokens, hidden = case.x.shape
    missing = ("milliseconds", "tflops", "above_inputs_gib", "above_gradients_gib")
    gradients = (case.x.numel() + case.w.numel()) * case.x.element_size()
    rows: dict[str, dict[str, Any]] = {}
    fitting = {}
    for rival in everyone:
        row = rows[rival.name] = {"name": rival.name, "tokens": tokens}
        row |= {"vocabulary": case.w.shape[0], "hidden": hidden, **dict.fromkeys(missing)}
        above = peak(rival, case.of_one())
        row |= {"note": "out of memory" if above is None else "", "spread": []}
        if above is not None:
            row["above_inputs_gib"] = above / GIB
            row["above_gradients_gib"] = (above - gradients) / GIB
            fitting[rival.name] = rival, case.of_one()
            torch.cuda.empty_cache()
    times: dict[str, list[float]] = {name: [] for name in fitting}
    for turn, name in rounds(fitting, count + 1):
        rival, own = fitting[name]
        if turn <= rival.repeats:
            times[name] += elapsed(step, rival, own, repeats=1)
            own.forget()
    for name, (_, *found) in times.items():  # the first turn warms up
        milliseconds = statistics.median(found)
        tflops = 6 * case.x.numel() * case.w.shape[0] / 1e9 / milliseconds
        spread = [min(found), max(found)]
        rows[name] |= {"milliseconds": milliseconds, "tflops": tflops, "spread": spread}
    return list(rows.values())


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


def _cells(row: dict[str, Any]) -> list[Any]:
    case = [row["tokens"], row["vocabulary"], row["name"]]
    if row["milliseconds"] is None:
        return [*case, row["note"], None, None, None, None]
    spread = "{:.2f}..{:.2f}".format(*row["spread"])
    peaks = row["above_inputs_gib"], row["above_gradients_gib"]
    return [*case, row["milliseconds"], spread, row["tflops"], *peaks]


def page(report: dict[str, Any]) -> str:
    of_check = [(name, ".2e" if name in ALLOWED else "") for name in report["correctness"][0]]
    checked = (
        [x if isinstance(x, float) else str(x) for x in each.values()]
        for each in report["correctness"]
    )
    of_sure = [("1 - p", ".0e"), "implementation", *((name, ".1e") for name in ALLOWED)]
    sure = ([each[x] for x in ("1 - p", "name", *ALLOWED)] for each in report["confident"])
    return results.page(
        f"# Linear cross-entropy, forward and backward, bf16, H={report['hidden']}",
        "Written by `benchmarks/linear_cross_entropy.py`; its docstring says what is counted.",
        results.bullets(report["environment"]),
        results.table(COLUMNS, map(_cells, report["rows"])),
        "Relative errors against fp64 at N=2085, V=32003, and the fused kernels that ran:",
        results.table(of_check, checked),
        "Relative errors of confident tokens against fp64 (bf16 logits around 20, exact):",
        results.table(of_sure, sure),
    )


class _Copied(torch.autograd.Function):
    """Identity whose backward sums over the ranks, as before a column-parallel layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        dist.all_reduce(gradient)
        return gradient


def split_unfused(case: Case) -> Tensor:
    """Megatron's loss over the materialized logits of a rank."""
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    logits = replace(case, x=_Copied.apply(case.x)).logits()  # type: ignore[no-untyped-call]
    found = vocab_parallel_cross_entropy(logits, case.targets, tp_group=dist.group.WORLD)
    return case.reduce(found)


def mine(rows: Tensor) -> Tensor:
    """This rank's rows of the weight, or of its gradient."""
    return rows.detach().chunk(dist.get_world_size())[dist.get_rank()].clone()


@click.group(help=__doc__)
def main() -> None:
    """Measure linear cross-entropy."""


@main.command()
@results.out_option(None)
@click.option("--name", default="linear_cross_entropy_h200", help="stem of the files")
@click.option("--tokens", type=int, multiple=True, default=TOKENS)
@click.option("--vocabularies", type=int, multiple=True, default=VOCABULARIES)
@click.option("--rounds", "count", default=20, help="timed steps of each")
@click.option("--only", multiple=True, help="measure only names that contain one of these")
@results.folder_option("--pull-3345", "checkout of Megatron's pull request 3345")
def compare(out: Path, name: str, count: int, pull_3345: Path | None, **of: Any) -> None:
    """Check and measure all implementations."""
    began = time.monotonic()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    parts = of["only"] or ("",)
    everyone = [r for r in rivals(pull_3345) if any(part in r.name for part in parts)]
    facts = {**results.stack("triton"), "python": platform.python_version()}
    facts |= {what: f"{value:.2f}" for what, value in ceilings().items()}
    report: dict[str, Any] = {
        "hidden": HIDDEN,
        "logits_budget_bytes": LOGITS_BYTES,
        "environment": facts,
        "correctness": check(everyone, hidden=1024),
        "confident": confident(everyone),
        "rows": [],
    }
    for vocabulary in of["vocabularies"]:
        for many in of["tokens"]:
            rows = in_turns(everyone, Case.random(many, HIDDEN, vocabulary), count)
            print(*results.table(COLUMNS, map(_cells, rows)), sep="\n", flush=True)
            report["rows"] += rows
            gc.collect()
            torch.cuda.empty_cache()
    facts["seconds for everything"] = f"{time.monotonic() - began:.0f}"
    results.write(out, name, report, page(report))


@main.command()
@results.out_option(None)
def tp(out: Path) -> None:
    """Measure on this rank, under torchrun; rank 0 writes the result."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    whole, report = Case.random(2085, 1024, 4096 * 8), list[dict[str, Any]]()
    loss, d_x, d_w = exact(whole)
    split = ours(**PROMISED, tp_group=dist.group.WORLD)
    for rival in (Rival("stock", split_unfused), Rival("ours", split, "_row_kernel")):
        case = replace(whole, w=mine(whole.w)).of_one()
        errors = errors_of(case, step(rival, case), (loss, d_x, mine(d_w)))
        refuse(f"{rival.name} on rank {rank}", errors, ALLOWED)
        large = Case.random(*LARGE)
        (row,) = in_turns([rival], replace(large, w=mine(large.w)), rival.repeats)
        torch.cuda.empty_cache()
        found: dict[str, Any] = {
            "name": rival.name,
            "tp": ranks,
            "tokens": LARGE[0],
            "vocabulary": LARGE[2],
        }
        found |= {"GPU": torch.cuda.get_device_name(), "torch": torch.__version__}
        found |= {"ms": row["milliseconds"], "TFLOP/s per GPU": row["tflops"]}
        found |= {"GiB above inputs, dX, dW": row["above_gradients_gib"], "errors": errors}
        report.append(found)
    if rank == 0:
        results.write(out, f"linear_cross_entropy_tp{ranks}", report)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
