"""What Megatron's own builder makes of a rendered recipe on every pipeline rank.

Imported in the process that runs a tree, never by pytest itself; Transformer Engine's stand-ins are
in place already.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training import argument_utils, arguments
from megatron.training.models.dist_utils import build_virtual_pipeline_stages

from tests.configurations.settings import Configuration
from tests.upstream_patches.forked_ranks import on_ranks
from tests.upstream_patches.optimizer.distributed_optimizer import on_cpu


def main() -> None:
    """Print, for every rank, parameters, layers and parts of each of its stages."""
    argv, rows, ranks, means = json.loads(os.environ["CASE"])
    os.environ.update(means)
    os.environ["WORLD_SIZE"] = str(ranks)
    with tempfile.TemporaryDirectory() as folder:
        found = on_ranks(Path(folder), Configuration(pipeline=ranks), built, argv, rows)
    print("ANSWER" + json.dumps(found))


def built(_: Configuration, argv: list[str], rows: int) -> list[dict[str, Any]]:
    """The stages of this rank."""
    sys.argv = ["train", *argv]
    with contextlib.redirect_stdout(sys.stderr):
        args = arguments.parse_args()
        arguments.validate_args(args)
    args.padded_vocab_size = rows
    args.bf16, args.params_dtype = False, torch.float32
    virtual = args.virtual_pipeline_model_parallel_size
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=virtual,
    )
    config = argument_utils.hybrid_config_from_args(args)
    builder = config.get_builder_cls()(config)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    with contextlib.redirect_stdout(sys.stderr), on_cpu():
        models = build_virtual_pipeline_stages(builder.build_model, groups, virtual)
    return [
        {
            "parameters": sum(p.numel() for p in model.parameters()),
            "layers": len(model.decoder.layers),
            "parts": sorted({name.partition(".")[0] for name, _ in model.named_parameters()}),
        }
        for model in models
    ]
