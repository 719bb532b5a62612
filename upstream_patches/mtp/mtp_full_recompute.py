"""Support full recomputation in MTP layers, with packed sequences as well.

What: `MultiTokenPredictionLayer._checkpointed_forward` accepts the padding mask that `forward`
    passes to it (0.18), and saves only tensors for the backward pass, not other arguments such as
    the packed-sequence parameters (up to 0.17).
Why: With `recompute_granularity=full`, every MTP run on 0.18 raises TypeError (unexpected keyword
    `padding_mask`) in its first forward pass, and on 0.16 and 0.17 every run with packed sequences
    does (save_for_backward accepts only tensors). Both were seen on CPU. On 0.15 the page is needed
    for the packed sequences that `mtp_roll_packed_sequences` adds there.
Upstream: https://github.com/NVIDIA/Megatron-LM/pull/6367 (0.18, open) and #4593 (in 0.18.0).
Remove: when `_checkpointed_forward` has the parameter `padding_mask`, as in 0.19.0.
Numerics: none (bitwise), except for FP8 on 0.15 to 0.17: stock loses gradients there, and this page
    does not add the outer FP8 context of the later releases
"""

# ruff: noqa: F821
from cppmega.catalogue.megatron_args import has_mtp, recomputes
from cppmega.edits import adding_argument, adding_parameter, body_of, in_order
from cppmega.page import Edit, Patch, Source

LAYER = "megatron/core/transformer/multi_token_prediction.py:MultiTokenPredictionLayer"
TARGET = f"{LAYER}._checkpointed_forward"


def _checkpointed_forward(self, forward_func, *args, **kwargs):
    # Only tensors and None can be saved for the backward, and only what is handed on by position
    # gets a gradient; the rest (packed_seq_params...) stays in the closure.
    tensors = {k: v for k, v in kwargs.items() if v is None or isinstance(v, torch.Tensor)}
    rest = {k: v for k, v in kwargs.items() if k not in tensors}

    def forward(*values):
        named = dict(zip(tensors, values[len(args) :], strict=True))
        return forward_func(*values[: len(args)], **named, **rest)

    def checkpoint_handler():
        """Determines whether to use the `te_checkpoint` or `tensor_parallel.checkpoint`"""
        if self.config.fp8:
            from megatron.core.extensions.transformer_engine import te_checkpoint

            return te_checkpoint(
                forward,
                self.config.distribute_saved_activations,
                tensor_parallel.random.get_cuda_rng_tracker,
                parallel_state.get_tensor_model_parallel_group(),
                *args,
                *tensors.values(),
            )
        return tensor_parallel.checkpoint(
            forward, self.config.distribute_saved_activations, *args, *tensors.values()
        )

    if self.config.recompute_method == "uniform":
        assert self.config.recompute_num_layers == 1, (
            "recompute_num_layers must be 1 for MTP recompute"
        )
        outputs = checkpoint_handler()
    elif self.config.recompute_method == "block":
        warnings.warn(
            "recompute_method == 'block' is not supported for MTP yet. Skipping recompute."
        )
        outputs = forward_func(*args, **kwargs)
    else:
        raise ValueError("Invalid activation recompute method.")

    return outputs


PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=TARGET,
            pins={
                "0.15.3": "5ee675869488710f",
                "0.16.1": "5ee675869488710f",
                "0.17.1": "5ee675869488710f",
            },
            edit=body_of(_checkpointed_forward),
        ),
        Edit(
            target=TARGET,
            pins={"0.18.2": "573bf2e7f2c1dbb2"},
            edit=in_order(
                adding_parameter("padding_mask=None"),
                # The mask needs no gradient, so the closure of the recomputed function may hold it.
                adding_argument(
                    "self._proj_and_transformer_layer", "padding_mask=padding_mask", times=2
                ),
            ),
        ),
    ),
    reached="forward",
    when=lambda args: has_mtp(args) and recomputes(args),
)


def fixed_upstream(source: Source) -> bool:
    signature = source.text(TARGET).partition('"""')[0]
    return "padding_mask" in signature


def verify() -> None:
    import inspect
    import warnings
    from types import SimpleNamespace
    from unittest import mock

    import torch
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

    layer = MultiTokenPredictionLayer.__new__(MultiTokenPredictionLayer)
    torch.nn.Module.__init__(layer)
    layer.config = SimpleNamespace(fp8=None, fp4=None, distribute_saved_activations=False)
    layer.config.recompute_method, layer.config.recompute_num_layers = "uniform", 1
    weight, seen = torch.tensor(3.0, requires_grad=True), []

    def inner(hidden_states, decoder_input, *others, **named):
        seen.append({name: value for name, value in named.items() if value is not None})
        return hidden_states * weight + decoder_input

    layer._proj_and_transformer_layer = inner
    # As `forward` calls it in this version.
    given, function = {"packed_seq_params": PackedSeqParams(qkv_format="thd")}, (inner,)
    if "forward_func" not in inspect.signature(layer._checkpointed_forward).parameters:
        given["padding_mask"], function = torch.tensor([[False, True]]), ()
    hidden = torch.ones(2, 1, 1, requires_grad=True)
    with (
        mock.patch.object(random, "_get_cuda_rng_state", return_value=None),
        mock.patch.object(random, "_set_cuda_rng_state"),
    ):
        out = layer._checkpointed_forward(
            *function, hidden_states=hidden, decoder_input=hidden, attention_mask=None, **given
        )
        assert len(seen) == 1
        out.sum().backward()
    assert len(seen) == 2  # a second time in the backward pass
    layer.config.recompute_method = "block"  # which recomputes nothing
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = layer._checkpointed_forward(
            *function, hidden_states=hidden, decoder_input=hidden, attention_mask=None, **given
        )
    assert torch.equal(plain, out) and len(seen) == 3
    for named in seen:
        assert named.keys() == given.keys()
        for name, value in named.items():
            same = value is given[name] or isinstance(value, torch.Tensor)
            assert same and (value is given[name] or torch.equal(value, given[name])), name
    assert out.flatten().tolist() == [4, 4]
    assert weight.grad == 2 and hidden.grad.flatten().tolist() == [4, 4]
