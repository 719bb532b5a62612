"""The indexer's gradient after a step of several microbatches, through Megatron's own schedule."""

import pytest

from tests.support import patched, pristine, python

STEP = """
import importlib.util

import torch
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.experimental_attention_variant import dsa
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from cppmega.proof import cpu_shims

cpu_shims.init_distributed()
zeros = torch.zeros
torch.zeros = lambda *size, device=None, **named: zeros(*size, **named)  # the schedule says "cuda"
scaler = dsa.DSAIndexerLossAutoScaler


class Model(MegatronModule):
    \"\"\"A main loss of weight * x and an indexer loss of indexer * x.\"\"\"

    def __init__(self, config):
        super().__init__(config)
        self.model_type = ModelType.encoder_or_decoder
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.indexer = torch.nn.Parameter(torch.ones(()))

    def set_input_tensor(self, tensor):
        pass

    def forward(self, x):
        return scaler.apply(self.weight * x, self.indexer * x)


def step(schedules, microbatches, **config):
    variant = config.pop("variant", "dsa")
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, deallocate_pipeline_outputs=False,
        **config,
    )
    config.experimental_attention_variant = variant
    model = Model(config)
    schedules.forward_backward_no_pipelining(
        forward_step_func=lambda data, model: (
            model(torch.tensor(next(data))),
            lambda out: (out.clone(), torch.tensor(1, dtype=torch.int), {}) if PER_TOKEN
            else (out.clone(), {}),
        ),
        data_iterator=iter([float(at) for at in range(1, microbatches + 1)]),
        model=model, num_microbatches=microbatches, seq_length=1, micro_batch_size=1,
        forward_only=False,
    )
    return model.weight.grad.item(), model.indexer.grad.item()


PER_TOKEN = False
assert step(schedules, 1) == (1, 1)
assert step(schedules, 4) == (2.5, 2.5)  # the mean of 1, 2, 3, 4
scale = dict(grad_scale_func=lambda loss: loss * torch.full((1,), 64.0))
assert step(schedules, 4, **scale) == (160, 160)
assert step(schedules, 2) == (1.5, 1.5)  # and not what the step before had set
scaler.main_loss_backward_scale = torch.tensor(1.0)  # as a backward before any schedule leaves it
assert step(schedules, 4) == (2.5, 2.5)
PER_TOKEN = True  # divided by the tokens when the gradients are reduced
assert step(schedules, 4, calculate_per_token_loss=True, **scale) == (640, 640)

PER_TOKEN = False
spec = importlib.util.spec_from_file_location("megatron.core.pipeline_parallel.stock", STOCK)
stock = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stock)
scaler.main_loss_backward_scale = None
assert step(stock, 4) == (2.5, 10) and step(stock, 4, **scale) == (160, 10)
assert step(schedules, 4, variant=None) == (2.5, 10)  # no DSA: nothing is set
print("done")
"""
SCHEDULES = "megatron/core/pipeline_parallel/schedules.py"


@pytest.mark.parametrize("version", ["0.16.1", "0.17.1", "0.18.2"])
def test_the_gradient_is_the_mean_over_the_microbatches(version: str) -> None:
    code = f"STOCK = {str(pristine(version) / SCHEDULES)!r}\n" + STEP
    done = python(patched(version, "dsa_indexer_loss_scale"), code)
    assert done.stdout.endswith("done\n"), done.stderr
