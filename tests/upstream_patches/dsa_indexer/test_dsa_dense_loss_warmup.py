"""DSA's indexer has the dense loss in the first steps; a resumed run changes it at that step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cppmega.features.dsa.loss_schedule import GATE, STEPS
from tests.support import patched, pristine, python
from tests.support.rules import broken
from tests.upstream_patches.dsa.dsa_layers import answers, assert_same

pytestmark = pytest.mark.slow

PAGE = "dsa_dense_loss_warmup"

STOCK = """
print(json.dumps({"dense": run(), "sparse": run(sparse=True)}))
"""
SWITCHED = """
from cppmega.errors import CppmegaError
from cppmega.features.dsa import loss_schedule as dsa_loss_schedule


def name_of(**case):
    try:
        run(**case)
    except CppmegaError as error:
        return error.name


def at(iteration, **case):
    dsa_loss_schedule.begin_step(iteration)
    return run(sparse=True, **case)


found = {"no steps": name_of(sparse=True)}
os.environ[dsa_loss_schedule.STEPS] = "2"
found["no step"] = name_of(sparse=True)
found["evaluation"] = run(sparse=True, train=False)["loss"]
dsa_loss_schedule.begin_step(0)
found["always dense"] = name_of()
found["dense"] = [at(0), at(1), at(1, recompute=True)]
found["sparse"] = [at(2), at(7), at(7, recompute=True)]
print(json.dumps(found))
"""


@pytest.mark.parametrize("version", ["0.16.1", "0.18.2", "0.19.2"])  # 0.17.1 has 0.18.2's text
def test_the_loss_of_a_layer_is_that_of_its_step(version: str) -> None:
    (stock,) = answers(pristine(version), STOCK)
    assert stock["dense"]["loss"] != stock["sparse"]["loss"]
    (found,) = answers(patched(version, PAGE, "dsa_indexer_kernels"), SWITCHED)
    for kind in ("dense", "sparse"):
        for mine in found[kind]:
            seen = mine["chosen"]  # once more where the layer is recomputed
            assert_same({**mine, "chosen": seen[-1:]}, stock[kind], kind)
    assert found["evaluation"] is None
    assert found["no steps"] == "dsa-dense-loss"
    assert found["no step"] == "dsa-dense-loss"
    assert found["always dense"] == "argument-without-effect"


TRAIN = """
import json, os, sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.transformer.enums import AttnMaskType, ModelType
from megatron.core.transformer.experimental_attention_variant import dsa
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.training import training

from cppmega.proof import cpu_shims
from cppmega.proof.small_models import Norm, Projection
from cppmega.proof.stand_ins import Arguments

cpu_shims.init_distributed()
mock.patch.object(dsa, "rotate_activation", lambda x: x).start()
LENGTH, HEADS, WIDTH = 12, 2, 12
START, FOLDER = int(os.environ["START"]), Path(os.environ["FOLDER"])
SPARSE = bool(os.environ["SPARSE"])


class OnCPU(torch.overrides.TorchFunctionMode):
    # The schedule and the reductions of a step name the device.
    def __torch_function__(self, function, types, args=(), kwargs=None):
        named = {**(kwargs or {})}
        if "device" in named:
            named["device"] = "cpu"
        return function(*args, **named)


class Model(torch.nn.Module):
    model_type, pg_collection, force_all_reduce = ModelType.encoder_or_decoder, None, False

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.config = MLATransformerConfig(
            num_layers=1, hidden_size=16, num_attention_heads=HEADS, q_lora_rank=8, kv_lora_rank=8,
            qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=8, add_bias_linear=False,
            experimental_attention_variant="dsa", dsa_indexer_n_heads=2, dsa_indexer_head_dim=8,
            dsa_indexer_topk=3, rope_type="rope", dsa_indexer_loss_coeff=1.0,
            dsa_indexer_use_sparse_loss=SPARSE)
        parts = dsa.DSAIndexerSubmodules(Projection, Projection, Norm, Projection)
        indexer = ModuleSpec(module=dsa.DSAIndexer, submodules=parts)
        self.attention = dsa.DSAttention(
            self.config, dsa.DSAttentionSubmodules(indexer), 1, AttnMaskType.causal, "self")
        self.into = torch.nn.Linear(16, 3 * HEADS * WIDTH)
        self.latent, self.out = torch.nn.Linear(16, 8), torch.nn.Linear(HEADS * WIDTH, 16)

    def zero_grad_buffer(self):
        self.zero_grad()

    def set_input_tensor(self, tensor):
        pass

    def forward(self, x):
        q, k, v = self.into(x).view(LENGTH, -1, HEADS, 3 * WIDTH).chunk(3, -1)
        out = self.attention(q, k, v, None, x, self.latent(x), attn_mask_type=AttnMaskType.causal)
        return (self.out(out) - x.roll(1, 0)).square().mean()


class Optimizer(torch.optim.SGD):
    def step(self):
        super().step()
        return True, 0.0, 0


def forward_step(data, model):
    return model(next(data)), lambda loss: (loss, {"lm loss": loss.detach()})


def batches(iteration):
    generator = torch.Generator().manual_seed(iteration)
    return iter([torch.randn(LENGTH, 2, 16, generator=generator) for _ in range(2)])


model = Model()
optimizer = Optimizer(model.parameters(), lr=0.5)
args = Arguments(iteration=0, micro_batch_size=2, seq_length=LENGTH, data_parallel_size=1,
                 gtp_weight_remat_size=1, empty_unused_memory_level=0)
if START:
    state = torch.load(FOLDER / f"{START}.pt", weights_only=False)
    model.load_state_dict(state["model"])
    args.iteration = state["args"].iteration
tracker, losses = dsa.DSAIndexerLossLoggingHelper.tracker, []
machine = mock.Mock()
machine.should_checkpoint_and_exit.return_value = False, False, 0
names = dict(get_args=lambda: args, get_timers=mock.Mock(), get_num_microbatches=lambda: 2,
             get_rerun_state_machine=lambda: machine)
with OnCPU(), mock.patch.multiple(training, **names):
    for iteration in range(args.iteration, 5):
        machine.should_run_forward_backward.side_effect = [True, False]
        tracker.clear()
        loss = training.train_step(
            forward_step, batches(iteration), [model], optimizer, mock.Mock(), model.config,
            forward_backward_no_pipelining, iteration=iteration)
        losses.append([float(loss[0]["lm loss"]), float(tracker["values"].sum())])
        with torch.no_grad():  # an evaluation between the steps
            model.eval()(next(batches(0)))
        model.train()
        args.iteration = iteration + 1
        kept = SimpleNamespace(**vars(args))  # as Megatron keeps them in a checkpoint
        torch.save({"model": model.state_dict(), "args": kept}, FOLDER / f"{args.iteration}.pt")
print("ANSWER" + json.dumps([losses, args.cppmega_dsa_dense_loss_steps]))
"""


def train(
    root: Path, folder: Path, start: int = 0, sparse: bool = True
) -> tuple[list[list[float]], int | None, list[str]]:
    """Train up to step 5, on its own or from the checkpoint of a step.

    Returns:
        The model's and the indexer's loss of every step, the recorded number of dense steps, and
        what cppmega printed.
    """
    variables = {"START": str(start), "SPARSE": "1" * sparse, "FOLDER": str(folder), STEPS: "2"}
    done = python(root, TRAIN, env=variables)
    assert "ANSWER" in done.stdout, done.stderr[-3000:]
    losses, recorded = json.loads(done.stdout.partition("ANSWER")[2])
    return losses, recorded, [x for x in done.stdout.splitlines() if x.startswith("cppmega: step")]


def test_a_resumed_run_changes_its_loss_where_an_uninterrupted_one_does(tmp_path: Path) -> None:
    root, stock = patched("0.19.2", PAGE), pristine("0.19.2")
    one, recorded, said = train(root, tmp_path)
    assert recorded == 2 and len(one) == 5
    assert len(said) == 2 and "step 3" in said[1] and "from dense to sparse" in said[1]
    early, late = train(root, tmp_path, 1), train(root, tmp_path, 3)
    assert early == (one[1:], 2, [said[0].replace("step 1", "step 2"), said[1]])
    assert late[:2] == (one[3:], 2) and "is sparse" in late[2][0]
    # On stock, the same needs a first run with the flag off, and a second with it on.
    assert train(stock, tmp_path, sparse=False)[0][:2] == one[:2]
    assert train(stock, tmp_path, 2) == (one[2:], None, [])


DSA = {
    **{"experimental_attention_variant": "dsa", "bf16": True, "fp16": False},
    **{"dsa_indexer_n_heads": 32, "dsa_indexer_head_dim": 64, "dsa_kernel_backend": "none"},
    **{"dsa_indexer_loss_coeff": 0.1, "dsa_indexer_use_sparse_loss": True},
    **{"cuda_graph_impl": "none", "context_parallel_size": 1},
}


@pytest.mark.parametrize(
    ("steps", "change", "error"),
    [
        ("2", {}, ""),
        (None, {"experimental_attention_variant": None}, ""),
        (None, {}, "dsa-dense-loss"),
        ("0", {}, "dsa-dense-loss"),
        ("2", {"cuda_graph_impl": "local"}, "unsupported"),
        ("2", {"dsa_indexer_use_sparse_loss": False}, "argument-without-effect"),
    ],
)
def test_the_preflight(steps: str | None, change: dict[str, object], error: str) -> None:
    environ = {GATE: "1", **({STEPS: steps} if steps is not None else {})}
    found = broken(PAGE, variables=environ, num_layers=2, **{**DSA, **change})
    assert [each.name for each in found] == [error] * bool(error)
