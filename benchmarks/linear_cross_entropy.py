"""Measure forward and backward of every linear cross-entropy on one GPU, in one process.

    python -m benchmarks.linear_cross_entropy --out DIR

First correctness, at a shape with ragged sizes: relative error of loss, dX and dW in the 2-norm
against fp64, next to that of the unfused path, and a profile of the kernels that ran: an
implementation whose own kernel is not among them, or whose errors are not near the unfused path's,
ends the run. Confident tokens, whose target has a probability of 1 - 1e-2 to 1 - 1e-7, have a
separate table of errors. Then, per shape, the median time of forward and backward, TFLOP/s counted
as 6*N*H*V (three GEMMs over all tokens, regardless of what is computed), and peak memory twice:
above the inputs, and above inputs plus the gradients dX and dW in the type of the inputs, which
every implementation must return. Writes `linear_cross_entropy_h200.json` and `.md` (or `--name`) to
DIR.

The implementations take turns, one step each in a shuffled order, because matrix work of more than
about 50 ms runs into the card's power limit: all of them are timed at the same clocks. The header
reports what a plain cuBLAS matrix product reaches in a short burst and after 2 s.

Data is random: logits of standard deviation 2, a tenth of the tokens masked.

Alternatives, if installed: Megatron's three losses on materialized logits, unfused ("stock", the
same arithmetic in torch if megatron-core is missing, and the table says so),
`--cross-entropy-fusion-impl native` and `te`; torch.compile of unfused torch, Liger mean and none,
cut-cross-entropy with its filter off. With --pull-3345, also the Hopper kernels of that pull
request of Megatron, from a checkout of it; they need nvidia-cutlass-dsl.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import statistics
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.gpu import elapsed, median, stack
from benchmarks.linear_cross_entropy_rivals import OURS_IN_FP32, Case, Rival, rivals
from cppmega.ops.linear_cross_entropy.chunks import LOGITS_BYTES

GIB = float(1 << 30)
PROOFS = ("_row_kernel", "liger_cross", "cce_backward", "kernel_cutlass")
"""Parts of kernel names that occur only in fused implementations."""
TOKENS = (8192, 32768, 49152)
VOCABULARIES = (65536, 131072)


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
    results: list[dict[str, Any]] = []
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
        kernels = {event.key for event in profile.key_averages()}
        got = (loss, case.x.grad, weight.main_grad if fused else case.w.grad)
        errors = {
            name: float((ours.double() - true).norm() / true.norm())
            for name, ours, true in zip(("loss", "dX", "dW"), got, truth, strict=True)
            if ours is not None
        }
        proven = [k for k in PROOFS if _ran(k, kernels)]
        results.append({"name": rival.name, **errors, "fused kernels": proven})
        print(results[-1], flush=True)
        ran = _ran(rival.kernel, kernels) if rival.kernel else not proven
        if not ran:
            raise SystemExit(f"{rival.name} did not run; kernels: {sorted(kernels)}")
        allowed = {"loss": 1e-4, "dX": 2e-2, "dW": 2e-2}
        if not all(errors[name] <= limit for name, limit in allowed.items()):
            raise SystemExit(f"{rival.name} is wrong: {errors}")
    return results


def _ran(part: str, kernels: set[str]) -> bool:
    return any(part in kernel for kernel in kernels)


def confident(everyone: list[Rival]) -> list[dict[str, Any]]:
    """Errors of loss, dX and dW against fp64 where the model is sure of its target."""
    results: list[dict[str, Any]] = []
    for doubt in (1e-2, 1e-4, 1e-6, 1e-7):
        case = Case.confident(doubt)
        truth = exact(case)
        for rival in everyone:
            own = case.of_one()
            loss = step(rival, own)
            weight: Any = own.w
            d_weight = getattr(weight, "main_grad", own.w.grad)
            got = (loss, own.x.grad, d_weight)
            errors = {
                name: float((ours.double() - true).norm() / true.norm())
                for name, ours, true in zip(("loss", "dX", "dW"), got, truth, strict=True)
            }
            results.append({"1 - p": doubt, "name": rival.name, **errors})
            print(results[-1], flush=True)
            if rival.name.startswith("ours") and not all(e < 1e-2 for e in errors.values()):
                raise SystemExit(f"{rival.name} is wrong at 1-p = {doubt}: {errors}")
    return results


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


def compare(everyone: list[Rival], case: Case, rounds: int) -> list[Row]:
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
    for turn in range(rounds + 1):
        # In another order each time: after a slow rival the card is cool, and its clocks are high.
        for rival in random.Random(turn).sample(everyone, len(everyone)):
            if rival.name in times and turn <= rival.repeats:
                part = parts[rival.name]
                times[rival.name] += elapsed(step, rival, part, repeats=1)
                part.x.grad = part.w.grad = None
    for name, found in times.items():
        row, counted = rows[name], found[1:]  # the first turn warms up
        row.milliseconds = statistics.median(counted)
        row.spread = [min(counted), max(counted)]
        row.tflops = 6 * case.x.numel() * case.w.shape[0] / 1e9 / row.milliseconds
    return list(rows.values())


def measure(rival: Rival, case: Case) -> Row:
    """Measure one implementation by itself."""
    return compare([rival], case, rival.repeats)[0]


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


def table(rows: list[Row]) -> list[str]:
    """Markdown lines."""
    lines = [
        "| N | V | implementation | ms | min..max | TFLOP/s "
        "| GiB above inputs | GiB above inputs, dX, dW |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row.milliseconds is None:
            values = f"{row.note} | | | |"
        else:
            values = (
                f"{row.milliseconds:.2f} | {row.spread[0]:.2f}..{row.spread[1]:.2f} "
                f"| {row.tflops:.0f} | {row.above_inputs_gib:.2f} "
                f"| {row.above_gradients_gib:.2f}"
            )
        lines.append(f"| {row.tokens} | {row.vocabulary} | {row.name} | {values} |")
    return lines


def markdown(report: dict[str, Any], rows: list[Row]) -> str:
    """The report for people."""
    names = list(report["correctness"][0])
    errors = [
        "| "
        + " | ".join(str(r.get(n)) if n in ("name", names[-1]) else f"{r[n]:.2e}" for n in names)
        for r in report["correctness"]
    ]
    facts = [f"- {name}: {value}" for name, value in report["environment"].items()]
    return "\n".join(
        [
            f"# Linear cross-entropy, forward and backward, bf16, H={report['hidden']}",
            "",
            "Written by `benchmarks/linear_cross_entropy.py`; its docstring says what is counted.",
            "",
            *facts,
            "",
            *table(rows),
            "",
            "Relative errors against fp64 at N=2085, V=32003, and the fused kernels that ran:",
            "",
            "| " + " | ".join(names) + " |",
            "|" + "---|" * len(names),
            *(line + " |" for line in errors),
            "",
            "Relative errors of confident tokens against fp64 (bf16 logits around 20, exact):",
            "",
            "| 1 - p | implementation | loss | dX | dW |",
            "|---|---|---|---|---|",
            *(
                f"| {r['1 - p']:.0e} | {r['name']} | {r['loss']:.1e} | {r['dX']:.1e} "
                f"| {r['dW']:.1e} |"
                for r in report["confident"]
            ),
            "",
        ]
    )


def main() -> None:
    """Parse the arguments, run, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--name", default="linear_cross_entropy_h200", help="stem of the files")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--vocabularies", type=int, nargs="+", default=list(VOCABULARIES))
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=20, help="timed steps of each")
    parser.add_argument("--only", nargs="+", help="measure only names that contain one of these")
    parser.add_argument("--pull-3345", type=Path, help="checkout of Megatron's pull request 3345")
    arguments = parser.parse_args()
    began = time.monotonic()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    everyone = rivals(arguments.pull_3345)
    if arguments.only:
        everyone = [r for r in everyone if any(part in r.name for part in arguments.only)]
    report: dict[str, Any] = {
        "hidden": arguments.hidden,
        "logits_budget_bytes": LOGITS_BYTES,
        "environment": {
            **stack("triton"),
            "python": platform.python_version(),
        },
    }
    report["environment"] |= {name: f"{value:.2f}" for name, value in ceilings().items()}
    report["correctness"] = check(everyone, hidden=1024)
    report["confident"] = confident(everyone)
    rows: list[Row] = []
    for vocabulary in arguments.vocabularies:
        for tokens in arguments.tokens:
            case = Case.random(tokens, arguments.hidden, vocabulary)
            rows += compare(everyone, case, arguments.rounds)
            print("\n".join(table(rows[-len(everyone) :])[2:]), flush=True)
            del case
            gc.collect()
            torch.cuda.empty_cache()
    report["rows"] = [asdict(row) for row in rows]
    report["environment"]["seconds for everything"] = f"{time.monotonic() - began:.0f}"
    arguments.out.mkdir(parents=True, exist_ok=True)
    stem = arguments.out / arguments.name
    stem.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    stem.with_suffix(".md").write_text(markdown(report, rows))
    print(markdown(report, rows))


if __name__ == "__main__":
    main()
