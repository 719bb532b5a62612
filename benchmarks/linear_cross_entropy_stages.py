"""Measure the stages of cppmega's linear cross-entropy, and the designs it was chosen from.

    python -m benchmarks.linear_cross_entropy_stages --out DIR

By chunk size: the three GEMMs and the row kernel of one chunk, times the number of chunks of 32768
tokens, next to two other ways to compute dW (rounded to bf16 per chunk, which is not precise
enough; an fp32 product and a separate addition). By launch parameters: the row kernel, with and
without the arg-max. Then whole steps by chunk size. Writes `linear_cross_entropy_stages.json` to
DIR.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.gpu import median
from benchmarks.linear_cross_entropy import GIB, measure
from benchmarks.linear_cross_entropy_rivals import Case, Rival, ours
from cppmega.ops.linear_cross_entropy import kernels_triton as kernels

TOKENS, HIDDEN, VOCABULARY = 32768, 4096, 131072


def add_fp32_product(into: Tensor, logits: Tensor, x: Tensor) -> None:
    """dW by a separate product and a pass over dW."""
    into.add_(torch.mm(logits.t(), x, out_dtype=torch.float32))


def stages(rows: int) -> dict[str, float]:
    """Milliseconds of each stage for `TOKENS` tokens in chunks of `rows`."""
    case = Case.random(rows, HIDDEN, VOCABULARY)
    x, w = case.x.detach(), case.w.detach()
    d_weight, d_hidden = torch.zeros_like(w, dtype=torch.float32), torch.empty_like(x)
    logits = kernels.logits_buffer(rows, VOCABULARY, x)
    kernels.logits(x, w, 1.0, logits)
    row_kernel = (logits, case.targets, VOCABULARY, case.mask, False)
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
    return {"chunk": rows} | {name: TOKENS / rows * each for name, each in of_one.items()}


def row_kernel_sweep() -> list[dict[str, float]]:
    """The row kernel over its launch parameters, 4096 rows."""
    shipped = kernels.ROW_GROUPS, kernels.ROW_WARPS
    logits = torch.randn(4096, VOCABULARY, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(VOCABULARY, (4096,), device="cuda")
    weights = torch.ones(4096, device="cuda")
    found = []
    for groups, warps in ((512, 8), (1024, 8), (1024, 16), (2048, 16), (2048, 32), (4096, 32)):
        kernels.ROW_GROUPS, kernels.ROW_WARPS = groups, warps
        of = (logits, targets, VOCABULARY)
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
    row = measure(Rival("ours", loss, "_row_kernel"), Case.random(TOKENS, HIDDEN, VOCABULARY))
    return {
        "chunk": chunk,
        "logits GiB": 2 * chunk * VOCABULARY / GIB,
        "ms": row.milliseconds or float("nan"),
        "TFLOP/s": row.tflops or float("nan"),
        "GiB above inputs, dX, dW": row.above_gradients_gib or float("nan"),
    }


def main() -> None:
    """Parse the arguments, run, write."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    out = parser.parse_args().out
    report: dict[str, Any] = {"GPU": torch.cuda.get_device_name(), "tokens": TOKENS}
    report["row_kernel"] = row_kernel_sweep()
    for name, work, sizes in (
        ("stages", stages, (1024, 2048, 4096, 8192)),
        ("whole_step", whole_step, (2048, 4096, 5504, 8192)),
    ):
        report[name] = []
        for size in sizes:
            report[name].append(work(size))
            torch.cuda.empty_cache()
            print({key: round(value, 2) for key, value in report[name][-1].items()}, flush=True)
    out.mkdir(parents=True, exist_ok=True)
    (out / "linear_cross_entropy_stages.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
