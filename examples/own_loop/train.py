"""A training loop of one's own: a small MoE model of megatron.core, without megatron.training.

python -m cppmega.run examples/own_loop/train.py --steps 20
torchrun --nproc-per-node 2 -m cppmega.run examples/own_loop/train.py --steps 20
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from cppmega import guard
from cppmega.proof import cpu_shims

LENGTH, VOCABULARY, EXPERTS = 32, 64, 4


def build() -> tuple[Any, Any]:
    """The model, and Megatron's data parallelism around it."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_moe_experts=EXPERTS,
        moe_router_topk=2,
        moe_aux_loss_coeff=1e-2,
        add_bias_linear=False,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(num_experts=EXPERTS),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
    )
    return model, DistributedDataParallel(
        config=config, ddp_config=DistributedDataParallelConfig(), module=model
    )


def batches(steps: int) -> Iterator[torch.Tensor]:
    """Sequences that count upwards from random tokens, which a model learns within a minute."""
    for _ in range(steps):
        yield (torch.randint(VOCABULARY, (4, 1)) + torch.arange(LENGTH + 1)) % VOCABULARY


def train(steps: int) -> None:
    """Train for so many steps, and print the losses."""
    cpu_shims.init_distributed()  # Megatron's process groups; on a CPU, by gloo
    torch.manual_seed(torch.distributed.get_rank())
    model, ddp = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    positions = torch.arange(LENGTH).expand(4, -1)
    mask = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()

    # This line is what the guard needs: it checks the code that trains before the first step and
    # after it. The configurations tell which patches the loop must reach; a dict states what none
    # of them has, here that no optimizer of Megatron is used.
    torch_only = {"use_layer_wise_distributed_optimizer": False}
    for step, tokens in enumerate(
        guard.steps(batches(steps), model.config, ddp.ddp_config, torch_only), 1
    ):
        ddp.zero_grad_buffer()
        loss = ddp(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).mean()
        loss.backward()
        ddp.finish_grad_sync()
        for parameter in model.parameters():
            parameter.grad = parameter.main_grad
        optimizer.step()
        if torch.distributed.get_rank() == 0:
            print(f"step {step}  loss {loss.item():.3f}", flush=True)
            guard.log_step(step, loss=loss.item())  # for `cppmega runs` and `compare`


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    train(parser.parse_args().steps)
