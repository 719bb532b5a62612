"""The output layer with a loss in it, against Megatron's layer and loss, on one and two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import forkserver
from tests.support.processes import assert_all_pass, started

pytestmark = pytest.mark.slow

torch = pytest.importorskip("torch")

S, B, H, V = 6, 3, 8, 20
ONE_RANK = """
import sys
from tests.features.linear_cross_entropy.test_module import main
main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
"""


@pytest.mark.megatron
@pytest.mark.parametrize("ranks", [1, 2])
def test_equals_megatron(ranks: int, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    python, store = forkserver.executable(), str(tmp_path / "store")
    processes = [
        started(python, "-c", ONE_RANK, str(rank), str(ranks), store, PYTHONWARNINGS="ignore")
        for rank in range(ranks)
    ]
    assert_all_pass(processes)


class Setup:
    """Inputs that are the same on every rank, and the layers that a test compares."""

    def __init__(self, rank: int, ranks: int, sequence_parallel: bool) -> None:
        from megatron.core.model_parallel_config import ModelParallelConfig

        generator = torch.Generator().manual_seed(1)
        self.rank, self.ranks = rank, ranks
        self.sequence_parallel = sequence_parallel
        self.hidden = torch.randn(S, B, H, generator=generator)
        self.weight = torch.randn(V, H, generator=generator)
        self.labels = torch.randint(V - 5, (B, S), generator=generator)
        self.mask = (torch.rand(B, S, generator=generator) > 0.3).float()
        self.config = ModelParallelConfig(
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
            tensor_model_parallel_size=ranks,
            sequence_parallel=sequence_parallel,
        )

    def layer(self, cls: Any, **options: Any) -> Any:
        """A layer of the class with this rank's part of the weight."""
        options = {"bias": False, "init_method": torch.nn.init.normal_} | options
        layer = cls(H, V, config=self.config, **options)
        if layer.weight is not None:
            layer.weight.data.copy_(self.weight.chunk(self.ranks)[self.rank])
        return layer

    def inputs(self) -> Any:
        """This rank's hidden states, with a gradient."""
        part = self.hidden.chunk(self.ranks)[self.rank] if self.sequence_parallel else self.hidden
        return part.clone().requires_grad_()


def stock(setup: Setup, layer: Any, hidden: Any, scale: float = 1.0) -> Any:
    """Megatron's path: logits, then the loss over the split vocabulary. `[b, s]`."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    logits, bias = layer(hidden)
    assert bias is None
    loss = vocab_parallel_cross_entropy(logits * scale, setup.labels.transpose(0, 1).contiguous())
    return loss.transpose(0, 1).contiguous()


def check_values(setup: Setup) -> None:
    from megatron.core.tensor_parallel import ColumnParallelLinear

    from cppmega.features.linear_cross_entropy.module import LinearCrossEntropyModule

    for scale in (1.0, 0.5):
        theirs, ours = setup.layer(ColumnParallelLinear), setup.layer(LinearCrossEntropyModule)
        expected_input = setup.inputs()
        expected = stock(setup, theirs, expected_input, scale)
        # What pretrain_gpt.py does with it.
        (expected * setup.mask).sum().div(setup.mask.sum()).mul(2.0**16).backward()
        for upstream in ("weighted-scalar", "arbitrary"):
            hidden = setup.inputs()
            ours.weight.grad = None
            out = ours(
                hidden,
                labels=setup.labels,
                loss_weights=setup.mask if upstream == "weighted-scalar" else None,
                upstream=upstream,
                logit_scale=scale,
                return_argmax=True,
            )
            torch.testing.assert_close(out.loss, expected)
            (out.loss * setup.mask).sum().div(setup.mask.sum()).mul(2.0**16).backward()
            unscaled = 2.0**-16
            torch.testing.assert_close(hidden.grad * unscaled, expected_input.grad * unscaled)
            torch.testing.assert_close(ours.weight.grad * unscaled, theirs.weight.grad * unscaled)
            whole = setup.hidden @ setup.weight.t()
            assert torch.equal(out.argmax, whole.argmax(-1).t())


def check_logits_form(setup: Setup) -> None:
    from megatron.core.tensor_parallel import ColumnParallelLinear

    from cppmega.features.linear_cross_entropy.module import LinearCrossEntropyModule

    theirs, ours = setup.layer(ColumnParallelLinear), setup.layer(LinearCrossEntropyModule)
    for options in ({}, {"runtime_gather_output": True}, {"weight": 2 * theirs.weight.detach()}):
        expected, got = theirs(setup.inputs(), **options), ours(setup.inputs(), **options)
        assert torch.equal(expected[0], got[0])
        assert expected[1] is got[1] is None
    assert list(theirs.state_dict()) == list(ours.state_dict())
    assert [name for name, _ in theirs.named_parameters()] == [
        name for name, _ in ours.named_parameters()
    ]
    metadata = {"dp_cp_group": None}
    if setup.ranks > 1:
        from megatron.core import parallel_state

        metadata = {
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)
        }
        shards = [layer.sharded_state_dict("head.", (), metadata) for layer in (theirs, ours)]
        assert list(shards[0]) == list(shards[1])
        assert shards[0]["head.weight"].global_offset == shards[1]["head.weight"].global_offset
    ours.load_state_dict(theirs.state_dict())


def check_tied_and_detached_weight(setup: Setup) -> None:
    from cppmega.features.linear_cross_entropy.module import LinearCrossEntropyModule

    tied = setup.weight.chunk(setup.ranks)[setup.rank].clone().requires_grad_()
    layer = setup.layer(LinearCrossEntropyModule, skip_weight_param_allocation=True)
    layer(setup.inputs(), weight=tied, labels=setup.labels).loss.sum().backward()
    own = setup.layer(LinearCrossEntropyModule)
    own(setup.inputs(), labels=setup.labels).loss.sum().backward()
    torch.testing.assert_close(tied.grad, own.weight.grad)
    hidden = setup.inputs()
    layer(hidden, weight=tied.detach(), labels=setup.labels).loss.sum().backward()
    assert hidden.grad is not None


def check_padding_columns(setup: Setup) -> None:
    from cppmega.features.linear_cross_entropy.module import LinearCrossEntropyModule

    layer = setup.layer(LinearCrossEntropyModule)
    loss = layer(setup.inputs(), labels=setup.labels, vocab_size=V - 5).loss
    logits = setup.hidden @ setup.weight[: V - 5].t()
    expected = torch.nn.functional.cross_entropy(
        logits.transpose(0, 1).reshape(-1, V - 5), setup.labels.reshape(-1), reduction="none"
    )
    torch.testing.assert_close(loss, expected.view(B, S))


def check_main_grad_and_hooks(setup: Setup) -> None:
    from cppmega.features.linear_cross_entropy.module import LinearCrossEntropyModule

    plain, fused = (setup.layer(LinearCrossEntropyModule) for _ in range(2))
    plain(setup.inputs(), labels=setup.labels).loss.sum().backward()
    # The constructor asks for an extension that only CUDA builds have.
    fused.gradient_accumulation_fusion = True
    fused.weight.main_grad = torch.ones_like(fused.weight)
    fused.weight.grad_added_to_main_grad = False
    seen = []
    fused.register_forward_pre_hook(lambda *_: seen.append("pre-forward"))
    for _ in range(2):
        fused(setup.inputs(), labels=setup.labels).loss.sum().backward()
    assert seen == ["pre-forward"] * 2
    assert fused.weight.grad_added_to_main_grad
    torch.testing.assert_close(fused.weight.main_grad - 1, 2 * plain.weight.grad)


def check_obstacles(setup: Setup) -> None:
    from cppmega.errors import CppmegaError
    from cppmega.features.linear_cross_entropy.module import LinearCrossEntropyModule

    layer = setup.layer(LinearCrossEntropyModule)
    assert layer.loss_obstacle() is None
    assert (layer.loss_obstacle(runtime_gather_output=True) is None) == (setup.ranks == 1)
    assert layer.loss_obstacle(weight=torch.zeros(1, H)) is not None
    biased = setup.layer(LinearCrossEntropyModule, bias=True)
    weightless = setup.layer(LinearCrossEntropyModule, skip_weight_param_allocation=True)
    deferred = setup.layer(LinearCrossEntropyModule)
    deferred.config = type("Deferred", (), {"defer_embedding_wgrad_compute": True})()
    for wrong, words in ((biased, "bias"), (weightless, "no weight"), (deferred, "defer")):
        with pytest.raises(CppmegaError, match=f"linear-ce-module: .*{words}"):
            wrong(setup.inputs(), labels=setup.labels)
    for alone in ({"loss_weights": setup.mask}, {"output_cross_entropy_loss": True}):
        with pytest.raises(CppmegaError, match="without labels"):
            layer(setup.inputs(), **alone)
    whole = layer(setup.inputs(), labels=setup.labels)
    loss = layer(setup.inputs(), labels=setup.labels, output_cross_entropy_loss=True)
    assert torch.equal(loss, whole.loss)


def main(rank: int, ranks: int, store: str) -> None:
    """Every check on one rank."""
    # Megatron asks for the CUDA device by name where it makes buffers.
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment]
    from megatron.core import parallel_state

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks
    )
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    for sequence_parallel in (False, True)[:ranks]:
        setup = Setup(rank, ranks, sequence_parallel)
        check_values(setup)
        check_logits_form(setup)
        check_tied_and_detached_weight(setup)
        check_padding_columns(setup)
        check_main_grad_and_hooks(setup)
        check_obstacles(setup)
    torch.distributed.destroy_process_group()
