"""Remove the wrappers of a CUDA-graph capture from every class that Transformer Engine wrapped.

What: After `make_graphed_callables` has captured layers of a class and of a class derived from it,
    calls of both work as before.
Why: For the capture, `__call__` of each layer's class is wrapped in an autocast. A derived class
    that inherits its `__call__` is found already wrapped, so that what is restored at the end is
    the wrapper of its base class: with `--cuda-graph-impl transformer_engine`, every call of
    Megatron's `MoETransformerLayer` runs in the autocast of the capture for the rest of the
    training, which turns FP8 on or off depending on the layers that were captured, and
    `cppmega.run` ends the run with `stale-code` (NAM56R's slice on an H200).
Upstream: Not sent: found on an H200 on 2026-11-23; release 2.20.2 has the bug.
Remove: when `make_graphed_callables` lets a class inherit its `__call__` again.
Numerics: none (bitwise) in bf16; where only some layers are FP8, eager calls of derived classes no
    longer use the precision of the capture
"""

from typing import Any

from cppmega.catalogue.megatron_args import cuda_graphs
from cppmega.edits import in_order, inserting, replacing
from cppmega.page import Edit, Patch, Source

FILE = "transformer_engine/pytorch/graph.py"
TARGET = f"{FILE}:make_graphed_callables"
RESTORED = """
for module_cls, old_call in old_call_funcs.items():
    module_cls.__call__ = old_call
"""


def captures_layers(args: Any) -> bool:
    """Whether Transformer Engine captures the layers of a run."""
    return cuda_graphs(args) == "transformer_engine"


PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=TARGET,
            pins={
                "2.11.0": "9bdd85ea3ff71135",
                "2.19.0": "3e4c32644f650204",
                "2.20.2": "3e4c32644f650204",
            },
            edit=in_order(
                inserting("own_call_funcs = {}", after="old_call_funcs = {}"),
                inserting(
                    'own_call_funcs[block_cls] = vars(block_cls).get("__call__")',
                    after="old_call_funcs[block_cls] = block_cls.__call__",
                ),
                replacing(
                    RESTORED,
                    """
                    for module_cls, own_call in own_call_funcs.items():
                        if own_call is None:
                            del module_cls.__call__  # it inherits that of its base class
                        else:
                            module_cls.__call__ = own_call
                    """,
                ),
            ),
            distribution="transformer-engine",
        ),
    ),
    reached="never",  # layers are captured only after some steps
    feature=(f"{FILE}:_graph_context_wrapper",),  # earlier releases wrap layers, not their classes
    when=captures_layers,
)


def fixed_upstream(source: Source) -> bool:
    text = source.text(TARGET)
    return bool(text) and "module_cls.__call__ = old_call" not in text


def verify() -> None:
    from unittest import mock

    import torch

    from ._te_modules import load

    te = load("graph")

    class Layer(torch.nn.Module):
        def __call__(self, *args):  # type: ignore[no-untyped-def]
            return super().__call__(*args)

    class MoELayer(Layer):
        pass

    class Other(torch.nn.Module):
        pass

    before = {each: vars(each).get("__call__") for each in (Layer, MoELayer, Other)}
    seen = []

    def capture(modules, *_, **__):  # type: ignore[no-untyped-def]
        seen.extend(type(each).__call__ for each in modules)
        return modules

    stand_ins = {
        "_make_graphed_callables": capture,
        "_canonicalize_capture_time_hooks": lambda *_: None,
        "save_fp8_tensors": lambda *_, **__: None,
        "restore_fp8_tensors": lambda *_: None,
        "graph_safe_rng_available": lambda: False,
    }
    rng = {"get_rng_state": lambda: None, "set_rng_state": lambda _: None}
    with (
        mock.patch.multiple(te, create=True, **stand_ins),
        mock.patch.multiple(torch.cuda, **rng),
    ):
        te.make_graphed_callables((Layer(), MoELayer(), Other()), (), enabled=False)
    assert all(each not in before.values() for each in seen), "nothing was wrapped"
    assert {each: vars(each).get("__call__") for each in before} == before, "a wrapper is left"
