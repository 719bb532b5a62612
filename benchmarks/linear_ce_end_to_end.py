"""Megatron's GPTModel with MTP on one GPU, stock against linear cross-entropy: time, memory, loss.

    python benchmarks/linear_ce_end_to_end.py --megatron ROOT --out FOLDER

ROOT is a folder that holds `megatron/` (an unpacked wheel). It is copied, and the overlay's pages
of linear cross-entropy are applied to the copy. Each side and micro-batch size is a process of its
own, so that the peak of one says nothing about another. bf16, forward and backward, no optimizer.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = ("cross_entropy_fusion_linear", "linear_ce_gpt_head", "mtp_linear_ce")
VOCABULARY, HIDDEN, SEQUENCE, LAYERS, DEPTHS = 131072, 4096, 4096, 2, 2
STEPS = 5


def measure(side: str, micro_batch: int) -> dict[str, Any]:
    """Step time, peak memory and losses of one side, in this process."""
    import torch
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
    from megatron.core.transformer.transformer_config import TransformerConfig

    class Attention(MegatronModule):
        """Causal, by torch: Megatron's own unfused attention holds the scores of all heads."""

        def __init__(self, config: Any, *_: Any, **__: Any) -> None:
            super().__init__(config=config)

        def forward(self, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
            heads = [x.permute(1, 2, 0, 3) for x in (query, key, value)]
            out = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
            return out.permute(2, 0, 1, 3).flatten(2)

    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    linear = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"}
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=32,
        mtp_num_layers=DEPTHS,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        **(linear if side == "patched" else {}),
    )
    layer = gpt_layer_specs.get_gpt_layer_local_spec()
    layer.submodules.self_attention.submodules.core_attention = Attention
    model = GPTModel(
        config=config,
        transformer_layer_spec=layer,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        mtp_block_spec=gpt_layer_specs.get_gpt_mtp_block_spec(
            config, layer, use_transformer_engine=False
        ),
    ).cuda()
    model.bfloat16()
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (micro_batch, SEQUENCE + 1), generator=generator).cuda()
    mask = (torch.rand(micro_batch, SEQUENCE, generator=generator) > 0.1).float().cuda()
    positions = torch.arange(SEQUENCE, device="cuda").expand(micro_batch, SEQUENCE)
    MTPLossAutoScaler.set_loss_scale(torch.ones(1, device="cuda"))

    def step() -> Any:
        model.zero_grad(set_to_none=True)
        losses = model(
            input_ids=tokens[:, :-1].contiguous(),
            position_ids=positions,
            attention_mask=None,
            labels=tokens[:, 1:].contiguous(),
            loss_mask=mask,
        )
        loss = (losses * mask).sum() / mask.sum()
        loss.backward()
        return loss.detach()

    loss = step()
    step()
    norm = torch.stack([p.grad.float().norm() for p in model.parameters() if p.grad is not None])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / STEPS
    return {
        "side": side,
        "micro_batch": micro_batch,
        "step_ms": seconds * 1e3,
        "tokens_per_s": micro_batch * SEQUENCE / seconds,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "weights_gib": weights / 2**30,
        "loss": loss.item(),
        "gradient_norm": norm.norm().item(),
        "output_layer": type(model.output_layer).__name__,
        "device": torch.cuda.get_device_name(),
    }


def run(side: str, root: Path, micro_batch: int) -> dict[str, Any]:
    """`measure` in a process whose `megatron` is the one below root."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CPPMEGA_")}
    paths = [str(root), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    environment |= {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    command = [sys.executable, __file__, "--one", side, str(micro_batch)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        wanted = {"side": side, "micro_batch": micro_batch}
        if "OutOfMemoryError" in done.stderr:
            return {**wanted, "failed": "out of memory"}
        return {**wanted, "failed": done.stderr[-1500:]}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    wanted_layer = "LinearCrossEntropyModule" if side == "patched" else "ColumnParallelLinear"
    assert result["output_layer"] == wanted_layer, result
    return result


def table(results: list[dict[str, Any]]) -> str:
    """The results as markdown."""
    lines = ["| MBS | side | ms/step | tokens/s | peak GiB | loss | gradient norm |"]
    lines.append("|---|---|---|---|---|---|---|")
    for r in results:
        start = f"| {r['micro_batch']} | {r['side']} |"
        if "failed" in r:
            lines.append(f"{start} {r['failed'].strip().splitlines()[-1]} | | | | |")
            continue
        lines.append(
            f"{start} {r['step_ms']:.1f} | {r['tokens_per_s']:.0f} | {r['peak_gib']:.1f} "
            f"| {r['loss']:.5f} | {r['gradient_norm']:.5f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run every side and size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megatron", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--one", nargs=2, metavar=("SIDE", "MBS"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given.one[0], int(given.one[1]))))
        return
    from cppmega import overlay

    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        patched = Path(scratch) / "patched"
        shutil.copytree(given.megatron, patched)
        outcome = overlay.apply(overlay.Session(patched), only=PAGES, environment={})
        applied = {v.name for v in outcome.verdicts if v.state == "applied"}
        assert applied >= set(PAGES), outcome.verdicts
        results = [
            run(side, root, size)
            for size in given.sizes
            for side, root in (("stock", given.megatron), ("patched", patched))
        ]
    (given.out / "linear_ce_end_to_end.json").write_text(json.dumps(results, indent=2) + "\n")
    (given.out / "linear_ce_end_to_end.md").write_text(table(results))
    print(table(results))
    if any("failed" in r and r["failed"] != "out of memory" for r in results):
        raise SystemExit(1)


if __name__ == "__main__":
    sys.path.insert(0, str(REPOSITORY))
    main()
