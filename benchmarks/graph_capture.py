"""Capture Megatron's MTP roll and MTP loss in CUDA graphs, stock and patched, on a GPU.

usage: python -m benchmarks.graph_capture --megatron ROOT [--out benchmarks/results]

ROOT holds a pristine megatron/ (an unpacked wheel); it is copied, and one copy is patched. Each
side runs in a separate process: capture, then replay on new data, compared with a plain loop over
documents. Also checked: a reached-mark is set by the capture, and the graph with the mark replays.
Writes graph_capture_h200.json and .md.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from benchmarks.harness import results, runs, trees

REAL, PADDED = [0, 3, 8, 20, 27], [0, 4, 12, 24, 32]
VOCABULARY, HIDDEN, DEPTHS = 512, 64, 2


def truth(values: Any) -> Any:
    """Shift left by one inside each document; everything else is 0."""
    out = values.clone().zero_()
    for start, a, b in zip(PADDED[:-1], REAL[:-1], REAL[1:], strict=True):
        end = start + b - a
        out[..., start : end - 1] = values[..., start + 1 : end]
    return out


def packed() -> Any:
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    real = torch.tensor(REAL, dtype=torch.int32, device="cuda")
    padded = torch.tensor(PADDED, dtype=torch.int32, device="cuda")
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=real,
        cu_seqlens_kv=real,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=12,
        max_seqlen_kv=12,
    )


def capture(work: Callable[[], Any]) -> tuple[Any, Any]:
    """Capture the work; the graph and what the work returned inside the capture."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()
    return graph, result


def roll() -> str:
    import torch
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    params = packed()
    static = torch.randint(1, VOCABULARY, (1, PADDED[-1]), device="cuda")
    graph, (rolled, total) = capture(
        lambda: roll_tensor(static, shifts=-1, dims=-1, packed_seq_params=params)
    )
    for _ in range(3):
        static.copy_(torch.randint(1, VOCABULARY, (1, PADDED[-1]), device="cuda"))
        graph.replay()
        if not torch.equal(rolled, truth(static)) or total.item() != truth(static).sum().item():
            return "captured, but the replay is wrong"
    return "captured; replays correctly"


def loss() -> str:
    """Capture process_mtp_loss with a real output layer, forward and backward."""
    import torch
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.multi_token_prediction import process_mtp_loss

    torch.distributed.init_process_group("nccl", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=2, hidden_size=HIDDEN, num_attention_heads=4, mtp_num_layers=DEPTHS
    )
    layer = tensor_parallel.ColumnParallelLinear(
        HIDDEN,
        VOCABULARY,
        config=config,
        init_method=torch.nn.init.normal_,
        bias=False,
        gather_output=False,
    )
    params = packed()
    hidden = torch.randn((1 + DEPTHS) * PADDED[-1], 1, HIDDEN, device="cuda", requires_grad=True)
    labels = torch.randint(1, VOCABULARY, (1, PADDED[-1]), device="cuda")
    mask = truth(torch.ones(1, PADDED[-1], device="cuda"))
    entropy = tensor_parallel.vocab_parallel_cross_entropy

    def work() -> Any:
        out = process_mtp_loss(
            hidden_states=hidden,
            labels=labels,
            loss_mask=mask,
            output_layer=layer,
            output_weight=None,
            runtime_gather_output=None,
            is_training=True,
            compute_language_model_loss=lambda labels, logits: entropy(
                logits.float(), labels.transpose(0, 1)
            ).transpose(0, 1),
            config=config,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            packed_seq_params=params,
        )
        return torch.autograd.grad(out.sum(), [hidden, layer.weight])

    graph, gradients = capture(work)
    for _ in range(3):
        labels.copy_(torch.randint(1, VOCABULARY, labels.shape, device="cuda"))
        graph.replay()
        kept = [gradient.clone() for gradient in gradients]
        for ours, eager in zip(kept, work(), strict=True):
            if not torch.equal(ours, eager):
                return "captured, but the replay differs from eager"
    return "captured; replays equal eager, forward and backward"


def attempt(name: str) -> None:
    """Print the outcome of one attempt as JSON.

    A failing capture leaves its context unusable, so each comes in a process alone.
    """
    import torch

    from cppmega.guard import reached_marks

    try:
        found = {"roll": roll, "loss": loss}[name]()
    except Exception as error:
        said = str(error).strip().partition("\n")[0]
        found = f"failed: {type(error).__name__}: {said}"[:160]
    reached = sorted(reached_marks.reached())
    print(json.dumps({name: found, "reached": reached, "torch": torch.__version__}), flush=True)
    os._exit(0)  # a broken CUDA context may hang at exit


def page(result: dict[str, Any]) -> str:
    stock, patched = (result["rows"][side] for side in ("stock", "patched"))
    step = f"`process_mtp_loss`, {DEPTHS} depths, forward and backward"
    stack = results.versions(result, "torch", "megatron-core", "overlay")
    return results.page(
        f"{result['gpu']}, {stack}, {result['date']}.",
        results.table(
            ["CUDA-graph capture of", "stock", "patched"],
            [
                ["`roll_tensor` on a padded pack", *(str(x.get("roll")) for x in (stock, patched))],
                [step, *(str(x.get("loss")) for x in (stock, patched))],
                ["reached-marks set by the capture", "-", ", ".join(patched["reached"])],
            ],
        ),
    )


@click.command(help=__doc__)
@results.folder_option("--megatron", "a pristine megatron/", required=True)
@results.out_option()
def main(megatron: Path, out: Path) -> None:
    rows: dict[str, dict[str, Any]] = {"stock": {}, "patched": {}}
    with trees.stock_and_patched(megatron) as (roots, overlay):
        for side, name in itertools.product(rows, ("roll", "loss")):
            code = f"from benchmarks import graph_capture as g\ng.attempt({name!r})"
            log = roots[side] / f"{name}.log"
            try:
                rows[side] |= runs.said(roots[side], code, {}, log, timeout=240)
            except click.ClickException as error:
                rows[side][name] = error.message[-300:]
    result = {**results.facts("torch"), **overlay, "rows": rows}
    results.write(out, "graph_capture_h200", result, page(result))


if __name__ == "__main__":
    main()
