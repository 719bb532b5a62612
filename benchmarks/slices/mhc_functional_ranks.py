"""The GPT of `mhc_functional.py`, trained by the ranks of one layout, which run one tree.

Forward and backward by Megatron's schedules, gradients by its DDP and `finalize_model_grads`, and
steps by its optimizer over torch's AdamW, all on the CPU and in fp32.
"""

from __future__ import annotations

import inspect
import json
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from megatron.core import optimizer as optimizers
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func

from cppmega.proof import cpu_shims
from tests.upstream_patches.mhc import mhc_models, mhc_ranks
from tests.upstream_patches.optimizer.distributed_optimizer import cuda_is_cpu

STREAMS = {
    **{"enable_mhc_connections": True, "mhc_num_residual_streams": 4},
    **{"mhc_sinkhorn_iterations": 20, "mhc_init_gating_factor": 0.01},
    **{**mhc_models.SELECTIVE, "mhc_recompute_layer_num": 2},
}

NUMBERINGS = 5
"""Of the first text, whose first loss depends on the weights of its frequent words."""


def main(split: bool, asked: dict[str, Any], weights: str) -> None:
    """Train, and print losses, gradient norms and counts as JSON from the last rank.

    Args:
        split: whether there are four ranks, TP 2 and PP 2, and not one.
        asked: sizes of the model and of the run, see `mhc_functional.SIZES`.
        weights: folder of the initial weights, which are drawn and saved where there are none.
    """
    cpu_shims.shim()
    torch.distributed.init_process_group("gloo")
    cpu_shims.keep_saves_here()
    options = {**mhc_ranks.SEQUENCES, **mhc_ranks.STAGES} if split else {}
    mhc_ranks.arrange(options)
    mhc_models.start()
    # Dev asks before each message to the next stage.
    torch.cuda.is_current_stream_capturing = lambda: False
    with cuda_is_cpu():
        model = gpt(asked, {**options, **STREAMS})
        drawn = [p.detach().clone() for p in model.parameters()]
        if not Path(weights).is_dir():
            mhc_ranks.save([model], Path(weights))
        mhc_ranks.load([model], Path(weights))
        words = batches(asked)
        pairs = zip(drawn, model.parameters(), strict=True)
        found: dict[str, Any] = {
            "parameters": sum(p.numel() for p in drawn),
            "of sites": of_sites(model),
            "weights apart": max((a - b).abs().max().item() for a, b in pairs),
        }
        if not split:
            numbered = [renumbered(words[0, 0], asked, seed) for seed in range(NUMBERINGS)]
            found["renumbered"] = [evaluated(model, each) for each in numbered]
            found["random words"] = evaluated(model, random_words(asked))
        found |= trained(model, words, asked)
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        print(json.dumps(found))


def gpt(asked: dict[str, Any], options: dict[str, Any]) -> Any:
    """This rank's part of the model; embeddings and output layer share their weights."""
    settings = mhc_models.config(
        **{"num_layers": asked["layers"], "hidden_size": asked["width"]},
        **{"ffn_hidden_size": 4 * asked["width"], "num_attention_heads": asked["heads"]},
        **{"init_method_std": 0.02, "attention_softmax_in_fp32": True, **options},
    )
    spec_of = gpt_layer_specs.get_gpt_layer_local_spec
    of_dev = mhc_models.OF_SPEC in inspect.signature(spec_of).parameters
    sites = {mhc_models.OF_SPEC: True} if of_dev else {}
    torch.manual_seed(1234)
    return GPTModel(
        config=settings,
        transformer_layer_spec=spec_of(**sites),
        vocab_size=asked["padded"],
        max_sequence_length=asked["length"],
        position_embedding_type="learned_absolute",
        share_embeddings_and_output_weights=True,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )


def of_sites(model: Any) -> int:
    """The number of parameters of hyper-connections."""
    named = model.named_parameters()
    return sum(p.numel() for name, p in named if "hyper" in name or "hc_" in name)


def batches(asked: dict[str, Any]) -> torch.Tensor:
    """Words of Python's own sources, numbered by how often they occur; `[steps, batch, length+1]`.

    Such numbers are as unequally frequent as those of a tokenizer.
    """
    shape = asked["steps"], asked["batch"], asked["length"] + 1
    files = sorted(Path(json.__file__).parents[1].glob("*.py"))
    texts = (file.read_text(errors="replace") for file in files)
    words = [word for text in texts for word in re.findall(r"\w+|\s+|[^\w\s]", text)]
    known = [word for word, _ in Counter(words).most_common(asked["words"])]
    number = {word: at for at, word in enumerate(known)}
    read = torch.tensor([number[word] for word in words if word in number])
    # From places that are far from each other, as a shuffled dataset has them.
    starts = torch.linspace(0, len(read) - shape[2], shape[0] * shape[1]).long()
    order = torch.randperm(len(starts), generator=torch.Generator().manual_seed(1234))
    found = torch.stack([read[at : at + shape[2]] for at in starts[order].tolist()])
    return found.view(shape)


def renumbered(sequence: torch.Tensor, asked: dict[str, Any], seed: int) -> torch.Tensor:
    """The same text, whose words are others of the vocabulary: its frequent ones above all."""
    drawn = torch.Generator().manual_seed(seed)
    return torch.randperm(asked["words"], generator=drawn)[sequence]


def random_words(asked: dict[str, Any]) -> torch.Tensor:
    """A sequence in which each word is as likely as any other."""
    drawn = torch.Generator().manual_seed(1234)
    return torch.randint(asked["words"], (asked["length"] + 1,), generator=drawn)


def arguments(sequence: torch.Tensor) -> dict[str, Any]:
    """What the model is called with: a micro-batch of one sequence."""
    length = len(sequence) - 1
    return {
        "input_ids": sequence[None, :-1],
        "labels": sequence[None, 1:],
        "position_ids": torch.arange(length)[None],
        "attention_mask": torch.ones(length, length).triu(1).bool()[None, None],
    }


@torch.no_grad()
def evaluated(model: Any, sequence: torch.Tensor) -> float:
    """The mean loss of a sequence."""
    value: float = model(**arguments(sequence)).mean().item()
    return value


def trained(model: Any, words: torch.Tensor, asked: dict[str, Any]) -> dict[str, list[float]]:
    """Losses, gradient norms before clipping and zeros among the gradients, step by step."""
    settings = model.config
    ddp = DistributedDataParallel(settings, DistributedDataParallelConfig(), model)
    settings.no_sync_func, settings.finalize_model_grads_func = ddp.no_sync, finalize_model_grads
    of_adam = {"optimizer": "adam", "lr": asked["lr"], "min_lr": asked["lr"]}
    adam = optimizers.get_megatron_optimizer(
        optimizers.OptimizerConfig(
            **of_adam, weight_decay=0.01, clip_grad=1.0, log_num_zeros_in_grad=True
        ),
        [ddp],
    )
    found: dict[str, list[float]] = {"loss": [], "grad norm": [], "zeros": [], "seconds": []}
    for batch in words:
        started = time.monotonic()
        ddp.zero_grad_buffer()
        adam.zero_grad()
        values: list[torch.Tensor] = []

        def forward(sequences: Any, chunk: Any, values: list[torch.Tensor] = values) -> Any:
            def mean(per_token: torch.Tensor) -> Any:
                values.append(per_token.detach().mean())
                return per_token.mean(), {}

            return chunk(**arguments(next(sequences))), mean

        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(batch),
            model=[ddp],
            num_microbatches=len(batch),
            seq_length=asked["length"],
            micro_batch_size=1,
            forward_only=False,
        )
        done, norm, zeros = adam.step()
        assert done
        found["loss"].append(torch.stack(values).mean().item() if values else 0.0)
        found["grad norm"].append(float(norm))
        found["zeros"].append(int(zeros))
        found["seconds"].append(round(time.monotonic() - started, 2))
    return found
