"""The logged indexer loss is a mean over the layers that have one, on every pipeline stage."""

import pytest

from tests.support import patched, pristine, python

PIPELINE_OF_TWO = """
import importlib.util
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.transformer.experimental_attention_variant import dsa

torch.distributed.init_process_group("gloo")
parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
rank = torch.distributed.get_rank()
mock.patch.object(torch.cuda, "current_device", return_value="cpu").start()


def log(helper, layers, microbatches=2):
    logged = {}
    for _ in range(microbatches):
        for layer, loss in layers:
            helper.save_loss_to_tracker(torch.tensor(loss), layer, 52)
    helper.track_indexer_metrics(1 / microbatches, 1, None, total_loss_dict=logged)
    return float(logged["indexer loss"]) if logged else None


helper = dsa.DSAIndexerLossLoggingHelper
# Stage 0 has DSA layers, stage 1 has none; then stage 1 has an MTP layer with a number of stage 0.
first = log(helper, [(5, 1.0), (9, 2.0), (13, 6.0)] if rank == 0 else [])
second = log(helper, [(5, 1.0), (9, 2.0)] if rank == 0 else [(5, 9.0)])
third = log(helper, [(9, 2.0)] if rank == 0 else [(54, 4.0)])  # 0.16: past the last slot
nothing = log(helper, [])  # a tracker that has slots and no losses, as after an evaluation
assert (first, second, third, nothing) == (3.0, 4.0, 3.0, 0.0), (first, second, third, nothing)

# What somebody put into the tracker without `save_loss_to_tracker`.
helper.tracker.clear()
helper.tracker["values"] = torch.tensor([2.0, 0.0, 6.0, 0.0])
logged = {}
with mock.patch.object(helper, "reduce_loss_in_tracker"):
    helper.track_indexer_metrics(0.5, 1, None, total_loss_dict=logged)
assert logged["indexer loss"] == 2.0

# The same on the unpatched file: every layer counts, and stage 1 leaves stage 0 waiting, until it
# closes the connection.
spec = importlib.util.spec_from_file_location("stock_dsa", STOCK)
stock = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stock)
both = log(stock.DSAIndexerLossLoggingHelper, [(5, 26.0)])
assert both == 1.0, both  # one layer with 26 on each of two stages, over 52
stock.DSAIndexerLossLoggingHelper.tracker.clear()
try:
    alone = log(stock.DSAIndexerLossLoggingHelper, [(5, 26.0)] if rank == 0 else [])
    hung = False
except RuntimeError:
    hung = True
assert hung == (rank == 0), hung
if not hung:
    torch.distributed.destroy_process_group()
print("done")
"""
DSA = "megatron/core/transformer/experimental_attention_variant/dsa.py"


@pytest.mark.parametrize("version", ["0.16.1", "0.19.2"])  # one text in all versions
def test_every_stage_logs_the_mean_over_the_layers_that_have_a_loss(version: str) -> None:
    code = f"STOCK = {str(pristine(version) / DSA)!r}\n" + PIPELINE_OF_TWO
    done = python(patched(version, "dsa_indexer_loss_metric"), code, nproc=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 2
