"""Nine DSA layers on one GPU: all Full, three Full and six Shared, and with keys that are given.

usage: python -m benchmarks.dsa_sharing --megatron ROOT [--out benchmarks/results]

ROOT holds a pristine megatron/ (an unpacked wheel); a copy gets every page, with
CPPMEGA_INDEX_CACHE=1. The layers are Megatron's DSAttention with its indexer, at NAM56R's sizes and
in bf16, without the projections around them, which are the same in all ways; all take the same
inputs. Timed are a forward of nine layers and the gradients of inputs and parameters: medians of 20
with CUDA events, host time included; the ways take turns, and the median over the turns counts.
Nine layers with given keys have no indexer, so two thirds of what they save are the time of six
indexers. Writes dsa_sharing_h200.json and .md: the share of that time that sharing saves.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks import RESULTS
from benchmarks import dsa_sparse_mla as yardstick
from benchmarks.harness import trees as sides
from cppmega.host import env

NAM56R = {
    **{"hidden_size": 4096, "num_attention_heads": 32, "q_lora_rank": 64, "kv_lora_rank": 64},
    **{"qk_head_dim": 64, "qk_pos_emb_head_dim": 64, "v_head_dim": 64, "dsa_indexer_topk": 256},
    **{"dsa_indexer_n_heads": 32, "dsa_indexer_head_dim": 64, "dsa_indexer_loss_coeff": 0.001},
}
SEQUENCE = 4096
PATTERNS = {"9 Full": "FFFFFFFFF", "3 Full, 6 Shared": "FSSFSSFSS", "keys given": "FSSSSSSSSS"}
"""Where keys are given, the first layer chooses them and is not timed."""
FULL, SHARED, GIVEN = PATTERNS
CASES = {
    f"{loss} loss, b {batch}": {"batch": batch, "dsa_indexer_use_sparse_loss": loss == "sparse"}
    for loss in ("sparse", "dense")
    for batch in (1, 8)
}
TURNS = 3

Way = Callable[[], tuple[torch.Tensor | None, ...]]


def layers(pattern: str, **options: Any) -> list[Any]:
    """DSA layers of a pattern, on the CPU."""
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.experimental_attention_variant import dsa
    from megatron.core.transformer.spec_utils import ModuleSpec

    from cppmega.features.dsa import layer_kinds as dsa_layer_kinds
    from cppmega.proof import small_models as parts

    config = parts.dsa_config(num_layers=len(pattern), **options)
    indexer = dsa.DSAIndexerSubmodules(
        parts.Projection, parts.Projection, parts.Norm, parts.Projection
    )
    given = dsa.DSAttentionSubmodules(ModuleSpec(dsa.DSAIndexer, submodules=indexer))
    numbers = range(1, 1 + len(pattern))
    torch.manual_seed(0)
    with _asked(pattern), dsa_layer_kinds.decoder(config, numbers, numbers):
        causal = AttnMaskType.causal
        return [dsa.DSAttention(config, given, n, causal, "self") for n in numbers]


@contextmanager
def _asked(pattern: str) -> Iterator[None]:
    """Let the variables of the page ask for a pattern."""
    before = dict(os.environ)
    os.environ |= {env.INDEX_CACHE.name: "1", env.DSA_INDEX_PATTERN.name: pattern}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class Inputs:
    """What all layers take: `[sequence, batch, ...]` in bf16."""

    def __init__(self, sequence: int, batch: int, device: str, **options: Any) -> None:
        heads, latent, value = (
            options[name] for name in ("num_attention_heads", "kv_lora_rank", "v_head_dim")
        )
        width = latent + options["qk_pos_emb_head_dim"]
        made = torch.Generator(device).manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=made, device=device).bfloat16()

        self.query = normal(sequence, batch, heads, width).requires_grad_()
        self.key = normal(sequence, batch, 1, width).requires_grad_()
        self.up = (normal(heads, value, latent) * latent**-0.5).requires_grad_()
        self.hidden = normal(sequence, batch, options["hidden_size"])
        self.compressed = normal(sequence, batch, options["q_lora_rank"])
        self.gradient = normal(sequence, batch, heads * value)

    def through(self, layer: Any) -> torch.Tensor:
        """The output of a layer."""
        from megatron.core.transformer.enums import AttnMaskType

        out: torch.Tensor = layer(
            *(self.query, self.key, None, None, self.hidden, self.compressed),
            attn_mask_type=AttnMaskType.causal,
            up_v_weight=self.up,
        )
        return out


def way(name: str, inputs: Inputs, device: str, **options: Any) -> Way:
    """Forward and backward of nine layers; returns the outputs and the gradients."""
    from cppmega.features.dsa import forward as dsa_forward

    stack = [layer.to(device) for layer in layers(PATTERNS[name], **options)]
    kept: dict[str, Any] = {}
    if name == GIVEN:
        chooses, *stack = stack
        with dsa_forward.forward() as here, torch.no_grad():
            inputs.through(chooses)
        kept = vars(here)
    leaves = [inputs.query, inputs.key, inputs.up, *(p for x in stack for p in x.parameters())]

    def step() -> tuple[torch.Tensor | None, ...]:
        with dsa_forward.forward() as here:
            for holder, keys in kept.items():
                if isinstance(keys, ChainMap):
                    setattr(here, holder, keys)
            outputs = [inputs.through(layer) for layer in stack]
        upstream = [inputs.gradient] * len(outputs)
        gradients = torch.autograd.grad(outputs, leaves, upstream, allow_unused=True)
        return (*(out.detach() for out in outputs), *gradients)

    return step


def measure(batch: int, **options: Any) -> dict[str, Any]:
    """Milliseconds and peaks of all ways, in turns, and what sharing saves."""
    options = {**NAM56R, **options}
    inputs = Inputs(SEQUENCE, batch, "cuda", **options)
    steps = {name: way(name, inputs, "cuda", **options) for name in PATTERNS}
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for _ in range(TURNS):
        for name, step in steps.items():
            turns[name].append(yardstick.timed(step))
    found = {
        name: {
            "milliseconds": round(statistics.median(taken for taken, _ in rows), 3),
            "turns": [round(taken, 3) for taken, _ in rows],
            "peak_gib": round(max(peak for _, peak in rows), 2),
        }
        for name, rows in turns.items()
    }
    return {"ways": found, **saved({name: row["milliseconds"] for name, row in found.items()})}


def saved(milliseconds: Mapping[str, float]) -> dict[str, float]:
    """The time of six indexers, what sharing saves, and its share of that time."""
    indexers = (milliseconds[FULL] - milliseconds[GIVEN]) * 6 / 9
    less = milliseconds[FULL] - milliseconds[SHARED]
    return {
        "six_indexers": round(indexers, 3),
        "saved": round(less, 3),
        "share": round(less / indexers, 3),
    }


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        f"{result['gpu']}, torch {result['torch']}, triton {result['triton']}, megatron-core "
        f"{result['megatron-core']}, overlay {result['overlay']}, {result['date']}.",
        "",
        "Milliseconds of forward and backward of nine DSA layers at NAM56R's sizes, host time "
        f"included (median over {TURNS} turns), with the peak in GiB above inputs and weights; and "
        "the share of six indexers' time that sharing saves.",
        "",
        f"| case | {' | '.join(PATTERNS)} | six indexers | saved | share |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in result["cases"].items():
        ways = [f"{x['milliseconds']} ({x['peak_gib']})" for x in row["ways"].values()]
        cells = [name, *ways, row["six_indexers"], row["saved"], f"{row['share']:.1%}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the cases and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megatron", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()

    from cppmega.overlay import verbs as overlay
    from cppmega.overlay.verbs import Session
    from cppmega.rank import imported

    options.out.mkdir(parents=True, exist_ok=True)
    target = options.out / "dsa_sharing_h200.json"
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "patched"
        sides.copy(options.megatron, root)
        session = Session(root)
        outcome = overlay.apply(session, environment={env.INDEX_CACHE.name: "1"})
        assert outcome.ok, outcome.plan.failures
        imported.only_from(root)
        result: dict[str, Any] = {
            "date": date.today().isoformat(),
            "gpu": torch.cuda.get_device_name(),
            **{name: metadata.version(name) for name in ("torch", "triton")},
            "megatron-core": session.read_tree().version,
            "overlay": outcome.digest,
            "cases": {},
        }
        for name, case in CASES.items():
            result["cases"][name] = measure(**case)
            print(f"{name}: {json.dumps(result['cases'][name])}", flush=True)
            target.write_text(json.dumps(result, indent=1) + "\n")
    target.with_suffix(".md").write_text(table(result))
    print(table(result))


if __name__ == "__main__":
    main()
